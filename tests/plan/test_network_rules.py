"""What a release's network cannot load or compute is refused with its reason and the choice to make instead."""

from pathlib import Path
from typing import Any

import pytest

from tests.families import TINY
from tests.plan.models import asked
from tests.plan.small_models import small
from trtforge.convert.stage import ConvertConfig, plan_conversion
from trtforge.core.parallel import Parallel
from trtforge.formats.networks import networks
from trtforge.formats.releases import release
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import fixes
from trtforge.plan.network_rules import network_problems, unbuildable

ROWWISE = "row-wise FP8 attention (Fp8RowwiseAttention)"
ELSE = "the engine would compute something else"


def judged(
    name: str, version: str, changes: dict[str, Any], backend: str = "tensorrt_llm", **options: Any
) -> tuple[Evaluation, list[str]]:
    """The evaluation, and the fixes of its problems."""
    model = small(name, **changes)
    recipe: dict[str, Any] = {"engine": {"backend": backend, "target": {"tensorrt_llm": version}}}
    if patterns := options.pop("exclude_modules", None):
        recipe["quantization"] = {"format": options.pop("quant"), "exclude_modules": patterns}
    found = evaluate(model, asked(model, recipe=recipe, dtype="bfloat16", **options))
    return found, [fix.text for fix in fixes(model, found)]


PIPELINE = {
    "bloom": "the bloom network has no pipeline stages: every rank holds the embedding, the final norm and the head",
    "gptj": "the gptj network loads by pipeline stages, but its forward pass neither sends nor receives hidden states",
}


@pytest.mark.parametrize("version", ["0.17.0", "1.2.1"])
@pytest.mark.parametrize("name", ["bloom", "gpt_neox", "gptj", "opt", "phi", "phi3"])
def test_networks_without_pipeline_stages(name: str, version: str) -> None:
    found, texts = judged(name, version, {}, pp=2)
    (problem,) = found.problems
    reason = PIPELINE.get(name) or PIPELINE["bloom"].replace("bloom", name)
    assert problem.message == f"TensorRT-LLM {version}: {reason}"
    assert texts == ["Use --pp 1 --tp 2."]
    assert judged(name, version, {}, backend="torch", pp=2)[0].legal


@pytest.mark.parametrize(
    ("name", "changes", "version", "reason"),
    [
        ("qwen3", {}, "1.2.1", f"{ROWWISE} has no norms of queries and keys, which qwen3 needs: {ELSE}"),
        (
            "cohere_qk", {}, "1.2.1",
            f"{ROWWISE} has no norms of queries and keys, which this model has (use_qk_norm): {ELSE}",
        ),
        ("gemma2", {}, "0.17.0", f"{ROWWISE} has neither q_scaling nor a soft cap, which gemma2 needs: {ELSE}"),
        ("granite", {}, "1.2.1", f"{ROWWISE} has neither q_scaling nor a soft cap, which granite needs: {ELSE}"),
        (
            "gemma3", {}, "1.2.1",
            "row-wise FP8 quantises the output of every norm, and gemma3 adds the outputs of two of them to the "
            "residual",
        ),
        (
            "falcon_rw", {}, "1.2.1",
            f"{ROWWISE} neither scales ALiBi's bias nor keeps its slopes, which it casts to the type of its FP8 inputs",
        ),
        ("phi3_long", {}, "1.2.1", f"{ROWWISE} does not pass on LongRoPE's second table of positions"),
        (
            "gpt2", {}, "0.17.0",
            "row-wise FP8 layers take the quantised output of a norm, and before 1.0 only RMS norms have one; gpt2 has "
            "LayerNorm",
        ),
    ],
)  # fmt: skip
def test_rowwise_fp8_that_would_lose_something(name: str, changes: dict[str, Any], version: str, reason: str) -> None:
    found, texts = judged(name, version, changes, quant="fp8_rowwise")
    assert f"TensorRT-LLM {version}: {reason}" in [problem.message for problem in found.problems]
    assert set(texts) == {"Use --quant fp8."}
    assert judged(name, version, changes, quant="fp8")[0].legal


