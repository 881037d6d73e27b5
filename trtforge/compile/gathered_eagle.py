"""Gathers the EAGLE network of a checkpoint from its ranks into a directory in Hugging Face's format.

Of several copies in a checkpoint, the first is used. Rows of fused and split matrices return to the order of the
source, the reverse of `models.eagle_plan`.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.eagle_checkpoint import LAYER, NETWORK, eagle_in, network_shapes
from trtforge.formats.hf import CONFIG, SINGLE
from trtforge.formats.shards import RowReader, read_header
from trtforge.formats.trtllm import CheckpointConfig, rank_file
from trtforge.models.torch_tensors import read_tensor, write_tensors


def gather_eagle(config: CheckpointConfig, checkpoint: Path, directory: Path) -> None:
    """Write the network of a checkpoint to `directory`. Raises ForgeError for a tensor that is missing or of another
    shape or dtype."""
    found = eagle_in(config)
    assert found is not None, "only of a checkpoint with networks"
    network, tp = found[1], config.parallel.tp
    values = {
        "architectures": [network.architecture],
        "hidden_size": network.hidden_size,
        "intermediate_size": network.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": network.num_attention_heads,
        "num_key_value_heads": network.num_key_value_heads,
        "head_dim": network.head_size,
        "vocab_size": network.vocab_size,
        "rms_norm_eps": network.norm_epsilon,
        "rope_theta": network.rotary_base,
        "rope_scaling": network.rotary_scaling,
        "max_position_embeddings": network.max_position_embeddings or 2048,
        "hidden_act": network.hidden_act,
    }
    (directory / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    ranks = [_of_rank(network, config, checkpoint / rank_file(rank), tp) for rank in range(tp)]
    write_tensors(directory / SINGLE, {name: each.contiguous() for name, each in _joined(network, ranks).items()})


def _of_rank(network: CheckpointConfig, config: CheckpointConfig, path: Path, tp: int) -> dict[str, Tensor]:
    stored, tensors = {tensor.spec.name: tensor for tensor in read_header(path)}, {}
    with RowReader() as reader:
        for name, shape in network_shapes(network, tp).items():
            full = NETWORK.format(0) + name
            spec = stored[full].spec if full in stored else None
            if spec is None or spec.shape != shape or spec.dtype.name != config.dtype:
                raise ForgeError(
                    f"{path}: {full} is not {config.dtype} {list(shape)}",
                    hint="Convert the model and its EAGLE network again, with an unquantised network.",
                )
            tensors[name] = read_tensor(reader, stored[full])
    return tensors


def _joined(network: CheckpointConfig, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole network's tensors by their published names."""
    tp, size = len(ranks), network.head_size
    queries = network.num_attention_heads // tp * size
    keys = max(1, network.num_key_value_heads // tp) * size
    repeated = max(1, tp // network.num_key_value_heads)

    def rows(name: str) -> Tensor:
        return torch.cat([rank[name] for rank in ranks])

    def columns(name: str) -> Tensor:
        return torch.cat([rank[name] for rank in ranks], dim=1)

    fused = [rank[f"{LAYER}attention.qkv.weight"].split((queries, keys, keys)) for rank in ranks]
    layer = {
        "self_attn.q_proj.weight": torch.cat([each[0] for each in fused]),
        "self_attn.k_proj.weight": torch.cat([each[1] for each in fused[::repeated]]),
        "self_attn.v_proj.weight": torch.cat([each[2] for each in fused[::repeated]]),
        "self_attn.o_proj.weight": columns(f"{LAYER}attention.dense.weight"),
        "mlp.gate_proj.weight": rows(f"{LAYER}mlp.fc.weight"),
        "mlp.up_proj.weight": rows(f"{LAYER}mlp.gate.weight"),
        "mlp.down_proj.weight": columns(f"{LAYER}mlp.proj.weight"),
        "post_attention_layernorm.weight": ranks[0][f"{LAYER}post_layernorm.weight"],
    }
    return {
        "embed_tokens.weight": ranks[0]["drafter.vocab_embedding.weight"],
        "fc.weight": rows("drafter.fc.weight"),
        "fc.bias": rows("drafter.fc.bias"),
        "lm_head.weight": rows("lm_head.weight")[: network.vocab_size],
    } | {f"layers.0.{name}": tensor for name, tensor in layer.items()}
