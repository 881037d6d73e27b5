"""`--feature` as a user types it: build flags and runtime keys in one plan, and a mistake in the user's words."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import llama
from tests.package.engines import tensorrt_engine
from trtforge.cli.features import parse_features
from trtforge.core.errors import UsageError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(llama(dtype="float16").to_json())
    return tmp_path / "checkpoint"


def test_a_plan_shows_build_flags_and_runtime_keys_together(run: Any, checkpoint: Path) -> None:
    status, out, _ = run(
        "compile", checkpoint, "engine", "--backend", "tensorrt_llm", "--dry-run",
        "--feature", "lookahead={window: 7, ngram: 7, verification: 7}", "--feature", "lora.max_rank=16",
    )  # fmt: skip
    assert status == 0
    plan = json.loads(out)
    assert plan["build_config"]["max_draft_len"] == 83
    assert plan["build_config"]["lora_config"]["max_lora_rank"] == 16
    assert plan["runtime_keys"] == {
        "lora_cache_optimal_adapter_size": "16",
        "lora_cache_max_adapter_size": "16",
        "lora_cache_gpu_memory_fraction": "0.05",
        "lora_cache_host_memory_bytes": "1073741824",
        "decoding_mode": "lookahead",
        "lookahead_window_size": "7",
        "lookahead_ngram_size": "7",
        "lookahead_verification_set_size": "7",
    }
    assert plan["features"]["lora"]["modules"] == ["attn_q", "attn_k", "attn_v"]


@pytest.mark.parametrize(
    ("feature", "status", "error", "hint"),
    [
        ("lookahed", 2, "unknown key --feature lookahed", "Did you mean --feature lookahead?"),
        ("lora.rank=8", 2, "unknown key --feature lora.rank", "Did you mean --feature lora.max_rank?"),
        ("medusa", 1, "the LlamaForCausalLM checkpoint has no medusa weights", "--medusa DIRECTORY"),
    ],
)
def test_a_mistake_is_told(run: Any, checkpoint: Path, feature: str, status: int, error: str, hint: str) -> None:
    words = ("compile", checkpoint, "engine", "--backend", "tensorrt_llm", "--dry-run", "--feature", feature)
    found, out, said = run(*words)
    assert (found, out) == (status, "")
    flat = " ".join(said.split())
    assert error in flat
    assert hint in flat


def test_an_engine_from_elsewhere_is_packaged_with_its_features_named(run: Any, tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", max_draft_len=5)
    status, _, said = run("package", engine, tmp_path / "out")
    assert status == 1
    assert "--feature draft, medusa, eagle or lookahead" in " ".join(said.split())


def test_a_plan_counts_what_features_take(run: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: a\nmodel: {source: meta-llama/Llama-3.1-8B, dtype: float16}\nengine:\n  backend: tensorrt_llm\n"
        "  max_seq_len: 4096\n  target: {gpu: h100-80gb}\n"
        "  features: {lora: {max_rank: 8}, lookahead: true, weights_on_gpu: 0.5}\n"
    )
    status, out, _ = run("plan", recipe)
    assert status == 0
    for label in ("LoRA adapters", "drafting (at most)", "host memory: ", "Times are estimated without lookahead"):
        assert label in out
    status, out, _ = run("plan", recipe, "--json")
    memory = json.loads(out)["memory"]
    assert memory["host"] == memory["streamed"] + (1 << 30)
    assert memory["draft"] == 64 * 15 * 128_256 * 4
    status, out, _ = run("plan", recipe, "--set", "engine.features={}")
    assert "LoRA adapters" not in out
    assert "for adapters and streamed weights" not in out


@pytest.mark.parametrize("words", [("lora.max_rank=16", "lora"), ("lora", "lora.max_rank=16")])
def test_a_features_keys_are_kept_in_any_order(words: tuple[str, ...]) -> None:
    assert parse_features(words) == {"lora": {"max_rank": 16}}


def test_a_feature_with_two_values_is_refused() -> None:
    with pytest.raises(UsageError, match="--feature kv_reuse is given twice, with different values"):
        parse_features(["kv_reuse", "kv_reuse=false"])
