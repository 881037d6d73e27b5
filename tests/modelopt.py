"""A tiny Llama quantised and exported by NVIDIA ModelOpt itself, on the CPU."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.quantized import tiny_llama

FORMATS = ("fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4")
SIZES = {"hidden_size": 256, "intermediate_size": 512}


def quantized_by_modelopt(format_: str, *, fp8_kv_cache: bool = False, fp8_attention: bool = False) -> Any:
    """A float32 model with values of float16: in bfloat16 the exporters divide by a scale in different precision.

    FP8 layers that TensorRT-LLM joins have one scale: the exporter for Hugging Face leaves them apart otherwise.
    `fp8_attention`: a model of mixed precision, in whose first layer down_proj is not quantised.
    """
    import modelopt.torch.quantization as mtq

    preset = copy.deepcopy(
        {
            "fp8": mtq.FP8_DEFAULT_CFG,
            "fp8_pc_pt": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
            "int4_awq": mtq.INT4_AWQ_CFG,
            "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
            "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
            "nvfp4": mtq.NVFP4_DEFAULT_CFG,
        }[format_]
    )
    if fp8_kv_cache:
        preset = mtq.utils.update_quant_cfg_with_kv_cache_quant(preset, mtq.FP8_KV_CFG["quant_cfg"])
    if fp8_attention:
        preset["algorithm"] = "max"  # AWQ's search would scale the inputs of FP8 layers too
        fp8 = {"num_bits": (4, 3), "axis": None}
        kinds = ("weight_quantizer", "input_quantizer")
        preset["quant_cfg"] += [{"quantizer_name": f"*self_attn.?_proj.{kind}", "cfg": fp8} for kind in kinds]
        preset["quant_cfg"] += [{"quantizer_name": "*layers.0.mlp.down_proj*", "enable": False}]
    ids = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(0))
    model = mtq.quantize(tiny_llama(torch.float16, **SIZES), preset, lambda model: model(ids))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            quantizers = [linear.weight_quantizer for linear in group]
            if all(quantizer.amax.numel() == 1 for quantizer in quantizers):
                largest = torch.stack([quantizer.amax for quantizer in quantizers]).amax()
                for quantizer in quantizers:
                    quantizer.amax = largest
    return model


def export_for_hugging_face(model: Any, directory: Path) -> None:
    """ModelOpt's "unified" checkpoint. It changes the model."""
    from modelopt.torch.export import export_hf_checkpoint

    with torch.inference_mode():
        export_hf_checkpoint(model, torch.float32, directory)


def export_for_tensorrt_llm(model: Any, directory: Path, tp: int) -> None:
    """ModelOpt's TensorRT-LLM checkpoint in float16."""
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(
            copy.deepcopy(model), "llama", torch.float16, directory, inference_tensor_parallel=tp
        )


def nvfp4_values(stored: dict[str, Tensor], module: str) -> Tensor:
    """The float32 weight of a module, read by ModelOpt's own class of NVFP4 tensors."""
    return _nvfp4(stored, module)


def dense(stored: dict[str, Tensor]) -> torch.nn.Module:
    """The float32 model that a checkpoint for Hugging Face stands for."""
    read = {"fp8": _fp8, "int4_awq": _int4, "w4a8_awq": _w4a8, "int8_sq": _int8, "nvfp4": _nvfp4}
    model = tiny_llama(torch.float16, **SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            found = format_of(stored, module)
            parameter.copy_(stored[name] if found is None else read[found](stored, module))
    return model


def format_of(stored: dict[str, Tensor], module: str) -> str | None:
    """The format of a module, by the tensors that it has; None if it is not quantised."""
    if f"{module}.weight_scale" not in stored:
        return None
    weight, scale = stored[f"{module}.weight"].dtype, stored[f"{module}.weight_scale"].dtype
    if weight != torch.uint8:
        return "int8_sq" if weight == torch.int8 else "fp8"
    if scale == torch.float8_e4m3fn:
        return "nvfp4"
    return "w4a8_awq" if f"{module}.weight_scale_2" in stored else "int4_awq"


def _fp8(stored: dict[str, Tensor], module: str) -> Tensor:
    return stored[f"{module}.weight"].float() * stored[f"{module}.weight_scale"]


def _int4(stored: dict[str, Tensor], module: str) -> Tensor:
    """Inputs are scaled before."""
    scales = stored[f"{module}.weight_scale"].repeat_interleave(128, dim=1)
    return _codes(stored, module) * scales * _pre(stored, module)


def _w4a8(stored: dict[str, Tensor], module: str) -> Tensor:
    """As TensorRT-LLM multiplies: scales of groups are of float16 once the tensor's is divided out."""
    second = stored[f"{module}.weight_scale_2"]
    scales = (stored[f"{module}.weight_scale"] / second).half().float() * second
    return _codes(stored, module) * scales.repeat_interleave(128, dim=1) * _pre(stored, module)


def _codes(stored: dict[str, Tensor], module: str) -> Tensor:
    """Even outputs are in low nibbles."""
    packed = stored[f"{module}.weight"]
    nibbles = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1).float()
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _int8(stored: dict[str, Tensor], module: str) -> Tensor:
    scales = stored[f"{module}.weight_scale"].unsqueeze(1)
    return stored[f"{module}.weight"].float() * scales * _pre(stored, module)


def _pre(stored: dict[str, Tensor], module: str) -> Tensor:
    """What inputs are multiplied by."""
    return stored.get(f"{module}.pre_quant_scale", torch.ones(1))


def _nvfp4(stored: dict[str, Tensor], module: str) -> Tensor:
    """Read by ModelOpt's own class of such tensors."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed = stored[f"{module}.weight"]
    tensor = NVFP4QTensor(torch.Size((packed.shape[0], 2 * packed.shape[1])), torch.float32, packed)
    scales = {"scale": stored[f"{module}.weight_scale"], "double_scale": stored[f"{module}.weight_scale_2"]}
    values: Tensor = tensor.dequantize(torch.float32, block_sizes={-1: 16}, **scales)
    return values
