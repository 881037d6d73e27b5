"""Llama checkpoints that nobody trained: right in names, shapes and headers, for what only moves bytes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trtforge.core.dtypes import dtype_named
from trtforge.formats.shards import TensorSpec, header_of

BF16 = dtype_named("bfloat16")
SHARD_BYTES = 1 << 30
POOL = 1 << 24  # random values that all tensors are filled from


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama. `heads`: as many as make up the hidden size, if None."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int | None = None
    kv_heads: int = 8
    head_size: int = 128

    @property
    def query_heads(self) -> int:
        """Attention heads."""
        return self.heads or self.hidden // self.head_size

    @property
    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in the order of the shards."""
        hidden, kv, queries = self.hidden, self.kv_heads * self.head_size, self.query_heads * self.head_size
        yield TensorSpec("model.embed_tokens.weight", BF16, (self.vocab, hidden))
        for layer in range(self.layers):
            shapes: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "mlp.down_proj": (hidden, self.intermediate),
                "mlp.gate_proj": (self.intermediate, hidden),
                "mlp.up_proj": (self.intermediate, hidden),
                "post_attention_layernorm": (hidden,),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.v_proj": (kv, hidden),
            }
            for name, shape in shapes.items():
                yield TensorSpec(f"model.layers.{layer}.{name}.weight", BF16, shape)
        yield TensorSpec("model.norm.weight", BF16, (hidden,))
        yield TensorSpec("lm_head.weight", BF16, (self.vocab, hidden))


LLAMA_405B = Shape(hidden=16384, intermediate=53248, layers=126, vocab=128256)


def llama_of(gigabytes: float) -> Shape:
    """A slice of Llama-3.1-8B's layers with as large a share of Llama-2's vocabulary, `gigabytes` (1e9 bytes) in
    all."""
    slices = [Shape(4096, 14336, layers, 1000 * layers) for layers in range(1, 33)]
    return min(slices, key=lambda shape: abs(_bytes(shape) - gigabytes * 1e9))


def write_model(directory: Path, shape: Shape, *, values: bool = True) -> int:
    """Write the checkpoint, sharded, with random values or as holes in sparse files; its size in bytes."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config, indent=2))
    shards = list(_shards(shape))
    pool = (torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().view(torch.uint8)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {spec.name: name for spec in specs}
        with (directory / name).open("wb") as file:
            file.write(header_of(specs))
            if not values:
                file.truncate(file.tell() + sum(spec.nbytes for spec in specs))
                continue
            left = sum(spec.nbytes for spec in specs)
            while left:
                left -= file.write(pool[: min(left, pool.nbytes)].numpy().data)
    index = {"metadata": {"total_size": _bytes(shape)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in directory.iterdir())


def _shards(shape: Shape) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    for spec in shape.tensors():
        if shard and sum(s.nbytes for s in shard) + spec.nbytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(spec)
    yield shard


def _bytes(shape: Shape) -> int:
    return sum(spec.nbytes for spec in shape.tensors())
