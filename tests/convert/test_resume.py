"""A conversion that was interrupted goes on where it was, if the source still is what it was."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Edit, MakeHf
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.digest import DigestThread
from trtforge.core.errors import ForgeError
from trtforge.formats.shards import TensorSpec, Writer

LAYOUT = ConvertConfig(tp=2, pp=2)


class Until:
    """Progress that calls `then` once `share` of the total is done, and keeps count."""

    def __init__(self, share: float, then: Callable[[], object]) -> None:
        self.share, self.then = share, then
        self.total = self.done = 0.0

    @contextmanager
    def bar(self, title: str, total: float, unit: str) -> Iterator["Until"]:
        self.total = total
        yield self

    def advance(self, amount: float) -> None:
        before, self.done = self.done, self.done + amount
        if before < self.share * self.total <= self.done:
            self.then()

    def describe(self, text: str) -> None:
        pass


def interrupt() -> None:
    raise KeyboardInterrupt


def all_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rank files that were opened for writing."""
    names: list[str] = []
    opened = Writer.__init__

    def record(writer: Writer, path: Path, tensors: Sequence[TensorSpec], digests: DigestThread | None = None) -> None:
        names.append(path.name)
        opened(writer, path, tensors, digests)

    monkeypatch.setattr(Writer, "__init__", record)
    return names


@pytest.mark.parametrize(
    ("share", "again"),
    [
        (0.3, ["rank0", "rank1", "rank2", "rank3"]),
        (0.9, ["rank2", "rank3"]),
    ],
)
def test_finished_pipeline_stages_are_kept(
    make_hf: MakeHf, tmp_path: Path, written: list[str], share: float, again: list[str]
) -> None:
    source = make_hf()
    expected = all_of(convert(LAYOUT, source, tmp_path / "expected").path)
    with pytest.raises(KeyboardInterrupt):
        convert(LAYOUT, source, tmp_path / "out", progress=Until(share, interrupt))
    written.clear()
    bar = Until(2, interrupt)

    out = convert(LAYOUT, source, tmp_path / "out", progress=bar).path

    assert written == [f"{name}.safetensors" for name in again]
    assert bar.done == bar.total == sum(len(data) for name, data in expected.items() if name.startswith("rank"))
    assert all_of(out) == expected
    assert not (tmp_path / ".out.partial").exists()


def test_files_of_other_weights_are_not_kept(
    make_hf: MakeHf, tmp_path: Path, written: list[str], edit_tensors: Edit
) -> None:
    source = make_hf()
    with pytest.raises(KeyboardInterrupt):
        convert(LAYOUT, source, tmp_path / "out", progress=Until(0.9, interrupt))
    edit_tensors(source, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[0:1].fill_(7))
    written.clear()

    out = convert(LAYOUT, source, tmp_path / "out").path

    assert written == [f"rank{rank}.safetensors" for rank in range(4)]
    assert all_of(out) == all_of(convert(LAYOUT, source, tmp_path / "expected").path)


def test_files_of_another_layout_are_not_kept(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf()
    with pytest.raises(KeyboardInterrupt):
        convert(LAYOUT, source, tmp_path / "out", progress=Until(0.9, interrupt))
    out = convert(ConvertConfig(), source, tmp_path / "out").path
    assert all_of(out) == all_of(convert(ConvertConfig(), source, tmp_path / "expected").path)
    assert sorted(path.name for path in out.glob("rank*")) == ["rank0.safetensors"]


def test_an_error_keeps_nothing(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf()
    edit_tensors(source, lambda tensors: tensors["lm_head.weight"].view(-1)[0:1].fill_(1e6))
    with pytest.raises(ForgeError, match=r"lm_head\.weight: a value does not fit float16"):
        convert(LAYOUT, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_going_on_is_said_but_nothing_of_it_stays(
    make_hf: MakeHf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_hf()
    caplog.set_level("INFO", "trtforge")
    with pytest.raises(KeyboardInterrupt):
        convert(LAYOUT, source, tmp_path / "out", progress=Until(0.9, interrupt))
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        f"{tmp_path / 'out'} was interrupted: 2 finished files"
    ]
    caplog.clear()
    resumed = convert(LAYOUT, source, tmp_path / "out")
    finished = sum((resumed.path / f"rank{rank}.safetensors").stat().st_size for rank in (0, 1))
    assert caplog.messages == [f"resuming an interrupted run: {finished:,} bytes of files are finished"]
    assert resumed.manifest == convert(LAYOUT, source, tmp_path / "other").manifest
    assert json.loads((resumed.path / "forge.json").read_text())["files"].keys() == resumed.manifest.files.keys()
