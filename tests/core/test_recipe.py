"""Recipes: the shipped ones are valid, and a mistake is named with the nearest key."""

from pathlib import Path

import pytest

from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import load_recipe
from trtforge.core.recipe_text import recipe_name
from trtforge.core.yaml_text import Lines

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


def test_paths_of_data_in_a_recipe_never_start_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here / "weights", there):
        directory.mkdir(parents=True)
    (here / "g.txt").write_text("text")
    monkeypatch.chdir(here)
    path = write(there, "name: a\nmodel: {source: org/m}\ngate: {data: g.txt, kl_mean: 1}\n")
    recipe = load_recipe(path)
    assert (recipe.model.source, recipe.gate.data) == ("org/m", str(there / "g.txt"))
    assert load_recipe(path, ("gate.data=g.txt", "model.source=weights")).model.source == "weights"
    assert load_recipe(path, ("gate.data=g.txt",)).gate.data == "g.txt"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: a\nmodel: {source: m, dtyp: auto}\n", "unknown key model.dtyp", r"Did you mean model\.dtype\?"),
        ("name: a\nmodel: {source: m}\nparalel: {tp: 2}\n", "unknown key paralel", r"Did you mean parallel\?"),
        ("name: a\n", "model is missing", "Add model"),
        ("name: a\nmodel: {source: m}\nparallel: {tp: 0}\n", "parallel.tp", "correct parallel.tp"),
        ("name: a\nmodel: {source: m}\nquantization: {format: fp7}\n", "quantization.format", "fp7"),
        ("name: a\nmodel: {source: m}\nengine: {tokens_per_block: 24}\n", "power of two", "24"),
        (
            "name: a\nmodel: ./m\n",
            "line 2: model: Input should be keys with values",
            "'./m'; give .*: source, revision",
        ),
        ("name: a\nmodel: {source: m}\nengine:\n", "engine: Input should be keys", "Got no value; give .*: backend"),
        ("name: a/b\nmodel: {source: m}\n", "name", "Got 'a/b'. .* letters, digits, "),
        ("name: a\nmodel: {source: m}\nparallel: {tp: true}\n", "tp: Input should be a number", "Got true"),
        (
            "name: no\nmodel: {source: true}\n",
            "model.source: Input should be a valid string",
            "Got true: put it in quotes",
        ),
        (
            "name: a\nmodel: {source: m}\nquantization: {exclude_modules: '*.o_proj'}\n",
            "exclude_modules: Input should be a list",
            "Got .*; write .FIRST, SECOND.",
        ),
        (
            "name: a\nmodel: {source: m}\nengine: {max_batch_size: 99999999999999}\n",
            "max_batch_size: Input should be less than or equal to 1048576",
            "correct engine.max_batch_size",
        ),
        ("name: a\nmodel: {source: m}\nquantization: {format: INT4_AWQ}\n", "format: Input", "did you mean int4_awq"),
        ("- a\n", "not keys with values", "recipes show"),
        ("# a\n", "it holds nothing", "recipes show"),
        ("name: [\n", "not YAML", "recipes show"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert str(tmp_path / "recipe.yaml") in caught.value.message
    import re

    assert re.search(hint, caught.value.hint)


def test_a_recipe_of_another_encoding_is_to_be_saved_anew(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes("# grün\nname: a\n".encode("latin-1"))
    with pytest.raises(ForgeError, match=r"recipe\.yaml: not UTF-8 text \(byte 4\)") as caught:
        load_recipe(path)
    assert caught.value.hint == "Save it as UTF-8."


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=0", "--set parallel.tp=0: Input should be greater than or equal to 1"),
        ("engine.max_batch=4", "--set engine.max_batch=4: unknown key engine.max_batch"),
        ("foo.bar=4", "--set foo.bar=4: unknown key foo"),
        ("engine=3", "--set engine=3: Input should be keys with values"),
        ("engine={max_batch_size: 0}", "--set engine={max_batch_size: 0}: engine.max_batch_size: Input should be grea"),
    ],
)
def test_a_wrong_override_is_not_a_mistake_of_the_file(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path, "name: a\nmodel: {source: m}\nparallel: {tp: 2}\n"), (override,))
    assert caught.value.message.startswith(message)
    assert caught.value.where == ()


