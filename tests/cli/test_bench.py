"""`trtforge bench` as a user types it; the measurement itself is that of another test."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.records import full, measured, written
from tests.pipeline.test_speed import repository
from trtforge.serve.local_server import LocalServer
from trtforge.serve.speed import Load

TOKENIZER = Path("ensemble/1/tokenizer/tokenizer.json")


@pytest.fixture(autouse=True)
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Load]]:
    """What is asked of a server that measures at once."""
    asked: list[tuple[str, str, Load]] = []

    def measure(url: str, model: str, load: Load, tokenizer: Path | None, *, done: object) -> object:
        assert tokenizer is None or tokenizer.parts[-5:] == ("repository", *TOKENIZER.parts)
        asked.append((url, model, load))
        return measured().speed

    @contextmanager
    def served(build: Path, *, quiet: bool) -> Iterator[tuple[LocalServer, str]]:
        yield LocalServer("127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"), "my-ensemble"

    monkeypatch.setattr("trtforge.serve.speed.measure", measure)
    monkeypatch.setattr("trtforge.cli.bench.served_build", served)
    monkeypatch.setattr("os.getloadavg", lambda: (0.314, 0.0, 0.0))
    return asked


@pytest.mark.parametrize("place", ["fp8", "fp8/repository"])
def test_the_figures_of_a_build_are_kept_and_compared(
    run: Any, tmp_path: Path, place: str, measuring: list[tuple[str, str, Load]]
) -> None:
    build, other = written(tmp_path / "fp8", full()), written(tmp_path / "none", full())
    repository(build, "1")
    (build / "repository" / TOKENIZER).parent.mkdir(parents=True)
    (build / "repository" / TOKENIZER).touch()
    status, out, err = run("bench", tmp_path / place, "--concurrency", "1,32", "--requests", "5")
    assert status == 0
    assert err == "note: --requests 5: a level with more requests at once sends as many as run at once\n"
    assert measuring == [("127.0.0.1:5", "my-ensemble", Load(concurrency=(1, 32), requests=5))]
    head, one, many, *rest = out.splitlines()
    assert head.split("  ")[0] == "at once"
    assert one.split() == ["1", "16", "128.0", "21", "ms", "7.6", "ms"]
    assert many.split() == ["32", "32", "2,048.0", "119", "ms", "13.2", "ms"]
    assert rest[0].startswith("prompts of 140 tokens, answers of 64; ")
    assert rest[1:] == ["processors busy with other work before: 0.31", f"kept in {build.resolve()}/bench.json"]
    _, out, _ = run("compare", build, other)
    lines = {line[: line.index("  ")]: line.split()[-2:] for line in out.splitlines() if "  " in line.strip()}
    assert lines["tokens/s, measured"] == ["2,048", "-"]
    assert lines["requests at once"] == ["32", "-"]
    assert "measured with prompts of 140 tokens, answers of 64; " in out
    assert out.rstrip().endswith("processors that other work used before: fp8 (0.31)")
    _, out, _ = run("compare", build, other, "--json", "--html", tmp_path / "page.html")
    one_build, without = json.loads(out)["builds"]
    assert one_build["measured"]["speed"] == measured().speed.model_dump(mode="json")
    assert without["measured"] is None
    assert "2,048, 32 at once" in (tmp_path / "page.html").read_text()


def test_figures_that_cannot_be_kept_are_shown(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = written(tmp_path / "fp8", full())
    repository(build, "1")
    (build / "repository" / TOKENIZER).parent.mkdir(parents=True)
    (build / "repository" / TOKENIZER).touch()

    def refuse(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("trtforge.pipeline.speed.replace_text", refuse)
    status, out, err = run("bench", build, "--json")
    assert status == 0
    assert json.loads(out)["file"] is None
    assert json.loads(out)["levels"][1]["concurrency"] == 32
    assert err == f"warning: the results could not be saved: {build}/bench.json: Read-only file system\n"


def test_a_running_server_is_measured_and_nothing_kept(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: list[tuple[str, str, Load]]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run("bench", "127.0.0.1:8001", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["where"], found["file"], found["busy"]) == ("server 127.0.0.1:8001", None, None)
    assert found["levels"][1]["concurrency"] == 32
    assert measuring == [("127.0.0.1:8001", "ensemble", Load())]
    assert list(tmp_path.iterdir()) == []


def test_a_repository_alone_has_no_report_to_keep_figures_with(run: Any, tmp_path: Path) -> None:
    repository(tmp_path, "1")
    status, out, _ = run("bench", tmp_path / "repository")
    assert status == 0
    assert "kept in" not in out
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize("levels", ["", "0", "1,x", "1,,2", "-1", "8,4097"])
def test_levels_are_numbers(run: Any, levels: str) -> None:
    status, _, err = run("bench", "127.0.0.1:8001", f"--concurrency={levels}")
    assert status == 2
    assert "not numbers from 1" in err


@pytest.mark.parametrize(
    ("target", "error", "hint"),
    [
        ("nothere", "nothere: neither a directory nor HOST:PORT", "HOST:PORT, such as 127.0.0.1:8001."),
        ("127.0.0.1", "127.0.0.1: no such directory, and an address", "Run `trtforge bench 127.0.0.1:8001 --quiet`."),
        ("localhost", "localhost: no such directory, and an address", "Run `trtforge bench localhost:8001 --quiet`."),
        ("bild", "bild: neither a directory nor", "Did you mean build? Run `trtforge bench build --quiet`."),
    ],
)
def test_what_is_neither_here_nor_an_address_is_said(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    status, out, errors = run("bench", target, "--quiet")
    assert (status, out) == (1, "")
    assert errors.startswith(f"error: {error}")
    assert errors.rstrip().endswith(hint)
