"""Qwen3-Next for the LLM API: linear attention as it is, attention and experts quantised, MTP copied."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compile.quantised import PROMPT, computed_in_every_layout, quantised
from tests.compile.test_llmapi import IDS, LLMAPI, tensors_of
from tests.families import TINY
from tests.modelopt import nvfp4_values
from tests.plan.models import asked
from tests.runtime.converted import error
from trtforge.compile.llmapi import plan_for_hugging_face
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.trtllm import CARRIED_FILE, read_checkpoint_config
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model

LINEAR = "model.layers.0.linear_attn"
PREDICTOR = {
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.self_attn.q_proj.weight": (192, 64),
    "mtp.layers.0.mlp.experts.3.up_proj.weight": (32, 64),
    "mtp.norm.weight": (64,),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16, with tensors of multi-token prediction."""
    directory = tmp_path_factory.mktemp("qwen3_next")
    TINY["qwen3_next"]().bfloat16().save_pretrained(directory / "hf")
    generator = torch.Generator().manual_seed(7)
    more = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in PREDICTOR.items()}
    path = directory / "hf" / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    save_file({"input_ids": IDS}, directory / "ids.safetensors")
    return directory / "hf"


def meant(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that a quantised checkpoint stands for, in float32, without multi-token prediction."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if name.startswith("mtp.") or name.endswith(("_scale", "_scale_2")):
            continue
        if f"{module}.weight_scale_2" in stored:
            tensor = nvfp4_values(stored, module)
        elif f"{module}.weight_scale" in stored:
            tensor = tensor.float() * stored[f"{module}.weight_scale"]
        found[name] = tensor.float()
    return found


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}, {"tp": 4, "ep": 2}], ids=["tp1", "tp2pp2", "tp4ep2"])
def test_an_unquantised_model_comes_back_byte_for_byte(layout: dict[str, int], hf: Path, tmp_path: Path) -> None:
    made = convert(ConvertConfig.parse(dict(layout), "test"), hf, tmp_path / "ck").path
    found, source = tensors_of(compile_engine(LLMAPI, made, tmp_path / "engine").path), tensors_of(hf)
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert set(load_file(made / CARRIED_FILE)) == set(PREDICTOR)


