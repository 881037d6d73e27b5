"""What `trtforge build --dry-run` says: every shipped recipe for every release, without a network."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from jsonschema import Draft202012Validator

from tests.compile.upstream import schema
from tests.recipes.shipped import FOR_THE_LLM_API, SHIPPED
from trtforge.compile.stage import CompileOptions
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe
from trtforge.formats.releases import release
from trtforge.pipeline.dry_run import dry_run
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.stages import selected
from trtforge.plan.known import known_config

RELEASES = ("0.17", "0.20", "1.0", "1.1", "1.2.1")
TOO_EARLY = {
    "qwen3-8b-fp8": "Qwen3ForCausalLM",
    "qwen3-32b-fp8": "Qwen3ForCausalLM",
    "qwen3-30b-a3b-fp8": "Qwen3MoeForCausalLM",
}
"""Recipes whose architecture 0.17 and 0.20 lack."""
FOR_ENGINES = [name for name in SHIPPED if name not in FOR_THE_LLM_API]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, and an empty cache."""

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("a dry run of a known model needs no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def planned(name: str, version: str, *overrides: str) -> dict[str, Any]:
    recipe = load_recipe(SHIPPED[name], (f"engine.target.tensorrt_llm={version}", *overrides))
    stages = selected(recipe, "calibrate", "package")
    return dry_run(recipe, Paths(Path("build")), stages, CompileOptions())


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", FOR_ENGINES)
def test_every_recipe_builds_with_every_release(name: str, version: str) -> None:
    recipe, target = load_recipe(SHIPPED[name]), release(version)
    if name in TOO_EARLY and version in ("0.17", "0.20"):
        with pytest.raises(ForgeError, match=rf"{TOO_EARLY[name]} was added in 1\.0\.0") as refused:
            planned(name, version)
        assert "--set engine.target.tensorrt_llm=1.2.1" in refused.value.hint
        return
    found = planned(name, version)
    deployment, engine = found["deployment"], found["stages"]["compile"]
    assert deployment["facts"] == "config.json facts that ship with trtforge"
    assert deployment["gpus"] == len(engine["ranks"]) == recipe.parallel.tp * recipe.parallel.pp
    assert deployment["full_length_requests"] >= recipe.engine.max_batch_size
    assert deployment["longest_prompt"] == engine["longest_prompt"] == (recipe.engine.max_seq_len or 0) - 1
    values, plugins = engine["build_config"], engine["build_config"]["plugin_config"]
    Draft202012Validator(schema(target.version)).validate(values)
    _require_in_flight_batching(values, plugins)
    assert engine["in_flight_batching"] is True
    assert engine["tensorrt_llm"] == target.version
    assert plugins["use_paged_context_fmha"] is True
    assert (values["max_batch_size"], values["max_seq_len"]) == (
        recipe.engine.max_batch_size,
        recipe.engine.max_seq_len,
    )
    config = found["stages"]["convert"]["config"]
    assert target.key_problem("architectures", config["architecture"]) is None
    for section in ("mapping", "quantization"):
        assert all(target.key_problem(section, key) is None for key in config[section])


@pytest.mark.parametrize(
    ("name", "version"),
    [
        (name, version)
        for name, version in product(FOR_THE_LLM_API, ("1.0", "1.1", "1.2.1", "1.3.0"))
        if version != "1.0" or not name.startswith("gpt-oss")
    ],
)
def test_recipes_for_the_llm_api_are_planned_for_every_release(name: str, version: str) -> None:
    recipe, found = load_recipe(SHIPPED[name]), planned(name, version)
    args = found["stages"]["compile"]["model_yaml"]
    if version in ("1.2.1", "1.3.0"):  # earlier ones are not known to free what is behind Gemma's windows
        assert found["deployment"]["full_length_requests"] >= recipe.engine.max_batch_size
    assert args["tensor_parallel_size"] == recipe.parallel.tp
    assert args.get("moe_expert_parallel_size", 1) == recipe.parallel.ep
    assert (args["max_batch_size"], args["max_seq_len"]) == (recipe.engine.max_batch_size, recipe.engine.max_seq_len)


def test_a_recipe_for_a_release_without_its_network_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"1\.0: its PyTorch backend has no network for GptOssForCausalLM"):
        planned("gpt-oss-20b-mxfp4", "1.0")


def _require_in_flight_batching(values: dict[str, Any], plugins: dict[str, Any]) -> None:
    """What `supportsInflightBatching` asks for (cpp/include/tensorrt_llm/runtime/modelConfig.h)."""
    assert values["kv_cache_type"] == "PAGED"
    assert plugins["gpt_attention_plugin"] is not None
    assert plugins["remove_input_padding"] is True
    assert plugins["paged_kv_cache"] is True


def test_calibration_and_ranks_are_those_of_the_model() -> None:
    found = planned("llama-3.1-405b-fp8", "1.2.1")["stages"]
    assert list(found) == ["calibrate", "convert", "verify", "compile", "package"]
    ranks = found["convert"]["ranks"]
    assert len(ranks) == 16
    table = 128_256 * 16_384 * 2  # each of a stage's eight ranks has the whole of it
    assert sum(rank["bytes"] for rank in ranks) == pytest.approx(401.6e9 + 8 * table + table, rel=0.002)
    assert found["calibrate"]["calibration"]["data"] == "hf:abisee/cnn_dailymail:3.0.0:train"


def test_what_is_in_the_hubs_cache_is_looked_at_before_the_shipped_facts(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    facts = known_config("Qwen/Qwen3-8B")
    assert facts is not None
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps({**facts.values, "num_hidden_layers": 40}))
    found = planned("qwen3-8b-fp8", "1.2.1", "engine.max_batch_size=32")
    assert found["deployment"]["facts"] == "the model's own config.json"
    assert found["stages"]["convert"]["config"]["num_hidden_layers"] == 40