def test_mistakes_of_the_file_and_of_overrides_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {source: m}\nfoo: {x: 1}\nparallel: {tp: 0, pp: 0}\n")
    overrides = ("parallel.pp=-1", "foo.bar=1", "parallel.ep=0")
    with pytest.raises(ForgeError) as caught:
        load_recipe(path, overrides, {"parallel.ep=0": "--ep 0"})
    at_least = "Input should be greater than or equal to 1"
    assert caught.value.message.splitlines() == [
        f"{path}: 4 mistakes",
        f"  --set parallel.pp=-1: {at_least}",
        f"  --ep 0: parallel.ep: {at_least}",
        "  line 3: unknown key foo",
        f"  line 4: parallel.tp: {at_least}",
    ]
    assert not isinstance(caught.value, UsageError)
    assert [(place.line, place.key) for place in caught.value.where] == [(3, "foo"), (4, "parallel.tp")]
    with pytest.raises(UsageError, match=r"^the command line: 2 mistakes\n  --set parallel.pp=-1: ") as only:
        load_recipe(write(tmp_path, "name: a\nmodel: {source: m}\n"), ("parallel.pp=-1", "parallel.ep=0"))
    assert "  --set parallel.ep=0: Got 0; correct parallel.ep." in only.value.hint.splitlines()


@pytest.mark.parametrize(
    ("count", "last", "correct"),
    [
        (20, "  line 22: unknown key greeting_19", "Correct each of them:"),
        (21, "  and 1 more mistake", "Correct these first:"),
        (5000, "  and 4,980 more mistakes", "Correct these first:"),
    ],
)
def test_of_many_mistakes_the_first_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, last: str, correct: str
) -> None:
    parsed: list[str] = []

    class Counted(Lines):
        def __init__(self, text: str) -> None:
            parsed.append(text)
            super().__init__(text)

    monkeypatch.setattr("trtforge.core.recipe.Lines", Counted)
    wrong = "".join(f"greeting_{number}: hello\n" for number in range(count))
    path = write(tmp_path, f"name: a\nmodel: {{source: m}}\n{wrong}")
    with pytest.raises(ForgeError) as caught:
        load_recipe(path)
    title, *listed = caught.value.message.splitlines()
    assert title == f"{path}: {count:,} mistakes"
    assert listed[:20] == [f"  line {number + 3}: unknown key greeting_{number}" for number in range(20)]
    assert listed[-1] == last
    assert len(listed) == min(count, 21)
    assert caught.value.hint.splitlines()[0] == correct
    assert len(caught.value.hint.splitlines()) == 21
    assert [place.line for place in caught.value.where] == list(range(3, 23))
    assert len(parsed) == 1


def test_options_beyond_the_listed_ones_do_not_make_the_file_right(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nmodel: {source: m}\nfoo: 1\n")
    with pytest.raises(ForgeError) as caught:
        load_recipe(path, tuple(f"wrong_{number}=1" for number in range(20)))
    assert not isinstance(caught.value, UsageError)
    assert caught.value.message.startswith(f"{path}: 21 mistakes\n  --set wrong_0=1: unknown key wrong_0\n")
    assert caught.value.message.endswith("\n  and 1 more mistake")


def test_of_two_overrides_the_later_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--set parallel.tp=-2: "):
        load_recipe(write(tmp_path, "name: a\nmodel: {source: m}\n"), ("parallel.tp=-1", "parallel.tp=-2"))


def test_absent_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"none.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_a_name_made_of_a_directory_has_no_loose_ends() -> None:
    assert recipe_name("my model é", "-fp8") == "my-model-fp8"
