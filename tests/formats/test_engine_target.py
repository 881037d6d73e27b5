"""What an engine was built for is recorded, and compared with a place as TensorRT would."""

import pytest

from trtforge.core.errors import ForgeError
from trtforge.formats.engine_target import EngineTarget, differences, images_for

H100 = EngineTarget(
    tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.1.0.036", sm="90", gpu="NVIDIA H100 80GB HBM3"
)


def elsewhere(**changes: str | None) -> EngineTarget:
    return H100.model_copy(update=changes)


def test_target_is_read_back_from_the_versions_of_a_manifest() -> None:
    assert H100.versions == {
        "tensorrt_llm": "1.2.1",
        "tensorrt": "10.14.1.48",
        "cuda": "13.1.0.036",
        "sm": "90",
        "gpu": "NVIDIA H100 80GB HBM3",
    }
    assert EngineTarget.recorded({"trtforge": "0.1.0", **H100.versions}) == H100
    assert EngineTarget(sm="90").versions == {"sm": "90"}


def test_engine_without_a_recorded_target_has_none() -> None:
    assert EngineTarget.recorded({"trtforge": "0.1.0", "torch": "2.9.0"}) is None


def test_recorded_value_that_cannot_be_is_named() -> None:
    with pytest.raises(ForgeError, match=r"forge\.json: versions: sm"):
        EngineTarget.recorded({"sm": "Hopper"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensorrt": "10.14.1.49"},
            "the engine was built with TensorRT 10.14.1.48, this has TensorRT 10.14.1.49",
        ),
        (
            {"tensorrt_llm": "1.1.0"},
            "the engine was built with TensorRT-LLM 1.2.1, this has TensorRT-LLM 1.1.0",
        ),
        ({"sm": "89"}, "the engine was built for SM 90, this has SM 89"),
    ],
)
def test_what_stops_an_engine(changes: dict[str, str], said: str) -> None:
    (found,) = differences(H100, elsewhere(**changes))
    assert found.stops
    assert found.said("this") == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"gpu": "NVIDIA H200"},
            "the engine was built for GPU NVIDIA H100 80GB HBM3, this has GPU NVIDIA H200",
        ),
        ({"cuda": "12.9"}, "the engine was built with CUDA 13.1.0.036, this has CUDA 12.9"),
    ],
)
def test_what_only_makes_an_engine_slower(changes: dict[str, str], said: str) -> None:
    (found,) = differences(H100, elsewhere(**changes))
    assert not found.stops
    assert found.said("this") == said


@pytest.mark.parametrize(
    "changes",
    [{"tensorrt": "10.14.1.48.post1"}, {"cuda": "13.0"}, {"tensorrt": None}, {"sm": None, "gpu": None}],
)
def test_what_does_not_count(changes: dict[str, str | None]) -> None:
    assert differences(H100, elsewhere(**changes)) == ()


def test_what_stops_comes_first() -> None:
    found = differences(elsewhere(sm=None), elsewhere(cuda="12.9", gpu="NVIDIA H200", tensorrt="10.13.3.9"))
    assert [difference.field for difference in found] == ["tensorrt", "cuda", "gpu"]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 4),
        ({"tensorrt_llm": "1.1.0", "tensorrt": "10.13.3.9"}, 3),
        ({"tensorrt": "10.13.3.9"}, 0),
        ({"tensorrt": None}, 4),
        ({"tensorrt_llm": "0.9.0"}, 0),
        ({"tensorrt_llm": None}, 0),
    ],
)
def test_images_are_those_with_both_versions(changes: dict[str, str | None], count: int) -> None:
    images = images_for(elsewhere(**changes))
    assert len(images) == count
    assert images == tuple(sorted(images, reverse=True)), "the newest first"
