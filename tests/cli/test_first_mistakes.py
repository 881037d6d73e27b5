"""Twenty-nine mistakes that a first user makes: each hint names a command that works as it is printed.

Every command runs in an empty directory beside the demo model (`model/`), a build of it (`build/demo/`) and a recipe.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig

COMMAND = re.compile(r"`trtforge ([^`]+)`")
MISTAKES = {
    "a command mistyped": "biuld demo-fp32 --dry-run",
    "a command of a group mistyped": "recipes lst",
    "an option mistyped": "build demo-fp32 --dryrun",
    "nothing to build": "build",
    "a required option left out": "calibrate model OUT",
    "a recipe's name mistyped": "build demo-fp23 --dry-run",
    "a recipe's name cut short": "recipes show demo-int4",
    "a recipe file mistyped": "recipes validate ./mine.yml",
    "a model's directory mistyped": "convert modle OUT",
    "a model's directory mistyped in a plan": "plan ./modell",
    "a file of the model": "inspect model/config.json",
    "a key mistyped": "build demo-fp32 --dry-run --set engine.max_bach_size=4",
    "a number format mistyped": "build demo-fp32 --dry-run --set quantization.format=fp7",
    "a number format that does not exist": "plan model --quant fp",
    "a GPU mistyped": "plan model --gpu h10",
    "a layout that does not divide": "build demo-fp32 --dry-run --set parallel.tp=3",
    "a layout that does not divide a model": "build model --dry-run --tp 3",
    "a layout that does not divide in a plan": "plan model --tp 3",
    "a layout that does not divide in a conversion": "convert model OUT --tp 3",
    "a stage that does not exist": "build demo-fp32 --dry-run --from packge",
    "a goal that does not exist": "plan model --alternatives --goal speed",
    "a format without its calibration": "convert model OUT --quant int8_sq",
    "a calibration that is not needed": "calibrate model OUT --quant int8_wo",
    "a checkpoint converted again": "convert build/demo/checkpoint OUT",
    "a model compiled before it is converted": "compile model OUT",
    "a checkpoint packaged before it is compiled": "package build/demo/checkpoint OUT",
    "an engine served before it is packaged": "serve build/demo/engine",
    "a checkpoint asked before it is compiled": "generate build/demo/checkpoint Hello",
    "an artifact's directory mistyped": "inspect build/demo/chekpoint",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model, a build and a recipe."""
    place = tmp_path_factory.mktemp("first")
    shutil.copytree(DEMO_MODEL, place / "model")
    build = place / "build" / "demo"
    convert(ConvertConfig(), place / "model", build / "checkpoint")
    compile_engine(EngineConfig(backend="torch"), build / "checkpoint", build / "engine")
    (place / "mine.yaml").write_text("name: mine\nmodel: {source: model}\n")
    return place


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_hint_names_a_command_that_works(
    mistake: str, place: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = set(place.iterdir())
    status, _, errors = run(*shlex.split(MISTAKES[mistake]))
    assert status in (1, 2)
    error, hint = errors.splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    named = COMMAND.findall(hint)
    assert named, hint
    words = shlex.split(named[-1])
    if words[0] == "calibrate":
        words += ["--samples", "2", "--seq-len", "16"]  # what is named works, only with less data
    status, _, errors = run(*words)
    assert status == 0, f"{hint}\n{errors}"
    for left in set(place.iterdir()) - before:
        shutil.rmtree(left, ignore_errors=True)


def test_there_are_twenty_and_more() -> None:
    assert len(MISTAKES) >= 20
