"""With --json a failure is one JSON object on stdout too; recipes are refused with all their mistakes and lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge import __version__
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe

BAD = """# a recipe
name: mine
model: {source: m, dtyp: auto}
engine:
  max_batch_size: many
  features:
    lora: {max_rank: x}
quantization: {format: fp7, memory: lots}
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("inspect", "/nowhere"), 1, "/nowhere: no such directory"),
        (("verify",), 2, "Missing argument 'CHECKPOINT_OR_ENGINE'."),
        (("convert", "a", "b", "--tp", "0"), 2, "Invalid value for '--tp'"),
        (("plan", str(DEMO_MODEL), "--quant", "fp7"), 2, "fp7"),
        (("build", "nowhere"), 1, "nowhere"),
        (
            ("recipes", "validate", "nowhere"),
            1,
            "nowhere: no such file or directory, and no recipe of this name ships with trtforge",
        ),
    ],
)
def test_a_failure_is_one_object(run: Any, words: tuple[str, ...], status: int, said: str) -> None:
    got, out, err = run(*words, "--json")
    found = json.loads(out)
    assert got == status
    assert list(found) == ["error", "hint", "where"]
    assert said in found["error"]
    assert err == f"error: {found['error']}\nhint: {found['hint']}\n"


def test_a_result_that_tells_of_the_failure_stays_the_only_object(run: Any) -> None:
    status, out, err = run("plan", DEMO_MODEL, "--tp", "3", "--json")
    found = json.loads(out)
    assert (status, found["legal"]) == (1, False)
    assert err.startswith("error: 8 attention heads cannot be split over tp 3\n")
    _, out, _ = run("inspect", "/nowhere", "--json")  # the next run prints its own
    assert "error" in json.loads(out)


def test_all_mistakes_of_a_recipe_have_their_lines(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    status, out, err = run("recipes", "validate", "mine.yaml", "--json")
    assert status == 1
    path = str(tmp_path / "mine.yaml")
    assert json.loads(out)["where"] == [
        {"file": path, "line": 3, "key": "model.dtyp"},
        {"file": path, "line": 5, "key": "engine.max_batch_size"},
        {"file": path, "line": 7, "key": "engine.features.lora.max_rank"},
        {"file": path, "line": 8, "key": "quantization.format"},
        {"file": path, "line": 8, "key": "quantization.memory"},
    ]
    assert err.startswith(f"error: {path}: 5 mistakes\n  line 3: unknown key model.dtyp\n  line 5: engine.max_batch")
    assert "\n  line 3: Did you mean model.dtype? Keys here: " in err
    assert "\n  line 8: Got 'fp7'; did you mean fp8?\n" in err


def test_one_mistake_names_its_line_and_an_override_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmodel: {source: m}\nparallel:\n  tp: 0\n")
    with pytest.raises(ForgeError, match=r"mine\.yaml, line 4: parallel\.tp: Input should be greater"):
        load_recipe(path)
    with pytest.raises(ForgeError, match=r"^--set parallel\.tp=-1: Input should be greater") as caught:
        load_recipe(path, ("parallel.tp=-1",))
    assert caught.value.where == ()
    path.write_text("name: mine\nmodel: [\n")
    with pytest.raises(ForgeError, match=r"line 3: not YAML") as caught:
        load_recipe(path)
    assert caught.value.where[0].line == 3


def test_the_version_is_an_option(run: Any) -> None:
    assert run("--version") == (0, f"trtforge {__version__}\n", "")


@pytest.mark.parametrize("command", ["build", "convert", "serve", "infer", "plan", "compare"])
def test_help_has_no_notation_of_types(run: Any, command: str) -> None:
    _, out, _ = run(command, "--help")
    for noise in ("<bool>", "<", "{", "x>=", "(build"):
        assert noise not in out.replace("build/<recipe>", "")
