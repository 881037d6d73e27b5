"""Families that only the LLM API serves: quantised, exported, with what is carried along, and refused as engines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from tests.calibrate.test_modelopt import SIZES, _rounded
from tests.compile.test_llmapi import IDS, LLMAPI, tensors_of
from tests.families import TINY
from tests.modelopt import nvfp4_values
from tests.plan.models import asked
from tests.runtime.converted import computed, error
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import CalibrationConfig, EngineConfig
from trtforge.formats.trtllm import CARRIED_FILE, read_checkpoint_config
from trtforge.models.registry import family_of
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model
from trtforge.runtime.linears import nvfp4_linear

FAMILIES = ("deepseek_v3", "exaone4", "glm4_moe")
WITH_MTP = ("deepseek_v3", "glm4_moe")
QUANTISED = [*((name, "fp8") for name in FAMILIES), ("exaone4", "nvfp4"), ("glm4_moe", "nvfp4")]


def saved(name: str | PreTrainedModel, directory: Path) -> Path:
    """A tiny model in bfloat16, and behind its layers one for multi-token prediction if its family has them."""
    model = TINY[name]().bfloat16() if isinstance(name, str) else name
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(directory)
    if name in WITH_MTP:
        tensors = load_file(directory / "model.safetensors")
        generator = torch.Generator().manual_seed(7)
        tensors["model.layers.4.eh_proj.weight"] = torch.randn(64, 128, generator=generator).bfloat16()
        tensors["model.layers.4.enorm.weight"] = torch.randn(64, generator=generator)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 1}))
    return directory


def quantised(name: str | PreTrainedModel, quant: str, tmp_path: Path, **layout: Any) -> tuple[Path, Path]:
    """The checkpoint of TensorRT-LLM, and the model for the LLM API that is made of it."""
    tmp_path.mkdir(exist_ok=True)
    source = saved(name, tmp_path / "hf")
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    data = CalibrationConfig(data=str(tmp_path / "ids.safetensors"), samples=8, sequence_length=64)
    config = CalibrateConfig.model_validate({"format": quant, "data": data, "rounding": "nearest"})
    calibration = calibrate(config, source, tmp_path / "calibration").path
    made = convert(
        ConvertConfig.parse({"quant": quant, **layout}, "test"), source, tmp_path / "ck", calibration=calibration
    ).path
    return made, compile_engine(LLMAPI, made, tmp_path / "engine").path


@pytest.mark.parametrize(("name", "quant"), QUANTISED)
def test_the_quantised_weights_are_near_the_models(name: str, quant: str, tmp_path: Path) -> None:
    _, out = quantised(name, quant, tmp_path, tp=2)
    found, source = tensors_of(out), tensors_of(tmp_path / "hf")
    described = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == {"fp8": "FP8", "nvfp4": "NVFP4"}[quant]
    quantised_modules = {key.removesuffix(".weight_scale") for key in found if key.endswith(".weight_scale")}
    assert "model.layers.1.self_attn.o_proj" in quantised_modules
    matrices = {key.removesuffix(".weight") for key, tensor in source.items() if tensor.dim() == 2}
    assert matrices - quantised_modules == set(described["exclude_modules"]) & matrices
    for module in quantised_modules:
        original = source[f"{module}.weight"].float()
        if quant == "fp8":
            made = found[f"{module}.weight"].float() * found[f"{module}.weight_scale"]
        else:
            made = nvfp4_values(found, module)
        assert float((made - original).norm() / original.norm()) < {"fp8": 0.05, "nvfp4": 0.15}[quant], module
    if name in WITH_MTP:
        assert "model.layers.2.mlp.experts.5.down_proj" in quantised_modules


def test_nvfp4_experts_compute_what_their_codes_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layout; compared with ModelOpt's reading of the codes where activations are not rounded."""
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    data = CalibrationConfig(data=str(tmp_path / "ids.safetensors"), samples=8, sequence_length=64)
    config = CalibrateConfig.model_validate({"format": "nvfp4", "data": data})
    source = saved("glm4_moe", tmp_path / "hf")
    calibration = calibrate(config, source, tmp_path / "calibration").path
    ids, found = IDS[0, :40].tolist(), []
    for number, layout in enumerate(({}, {"tp": 2}, {"tp": 2, "ep": 2})):
        values = {"quant": "nvfp4", "dtype": "float32", **layout}
        out = tmp_path / f"ck{number}"
        made = convert(ConvertConfig.parse(values, "test"), source, out, calibration=calibration).path
        found.append(computed(made, ids)[0])
    for other in found[1:]:
        assert error(other, found[0]) < 1e-3
    stored = tensors_of(compile_engine(LLMAPI, made, tmp_path / "engine").path)
    meant = {name: tensor for name, tensor in stored.items() if not name.endswith(("_scale", "_scale_2"))}
    for name in [name for name in stored if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        meant[f"{module}.weight"] = nvfp4_values(stored, module)
    save_file(meant, source / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    monkeypatch.setattr(nvfp4_linear, "round_to_nvfp4", lambda values, scale: values.float() / scale)
    assert error(computed(tmp_path / "ck0", ids)[0], expected) < 1e-4
    for expert in range(8):
        gate, up = (f"model.layers.2.mlp.experts.{expert}.{part}_proj" for part in ("gate", "up"))
        assert torch.equal(stored[f"{gate}.weight_scale_2"], stored[f"{up}.weight_scale_2"])


@pytest.mark.parametrize("quant", ["fp8_rowwise", "int8_sq", "w4a8_awq"])
@pytest.mark.parametrize("name", WITH_MTP)
def test_formats_that_their_experts_lack_are_refused(name: str, quant: str, tmp_path: Path) -> None:
    model = find_model(str(saved(name, tmp_path / "hf")))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16", quant=quant)).problems
    assert problem.message == f"the LLM API's mixture of experts ({name}) is not known to support {quant}"


@pytest.mark.parametrize("name", WITH_MTP)
def test_layers_for_multi_token_prediction_pass_through(name: str, tmp_path: Path) -> None:
    checkpoint, out = quantised(name, "fp8", tmp_path, pp=2)
    assert set(load_file(checkpoint / CARRIED_FILE)) == {"model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"}
    found, source = tensors_of(out), tensors_of(tmp_path / "hf")
    for tensor in ("model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"):
        assert found[tensor].dtype is source[tensor].dtype
        assert torch.equal(found[tensor], source[tensor])
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert found[bias].dtype is torch.float32
    assert torch.equal(found[bias], source[bias].float())
    described = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert "model.layers.4.eh_proj" in described["exclude_modules"]
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    config = EngineConfig.parse({"backend": "llmapi", "features": {"mtp": {"draft_tokens": 2}}}, "test")
    plan = engine_plan_for(read_checkpoint_config(checkpoint), config, checkpoint, out, CompileOptions()).as_json()
    assert plan["model_yaml"]["speculative_config"]["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_no_release_builds_engines_of_them(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "hf")
    assert not family_of(json.loads((source / "config.json").read_text())["architectures"][0]).engines
    model = find_model(str(source))
    engine = {"backend": "tensorrt_llm", "max_seq_len": 64, "max_batch_size": 2}
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16")).problems
    assert "TensorRT-LLM builds no engines for" in problem.message
    assert problem.fix == "Use engine.backend: llmapi."
    assert evaluate(model, asked(model, recipe={"engine": {**engine, "backend": "llmapi"}}, dtype="float16")).legal
    made = convert(ConvertConfig(), source, tmp_path / "checkpoint").path
    config = EngineConfig.parse({"backend": "tensorrt_llm"}, "test")
    with pytest.raises(ForgeError, match="TensorRT-LLM builds no engines for"):
        engine_plan_for(read_checkpoint_config(made), config, made, tmp_path / "x", CompileOptions())


def test_a_compressed_cache_stays_unquantised(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="deepseek_v3 caches compressed keys and values"):
        convert(ConvertConfig(kv_cache="fp8"), saved("deepseek_v3", tmp_path / "hf"), tmp_path / "checkpoint")


def test_slow_links_are_a_warning(tmp_path: Path) -> None:
    model = find_model(str(saved("glm4_moe", tmp_path / "hf")))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2, "target": {"gpu": "l40s"}}
    found = evaluate(model, asked(model, recipe={"engine": engine}, tp=2))
    assert found.legal
    assert "tp 2 goes over PCIe on l40s: two all-reduces a layer. Pipeline parallelism sends far less data." in (
        found.warnings
    )


def test_awq_without_a_norm_before_attention_is_refused(tmp_path: Path) -> None:
    made = _rounded(Exaone4Config, **SIZES, sliding_window=None, layer_types=["full_attention"] * 2)
    with pytest.raises(ForgeError, match="cannot be folded into a normalisation"):
        quantised(made.half(), "int4_awq", tmp_path, shared_pre_quant_scale=True)


def with_vision(name: str) -> PreTrainedModel:
    """A tiny multimodal model; every parameter random."""
    if name == "gemma3_multimodal":
        text = {**TINY["gemma3"]().config.to_dict(), "tie_word_embeddings": True}
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        ids = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
        )
    else:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14, "model_type": "pixtral"}
        text = TINY["mistral"]().config.to_dict() | {"sliding_window": None}
        model = Mistral3ForConditionalGeneration(
            Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.float().eval()


@pytest.mark.parametrize("name", ["gemma3_multimodal", "mistral3"])
def test_the_language_part_is_converted_and_the_vision_part_copied(name: str, tmp_path: Path) -> None:
    model = with_vision(name)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text('{"do_resize": true}')
    ids = torch.randint(8, 131, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0]
    for layout in ({}, {"tp": 2, "pp": 2}):
        out = tmp_path / f"ck{len(layout)}"
        made = convert(ConvertConfig.parse({"dtype": "float32", **layout}, "test"), tmp_path / "hf", out).path
        assert error(computed(made, ids[0].tolist())[0], expected) < 1e-4
    engine = compile_engine(LLMAPI, made, tmp_path / "plain").path
    assert (engine / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    found, source = tensors_of(engine), tensors_of(tmp_path / "hf")
    assert found.keys() == source.keys()
    for key, tensor in source.items():
        assert torch.allclose(found[key], tensor, rtol=0, atol=1e-6), key
    _, out = quantised(model, "fp8", tmp_path / "q", tp=2, exclude_modules=["*.layers.1.mlp.down_proj"])
    found = tensors_of(out)
    described = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert "language_model.model.layers.0.mlp.up_proj.weight_scale" in found
    left = "model.layers.1.mlp.down_proj"  # TensorRT-LLM's language model, of its own, gets the same list
    assert f"language_model.{left}.weight_scale" not in found
    assert {left, f"language_model.{left}"} <= set(described["exclude_modules"])
    vision = [key for key in source if key.startswith("vision_tower.") and source[key].dim() == 2]
    assert vision
    for key in vision:
        assert torch.equal(found[key], source[key])
        assert key.removesuffix(".weight") in described["exclude_modules"]


@pytest.mark.parametrize("name", ["gemma3_multimodal", "mistral3"])
def test_tensors_named_as_transformers_names_its_modules_are_those_of_published_models(
    name: str, tmp_path: Path
) -> None:
    """`model.language_model.layers...`, which programs write that save a model's state themselves."""
    model = with_vision(name)
    model.save_pretrained(tmp_path / "published")
    shutil.copytree(tmp_path / "published", tmp_path / "modules")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert "model.language_model.layers.0.mlp.up_proj.weight" in state
    save_file(state, tmp_path / "modules" / "model.safetensors", {"format": "pt"})
    made = [
        convert(ConvertConfig(dtype="float32"), tmp_path / each, tmp_path / f"{each}-made").path
        for each in ("published", "modules")
    ]
    for file in ("config.json", "rank0.safetensors", CARRIED_FILE):
        assert (made[0] / file).read_bytes() == (made[1] / file).read_bytes()
    with pytest.raises(ForgeError, match="a name of transformers' modules, which TensorRT-LLM does not read") as caught:
        compile_engine(LLMAPI, tmp_path / "modules", tmp_path / "engine")
    assert "trtforge convert HF_DIR CHECKPOINT" in (caught.value.hint or "")
    state["language_model.model.norm.weight"] = state["model.language_model.norm.weight"].clone()
    save_file(state, tmp_path / "modules" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ForgeError, match=r"language_model\.model\.norm\.weight is in model\.safetensors and in"):
        convert(ConvertConfig(), tmp_path / "modules", tmp_path / "out")
