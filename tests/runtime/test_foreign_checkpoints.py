"""Checkpoints that ModelOpt's TensorRT-LLM exporter wrote, as they are: verified, compiled and run."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.calibrate.test_modelopt import IDS, MODELS, Pair, exported, linears
from tests.runtime.converted import computed
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import read_manifest, record_of
from trtforge.core.recipe import EngineConfig, GateConfig
from trtforge.pipeline.adoption import adopt
from trtforge.verify.stage import verify

TOKENS = IDS[0].tolist()[:40]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("foreign"))


def same_calibration(pair: Pair, quant: str, kv_cache: str, out: Path) -> Path:
    """Our calibration with the numbers that ModelOpt measured on the same data."""
    shutil.copytree(pair.ours("llama", quant, kv_cache), out)
    tensors = load_file(out / "calibration.safetensors")
    for name, module in linears(pair.theirs("llama", quant, fp8_kv=kv_cache == "fp8")).items():
        inputs, weights = module.input_quantizer, module.weight_quantizer
        for key, value in {
            "input_amax": inputs.amax,
            "weight_amax": weights.amax,
            "pre_quant_scale": getattr(inputs, "pre_quant_scale", None),
            "input_channel_amax": getattr(inputs, "_amax_for_smoothing", None),
        }.items():
            own = tensors.get(f"{name}.{key}")
            if own is not None and value is not None and value.numel() == own.numel():
                tensors[f"{name}.{key}"] = value.float().reshape(own.shape).clone()
    save_file(tensors, out / "calibration.safetensors")
    manifest = read_manifest(out)
    assert manifest is not None
    manifest.model_copy(update={"files": {name: record_of(out / name) for name in manifest.files}}).write(out)
    return out


def gate(pair: Pair) -> GateConfig:
    data = str(pair.source("llama").parent / "ids.safetensors")
    return GateConfig.model_validate({"data": data, "samples": 2, "sequence_length": 64})


@pytest.mark.parametrize(
    ("quant", "kv_cache", "tp", "share"),
    [
        ("fp8", "none", 1, 0.0),
        ("fp8", "fp8", 2, 0.0),
        ("nvfp4", "none", 1, 0.0),
        ("int4_awq", "none", 2, 0.2),
        ("int8_sq", "none", 1, 0.2),
    ],
)
def test_modelopts_checkpoints_compute_the_same_as_ours(
    pair: Pair, tmp_path: Path, quant: str, kv_cache: str, tp: int, share: float
) -> None:
    """`share`: of the quantisation error; rounded codes of a few weights differ in a last bit of float32."""
    theirs = tmp_path / "theirs"
    exported(pair, quant, tp, theirs, fp8_kv=kv_cache == "fp8")
    layout = {"tp": tp, "quant": quant, "kv_cache": kv_cache, "dtype": "float16", "parallel_embedding": True}
    calibration = same_calibration(pair, quant, kv_cache, tmp_path / "calibration")
    ours = convert(
        ConvertConfig.model_validate(layout), pair.source("llama"), tmp_path / "ours", calibration=calibration
    ).path
    with torch.no_grad():
        original = MODELS["llama"]()(torch.tensor([TOKENS])).logits[0]

    warnings: list[str] = []
    engines = []
    for checkpoint in (theirs, ours):
        engine = tmp_path / f"engine-{checkpoint.name}"
        compile_engine(EngineConfig(backend="torch", device="cpu"), checkpoint, engine, warn=warnings.append)
        engines.append(computed(engine, TOKENS)[0])
        assert_alike(computed(checkpoint, TOKENS)[0], computed(ours, TOKENS)[0], original, share)
    assert_alike(*engines, original, share)
    assert warnings[0].startswith(f"{theirs} is a foreign checkpoint: trtforge did not write it")
    assert "foreign" not in " ".join(warnings[1:])

    found, expected = (verify(checkpoint, pair.source("llama"), gate(pair)) for checkpoint in (theirs, ours))
    assert [note.partition(":")[0] for note in found.notes] == [f"{theirs} is foreign"]
    assert expected.notes == ()
    if not share:
        assert found.kl_mean == pytest.approx(expected.kl_mean, rel=1e-3)
        assert found.perplexity.candidate == pytest.approx(expected.perplexity.candidate, rel=1e-4)

    adopted = adopt(theirs)
    assert adopted.tensors == sum(len(load_file(path)) for path in theirs.glob("rank*"))
    assert list(adopted.manifest.identity.versions) == ["modelopt"]
    again = compile_engine(EngineConfig(backend="torch", device="cpu"), theirs, tmp_path / "engine-theirs")
    assert again.origin == "already right"


def assert_alike(mine: Tensor, other: Tensor, original: Tensor, share: float) -> None:
    """Their difference is rounding noise, or at most `share` of their distance from the original model."""
    quantisation = float((other - original).norm())
    assert quantisation > 0
    assert float((mine - other).norm()) <= max(share * quantisation, 1e-5 * float(original.norm()))


def export(model: Any, directory: Path, architecture: str, tp: int = 1) -> Path:
    with torch.no_grad():
        quantised = mtq.quantize(model, copy.deepcopy(mtq.FP8_DEFAULT_CFG), lambda m: m(input_ids=IDS))
        export_tensorrt_llm_checkpoint(quantised, architecture, torch.float16, directory, inference_tensor_parallel=tp)
    return directory


def test_fields_that_modelopt_leaves_out_have_tensorrt_llms_defaults(pair: Pair, tmp_path: Path) -> None:
    """Qwen2's config.json has no attn_bias, which TensorRT-LLM takes as true for its architecture."""
    model = MODELS["qwen2"]()
    checkpoint = export(model, tmp_path / "theirs", "qwen", tp=2)
    assert "attn_bias" not in json.loads((checkpoint / "config.json").read_text())
    found = verify(checkpoint, pair.source("qwen2"), gate(pair))
    assert found.kl_mean < 0.3
    assert found.tensors_checked == adopt(checkpoint).tensors == 78


def test_positions_that_modelopt_lost_are_named(tmp_path: Path) -> None:
    """Its exporter looks for rope_theta and rope_scaling where transformers 4 had them, and writes neither."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = MODELS["llama"](rope_parameters=rope | {"original_max_position_embeddings": 64})
    model.save_pretrained(tmp_path / "hf")
    checkpoint = export(model, tmp_path / "theirs", "llama")
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    limits = {"data": str(tmp_path / "ids.safetensors"), "samples": 1, "sequence_length": 64}
    notes = verify(checkpoint, tmp_path / "hf", GateConfig.model_validate(limits)).notes
    assert notes[1] == "its rotary_base is 10000, the default, as its config.json has none; the model's is 500000"
    assert notes[2].startswith("its config.json has no rotary_scaling; the model's is {'factor': 8.0, ")
    unknown = adopt(checkpoint).unknown
    assert "rotary_base: config.json has none, so that 10000 is taken; compare it with the model's" in unknown


def test_another_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    """By its sizes, or by a tensor that was only copied."""
    checkpoint = export(MODELS["llama"](), tmp_path / "theirs", "llama")
    smaller = MODELS["llama"](num_hidden_layers=1)
    smaller.save_pretrained(tmp_path / "smaller")
    with pytest.raises(ForgeError, match=r"is not the model that .* num_hidden_layers differs"):
        verify(checkpoint, tmp_path / "smaller", gate(pair))
    other = MODELS["llama"]()
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ForgeError, match=r"transformer\.ln_f\.weight differs from its source model\.norm\.weight"):
        verify(checkpoint, tmp_path / "other", gate(pair))
