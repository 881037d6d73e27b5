"""The directory of several builds is told from a build, and one of its builds is named."""

from pathlib import Path

import pytest

from trtforge.core.builds import RECIPE_FILE, REPORT_FILE, builds_in, require_build_directory, require_one_build
from trtforge.core.errors import ForgeError, Repair


def made(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text('{"recipe": "demo", "stages": []}')
    return place


def test_builds_are_found_by_their_files(tmp_path: Path) -> None:
    made(tmp_path, f"fp8/{REPORT_FILE}", f"derived/{RECIPE_FILE}", "half/checkpoint/forge.json", "other/notes.txt")
    assert [build.name for build in builds_in(tmp_path)] == ["derived", "fp8", "half"]
    assert builds_in(tmp_path / "fp8") == builds_in(tmp_path / "none") == ()
    require_one_build(tmp_path / "fp8")


@pytest.mark.parametrize("own", ["forge.json", "config.json", REPORT_FILE, RECIPE_FILE, "engine/forge.json"])
def test_what_is_a_build_itself_does_not_hold_builds(tmp_path: Path, own: str) -> None:
    assert builds_in(made(tmp_path, f"fp8/{REPORT_FILE}", own)) == ()


def test_the_build_that_has_what_is_needed_is_named(tmp_path: Path) -> None:
    made(tmp_path, f"a/{REPORT_FILE}", f"b/{REPORT_FILE}", "b/repository/forge.json")
    with pytest.raises(ForgeError) as caught:
        require_one_build(tmp_path, "repository")
    assert caught.value.message == f"{tmp_path} is not a build: it holds the builds a, b"
    assert caught.value.hint == f"Give one of them, such as {tmp_path / 'b'}."
    assert caught.value.repair == Repair(str(tmp_path), str(tmp_path / "b"))
    with pytest.raises(ForgeError) as caught:
        require_one_build(tmp_path, "engine")
    assert (caught.value.hint, caught.value.repair) == ("They have no engine yet.", None)
    with pytest.raises(ForgeError) as caught:
        require_one_build(tmp_path, RECIPE_FILE)  # finished builds, each of a recipe elsewhere
    assert caught.value.hint == "Give the recipe of one of them, and its directory with --out."


def test_many_builds_are_counted(tmp_path: Path) -> None:
    made(tmp_path, *(f"{name}/{REPORT_FILE}" for name in "abcdefgh"))
    with pytest.raises(ForgeError, match=r"it holds the builds a, b, c, d, e, f and 2 more$"):
        require_one_build(tmp_path)


@pytest.mark.parametrize(
    "names", [(), ("build.log", ".calibration.partial/x"), (REPORT_FILE, "report.html"), (RECIPE_FILE, "report.md")]
)
def test_a_build_goes_beside_other_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    require_build_directory(made(tmp_path / "out", *names))


def test_a_build_replaces_no_report_of_others(tmp_path: Path) -> None:
    made(tmp_path, "notes.txt", "report.html")
    (tmp_path / REPORT_FILE).write_text('{"tests": 3}')
    with pytest.raises(ForgeError) as caught:
        require_build_directory(tmp_path)
    assert caught.value.message == (
        f"{tmp_path} is not a build, but has files named like a build's report: report.json, report.html"
    )
    assert caught.value.hint == "Choose another directory with --out, or move them away."
