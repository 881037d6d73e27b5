"""The command that a stage names next can be pasted into a shell, also for paths with spaces."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.pipeline.build import next_command
from trtforge.pipeline.paths import Paths


def test_each_stage_quotes_the_next_command(run: Any, tmp_path: Path) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    (place / "model").symlink_to(DEMO_MODEL)
    model, calibration, checkpoint, engine, repository = (
        str(place / name) for name in ("model", "calibration", "checkpoint", "engine", "repository")
    )

    def following(*words: str) -> list[str]:
        status, printed, errors = run(*words, "--json")
        assert status == 0, errors
        return shlex.split(json.loads(printed)["next"])

    few = ("--quant", "int8_sq", "--samples", "2", "--seq-len", "32")
    found = following("calibrate", model, calibration, *few)
    assert found == ["trtforge", "convert", model, "CHECKPOINT", *few[:2], "--kv-cache", "none", "--calibration",
                     calibration]  # fmt: skip
    assert following("convert", model, checkpoint) == ["trtforge", "verify", checkpoint, "--against", model]
    assert following("compile", checkpoint, engine) == ["trtforge", "package", engine, "REPOSITORY"]
    assert following("package", engine, repository) == ["trtforge", "serve", repository]
    arguments, llmapi = str(place / "arguments"), str(place / "llmapi")
    found = following("migrate", engine, arguments)
    assert found == ["trtforge", "migrate", engine, "ENGINE", "--checkpoint", "DIR"]
    found = following("migrate", engine, llmapi, "--checkpoint", model)
    assert found == ["trtforge", "package", llmapi, "REPOSITORY"]
    _, _, errors = run("calibrate", model, calibration, "--quant", "int8_wo")
    assert f"hint: Run `trtforge convert {shlex.quote(model)} CHECKPOINT --quant int8_wo`." in errors


def test_recipes_quote_the_next_command(run: Any, tmp_path: Path) -> None:
    copy = str(tmp_path / "my recipe.yaml")
    _, printed, _ = run("recipes", "copy", "demo-fp32", copy, "--json")
    assert shlex.split(json.loads(printed)["next"]) == ["trtforge", "build", copy]
    assert Path(copy).read_text().startswith("# ")
    assert f"# trtforge build '{copy}'" in Path(copy).read_text()
    _, printed, _ = run("recipes", "validate", copy)
    assert printed == f"{copy} is valid: my-recipe; next: trtforge build '{copy}' --dry-run\n"
    _, printed, _ = run("recipes", "copy", "demo-fp32", tmp_path / "other recipe.yaml")
    assert printed.endswith(f"next: trtforge build '{tmp_path}/other recipe.yaml'\n")


@pytest.mark.parametrize("words", ["compile {} out", "package {} out", "recipes validate {}", "generate {} a"])
def test_hints_quote_paths(run: Any, tmp_path: Path, words: str) -> None:
    model = tmp_path / "a b"
    model.symlink_to(DEMO_MODEL)
    _, _, errors = run(*(word.format(model) for word in words.split()))
    (command,) = re.findall(r"`(trtforge [^`]*)`", errors)
    assert str(model) in shlex.split(command)


def test_a_build_quotes_the_next_command() -> None:
    spaced, plain = Paths(Path("a b/out")), Paths(Path("build/mine"))
    named = "'my recipe.yaml'"
    assert next_command(named, spaced, ("convert",)) == f"trtforge build {named} --out 'a b/out' --from verify"
    assert next_command(named, spaced, ("package",)) == "trtforge serve 'a b/out/repository'"
    assert next_command("mine", plain, ("convert",)) == "trtforge build mine --out build/mine --from verify"
    assert next_command("mine", plain, ("package",)) == "trtforge serve build/mine/repository"
