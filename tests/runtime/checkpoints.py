"""Small random Llama models of transformers, written as TensorRT-LLM checkpoints and as engines.

Written from the format's description alone, so that the runtime is not tested against the project's own converter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.kernels import DTYPES, Kernels, choose_kernels
from trtforge.runtime.packing import pack_rank
from trtforge.runtime.spec import DecoderSpec


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


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written."""

    tp: int = 1
    pp: int = 1
    quant: str | None = None
    fp8_kv: bool = False
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
            "kv_cache_quant_algo": "FP8" if layout.fp8_kv else None,
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
    checkpoint: Path, out: Path, *, dtype: str = "float32", kernels: Kernels | None = None, **limits: int
) -> Path:
    """What compiling a checkpoint for the CPU gives."""
    config = read_checkpoint_config(checkpoint)
    spec = DecoderSpec.of(config, 0)
    kernels = kernels or choose_kernels(spec.algorithm, spec.group_size, "cpu", dtype)  # type: ignore[arg-type]
    build = {"max_batch_size": 8, "max_input_len": 128, "max_seq_len": 192, "max_num_tokens": 256} | limits
    tokens_per_block = build.pop("tokens_per_block", 16)
    out.mkdir(parents=True)
    values = {
        "version": "1.2.1",
        "pretrained_config": json.loads((checkpoint / "config.json").read_text()),
        "build_config": {**build, "plugin_config": {"tokens_per_block": tokens_per_block}},
        "forge": {"backend": "torch", "device": "cpu", "compute_dtype": dtype, "kernels": kernels.model_dump()},
    }
    (out / "config.json").write_text(json.dumps(values))
    for index in range(config.parallel.world_size):
        tensors = load_file(checkpoint / f"rank{index}.safetensors")
        save_file(pack_rank(config, index, tensors, kernels, DTYPES[dtype]), out / f"rank{index}.safetensors")
    return out


def _rank_tensors(model: LlamaForCausalLM, layout: Layout, tp_rank: int, pp_rank: int) -> dict[str, Tensor]:
    config, tp = model.config, layout.tp
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dtype = DTYPES[layout.dtype]
    out: dict[str, Tensor] = {}

    def split(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(tp, dim)[tp_rank] if tp > 1 else tensor

    def kv_heads(tensor: Tensor) -> Tensor:
        """Heads are repeated where there are more ranks than heads."""
        heads = tensor.unflatten(0, (config.num_key_value_heads, config.head_dim))
        if tp > config.num_key_value_heads:
            heads = heads.repeat_interleave(tp // config.num_key_value_heads, dim=0)
        return split(heads.flatten(0, 1), 0)

    per_stage = config.num_hidden_layers // layout.pp
    for local in range(per_stage):
        old, new = f"model.layers.{pp_rank * per_stage + local}.", f"transformer.layers.{local}."
        for source, target in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_layernorm")):
            out[f"{new}{target}.weight"] = state[f"{old}{source}.weight"].to(dtype)

        def heads(kind: str, old: str = old) -> Tensor:
            return torch.cat(
                [
                    split(state[f"{old}self_attn.q_proj.{kind}"], 0),
                    kv_heads(state[f"{old}self_attn.k_proj.{kind}"]),
                    kv_heads(state[f"{old}self_attn.v_proj.{kind}"]),
                ]
            )

        linears = {"attention.qkv": (heads("weight"), heads("bias") if config.attention_bias else None, 1)}
        for name, source, dim, has_bias in (
            ("attention.dense", "self_attn.o_proj", 1, config.attention_bias),
            ("mlp.fc", "mlp.gate_proj", 0, config.mlp_bias),
            ("mlp.gate", "mlp.up_proj", 0, config.mlp_bias),
            ("mlp.proj", "mlp.down_proj", 1, config.mlp_bias),
        ):
            weight, bias = split(state[f"{old}{source}.weight"], dim), None
            if has_bias:
                bias = state[f"{old}{source}.bias"] if dim == 1 else split(state[f"{old}{source}.bias"], 0)
            linears[name] = (weight, bias, 1 + 0 * dim)
        for name, (weight, bias, _) in linears.items():
            out |= {f"{new}{name}.{key}": value for key, value in _linear(weight, layout, dtype).items()}
            if bias is not None:
                out[f"{new}{name}.bias"] = bias.to(dtype)
        if layout.fp8_kv:
            out[f"{new}attention.kv_cache_scaling_factor"] = torch.tensor([layout.kv_scale])
    share = -(-config.vocab_size // tp)
    padding = share * tp - config.vocab_size
    if pp_rank == 0:
        table = state["model.embed_tokens.weight"]
        if layout.embedding_sharding_dim == 0:
            table = torch.nn.functional.pad(table, (0, 0, 0, padding))
        if layout.embedding_sharding_dim is not None:
            table = split(table, layout.embedding_sharding_dim)
        out["transformer.vocab_embedding.weight"] = table.to(dtype)
    if pp_rank == layout.pp - 1:
        out["transformer.ln_f.weight"] = state["model.norm.weight"].to(dtype)
        head = torch.nn.functional.pad(state["lm_head.weight"], (0, 0, 0, padding))
        out["lm_head.weight"] = split(head, 0).to(dtype)
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def _linear(weight: Tensor, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    match layout.quant:
        case "FP8":
            scale = torch.tensor([1.5 / 448])  # one scale for every part, as for fused linears
            return {
                "weight": (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
                "weights_scaling_factor": scale,
                "activation_scaling_factor": torch.tensor([6.0 / 448]),
            }
        case "W4A16_AWQ":
            prequant = torch.linspace(0.5, 2.0, weight.shape[1])
            blocks = (weight / prequant).unflatten(1, (-1, layout.group_size))
            scales = blocks.abs().amax(2) / 7
            codes = (blocks / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1)
            return {
                "weight": (codes[0::2] & 15) | (codes[1::2] << 4),
                "weights_scaling_factor": scales,
                "prequant_scaling_factor": prequant.to(dtype),
            }
        case _:
            return {"weight": weight.to(dtype)}
