"""NVIDIA ModelOpt on the same float32 model and token ids: scales, packed weights, and its exported checkpoints."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MixtralConfig, Qwen2Config

from tests.families import _GQA, _tiny
from trtforge.calibrate import precision
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import CalibrationConfig
from trtforge.formats.calibration import Calibration, open_calibration
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.models.transforms import dequantize_int4, int4_scales, quantize_int4, unpack_int4

SIZES = _GQA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 128}


def _rounded(*arguments: Any, to: torch.dtype = torch.float16, **values: Any) -> Any:
    """A float32 model with values of float16, which ModelOpt's exporter writes, or of another type."""
    model = _tiny(*arguments, **values)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(to))
    return model


MODELS = {
    "llama": partial(_rounded, LlamaConfig, **SIZES),
    "llama_bfloat16": partial(_rounded, LlamaConfig, to=torch.bfloat16, **SIZES),
    "qwen2": partial(_rounded, Qwen2Config, **SIZES),
    "mixtral": partial(_rounded, MixtralConfig, **SIZES, num_local_experts=4, num_experts_per_tok=2),
}
PRESETS = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
    "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
}
IDS = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(0))


class Pair:
    """One model, calibrated by us and by ModelOpt."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._quantized: dict[tuple[str, str, bool], Any] = {}

    def source(self, model: str) -> Path:
        directory = self._root / model
        if not directory.exists():
            dtype = torch.bfloat16 if model.endswith("_bfloat16") else torch.float32
            MODELS[model]().to(dtype).save_pretrained(directory)
            save_file({"input_ids": IDS}, self._root / "ids.safetensors")
        return directory

    def ours(self, model: str, quant: str, kv_cache: str = "none") -> Path:
        data = CalibrationConfig(data=str(self._root / "ids.safetensors"), samples=8, sequence_length=64)
        settings = {"format": quant, "kv_cache": kv_cache, "data": data, "rounding": "nearest"}
        config = CalibrateConfig.model_validate(settings)
        return calibrate(config, self.source(model), self._root / f"{model}-{quant}-{kv_cache}").path

    def theirs(self, model: str, quant: str, *, fp8_kv: bool = False) -> Any:
        key = (model, quant, fp8_kv)
        if key not in self._quantized:
            preset = copy.deepcopy(PRESETS[quant])
            if fp8_kv:
                preset = mtq.utils.update_quant_cfg_with_kv_cache_quant(preset, mtq.FP8_KV_CFG["quant_cfg"])
            with torch.no_grad():
                self._quantized[key] = mtq.quantize(MODELS[model](), preset, lambda m: m(input_ids=IDS))
        return self._quantized[key]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("modelopt"))


def linears(model: Any) -> dict[str, Any]:
    """The linears that ModelOpt quantises, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name and hasattr(module, "input_quantizer") and hasattr(module, "weight_quantizer")
    }


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_largest_magnitudes_are_equal(pair: Pair, model: str) -> None:
    found = open_calibration(pair.ours(model, "fp8"))
    for name, module in linears(pair.theirs(model, "fp8")).items():
        assert torch.allclose(found.input_amax(name), module.input_quantizer.amax, rtol=1e-3), name
        assert torch.allclose(found.weight_amax(name), module.weight_quantizer.amax, rtol=1e-3), name


def test_largest_magnitudes_of_experts_are_equal(pair: Pair) -> None:
    """ModelOpt has one input quantiser for all experts, and a weight quantiser for an expert's gate and up together."""
    found = open_calibration(pair.ours("mixtral", "fp8"))
    for index, layer in enumerate(pair.theirs("mixtral", "fp8").model.layers):
        prefix, experts = f"model.layers.{index}.block_sparse_moe.experts.", layer.mlp.experts
        inputs = torch.stack([found.input_amax(f"{prefix}{e}.w1") for e in range(4)]).amax()
        assert torch.allclose(inputs, experts.gate_up_proj_input_quantizer.amax, rtol=1e-3)
        inner = torch.stack([found.input_amax(f"{prefix}{e}.w2") for e in range(4)]).amax()
        assert torch.allclose(inner, experts.down_proj_input_quantizer.amax, rtol=1e-3)
        for expert in range(4):
            both = torch.stack([found.weight_amax(f"{prefix}{expert}.{part}") for part in ("w1", "w3")]).amax()
            assert torch.allclose(both, experts.gate_up_proj_weight_quantizers[expert].amax, rtol=1e-3)


