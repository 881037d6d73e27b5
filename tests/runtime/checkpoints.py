"""Small random Llama models of transformers, written as TensorRT-LLM checkpoints and as engines.

Written from the format's description alone, so that the runtime is not tested against the project's own converter.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runtime.quantised import Quantised, quantised
from trtforge.core.device import UsableDevice
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.kernels import DTYPES, Kernels, choose_kernels
from trtforge.runtime.linears.packing import pack_rank


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A float32 Llama with random weights, norms and biases included."""
    values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    } | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**values)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model


LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
"""TensorRT-LLM's names, and transformers'."""
ROW_PARALLEL = ("attention.dense", "mlp.proj")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written. `quant`, `kv`: TensorRT-LLM's algorithms."""

    tp: int = 1
    pp: int = 1
    quant: str | None = None
    kv: str | None = None
    group_size: int = 32
    embedding_sharding_dim: int | None = None
    dtype: str = "float32"
    kv_scale: float = 0.05
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_checkpoint(model: LlamaForCausalLM, out: Path, layout: Layout = Layout()) -> Path:
    """Write config.json and the rank files; linears are quantised by round to nearest."""
    config = model.config
    out.mkdir(parents=True)
    rope = dict(config.rope_parameters)
    base = rope.pop("rope_theta")
    values = {
        "architecture": "LlamaForCausalLM",
        "dtype": layout.dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_base": base,
        "rotary_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "rotary_embedding_dim": config.head_dim,
        "attn_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "use_parallel_embedding": layout.embedding_sharding_dim is not None,
        "embedding_sharding_dim": layout.embedding_sharding_dim or 0,
        "mapping": {"world_size": layout.tp * layout.pp, "tp_size": layout.tp, "pp_size": layout.pp},
        "quantization": {
            "quant_algo": layout.quant,
            "kv_cache_quant_algo": layout.kv,
            "group_size": layout.group_size,
        },
        **layout.extra,
    }
    (out / "config.json").write_text(json.dumps(values))
    for pp_rank in range(layout.pp):
        for tp_rank in range(layout.tp):
            tensors = _rank_tensors(model, layout, tp_rank, pp_rank)
            save_file(tensors, out / f"rank{pp_rank * layout.tp + tp_rank}.safetensors")
    return out


def write_engine(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    kernels: Kernels | None = None,
    device: UsableDevice = "cpu",
    **limits: int,
) -> Path:
    """What compiling a checkpoint gives, for the CPU unless told."""
    config = read_checkpoint_config(checkpoint)
    spec = DecoderSpec.of(config, 0)
    kernels = kernels or choose_kernels(spec.algorithm, spec.group_size, device, dtype)  # type: ignore[arg-type]
    build = {"max_batch_size": 8, "max_input_len": 128, "max_seq_len": 192, "max_num_tokens": 256} | limits
    tokens_per_block = build.pop("tokens_per_block", 16)
    out.mkdir(parents=True)
    values = {
        "version": "1.2.1",
        "pretrained_config": json.loads((checkpoint / "config.json").read_text()),
        "build_config": {**build, "plugin_config": {"tokens_per_block": tokens_per_block}},
        "forge": {"backend": "torch", "device": device, "compute_dtype": dtype, "kernels": kernels.model_dump()},
    }
    (out / "config.json").write_text(json.dumps(values))
    for index in range(config.parallel.world_size):
        tensors = load_file(checkpoint / f"rank{index}.safetensors")
        save_file(pack_rank(config, index, tensors, kernels, DTYPES[dtype]), out / f"rank{index}.safetensors")
    return out


def quantised_linears(model: LlamaForCausalLM, layout: Layout, layer: int) -> dict[str, Quantised]:
    """The linears of a layer by their name in a checkpoint."""
    state, dtype = model.state_dict(), DTYPES[layout.dtype]
    return {
        name: quantised(
            torch.cat([state[f"model.layers.{layer}.{source}.weight"] for source in sources]),
            layout.quant,
            layout.group_size,
            dtype,
            layout.tp if name in ROW_PARALLEL else 1,
        )
        for name, sources in LINEARS.items()
    }


