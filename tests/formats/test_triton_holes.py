"""The table of Triton's holes: whole, sourced, and read as it says."""

import json

import pytest

from trtforge.formats import triton_holes
from trtforge.formats.releases import read_release_data
from trtforge.formats.triton_holes import (
    has_option,
    holes_of,
    open_holes,
    release_of_server,
    release_of_wheel,
)
from trtforge.launch.doors import DOORS

DATA = json.loads(triton_holes._FILE.read_text())


def ids(release: str, **how: object) -> set[str]:
    return {hole.id for hole in open_holes(release, **({"front": True, "opened": ()} | how))}  # type: ignore[arg-type]


def test_every_source_and_door_that_is_named_exists() -> None:
    for entry in (*DATA["holes"], *DATA["options"]):
        assert entry["sources"]
        assert set(entry["sources"]) <= set(DATA["sources"])
    assert {hole.get("door") for hole in DATA["holes"]} - {None} <= set(DOORS)
    assert {hole["confidence"] for hole in DATA["holes"]} <= set(DATA["confidence"])


def test_every_container_has_a_known_release() -> None:
    releases = {container["triton"] for container in read_release_data("containers")["containers"]}
    assert releases <= set(DATA["versions"].values())


@pytest.mark.parametrize(
    ("release", "has", "lacks"),
    [
        ("24.10", {"grpc-cancel-race", "json-depth", "http-pieces", "shm-chain", "model-name"}, set()),
        ("25.05", {"http-pieces", "text-classes"}, {"grpc-cancel-race", "json-depth", "load-file-overflow"}),
        ("25.07", {"model-name", "compressed-pieces"}, {"http-pieces", "shm-chain", "text-classes"}),
        ("25.10", {"auth-bypass"}, {"compressed-pieces", "model-name"}),
        ("26.03", {"json-sizes"}, {"auth-bypass"}),
        ("26.07", set(), {"json-sizes"}),
    ],
)
def test_a_release_has_the_holes_that_later_ones_mended(release: str, has: set[str], lacks: set[str]) -> None:
    found = {hole.id for hole in holes_of(release)}
    assert has <= found
    assert not lacks & found


def test_front_and_doors_cover_what_they_stand_before() -> None:
    assert not {"json-depth", "http-pieces", "shm-chain", "model-name", "dali"} & ids("24.10")
    assert {"json-depth", "http-pieces"} <= ids("24.10", front=False)
    assert "shm-chain" in ids("24.10", opened=("shared-memory",))
    assert "model-name" not in ids("24.10", opened=("shared-memory",))


def test_releases_are_known_by_server_and_wheel() -> None:
    assert (release_of_wheel("0.7.0"), release_of_wheel("9.9"), release_of_wheel(None)) == ("24.10", None, None)
    assert (release_of_server("2.51.0"), release_of_server("24.10"), release_of_server("9")) == ("24.10", "24.10", None)


def test_the_limit_on_bodies_came_with_25_06() -> None:
    assert not has_option("25.05", "http-max-input-size")
    assert has_option("25.06", "http-max-input-size")
    assert not has_option("26.07", "no-such-option")
