from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compile.checkpoints import engine, llama
from tests.compile.trtllm import Trtllm
from trtforge.compile.build_site import ContainerSite, LocalSite, chosen_gpus, lanes
from trtforge.compile.build_site_choice import chosen_site, require_site
from trtforge.compile.machine import Machine, this_machine
from trtforge.compile.stage import CompileOptions, engine_plan_for, warnings_of
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import release

OUT = Path("/engine")
TARGET = release("1.2.1")
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


@pytest.mark.parametrize(
    ("container", "installed", "place"),
    [
        (None, "1.2.1", LocalSite()),
        (None, None, ContainerSite(IMAGE, OUT)),
        (None, "1.1.0", ContainerSite(IMAGE, OUT)),
        ("none", None, LocalSite()),
        ("mine", "1.2.1", ContainerSite("mine", OUT)),
    ],
)
def test_the_place_follows_from_what_is_here(
    container: str | None, installed: str | None, place: LocalSite | ContainerSite
) -> None:
    assert chosen_site(container, TARGET, Machine(tensorrt_llm=installed), OUT) == place


@pytest.mark.parametrize(
    ("container", "machine", "message", "way"),
    [
        (None, Machine(gpu=True), "TensorRT-LLM is not installed, and docker is not on PATH", IMAGE),
        (
            None,
            Machine(gpu=True, tensorrt_llm="1.1.0"),
            r"TensorRT-LLM 1\.1\.0 is installed, the engine is for 1\.2\.1, and docker is not on PATH",
            "where TensorRT-LLM 1.2.1 is installed",
        ),
        ("none", Machine(gpu=True, docker=True), "TensorRT-LLM is not installed$", "--container IMAGE"),
        ("none", Machine(gpu=True, tensorrt_llm="1.1.0"), r"1\.1\.0 is installed, the engine", "--container"),
        ("mine", Machine(gpu=True, tensorrt_llm="1.2.1"), "A container was requested, and docker is not", "mine"),
        (None, Machine(tensorrt_llm="1.2.1"), "No NVIDIA GPU was found", "--backend torch"),
        (None, Machine(docker=True), "No NVIDIA GPU was found", "--dry-run"),
    ],
)
def test_what_is_missing_is_said_with_the_ways_out(
    container: str | None, machine: Machine, message: str, way: str
) -> None:
    place = chosen_site(container, TARGET, machine, OUT)
    with pytest.raises(ForgeError, match=message) as caught:
        require_site(place, TARGET, machine)
    assert way in caught.value.hint


@pytest.mark.parametrize("machine", [Machine(gpu=True, tensorrt_llm="1.2.1"), Machine(gpu=True, docker=True)])
def test_one_place_and_a_gpu_are_enough(machine: Machine) -> None:
    require_site(chosen_site(None, TARGET, machine, OUT), TARGET, machine)


def test_a_machine_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert this_machine(tmp_path) == Machine()
    (tmp_path / "nvidiactl").touch()
    site = Trtllm.install(tmp_path / "bin", "1.1.0+cu130").site
    monkeypatch.syspath_prepend(site)
    assert this_machine(tmp_path) == Machine(tensorrt_llm="1.1.0", gpu=True, docker=True)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 32))
def test_every_rank_is_dealt_once_and_a_gpu_has_one_lane(ranks: int, gpus: int, workers: int) -> None:
    dealt = lanes(range(ranks), [str(gpu) for gpu in range(gpus)], workers)
    assert sorted(rank for _, lane in dealt for rank in lane) == list(range(ranks))
    assert len({gpu for gpu, _ in dealt}) == len(dealt) <= workers
    sizes = [len(lane) for _, lane in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert all(list(lane) == sorted(lane) for _, lane in dealt)


def test_no_ranks_are_no_lanes() -> None:
    assert lanes([], ["0"], 4) == ()


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0, GPU-1f"}, ("0", "GPU-1f")),
    ],
)
def test_visible_devices(environment: dict[str, str], gpus: tuple[str, ...] | None) -> None:
    assert chosen_gpus(environment) == gpus


@pytest.mark.parametrize("installed", ["1.2.1", None])
@pytest.mark.parametrize("gpu", ["h100-80gb", None])
def test_auto_says_when_a_gpus_engine_is_the_embedded_one(installed: str | None, gpu: str | None) -> None:
    """For a recipe that names a GPU, and only where TensorRT-LLM is not beside one."""
    config = engine(target={} if gpu is None else {"gpu": gpu})
    machine = Machine(tensorrt_llm=installed, gpu=True, docker=True)
    places = Path("checkpoint"), Path("engine")
    plan = engine_plan_for(llama(), config, *places, CompileOptions(), machine=machine)
    said = [text for text in warnings_of(plan) if text.startswith("backend auto: ")]
    assert len(said) == (installed is None and gpu is not None)