@pytest.mark.parametrize(("name", "version"), [("llama", "0.17.0"), ("gemma", "0.17.0"), ("gpt2", "1.0.0")])
def test_rowwise_fp8_that_loses_nothing(name: str, version: str) -> None:
    assert judged(name, version, {}, quant="fp8_rowwise")[0].legal


def test_rowwise_fp8_cannot_leave_single_layers_out() -> None:
    excluded = {"exclude_modules": ["*.0.mlp.down_proj"]}
    found, _ = judged("llama", "1.2.1", {}, quant="fp8_rowwise", **excluded)
    (problem,) = found.problems
    assert problem.message == (
        "TensorRT-LLM 1.2.1: row-wise FP8 replaces whole attention, MLP and norm modules, so single linear layers "
        "cannot be left out"
    )
    assert problem.fix == "Leave exclude_modules out, or convert with --quant fp8."
    assert judged("llama", "1.2.1", {}, quant="fp8", **excluded)[0].legal


@pytest.mark.parametrize(
    ("name", "changes", "version", "options", "reason", "fix"),
    [
        (
            "qwen2_moe", {"mlp_only_layers": [0]}, "0.21.0", {},
            "before 1.0 qwen2_moe's network has experts in every layer: it does not read decoder_sparse_step and "
            "mlp_only_layers",
            "Use --target-version 1.2.1.",
        ),
        (
            "mixtral", {}, "0.18.2", {"quant": "int4_awq"}, "the mixture of experts has INT4-AWQ from 0.19.0 on",
            "Use --target-version 1.2.1.",
        ),
        (
            "deepseek_v2", {}, "1.2.1", {},
            "the network of later releases declares attention.k_b_proj_trans, but its forward pass reads fused_q_proj, "
            "so no engine builds",
            "Use --target-version 0.17.0.",
        ),
        (
            "deepseek_v2", {}, "0.17.0", {"quant": "int8_wo"},
            "the deepseek_v2 network of 0.17 leaves its experts unquantised, while the loader quantises their weights",
            "Use --quant none.",
        ),
        (
            "deepseek_v2", {"first_k_dense_replace": 0}, "0.17.0", {},
            "the deepseek_v2 network has experts in every layer but the first, whatever "
            "first_k_dense_replace says",
            "Serve the Hugging Face checkpoint with engine.backend: llmapi.",
        ),
        (
            "deepseek_v2", {"rope_scaling": None}, "0.17.0", {},
            "the deepseek_v2 network takes its positions from rope_scaling of type yarn, which this "
            "config.json lacks",
            "Serve the Hugging Face checkpoint with engine.backend: llmapi.",
        ),
        (
            "deepseek_v2", {"v_head_dim": 64}, "0.17.0", {},
            "the deepseek_v2 network has values as wide as the keys' part without positions (v_head_dim = "
            "qk_nope_head_dim)",
            "Serve the Hugging Face checkpoint with engine.backend: llmapi.",
        ),
        (
            "gpt_neox", {"intermediate_size": 768}, "1.2.1", {},
            "the gpt_neox network has an FFN of four times the hidden size, whatever config.json says",
            "Use engine.backend: torch.",
        ),
    ],
)  # fmt: skip
def test_networks_of_a_release(
    name: str, changes: dict[str, Any], version: str, options: dict[str, Any], reason: str, fix: str
) -> None:
    found, texts = judged(name, version, changes, **options)
    assert [problem.message for problem in found.problems] == [f"TensorRT-LLM {version}: {reason}"]
    assert texts == [fix]
    assert judged(name, version, changes, backend="torch", **options)[0].legal


def test_deepseek_is_legal_where_its_network_takes_it() -> None:
    assert [v for v in ("0.17.0", "0.18.2", "0.19.0", "1.2.1") if judged("deepseek_v2", v, {})[0].legal] == [
        "0.17.0",
        "0.18.2",
    ]


