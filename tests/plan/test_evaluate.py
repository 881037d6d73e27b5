"""One request judged: its limits, its warnings, and the rules of engines that layouts alone do not have."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.plan.models import LLAMA_8B, LLAMA_70B, asked, known
from trtforge.core.errors import ForgeError, UsageError
from trtforge.formats.hf import HfConfig
from trtforge.plan.engine_rules import head_problems
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.model import Model, find_model


def judged(hub_id: str, **options: Any) -> Evaluation:
    model = known(hub_id)
    return evaluate(model, asked(model, **options))


def rules(evaluation: Evaluation) -> set[str]:
    return {problem.rule for problem in evaluation.problems}


@pytest.mark.parametrize(
    ("chunked", "longest"),
    [(True, 9_999), (False, 2_048)],
)
def test_longest_prompt(chunked: bool, longest: int) -> None:
    """As TensorRT-LLM logs it: tensorrtllm_backend issue 563, TensorRT-LLM issue 4028."""
    engine = {"max_seq_len": 10_000, "max_num_tokens": 2_048, "features": {"chunked_context": chunked}}
    assert judged(LLAMA_8B, recipe={"engine": engine}).longest_prompt == longest


def test_an_fp8_cache_beside_other_weights_ends_prompts_at_a_step() -> None:
    found = judged(LLAMA_8B, quant="int4_awq", kv_cache="fp8")
    assert found.legal
    assert found.longest_prompt == 8_192
    assert any("kv_reuse and chunked_context are off" in warning for warning in found.warnings)
    assert judged(LLAMA_8B, quant="fp8", kv_cache="fp8").longest_prompt == 131_071


def test_a_prompt_that_the_pool_cannot_hold_is_not_promised() -> None:
    found = judged(LLAMA_8B, gpu="l4")
    assert found.legal
    assert found.memory is not None
    assert found.longest_prompt == found.memory.kv_tokens - 1
    assert any("prompts that do not fit are refused" in warning for warning in found.warnings)


# lm_head of Llama-2-70B, vocabulary 32000: TensorRT-LLM issue 843.
@pytest.mark.parametrize(("tp", "legal"), [(8, False), (4, True)])
def test_a_quantised_head_wants_whole_32_byte_columns(tp: int, legal: bool) -> None:
    quantised = replace(WEIGHTS["int4_awq"], quantizes_head=True)
    found = list(head_problems(32_000, tp, quantised))
    assert (found == []) is legal
    assert legal or "2000 bytes a rank" in found[0].message
    assert list(head_problems(32_000, tp, WEIGHTS["int4_awq"])) == []


def with_config(**changes: Any) -> Model:
    config = known(LLAMA_8B).config
    return Model.of_config("changed", HfConfig({**config.values, **changes}, Path("config.json")))


def test_heads_that_no_kernel_has_are_refused_by_engines_alone() -> None:
    """TensorRT-LLM issue 855."""
    model = with_config(head_dim=100)
    assert rules(evaluate(model, asked(model, gpu="h100-80gb"))) == {"head_size"}
    assert rules(evaluate(model, asked(model, recipe={"engine": {"backend": "tensorrt_llm"}}))) == {"head_size"}
    embedded = evaluate(model, asked(model, recipe={"engine": {"backend": "torch", "max_seq_len": 4096}}))
    assert (embedded.legal, embedded.warnings) == (True, ())
    unsaid = evaluate(model, asked(model))
    assert unsaid.legal
    assert "head size 100" in unsaid.warnings[0]


def test_w4a8_pads_to_larger_blocks_than_w4a16() -> None:
    model = with_config(intermediate_size=14_400)
    found = evaluate(model, asked(model, quant="w4a8_awq", group_size=64, gpu="h100-80gb"))
    assert "awq_padding" in rules(found)
    assert evaluate(model, asked(model, quant="int4_awq", group_size=64, gpu="h100-80gb")).legal


@pytest.mark.parametrize("version", ["0.17.0", "0.21.0"])
def test_a_family_is_refused_before_the_release_that_added_it(version: str) -> None:
    (problem,) = judged("Qwen/Qwen3-8B", target_version=version).problems
    assert problem.message == f"TensorRT-LLM {version}: architectures: Qwen3ForCausalLM was added in 1.0.0"
    assert problem.fix == "Target 1.0.0."


def test_attention_biases_and_an_fp8_cache_are_warned_of() -> None:
    """TensorRT-LLM issue 4218: Qwen2.5 loses its accuracy, Qwen3 with its norms does not."""
    assert any("issue #4218" in w for w in judged("Qwen/Qwen2.5-7B", quant="fp8", kv_cache="fp8").warnings)
    assert judged("Qwen/Qwen3-8B", quant="fp8", kv_cache="fp8").warnings == ()


@pytest.mark.parametrize(
    ("gpu", "tp", "warning"),
    [("h100-80gb", 16, "spans servers"), ("l40s", 2, "over PCIe"), ("rtx-a6000", 4, "over PCIe"), ("a100-80gb", 8, "")],
)
def test_slow_links_are_warned_of(gpu: str, tp: int, warning: str) -> None:
    found = judged(LLAMA_70B, gpu=gpu, tp=tp, quant="none", pp=2)
    assert any(warning in text for text in found.warnings) is bool(warning)


def test_repeated_kv_heads_are_warned_of() -> None:
    assert any("each is stored 2 times" in text for text in judged(LLAMA_8B, tp=16).warnings)


def test_unknown_formats_gpus_and_releases_are_named() -> None:
    with pytest.raises(UsageError, match="--quant: fp6 is not a format"):
        judged(LLAMA_8B, quant="fp6")
    with pytest.raises(UsageError, match="--kv-cache: fp4 is not a format"):
        judged(LLAMA_8B, kv_cache="fp4")
    with pytest.raises(ForgeError, match="GPU h1000 is not known"):
        judged(LLAMA_8B, gpu="h1000")
    with pytest.raises(ForgeError, match=r"1\.3\.0 has no TensorRT engines"):
        judged(LLAMA_8B, target_version="1.3.0")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("awq", "int4_awq"), ("INT4", "int4_awq"), ("w4a8", "w4a8_awq"), ("bf16", "none"), ("int8_qs", "int8_sq")],
)
def test_formats_by_the_names_that_others_give_them(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        judged(LLAMA_8B, quant=name)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(f"Did you mean {meant}? Formats: none, fp8,")


def test_headers_tell_of_weights_that_are_not_what_config_says(
    golden_hf: Path, edit_config: Callable[..., None]
) -> None:
    model = find_model(str(golden_hf))
    assert model.stored_bytes == (golden_hf / "model.safetensors").stat().st_size - header_bytes(golden_hf)
    assert evaluate(model, asked(model)).legal
    vocab = model.facts.sizes.vocab
    edit_config(golden_hf, vocab_size=vocab - 1)
    model = find_model(str(golden_hf))
    found = evaluate(model, asked(model)).problems
    assert [problem.rule for problem in found] == ["source"]
    assert f"has shape [{vocab}, 128], config.json says [{vocab - 1}, 128]" in found[0].message


def header_bytes(directory: Path) -> int:
    with (directory / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_a_download_without_its_weights_is_planned_from_config_alone(tmp_path: Path) -> None:
    config = (DEMO_MODEL / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path)).notes == ()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    model = find_model(str(tmp_path))
    assert "planned from config.json alone" in model.notes[0]
    assert evaluate(model, asked(model)).legal


def test_a_quantised_source_keeps_its_format(tmp_path: Path) -> None:
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": False}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantised}))
    model = find_model(str(tmp_path))
    request = asked(model)
    assert (request.quant, request.group_size) == ("int4_awq", 64)
    assert evaluate(model, request).legal
    found = evaluate(model, asked(model, quant="fp8"))
    assert [problem.rule for problem in found.problems] == ["format"]


def test_the_llm_api_has_rules_of_its_own() -> None:
    """A release without engines is no problem, and a format without a place in a Hugging Face checkpoint is one."""
    engine = {"backend": "llmapi", "target": {"tensorrt_llm": "1.3.0"}}
    assert judged(LLAMA_8B, quant="fp8", kv_cache="fp8", recipe={"engine": engine}).legal
    found = judged(LLAMA_8B, quant="int8_wo", recipe={"engine": engine})
    assert rules(found) == {"format"}
    assert "is not supported in a Hugging Face checkpoint" in found.problems[0].message
    gpu = {**engine, "target": {"tensorrt_llm": "1.3.0", "gpu": "a100-80gb"}}
    assert rules(judged(LLAMA_8B, quant="fp8", recipe={"engine": gpu})) == {"gpu_format"}
