"""GPT-OSS: converted from bfloat16 and from MXFP4, verified, and exported for the LLM API."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compile.test_llmapi import IDS, LLMAPI, ranks_of, same_bytes, tensors_of
from tests.families import TINY
from tests.mxfp4 import in_mxfp4, meant
from tests.plan.models import asked
from tests.runtime.converted import computed, error
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.llmapi import plan_for_hugging_face
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import CalibrationConfig, GateConfig
from trtforge.formats.hf import HfConfig, open_checkpoint
from trtforge.formats.shards import RowReader
from trtforge.models.registry import family_of
from trtforge.models.torch_tensors import read_tensor
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model
from trtforge.verify.stage import verify

LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 4, "ep": 2}]
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt-oss")
    TINY["gpt_oss"]().bfloat16().save_pretrained(directory / "hf")
    save_file({"input_ids": IDS}, directory / "ids.safetensors")
    return directory / "hf"


@pytest.fixture(scope="module")
def mxfp4(bfloat16: Path) -> Path:
    return in_mxfp4(bfloat16, bfloat16.parent / "mxfp4")


def gate(source: Path) -> GateConfig:
    return GateConfig(data=str(source.parent / "ids.safetensors"), samples=4, sequence_length=48)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_comes_back(layout: dict[str, Any], bfloat16: Path, tmp_path: Path) -> None:
    made = convert(ConvertConfig.parse(layout, "test"), bfloat16, tmp_path / "ck").path
    engine = compile_engine(LLMAPI, made, tmp_path / "engine").path
    found, source = tensors_of(engine), tensors_of(bfloat16)
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert same_bytes(found[name], tensor), name
    result = verify(made, bfloat16, gate(bfloat16))
    assert result.passed
    assert result.max_abs_logit_error < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mxfp4_computes_what_transformers_reads(layout: dict[str, Any], mxfp4: Path, tmp_path: Path) -> None:
    """The ranks are those of the bfloat16 model whose experts transformers' own function dequantised."""
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(meant(mxfp4), plain / "model.safetensors", {"format": "pt"})
    values = json.loads((mxfp4 / "config.json").read_text())
    del values["quantization_config"]
    (plain / "config.json").write_text(json.dumps(values))
    config = ConvertConfig.parse(layout, "test")
    made = convert(config, mxfp4, tmp_path / "ck").path
    assert ranks_of(made) == ranks_of(convert(config, plain, tmp_path / "other").path)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    ids = IDS[0, :40].tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    exact = convert(ConvertConfig.parse({"dtype": "float32", **layout}, "test"), mxfp4, tmp_path / "exact").path
    assert error(computed(exact, ids)[0], expected) < 1e-4