@pytest.mark.parametrize("model", ["llama", "llama_bfloat16", "qwen2", "mixtral"])
def test_awq_chooses_as_well(pair: Pair, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per linear: the chosen scale's output error on the data; where the choice is the same, the scale itself.

    ModelOpt computes in float32, also where we compute a bfloat16 model in bfloat16.
    """
    monkeypatch.setattr(precision, "_multiplies_bfloat16_faster", lambda: model == "llama_bfloat16")
    found, inputs = open_calibration(pair.ours(model, "int4_awq")), {}
    plain = MODELS[model]()
    theirs = linears(pair.theirs(model, "int4_awq"))
    for name, module in plain.named_modules():
        if name in theirs:
            module.register_forward_pre_hook(partial(_keep, inputs, name))
    with torch.no_grad():
        plain(input_ids=IDS)
        same = 0
        for name, module in theirs.items():
            weight, x = plain.get_submodule(name).weight, inputs[name]
            ours, other = found.pre_quant_scale(name), module.input_quantizer.pre_quant_scale.float()
            assert _error(weight, ours, x) <= 1.01 * _error(weight, other, x), name
            if torch.allclose(ours, other, rtol=1e-2):
                same += 1
                mine, others = (quantize_int4(weight / s, int4_scales(weight / s, 128)) for s in (ours, other))
                assert (mine == others).float().mean() >= 0.99, name
    assert same >= (0.8 if model == "llama_bfloat16" else 0.9) * len(theirs)  # processors sum bfloat16 differently


def _keep(inputs: dict[str, torch.Tensor], name: str, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
    inputs[name] = arguments[0].flatten(0, -2)


def _error(weight: torch.Tensor, pre_quant: torch.Tensor, x: torch.Tensor) -> float:
    scales = int4_scales(weight / pre_quant, 128)
    rounded = dequantize_int4(quantize_int4(weight / pre_quant, scales), scales) * pre_quant
    return float((x @ (rounded - weight).T).square().sum())


def exported(pair: Pair, quant: str, tp: int, out: Path, *, fp8_kv: bool = False) -> list[dict[str, torch.Tensor]]:
    with torch.no_grad():
        export_tensorrt_llm_checkpoint(
            copy.deepcopy(pair.theirs("llama", quant, fp8_kv=fp8_kv)),
            "llama",
            torch.float16,
            out,
            inference_tensor_parallel=tp,
        )
    return [load_file(path) for path in sorted(out.glob("rank*.safetensors"))]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("quant", "kv"), [("fp8", "none"), ("fp8", "fp8"), ("int4_awq", "none"), ("w4a8_awq", "none"), ("int8_sq", "none")]
)
def test_exported_checkpoints_are_equal(pair: Pair, tmp_path: Path, quant: str, kv: str, tp: int) -> None:
    """Names, shapes, dtypes; scales within 1e-3; rounded weights all but equal (a last bit of the input decides)."""
    theirs = exported(pair, quant, tp, tmp_path / "theirs", fp8_kv=kv == "fp8")
    config = ConvertConfig.model_validate(
        {"tp": tp, "quant": quant, "kv_cache": kv, "dtype": "float16", "parallel_embedding": True}
    )
    out = convert(config, pair.source("llama"), tmp_path / "ours", calibration=pair.ours("llama", quant, kv)).path
    ours = [load_file(path) for path in sorted(out.glob("rank*.safetensors"))]

    assert len(ours) == len(theirs) == tp
    for mine, others in zip(ours, theirs, strict=True):
        others = {
            n: t for n, t in others.items() if not n.endswith((".k_cache_scaling_factor", ".v_cache_scaling_factor"))
        }
        assert mine.keys() == others.keys()
        for name, tensor in mine.items():
            other = others[name]
            assert tensor.shape == other.shape or tensor.numel() == other.numel() == 1, name
            assert tensor.dtype == other.dtype or {tensor.dtype, other.dtype} == {torch.int8, torch.uint8}, name
            _assert_alike(name, tensor, other, packed=quant in ("int4_awq", "w4a8_awq"))
    written, reference = read_checkpoint_config(out), read_checkpoint_config(tmp_path / "theirs")
    for key in ("quant_algo", "kv_cache_quant_algo", "pre_quant_scale", "has_zero_point"):
        assert getattr(written.quantization, key) == getattr(reference.quantization, key), key


def _assert_alike(name: str, tensor: torch.Tensor, other: torch.Tensor, *, packed: bool) -> None:
    if tensor.dtype in (torch.int8, torch.uint8):
        mine, others = tensor.view(torch.int8), other.view(torch.int8)
        codes = [unpack_int4(part) if packed else part for part in (mine, others)]
        assert (codes[0] == codes[1]).float().mean() >= 0.99, name
    elif tensor.dtype is torch.float8_e4m3fn:
        assert (tensor.view(torch.uint8) == other.view(torch.uint8)).float().mean() >= 0.99, name
    else:
        assert torch.allclose(tensor.flatten().float(), other.flatten().float(), rtol=1e-3, atol=1e-7), name


def test_nvfp4_values_are_equal(pair: Pair, tmp_path: Path) -> None:
    """The exported matrices of the quantiser's own class, and its activation scales."""
    theirs = linears(pair.theirs("llama", "nvfp4"))
    config = ConvertConfig.model_validate({"quant": "nvfp4", "dtype": "float32"})
    out = convert(config, pair.source("llama"), tmp_path / "out", calibration=pair.ours("llama", "nvfp4")).path
    ours = load_file(out / "rank0.safetensors")
    for layer in range(2):
        attention = [f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkv"]
        mlp = [f"model.layers.{layer}.mlp.{part}_proj" for part in ("gate", "up")]
        for target, modules, shared in (
            ("attention.qkv", attention, attention),
            ("attention.dense", [f"model.layers.{layer}.self_attn.o_proj"], None),
            ("mlp.fc", mlp[:1], mlp),
            ("mlp.gate", mlp[1:], mlp),
            ("mlp.proj", [f"model.layers.{layer}.mlp.down_proj"], None),
        ):
            prefix = f"transformer.layers.{layer}.{target}."
            group = [theirs[name] for name in shared or modules]
            scale_2 = torch.stack([m.weight_quantizer.amax.float() for m in group]).amax() / (6 * 448)
            weight = torch.cat([theirs[name].weight.detach() for name in modules])
            codes, blocks, _ = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=scale_2)
            assert torch.allclose(ours[f"{prefix}weights_scaling_factor_2"], scale_2, rtol=1e-6)
            assert torch.equal(ours[f"{prefix}weights_scaling_factor"].view(torch.uint8), blocks.view(torch.uint8))
            assert torch.equal(ours[f"{prefix}weight"], codes._quantized_data)
            amax = torch.stack([m.input_quantizer.amax.float() for m in group]).amax()
            assert torch.allclose(ours[f"{prefix}activation_scaling_factor"], amax / (6 * 448), rtol=1e-3)


def test_w4a8_has_the_same_choices_as_int4(pair: Pair) -> None:
    """Activations in FP8 change nothing about how the weights' scale is chosen."""
    ours: list[Calibration] = [open_calibration(pair.ours("llama", quant)) for quant in ("int4_awq", "w4a8_awq")]
    for name in linears(pair.theirs("llama", "w4a8_awq")):
        assert torch.equal(ours[0].pre_quant_scale(name), ours[1].pre_quant_scale(name))