def dense_reference(model: LlamaForCausalLM, layout: Layout) -> LlamaForCausalLM:
    """The float32 model whose weights and roundings of activations are those of the checkpoint."""
    dense = copy.deepcopy(model)
    for index, layer in enumerate(dense.model.layers):
        for name, linear in quantised_linears(model, layout, index).items():
            modules = [layer.get_submodule(source) for source in LINEARS[name]]
            sizes = [module.weight.shape[0] for module in modules]
            for module, values in zip(modules, linear.values.split(sizes), strict=True):
                module.weight.data.copy_(values)
                module.register_forward_pre_hook(lambda _, inputs, rounded=linear.rounded: (rounded(inputs[0]),))
    return dense


def _cut(model: LlamaForCausalLM, name: str, shape: torch.Size, tp: int, tp_rank: int) -> tuple[Tensor, slice]:
    """The rows and columns of the whole weight that a rank holds."""
    config = model.config
    rows, columns = torch.arange(shape[0]), slice(0, shape[1])
    if name in ROW_PARALLEL:
        share = shape[1] // tp
        return rows, slice(tp_rank * share, (tp_rank + 1) * share)
    if name != "attention.qkv":
        return rows.chunk(tp)[tp_rank], columns
    queries = config.num_attention_heads * config.head_dim
    parts = [rows[:queries]]
    for heads in rows[queries:].view(2, config.num_key_value_heads, config.head_dim):
        # Heads are repeated where there are more ranks than heads.
        parts.append(heads.repeat_interleave(max(1, tp // len(heads)), dim=0).flatten())
    return torch.cat([part.chunk(tp)[tp_rank] for part in parts]), columns


def _rank_tensors(model: LlamaForCausalLM, layout: Layout, tp_rank: int, pp_rank: int) -> dict[str, Tensor]:
    config, tp = model.config, layout.tp
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dtype = DTYPES[layout.dtype]
    out: dict[str, Tensor] = {}
    per_stage = config.num_hidden_layers // layout.pp
    for local in range(per_stage):
        layer = pp_rank * per_stage + local
        old, new = f"model.layers.{layer}.", f"transformer.layers.{local}."
        for source, target in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_layernorm")):
            out[f"{new}{target}.weight"] = state[f"{old}{source}.weight"].to(dtype)
        for name, linear in quantised_linears(model, layout, layer).items():
            rows, columns = _cut(model, name, linear.codes.shape, tp, tp_rank)
            out |= {f"{new}{name}.{key}": value for key, value in linear.part(rows, columns).items()}
            if f"{old}{LINEARS[name][0]}.bias" in state:
                bias = torch.cat([state[f"{old}{source}.bias"] for source in LINEARS[name]])
                out[f"{new}{name}.bias"] = bias[rows].to(dtype)
        if layout.kv:
            out[f"{new}attention.kv_cache_scaling_factor"] = torch.tensor([layout.kv_scale])
    share = -(-config.vocab_size // tp)
    padding = share * tp - config.vocab_size
    if pp_rank == 0:
        table = state["model.embed_tokens.weight"]
        if layout.embedding_sharding_dim == 0:
            table = torch.nn.functional.pad(table, (0, 0, 0, padding))
        if layout.embedding_sharding_dim is not None:
            table = table.chunk(tp, layout.embedding_sharding_dim)[tp_rank]
        out["transformer.vocab_embedding.weight"] = table.to(dtype)
    if pp_rank == layout.pp - 1:
        out["transformer.ln_f.weight"] = state["model.norm.weight"].to(dtype)
        head = torch.nn.functional.pad(state["lm_head.weight"], (0, 0, 0, padding))
        out["lm_head.weight"] = head.chunk(tp)[tp_rank].to(dtype)
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}
