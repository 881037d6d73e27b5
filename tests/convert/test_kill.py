"""Killed at any instant: what was there stays whole, and a rerun gives the same bytes as if nothing had happened."""

import multiprocessing
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.digest import file_digest
from trtforge.core.manifest import files_below

OLD, NEW = ConvertConfig(), ConvertConfig(tp=2, pp=2)
CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


class _Mortal:
    """Counts the changes that this process makes to the disk and kills it at one of them: after half of a write."""

    def __init__(self, last: int | None) -> None:
        self.changes, self._last, self._write = 0, last, os.write
        os.write = self._write_some  # type: ignore[assignment]
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            self._count()

    def _count(self) -> None:
        self.changes += 1
        if self.changes == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write_some(self, descriptor: int, data: memoryview) -> int:
        if self.changes + 1 == self._last:
            self._write(descriptor, data[: len(data) // 2])
        self._count()
        return self._write(descriptor, data)


def _convert(source: Path, out: Path, last: int | None, count: Path) -> None:
    """In a process of its own: convert, die at change number `last`; else leave the number of changes in `count`."""
    mortal = _Mortal(last)
    convert(NEW, source, out)
    changes = mortal.changes
    count.write_text(str(changes))


def content(directory: Path) -> dict[str, str]:
    return {name: file_digest(directory / name) for name in [*files_below(directory), "forge.json"]}


@dataclass(frozen=True)
class Scene:
    """An artifact at `old`; what a rerun should make of `source`; how many changes to the disk that takes."""

    context: ForkServerContext
    source: Path
    old: Path
    expected: dict[str, str]
    changes: int

    def run(self, out: Path, last: int | None) -> int:
        """The exit status of a run that is killed at change number `last`."""
        process = self.context.Process(target=_convert, args=(self.source, out, last, out.parent / "count"))
        process.start()
        process.join()
        return process.exitcode or 0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("scene")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory / "hf")
    convert(OLD, directory / "hf", directory / "old")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trtforge.convert.writer", "tests.convert.test_kill"])
    scene = Scene(context, directory / "hf", directory / "old", {}, 0)
    shutil.copytree(directory / "old", directory / "uninterrupted/out")
    assert scene.run(directory / "uninterrupted/out", None) == 0
    changes = int((directory / "uninterrupted/count").read_text())
    return Scene(context, directory / "hf", directory / "old", content(directory / "uninterrupted/out"), changes)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_killed_at_any_instant(scene: Scene, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("killed")
    out, replaced = directory / "out", directory / ".out.replaced"
    shutil.copytree(scene.old, out)
    old = content(scene.old)
    for last in data.draw(st.lists(st.integers(1, scene.changes), min_size=1, max_size=3), label="killed at"):
        status = scene.run(out, last)
        assert status in (-signal.SIGKILL, 0)
        whole = content(out if out.exists() else replaced)
        assert whole == old if not out.exists() else whole in (old, scene.expected)

    assert scene.run(out, None) == 0

    assert content(out) == scene.expected
    assert sorted(path.name for path in directory.iterdir()) == ["count", "out"]
    shutil.rmtree(directory)


def test_every_kind_of_change_is_counted(scene: Scene) -> None:
    assert scene.changes > 30
