"""Small Llamas as other tools quantise them, packed here from each format's definition, with the weights they mean.

Nothing here uses trtforge: words are built nibble by nibble, scales are chosen so that no format can hide a swap.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from tests.conftest import DEMO_MODEL

GROUP = 64
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Quantized:
    """A quantised checkpoint, and a float32 model whose weights are those that the codes and scales stand for."""

    directory: Path
    model: PreTrainedModel


def tiny_llama(dtype: torch.dtype = torch.float16, **changes: Any) -> LlamaForCausalLM:
    """Every parameter random; all values of the float32 model fit `dtype` exactly."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            value = 1 + noise * 0.1 if "norm" in name else noise * 0.1
            parameter.copy_(value.to(dtype).float())
    return model


Pack = Callable[[str, Tensor], tuple[Stored, Tensor]]
"""A module's name and its float32 weight (out, in) to the tensors stored under it and the weight that they mean."""


def write_quantized(
    directory: Path,
    pack: Pack,
    quantization: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float16,
    left: Callable[[str], bool] = lambda module: False,
    more: Stored | None = None,
    model: PreTrainedModel | None = None,
    **changes: Any,
) -> Quantized:
    """A checkpoint whose linear layers `pack` quantises, but for the head and those `left`.

    `more` are tensors beside them. The model is `model`, or a tiny Llama with `changes` in its configuration.
    """
    model = model or tiny_llama(dtype, **changes)
    tensors: Stored = dict(more or {})
    matrices = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    matrices.pop("lm_head", None)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module in matrices and not left(module):
                turned = isinstance(matrices[module], Conv1D)
                stored, meant = pack(module, parameter.detach().T if turned else parameter.detach())
                tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
                parameter.copy_(meant.T if turned else meant)
            elif kind in ("gate_up_proj", "down_proj") and module.endswith(".experts"):
                tensors |= _packed_experts(pack, module, kind, parameter)
            elif not (tied and module == "lm_head"):
                tensors[name] = parameter.detach().to(dtype)
    if "gpt_neox.embed_in.weight" in tensors:  # transformers renames it when it saves
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    directory.mkdir(parents=True)
    written = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": quantization,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return Quantized(directory, model)


def quantized_demo(directory: Path, pack: Pack, values: dict[str, Any]) -> Quantized:
    """The demo model with its tokenizer, quantised by another tool."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    found = write_quantized(directory, pack, values, dtype=torch.bfloat16, model=model)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    return found


def tiny_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """Four experts of a Qwen3, two a token; every parameter random."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_((1 + noise * 0.1 if "norm" in name else noise * 0.1).half().float())
    return model


def _packed_experts(pack: Pack, module: str, kind: str, parameter: nn.Parameter) -> Stored:
    """Experts are published one by one; `transformers` has them in one tensor, gate and up joined."""
    stored: Stored = {}
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for number, expert in enumerate(parameter.detach().clone()):
        meant = []
        for name, weight in zip(names, expert.chunk(len(names)), strict=True):
            packed, values = pack(f"{module}.{number}.{name}", weight)
            stored |= {f"{module}.{number}.{name}.{suffix}": tensor for suffix, tensor in packed.items()}
            meant.append(values)
        parameter[number] = torch.cat(meant)
    return stored