@pytest.mark.parametrize("quant", ["fp8", "nvfp4"])
def test_the_logits_are_those_that_the_codes_stand_for(
    quant: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layout, where activations are not rounded; run by transformers."""
    made, found = computed_in_every_layout(hf, quant, tmp_path, monkeypatch)
    stored = tensors_of(compile_engine(LLMAPI, made, tmp_path / "engine").path)
    (tmp_path / "meant").mkdir()
    (tmp_path / "meant" / "config.json").write_text((hf / "config.json").read_text())
    save_file(meant(stored), tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    for logits in found:
        assert error(logits, expected) < 1e-4
    assert f"{LINEAR}.in_proj_qkvz.weight_scale" not in stored
    assert "model.layers.2.self_attn.q_proj.weight_scale" in stored
    assert "model.layers.0.mlp.experts.7.down_proj.weight_scale" in stored
    for name, tensor in tensors_of(hf).items():
        if ".linear_attn." in name or name.startswith("mtp."):
            assert torch.equal(stored[name].float(), tensor.float()), name


def test_what_is_not_quantised_is_excluded_by_every_name(hf: Path, tmp_path: Path) -> None:
    made = quantised(hf, "fp8", tmp_path / "ck", kv_cache="fp8", tp=2)
    out = compile_engine(LLMAPI, made, tmp_path / "engine").path
    excluded = set(json.loads((out / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"])
    linear = {f"{LINEAR}.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj")}
    others = {"lm_head", "model.layers.2.mlp.gate", "model.layers.2.mlp.shared_expert_gate", "mtp.fc"}
    assert linear | others | {"mtp.*", "model.layers.4.*"} <= excluded
    assert not any(".experts." in name or ".self_attn." in name for name in excluded if name.startswith("model."))
    scales = {name for name in tensors_of(out) if name.endswith((".k_scale", ".v_scale"))}
    assert scales == {"model.layers.2.self_attn.k_proj.k_scale", "model.layers.2.self_attn.v_proj.v_scale"}
    target = {"backend": "llmapi", "target": {"tensorrt_llm": "1.2.1"}}
    plan = engine_plan_for(
        read_checkpoint_config(made), EngineConfig.parse(target, "test"), made, tmp_path / "x", CompileOptions()
    ).as_json()
    assert plan["model_yaml"]["kv_cache_config"]["enable_block_reuse"] is False
    as_it_is = plan_for_hugging_face(hf, Parallel(), EngineConfig.parse(target, "test"))
    assert as_it_is.args.kv_cache_config.enable_block_reuse is False
    assert as_it_is.warnings == ()


@pytest.mark.parametrize("quant", ["fp8_rowwise", "int8_sq", "w4a8_awq"])
def test_formats_that_its_experts_lack_are_refused(quant: str, hf: Path) -> None:
    model = find_model(str(hf))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16", quant=quant)).problems
    assert problem.message == f"the LLM API's mixture of experts (qwen3_next) is not known to support {quant}"


def test_what_the_llm_api_lacks_is_said(hf: Path) -> None:
    def planned(**values: Any) -> Any:
        return plan_for_hugging_face(hf, Parallel(), EngineConfig.parse({"backend": "llmapi", **values}, "test"))

    (warning,) = planned(target={"tensorrt_llm": "1.1.0"}).warnings
    assert warning == (
        "TensorRT-LLM 1.1.0: its PyTorch backend is not known to support Qwen3NextForCausalLM. "
        "Use TensorRT-LLM 1.2.x or later."
    )
    (warning,) = planned(target={"tensorrt_llm": "1.3.0"}, features={"ngram": {"draft_tokens": 3}}).warnings
    assert "can undo what rejected drafts change in the states of linear attention" in warning
    with pytest.raises(ForgeError, match="is not known to support adapters for Qwen3NextForCausalLM"):
        planned(features={"lora": {"max_rank": 8}})
    for name, value in (("mtp", {"draft_tokens": 1}), ("attention_dp", {})):
        with pytest.raises(ForgeError, match=f"{name}: not supported by TensorRT-LLM 1.2.1 for Qwen3Next") as caught:
            planned(target={"tensorrt_llm": "1.2.1"}, features={name: value})
        assert caught.value.hint == "Leave it out, or use TensorRT-LLM 1.3.x."
    with pytest.raises(ForgeError, match=r"the model has no MTP layers \(num_nextn_predict_layers\)"):
        planned(target={"tensorrt_llm": "1.3.0"}, features={"mtp": {"draft_tokens": 1}})


def test_the_plan_counts_the_cache_of_attention_and_the_states_of_linear_attention(hf: Path) -> None:
    model = find_model(str(hf))
    assert model.complaint is None
    assert model.vision_bytes == 0
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 3, "target": {"gpu": "h100-80gb"}}
    whole, split = (
        evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16", tp=tp, pp=pp)).memory
        for tp, pp in ((1, 1), (2, 2))
    )
    assert whole is not None
    assert split is not None
    assert whole.kv_per_token == 2 * 2 * 24 * 2
    state = 8 * 12 * 10 * 4 + 3 * (2 * 48 + 80) * 2
    assert [rank.state for rank in whole.stages] == [3 * 3 * state]
    assert [rank.state for rank in split.stages] == [3 * 2 * state // 2, 3 * 1 * state // 2]
    assert whole.as_json()["state"] == 3 * 3 * state
    weights = sum(tensor.nbytes for name, tensor in tensors_of(hf).items() if not name.startswith("mtp."))
    routers = 4 * 8 * 64 * 2  # kept in float32
    assert whole.weights == weights + routers


def test_beams_of_the_embedded_engine_are_refused_before_anything_is_made(hf: Path) -> None:
    model = find_model(str(hf))
    engine = {"backend": "torch", "device": "cpu", "max_seq_len": 64, "max_batch_size": 4, "max_beam_width": 2}
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16")).problems
    assert problem.message == ("max_beam_width 2: not supported with linear attention, whose states beams cannot share")
    assert problem.fix == "Use max_beam_width 1."


def test_host_memory_for_kv_blocks_is_refused_before_anything_is_made(hf: Path) -> None:
    model = find_model(str(hf))
    engine = {"backend": "torch", "device": "cpu", "max_seq_len": 64, "max_batch_size": 4}
    recipe = {"engine": engine, "serving": {"kv_cache_host_memory_bytes": "16MB"}}
    problem, *_ = evaluate(model, asked(model, recipe=recipe, dtype="bfloat16")).problems
    assert (
        problem.message
        == "serving.kv_cache_host_memory_bytes: not supported with linear attention, whose states are not in KV blocks"
    )
    assert problem.fix == "Leave it out of serving."
    assert problem.refuses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "is not linear_attention or full_attention for each of 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is no multiple of linear_num_key_heads 4"),
        ({"attention_bias": True}, "attention_bias True cannot be converted"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] cannot be converted"),
        ({"norm_topk_prob": False}, "norm_topk_prob False cannot be converted"),
    ],
)
def test_networks_that_tensorrt_llm_does_not_have_are_refused(
    changes: dict[str, Any], message: str, hf: Path, tmp_path: Path
) -> None:
    values = json.loads((hf / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ForgeError, match=message) as caught:
        find_model(str(tmp_path))
    assert caught.value.hint


def test_heads_of_linear_attention_are_not_split(hf: Path, tmp_path: Path) -> None:
    values = json.loads((hf / "config.json").read_text()) | {"linear_num_key_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = find_model(str(tmp_path))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16", tp=4)).problems
    assert problem.message == "2 key heads of linear attention cannot be split over tp 4"
    assert problem.fix == "Choose a --tp that divides 2: 1, 2."


def test_layers_follow_the_interval_where_config_json_names_no_types(hf: Path) -> None:
    model = find_model(str(hf))
    values = {key: value for key, value in model.config.values.items() if key != "layer_types"}
    facts = model.family.facts(replace(model.config, values=values | {"full_attention_interval": 2}))
    assert facts.sizes.linear_layers == {0, 2}
    assert model.family.facts(replace(model.config, values=values)).sizes.linear_layers == {0, 1, 2}
