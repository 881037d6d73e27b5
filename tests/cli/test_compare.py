"""`trtforge compare` as a user types it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.records import full, written
from tests.pipeline.test_compare import verified


def test_compare_prints_json_and_a_page(run: Any, tmp_path: Path) -> None:
    builds = [written(tmp_path / name, full()) for name in ("fp8", "int4_awq")]
    page = tmp_path / "comparison.html"
    status, out, err = run("compare", *builds, "--html", page, "--json")
    assert (status, err) == (0, "")
    assert [build["name"] for build in json.loads(out)["builds"]] == ["fp8", "int4_awq"]
    assert "2 builds compared" in page.read_text()
    status, out, err = run("compare", *builds, "--html", tmp_path / "no" / "x.html")
    assert (status, out) == (1, "")
    assert f"there is no directory {tmp_path / 'no'}\nhint: Create it" in err
    assert run("compare", builds[0])[0] == 2


def test_a_full_disk_leaves_the_earlier_page(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, pages = written(tmp_path / "fp8", full()), tmp_path / "pages"
    pages.mkdir()
    (pages / "page.html").write_text("old")
    (pages / "link.html").symlink_to("page.html")

    def half(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        status, _, err = run("compare", build, build, "--html", pages / "link.html")
    assert (status, "link.html cannot be written: No space left on device" in err) == (1, True)
    assert sorted(path.name for path in pages.iterdir()) == ["link.html", "page.html"]
    assert (pages / "page.html").read_text() == "old"
    assert run("compare", build, build, "--html", pages / "link.html")[0] == 0
    assert (pages / "link.html").is_symlink()
    assert "2 builds compared" in (pages / "page.html").read_text()
    assert run("compare", build, build, "--html", "/dev/null")[0] == 0


@pytest.mark.parametrize("columns", [80, 120])
def test_many_builds_are_shown_in_blocks_that_fit(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    builds = [written(tmp_path / f"build-{number}-of-a-long-name", full()) for number in range(7)]
    status, out, _ = run("compare", *builds)
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    assert out.count("9.12 GB") == 7
    names = [word for line in out.splitlines() for word in line.split() if word.startswith("build-")]
    assert names == [f"build-{number}-of-a-long-name" for number in range(7)]
    assert "source" in out


def test_differences_from_the_first_build_are_columns(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    builds = [verified(tmp_path / "a", 0.01), verified(tmp_path / "b", 0.03), verified(tmp_path / "c", 0.01)]
    status, out, _ = run("compare", *builds, "--html", tmp_path / "page.html")
    assert status == 0
    rows = {line[:30].strip(): line[30:].split("  ") for line in out.splitlines()}
    assert [word.strip() for word in rows["KL mean, against the first"] if word] == ["-", "+0.02 to +0.02", "+0 to +0"]
    real = [word.strip() for word in rows["significant differences"] if word]
    assert real == ["-", "perplexity and KL", "none shown"]
    assert "b against a: perplexity +2.02% to +2.02%, mean KL" in (tmp_path / "page.html").read_text()
    other = verified(tmp_path / "other", 0.03, text=4.0)
    assert "other against a: verified on other text, so they do not compare\n" in run("compare", builds[0], other)[1]
    found = json.loads(run("compare", *builds, "--json")[1])["differences"]
    assert [each["kl_mean"]["real"] for each in found] == [True, False]


def test_a_mistyped_build_is_named_with_the_command(run: Any, tmp_path: Path) -> None:
    build, other = written(tmp_path / "demo-fp8", full()), written(tmp_path / "demo-int4", full())
    typed = tmp_path / "demo-fp88"
    status, _, err = run("compare", other, typed)
    assert status == 1
    assert err.endswith(f"hint: Did you mean {build}? Run `trtforge compare {other} {build}`.\n")
    status, _, err = run("compare", build, typed)
    assert (status, "Did you mean" in err) == (1, False), "it is compared already"
    assert f"error: {typed}: no such directory\n" in err


def test_losses_without_an_interval_are_said_and_json_has_no_nan(run: Any, tmp_path: Path) -> None:
    """Sums near the largest float64 are finite, and their draws are not."""
    builds = [verified(tmp_path / "a", 0.01), verified(tmp_path / "b", 1e306)]
    status, out, err = run("compare", *builds, "--json")
    assert (status, err) == (0, "")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (found,) = json.loads(out, parse_constant=refuse)["differences"]
    assert (found["perplexity"], found["kl_mean"]) == (None, None)
    assert found["reason"] == "the losses are too large for an interval"
    assert "b against a: the losses are too large for an interval\n" in run("compare", *builds)[1]
