"""The config.json of a checkpoint: what the family's facts say, and the layout."""

from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig, Quantization
from trtforge.models.family import Facts, Family
from trtforge.models.plan import Layout, shards_embedding

_KV_DTYPE_OF = {"none": None, "fp8": "FP8"}
_ALGORITHM_OF = {"none": None, "fp8": "FP8", "int4_awq": "W4A16_AWQ"}


def checkpoint_config(family: Family, facts: Facts, architecture: str, layout: Layout) -> CheckpointConfig:
    """The config.json of the checkpoint."""
    sizes = facts.sizes
    quantized = layout.quant != "none"
    return CheckpointConfig.model_validate(
        {
            "architecture": family.architectures[architecture],
            "dtype": layout.dtype,
            "logits_dtype": "float32",
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_size": sizes.head_size,
            "intermediate_size": sizes.intermediate,
            "max_position_embeddings": sizes.max_positions,
            "use_parallel_embedding": shards_embedding(family, layout),
            "embedding_sharding_dim": layout.embedding_sharding_dim,
            "tie_word_embeddings": facts.tied_embeddings,
            **facts.config,
            "mapping": layout.parallel.mapping(),
            "quantization": Quantization(
                quant_algo=_ALGORITHM_OF[layout.quant],
                kv_cache_quant_algo=_KV_DTYPE_OF[layout.kv_cache],
                group_size=layout.group_size,
                pre_quant_scale=layout.quant == "int4_awq",
                exclude_modules=list(UNQUANTIZED_MODULES) if quantized else None,
            ),
        }
    )
