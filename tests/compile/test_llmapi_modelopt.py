"""What ModelOpt exports for TensorRT-LLM, taken apart, against what it exports for Hugging Face from the same model."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.calibrate.test_modelopt import IDS, MODELS, PRESETS
from tests.compile.test_llmapi import LLMAPI, Models, tensors_of
from tests.modelopt import export_for_hugging_face, export_for_tensorrt_llm, quantized_by_modelopt
from trtforge.compile.stage import compile_engine
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity


def as_artifact(ranks: Path, hugging_face: Path, out: Path) -> Path:
    """A checkpoint of ours with ModelOpt's rank files and configuration."""

    def write(directory: Path) -> dict[str, Any]:
        shutil.copytree(ranks, directory, dirs_exist_ok=True)
        (directory / "source").mkdir()
        shutil.copyfile(hugging_face / "config.json", directory / "source" / "config.json")
        return {}

    return produce(out, Identity(stage="checkpoint"), write).path


def of_modelopt(format_: str, directory: Path, *, tp: int) -> tuple[Path, Path]:
    """A checkpoint and the Hugging Face export of one Llama."""
    model = quantized_by_modelopt(format_)
    export_for_tensorrt_llm(model, directory / "trtllm", tp)
    export_for_hugging_face(model, directory / "hf")
    return as_artifact(directory / "trtllm", directory / "hf", directory / "checkpoint"), directory / "hf"


def require_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Names, shapes and bytes; what is not quantised is float16 here and float32 there, of the same values."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        if ours[name].dtype is torch.float16:
            assert torch.equal(ours[name].float(), expected), name
        else:
            assert ours[name].dtype is expected.dtype, name
            assert torch.equal(ours[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("format_", ["fp8", "fp8_pc_pt", "nvfp4"])
def test_bytes_and_descriptions_are_modelopts(tmp_path: Path, format_: str, tp: int) -> None:
    checkpoint, expected = of_modelopt(format_, tmp_path, tp=tp)
    engine = compile_engine(LLMAPI, checkpoint, tmp_path / "engine").path
    require_alike(tensors_of(engine), tensors_of(expected))
    ours, theirs = (json.loads((path / "hf_quant_config.json").read_text()) for path in (engine, expected))
    assert ours["quantization"] == theirs["quantization"]
    config, exported = (json.loads((path / "config.json").read_text()) for path in (engine, expected))
    for values in (config, exported):
        del values["quantization_config"]["producer"]
        values["dtype"] = "-"
    assert {key: config[key] for key in exported} == exported
    assert config.keys() - exported.keys() <= {"rope_theta", "torch_dtype"}  # which transformers 4 reads


def test_gate_and_up_with_scales_of_their_own_are_refused(tmp_path: Path) -> None:
    """ModelOpt's exporter for TensorRT-LLM leaves them apart; the LLM API runs both as one linear."""
    checkpoint, _ = of_modelopt("int4_awq", tmp_path, tp=1)
    said = r"mlp\.fc\.prequant_scaling_factor and .*mlp\.gate\.prequant_scaling_factor differ"
    with pytest.raises(ForgeError, match=said) as caught:
        compile_engine(LLMAPI, checkpoint, tmp_path / "engine")
    assert "--shared-pre-quant-scale" in caught.value.hint


def exported(family: str, quant: str, directory: Path, *, fp8_kv: bool = False) -> Path:
    """ModelOpt's own calibration on the same ids, exported."""
    preset = copy.deepcopy(PRESETS[quant])
    if fp8_kv:
        preset = mtq.utils.update_quant_cfg_with_kv_cache_quant(preset, mtq.FP8_KV_CFG["quant_cfg"])
    model = MODELS[family]()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        export_for_hugging_face(mtq.quantize(model, preset, lambda m: m(input_ids=IDS)), directory)
    return directory


@pytest.mark.parametrize(
    ("family", "quant"), [("llama", "fp8"), ("qwen2", "fp8"), ("llama", "nvfp4"), ("qwen2", "nvfp4")]
)
def test_a_whole_build_has_modelopts_names_and_scales(models: Models, tmp_path: Path, family: str, quant: str) -> None:
    """Scales that TensorRT-LLM's checkpoint joins are the largest of those that ModelOpt leaves apart."""
    ours = tensors_of(models.engine(family, quant, kv_cache="fp8", tp=2))
    theirs = tensors_of(exported(family, quant, tmp_path, fp8_kv=True))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        joined = name.rpartition(".")[0].rpartition(".")[2] not in ("o_proj", "down_proj")
        if name.endswith(("_scale", "_scale_2")) and expected.dim() == 0:
            assert ours[name].dtype is torch.float32, name
            if joined:
                assert ours[name] >= expected * 0.999, name
            else:
                assert torch.allclose(ours[name], expected, rtol=1e-3), name


def test_int4_awq_is_what_modelopt_exports(models: Models, tmp_path: Path) -> None:
    """Both fold what scales the norms' outputs into the norms, and round gate and up once, with the shared scale."""
    engine, expected = models.engine("llama", "int4_awq"), exported("llama", "int4_awq", tmp_path)
    ours, theirs = tensors_of(engine), load_file(expected / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, name
        if tensor.dtype is torch.uint8:
            assert ours[name].dtype is torch.uint8
            assert (ours[name] == tensor).float().mean() > 0.99, name
        else:
            assert torch.allclose(ours[name].float(), tensor.float(), rtol=5e-3, atol=1e-3), name
    quantization = json.loads((engine / "hf_quant_config.json").read_text())["quantization"]
    assert quantization == json.loads((expected / "hf_quant_config.json").read_text())["quantization"]