def codes_and_scales(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Unsigned codes (out, in) with zero point 8, and float16 scales (out, in / group)."""
    blocks = weight.unflatten(1, (-1, group))
    scales = (blocks.abs().amax(dim=2) / 7).half()
    codes = (blocks / scales.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1).long() + 8
    return codes, scales


def meant_by(codes: Tensor, scales: Tensor, zero: int = 8) -> Tensor:
    """The float32 weight (out, in) of codes."""
    return (codes - zero).float() * scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """(rows, columns / 8) int32: nibble n of a word holds code order[n] of eight neighbours in a row."""
    packed = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for nibble, code in enumerate(order):
        packed |= codes[:, code::8] << (4 * nibble)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


def awq(zero: int = 8, *, by_output: bool = False) -> Pack:
    """AutoAWQ's gemm layout: everything is (in, out), eight outputs a word. `by_output`: one group of all inputs."""

    def pack(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        codes, scales = codes_and_scales(weight, weight.shape[1] if by_output else GROUP)
        zeros = torch.full((scales.shape[1], weight.shape[0]), zero)
        stored = {
            "qweight": words(codes.T, AWQ_ORDER),
            "qzeros": words(zeros, AWQ_ORDER),
            "scales": scales.T,
        }
        return stored, meant_by(codes, scales, zero)

    return pack


def gptq(stored_zero: int = 7, *, by_output: bool = False) -> Pack:
    """AutoGPTQ's layout: eight inputs a word, (in / 8, out); zero points (in / group, out / 8).

    `by_output`: one group of all inputs.
    """

    def pack(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        group = weight.shape[1] if by_output else GROUP
        codes, scales = codes_and_scales(weight, group)
        zeros = torch.full((scales.shape[1], weight.shape[0]), stored_zero)
        stored = {
            "qweight": words(codes).T,
            "qzeros": words(zeros),
            "scales": scales.T,
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
        }
        return stored, meant_by(codes, scales)

    return pack


def pack_quantized(module: str, weight: Tensor, group: int = GROUP) -> tuple[Stored, Tensor]:
    """compressed-tensors' INT4: eight inputs a word, (out, in / 8)."""
    codes, scales = codes_and_scales(weight, group)
    stored = {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    return stored, meant_by(codes, scales)


def pack_quantized_by_output(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """The same with a scale for each output."""
    return pack_quantized(module, weight, weight.shape[1])


def fp8_static(equal: bool = True) -> Pack:
    """One float32 scale a tensor, and one for its inputs.

    `equal`: q, k and v have the same weight scale, as gate and up have.
    """

    def pack(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        kind = LINEARS.index(module.rpartition(".")[2])
        group = (0, 0, 0, 1, 2, 2, 3)[kind]
        scale = torch.tensor([2.0**-10 * (1 + group / 5 if equal else 1 + kind / 7)])
        quantised = (weight / scale).clamp(-448, 448).to(FP8)
        return {
            "weight": quantised,
            "weight_scale": scale,
            "input_scale": torch.tensor([0.03125 * (1 + group / 9)]),
        }, quantised.float() * scale

    return pack


def fp8_rows(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """A bfloat16 scale for each output."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    quantised = (weight / scales.float()).clamp(-448, 448).to(FP8)
    return {"weight": quantised, "weight_scale": scales}, quantised.float() * scales.float()


def fp8_one_scale(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale for a tensor, none for its inputs."""
    scale = (weight.abs().amax() / 448).reshape(1)
    quantised = (weight / scale).clamp(-448, 448).to(FP8)
    return {"weight": quantised, "weight_scale": scale}, quantised.float() * scale


def int8_static(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """A scale for each output, and one for the inputs."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    stored = {"weight": codes.to(torch.int8), "weight_scale": scales, "input_scale": torch.tensor([INT8_INPUTS])}
    return stored, codes * scales.float()


INT8_INPUTS, NVFP4_INPUTS = 0.0625, 256.0
"""The scale of INT8's inputs, and the divisor of NVFP4's."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4_divided(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors' NVFP4: the scales of blocks are divided by that of the tensor; even inputs in low nibbles."""
    divisor = torch.tensor([4096.0])
    blocks = weight.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(dim=2) / 6 * divisor).clamp(max=448).to(FP8)
    steps = (scales.float() / divisor).unsqueeze(2)
    codes = ((blocks / steps).abs().unsqueeze(3) - _E2M1).abs().argmin(dim=3)
    values = (_E2M1[codes] * blocks.sign() * steps).flatten(1)
    nibbles = (codes + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    return {
        "weight_packed": nibbles[:, ::2] | (nibbles[:, 1::2] << 4),
        "weight_scale": scales,
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([NVFP4_INPUTS]),
    }, values


def fp8_blocks(rows: int, columns: int) -> Pack:
    """DeepSeek's FP8: a float32 scale for each block; a block at an edge may be smaller. It means bfloat16 weights."""

    def pack(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes, meant = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
                scales[row, column] = weight[block].abs().amax() / 448
                codes[block] = (weight[block] / scales[row, column]).to(FP8)
                meant[block] = (codes[block].float() * scales[row, column]).bfloat16().float()
        return {"weight": codes, "weight_scale_inv": scales}, meant

    return pack


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
SCHEMES: dict[str, dict[str, Any]] = {
    "int-quantized": {
        "weights": INT8 | {"strategy": "channel", "dynamic": False},
        "input_activations": INT8 | {"strategy": "tensor", "dynamic": False},
    },
    "nvfp4-pack-quantized": {
        "weights": NVFP4 | {"dynamic": False},
        "input_activations": NVFP4 | {"dynamic": "local"},
    },
}


def compressed(format_: str, weights: str, inputs: str | None, **more: Any) -> dict[str, Any]:
    """compressed-tensors' `quantization_config`; `weights` and `inputs` are strategies."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": float8 | {"strategy": weights, "dynamic": False},
        "input_activations": float8 | {"strategy": inputs, "dynamic": inputs == "token"},
    }
    if format_ == "pack-quantized":
        group |= {
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": weights},
            "input_activations": None,
        }
        group["weights"]["group_size"] = GROUP if weights == "group" else None
    group |= SCHEMES.get(format_, {})
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **more,
    }
