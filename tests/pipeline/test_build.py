"""Builds at one place run one after the other."""

import os
import threading
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from trtforge.core.errors import ForgeError
from trtforge.core.locks import is_held, take_lock
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe
from trtforge.pipeline.build import Build


def build_in(out: Path) -> Build:
    return Build(Recipe.parse({"name": "mine", "model": {"source": str(DEMO_MODEL)}}, "test"), out, Silent())


def test_a_second_build_at_the_same_place_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its convert would replace the checkpoint that the first one verifies and reports."""
    out = tmp_path / "out"
    out.mkdir()
    waiting, started = threading.Event(), list[str]()
    logger = "trtforge.pipeline.build._LOG.warning"
    monkeypatch.setattr(logger, lambda text, *values: said.append(text % values) or waiting.set())
    said: list[str] = []
    lock = take_lock(out / ".build.lock")
    second = threading.Thread(target=lambda: build_in(out).run(("convert",), started.append))
    second.start()
    assert waiting.wait(PATIENCE)
    assert (started, said) == ([], [f"another process is building {out}: waiting for it"])
    os.close(lock)
    second.join(PATIENCE)
    assert started == ["convert"]
    assert not (out / ".build.lock").exists()


def test_the_place_is_locked_from_the_first_stage_to_the_report(tmp_path: Path) -> None:
    held = list[bool]()
    build_in(tmp_path / "out").run(("convert",), lambda stage: held.append(is_held(tmp_path / "out/.build.lock")))
    assert held == [True]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint", "report.html", "report.json", "report.md",
    ]  # fmt: skip


def test_a_build_that_cannot_go_on_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="out/checkpoint"):
        build_in(tmp_path / "out").run(("compile",), started=lambda stage: pytest.fail(stage))
    assert not (tmp_path / "out").exists()


def test_a_failed_build_says_so_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier summary would say that the build passed."""
    out = tmp_path / "out"
    build_in(out).run(("convert",), lambda stage: None)
    earlier = {name: (out / name).read_text() for name in ("report.json", "report.html")}
    assert not (out / "report.md").read_text().startswith("## mine: failed")
    with pytest.raises(ForgeError) as caught:
        build_in(out).run(("package",), started=lambda stage: pytest.fail(stage))
    assert (out / "report.md").read_text() == (
        f"## mine: failed\n\n```text\nerror: {caught.value.message}\nhint: {caught.value.hint}\n```\n\n"
        "report.json and report.html are of an earlier build, if they exist.\n"
    )
    assert {name: (out / name).read_text() for name in earlier} == earlier
    build_in(out).run(("convert",), lambda stage: None)
    assert (out / "report.md").read_text().startswith("## mine: no")

    def interrupted(stage: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_in(out).run(("convert",), interrupted)
    assert "it was interrupted" in (out / "report.md").read_text()


def test_a_build_that_fails_leaves_reports_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(ForgeError):
        build_in(tmp_path).run(("compile",), started=lambda stage: pytest.fail(stage))
    assert (tmp_path / "report.md").read_text() == "mine"