def test_mxfp4_is_verified_and_exported_in_bfloat16(mxfp4: Path, tmp_path: Path) -> None:
    made = convert(ConvertConfig(tp=2), mxfp4, tmp_path / "ck").path
    result = verify(made, mxfp4, gate(mxfp4))
    assert result.passed
    assert result.max_abs_logit_error < 1e-3
    engine = compile_engine(LLMAPI, made, tmp_path / "engine").path
    assert "quantization_config" not in json.loads((engine / "config.json").read_text())
    found, expected = tensors_of(engine), meant(mxfp4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bytes(found[name], tensor), name


def test_every_code_and_scale_is_read_as_transformers_does(mxfp4: Path, tmp_path: Path) -> None:
    """All bytes with all scales but the last, which means NaN."""
    tensors = {
        f"{DOWN}_blocks": torch.arange(256).to(torch.uint8).view(1, 1, 16, 16).repeat(2, 255, 1, 1),
        f"{DOWN}_scales": torch.arange(255).to(torch.uint8).view(1, 255, 1).repeat(2, 1, 16),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((mxfp4 / "config.json").read_text())
    expected = meant(tmp_path)[DOWN][1]
    assert float(expected[0, 0]) == 0
    assert float(expected[2 * 3, 127]) == 1.5
    stored = open_checkpoint(tmp_path).tensors["model.layers.1.mlp.experts.1.down_proj.weight"]
    with RowReader() as reader:
        assert same_bytes(read_tensor(reader, stored), expected)
        part = reader.read_columns(stored, 100, 200, memoryview(bytearray(512 * 100 * 2)))
        assert same_bytes(
            torch.frombuffer(part, dtype=torch.bfloat16).view(512, 100), expected[:, 100:200].contiguous()
        )
        some = reader.read_bytes(stored, 1000, memoryview(bytearray(3000)))
        assert bytes(some) == expected.view(torch.uint8).flatten()[1000:4000].numpy().tobytes()


def test_the_cache_is_calibrated(bfloat16: Path, tmp_path: Path) -> None:
    """The LLM API runs an FP8 KV cache with scale 1; the embedded engine has scales, of INT8 too."""
    data = CalibrationConfig(data=str(bfloat16.parent / "ids.safetensors"), samples=4, sequence_length=48)
    config = CalibrateConfig.model_validate({"format": "none", "kv_cache": "int8", "data": data})
    calibration = calibrate(config, bfloat16, tmp_path / "calibration").path
    settings = ConvertConfig.parse({"kv_cache": "int8", "tp": 2}, "test")
    made = convert(settings, bfloat16, tmp_path / "ck", calibration=calibration).path
    scales = [
        load_file(made / "rank0.safetensors")[f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"]
        for layer in range(4)
    ]
    assert all(0 < float(scale) < 1 for scale in scales)
    assert verify(made, bfloat16, gate(bfloat16)).top1_agreement > 0.8
    with pytest.raises(ForgeError, match="the INT8 KV cache is not supported"):
        compile_engine(LLMAPI, made, tmp_path / "engine")
    fp8 = convert(ConvertConfig.parse({"kv_cache": "fp8"}, "test"), bfloat16, tmp_path / "fp8").path
    engine = compile_engine(LLMAPI, fp8, tmp_path / "fp8-engine").path
    assert "dtype: fp8" in (engine / "model.yaml").read_text()
    assert set(tensors_of(engine)) == set(tensors_of(bfloat16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}_scales": None}, rf"{DOWN}_blocks has no {DOWN}_scales"),
        ({f"{DOWN}_blocks": None}, rf"{DOWN}_scales has no {DOWN}_blocks"),
        ({f"{DOWN}_blocks": torch.zeros(4, 64, 1, 8, dtype=torch.uint8)}, r"_blocks is uint8 \[4, 64, 1, 8\]"),
        ({f"{DOWN}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, r"_scales uint8 \[4, 64, 2\]: MXFP4 has"),
        ({f"{DOWN}_scales": torch.zeros(4, 64, 1)}, r"_scales float32 \[4, 64, 1\]: MXFP4 has"),
    ],
)
def test_damaged_experts_are_refused(
    changes: dict[str, Tensor | None], message: str, mxfp4: Path, tmp_path: Path
) -> None:
    tensors = {**load_file(mxfp4 / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((mxfp4 / "config.json").read_text())
    with pytest.raises(ForgeError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "Fetch the checkpoint again."


def test_a_scale_that_is_no_number_is_refused(mxfp4: Path, tmp_path: Path) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    tensors[f"{DOWN}_scales"][2, 5] = 255
    source = tmp_path / "hf"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text((mxfp4 / "config.json").read_text())
    with pytest.raises(ForgeError, match=r"experts\.2\.down_proj\.weight .*(NaN|infinity)"):
        convert(ConvertConfig(), source, tmp_path / "ck")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias False cannot be converted"),
        ({"swiglu_limit": 6.0}, r"swiglu_limit 6\.0 cannot be converted"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0 cannot be converted"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has windows in other layers"),
    ],
)
def test_what_tensorrt_llm_has_as_constants_is_refused(changes: dict[str, Any], message: str, bfloat16: Path) -> None:
    values = json.loads((bfloat16 / "config.json").read_text()) | changes
    with pytest.raises(ForgeError, match=message):
        family_of("GptOssForCausalLM").facts(HfConfig(values, bfloat16 / "config.json"))


def test_absent_keys_have_the_defaults_of_transformers(bfloat16: Path) -> None:
    values = json.loads((bfloat16 / "config.json").read_text())
    for key in ("attention_bias", "head_dim", "sliding_window", "layer_types", "rope_parameters", "rope_theta"):
        values.pop(key, None)
    facts = family_of("GptOssForCausalLM").facts(HfConfig(values, bfloat16 / "config.json"))
    assert (facts.sizes.head_size, facts.config["sliding_window"]) == (64, 128)
    assert facts.config["sliding_window_layers"] == [0, 2]
    assert facts.config["rotary_base"] == 150000.0
    assert facts.config["rotary_scaling"]["factor"] == 32.0
    assert facts.config["rotary_scaling"]["truncate"] is False
    alone = HfConfig(values | {"rope_theta": 20000.0, "rope_scaling": None}, bfloat16 / "config.json")
    facts = family_of("GptOssForCausalLM").facts(alone)
    assert (facts.config["rotary_base"], facts.config["rotary_scaling"]["factor"]) == (20000.0, 32.0)


def test_formats_and_layouts_that_its_loader_lacks_are_refused(bfloat16: Path, mxfp4: Path, tmp_path: Path) -> None:
    model = find_model(str(bfloat16))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    assert evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16")).legal
    for quant in ("fp8", "int4_awq", "nvfp4"):
        problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16", quant=quant)).problems
        assert problem.message.endswith(f"no release is known to load {quant}")
    with pytest.raises(ForgeError, match="no release is known to load fp8_rowwise"):
        convert(ConvertConfig(quant="fp8_rowwise"), bfloat16, tmp_path / "x")
    with pytest.raises(ForgeError, match="no release is known to load fp8"):
        calibrate(CalibrateConfig.model_validate({"format": "fp8"}), bfloat16, tmp_path / "x")
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16", pp=2)).problems
    assert problem.message == "pp 2: TensorRT-LLM's GPT-OSS has no pipeline parallelism"
    made = convert(ConvertConfig(pp=2), bfloat16, tmp_path / "ck").path
    with pytest.raises(ForgeError, match="GPT-OSS has no pipeline parallelism") as caught:
        compile_engine(LLMAPI, made, tmp_path / "engine")
    assert caught.value.hint == "Use --pp 1 and a larger --tp."
    with pytest.raises(ForgeError, match="GPT-OSS has no pipeline parallelism"):
        plan_for_hugging_face(mxfp4, Parallel(pp=2), LLMAPI)