def test_scaled_positions_of_gemma_3_are_warned_of() -> None:
    scaled, _ = judged("gemma3", "1.2.1", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.legal
    (warning,) = [text for text in scaled.warnings if "sliding-window" in text]
    assert "the engine scales the positions of sliding-window layers by rope_scaling too" in warning
    assert "transformers only those of the other layers" in warning
    assert not any("sliding-window" in text for text in judged("gemma3", "1.2.1", {})[0].warnings)


@pytest.mark.parametrize(
    ("name", "quant", "pp", "reason"),
    [
        ("llama", "none", 2, None),
        ("mixtral", "int4_awq", 1, None),
        ("gpt2", "fp8_rowwise", 1, None),
        ("bloom", "none", 2, "the bloom network has no pipeline stages"),
        ("qwen3", "fp8_rowwise", 1, f"{ROWWISE} has no norms of queries and keys, which qwen3 needs"),
        ("deepseek_v2", "none", 1, None),
        ("deepseek_v2", "int8_wo", 1, "the network of later releases declares attention.k_b_proj_trans"),
    ],
)
def test_what_no_release_takes(name: str, quant: Any, pp: int, reason: str | None) -> None:
    model = small(name)
    layout = Layout(Parallel(pp=pp), "bfloat16", quant)
    found = unbuildable(checkpoint_config(model.family, model.facts, model.config.architecture, layout))
    assert (found is None) if reason is None else (found is not None and found.message.startswith(reason))


def test_a_rowwise_checkpoint_of_earlier_conversions_is_converted_again() -> None:
    model = small("llama")
    layout = Layout(Parallel(), "bfloat16", "fp8_rowwise")
    config = checkpoint_config(model.family, model.facts, model.config.architecture, layout)
    assert list(network_problems(config, release("0.17.0"))) == []
    listed = config.quantization.model_copy(update={"exclude_modules": ["*lm_head"]})
    earlier = config.model_copy(update={"quantization": listed})
    (problem,) = network_problems(earlier, release("0.17.0"))
    assert problem.message.startswith("TensorRT-LLM 0.17.0: exclude_modules lists no *ln_f")
    assert problem.fix == "Convert the model again."
    assert list(network_problems(earlier, release("1.2.1"))) == []
    unlisted = config.quantization.model_copy(update={"exclude_modules": None})
    assert list(network_problems(config.model_copy(update={"quantization": unlisted}), release("0.17.0"))) == []


def test_a_checkpoint_of_others_has_no_limits() -> None:
    model = small("bloom")
    config = checkpoint_config(
        model.family, model.facts, model.config.architecture, Layout(Parallel(pp=2), "bfloat16")
    ).model_copy(update={"architecture": "ArcticForCausalLM"})
    assert list(network_problems(config, release("1.2.1"))) == []
    assert unbuildable(config) is None


def test_the_data_names_its_sources_and_releases() -> None:
    data = networks()
    assert [known.source for known in data.loads] == ["loaded", "read-1.x"]
    assert data.source_of(release("0.18.2")) == "loaded"
    assert data.source_of(release("0.19.0")) == "read-1.x"
    for limit in data.limits:
        assert limit.sources, limit.name
        assert set(limit.sources) <= set(data.sources), limit.name
        for version in (limit.since, limit.until):
            assert version is None or release(version).line == version, limit.name


def test_convert_warns_of_a_checkpoint_that_only_other_backends_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TINY["opt"]().save_pretrained(tmp_path / "hf")
    plan_conversion(ConvertConfig(), tmp_path / "hf")
    assert caplog.messages == []
    plan_conversion(ConvertConfig(pp=2), tmp_path / "hf")
    (message,) = caplog.messages
    assert message.startswith(
        "no TensorRT-LLM release builds an engine of this checkpoint: the opt network has no pipeline stages"
    )
