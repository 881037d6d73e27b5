"""Recipes: the shipped ones are valid, and a mistake is named with the nearest key."""

from pathlib import Path

import pytest

from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe

SHIPPED = sorted(asset_directory("recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_is_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert f"# trtforge build {recipe.name}" in path.read_text()


def test_a_release_is_text_and_not_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {source: org/model}\n")
    assert load_recipe(path, ("engine.target.tensorrt_llm=0.20",)).engine.target.tensorrt_llm == "0.20"
    with pytest.raises(ForgeError, match=r"engine\.target\.tensorrt_llm: Input should be a valid string") as caught:
        load_recipe(write(tmp_path, "name: a\nmodel: {source: b/c}\nengine: {target: {tensorrt_llm: 0.20}}\n"))
    assert "put it in quotes to make it text" in caught.value.hint


@pytest.mark.parametrize("spelled", ["none", "null", "~"])
def test_a_limit_that_is_none_is_not_checked(tmp_path: Path, spelled: str) -> None:
    gate = "gate: {perplexity_increase: 0.1, kl_mean: 0.2}\n"
    path = write(tmp_path, f"name: a\nmodel: {{source: org/model}}\n{gate}")
    assert load_recipe(path, (f"gate.perplexity_increase={spelled}",)).gate.limits == {"kl_mean": 0.2}
    path = write(tmp_path, f"name: a\nmodel: {{source: org/model}}\n{gate.replace('0.1', spelled)}")
    assert load_recipe(path).gate.limits == {"kl_mean": 0.2}
    # Other keys that can be unset take the word too, a format keeps it.
    changed = load_recipe(path, (f"engine.max_seq_len={spelled}", "quantization.format=none"))
    assert (changed.engine.max_seq_len, changed.quantization.format) == (None, "none")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_only_name_and_source_are_required(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "name: a\nmodel: {source: org/model}\n"))
    assert recipe.model.source == "org/model"
    assert recipe.quantization.format == "none"
    assert recipe.engine.max_batch_size == 64


def test_source_is_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    recipe = load_recipe(write(tmp_path, "name: a\nmodel: {source: weights}\n"))
    assert recipe.model.source == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: a\nmodel: {source: m, dtyp: auto}\n", "unknown key model.dtyp", r"Did you mean model\.dtype\?"),
        ("name: a\nmodel: {source: m}\nparalel: {tp: 2}\n", "unknown key paralel", r"Did you mean parallel\?"),
        ("name: a\n", "model is missing", "Add model"),
        ("name: a\nmodel: {source: m}\nparallel: {tp: 0}\n", "parallel.tp", "correct parallel.tp"),
        ("name: a\nmodel: {source: m}\nquantization: {format: fp7}\n", "quantization.format", "fp7"),
        ("name: a/b\nmodel: {source: m}\n", "name", "a/b"),
        ("name: a\nmodel: {source: m}\nengine: {tokens_per_block: 24}\n", "power of two", "24"),
        ("- a\n", "not a mapping", "recipes show"),
        ("name: [\n", "not YAML", "recipes show"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert str(tmp_path / "recipe.yaml") in caught.value.message
    import re

    assert re.search(hint, caught.value.hint)


def test_overrides_are_applied(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {source: m}\n")
    recipe = load_recipe(path, ("parallel.tp=4", "engine.features.kv_reuse=false", "gate.kl_mean=0.5"))
    assert recipe.parallel.tp == 4
    assert recipe.engine.features.kv_reuse is False
    assert recipe.gate.kl_mean == 0.5


@pytest.mark.parametrize(("override", "message"), [("x", "not KEY=VALUE"), ("name.x=1", "has no keys below it")])
def test_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        load_recipe(write(tmp_path, "name: a\nmodel: {source: m}\n"), (override,))


def test_absent_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"none.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")
