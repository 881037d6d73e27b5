"""What a recipe asks of a machine."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.machine.hosts import (
    CPU_ONLY,
    GIB,
    VERSIONS,
    FakeGpu,
    FakeNvml,
    FakePackages,
    make_host,
    on_tensorrt,
    one,
    recipe,
    report_on,
)
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import Recipe
from trtforge.doctor.finding import Finding
from trtforge.doctor.needs import needs_of


def test_recipe_for_gpus_needs_them(tmp_path: Path) -> None:
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, programs={"docker": "{}"}), on_tensorrt(tp=4))
    assert [finding.name for finding in report.problems] == ["driver", "container runtime"]
    assert report.problems[0].found.endswith("mine needs 4 GPU(s)")
    assert report.as_json()["fit"] is False


def test_auto_needs_what_the_backend_is_here() -> None:
    wanted = recipe(parallel={"tp": 2})
    assert wanted.engine.backend == "auto"
    assert (needs_of(wanted).backend, needs_of(wanted).gpus) == ("torch", 0)
    there = needs_of(wanted, "tensorrt_llm")
    assert (there.backend, there.gpus) == ("tensorrt_llm", 2)
    assert there.release is not None


@pytest.mark.parametrize(("capability", "status"), [((8, 0), "problem"), ((8, 9), "ok"), ((9, 0), "ok")])
def test_formats_are_checked_against_the_gpu(tmp_path: Path, capability: tuple[int, int], status: str) -> None:
    nvml = FakeNvml([FakeGpu("NVIDIA A100-SXM4-80GB", capability)])
    host = make_host(tmp_path, nvml=nvml, programs={"docker": '{"nvidia":{}}'})
    gpu = one(report_on(host, on_tensorrt(quant="fp8")), "GPU 0")
    assert gpu.status == status
    if status == "problem":
        assert "NVIDIA A100-SXM4-80GB has compute capability 8.0" in gpu.found
        assert "int4_awq" in gpu.todo


@pytest.mark.parametrize(("gpu", "status"), [("a100-80gb", "problem"), ("l4", "ok")])
def test_named_gpu_is_checked_without_being_here(tmp_path: Path, gpu: str, status: str) -> None:
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY), on_tensorrt(quant="fp8", gpu=gpu))
    assert one(report, "target GPU").status == status


def test_engine_of_another_architecture_is_a_problem(tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu("NVIDIA L40S", (8, 9), 48 * GIB)])
    host = make_host(tmp_path, nvml=nvml, programs={"docker": '{"nvidia":{}}'})
    found = one(report_on(host, on_tensorrt(gpu="h100-80gb")), "GPU 0").found
    assert "the recipe builds for h100-80gb (SM 90)" in found
    assert report_on(host, on_tensorrt(gpu="l4")).problems == ()


def test_weights_must_fit(tmp_path: Path) -> None:
    engine = {"backend": "tensorrt_llm"}
    needs = needs_of(recipe(model={"source": str(DEMO_MODEL)}, engine=engine))
    assert needs.weights is not None
    for gpu, found in (
        (FakeGpu(memory=needs.weights - 1), "a rank's weights take about"),
        (FakeGpu(used=80 * GIB - needs.weights + 1), "a rank's weights take about"),
        (FakeGpu(memory=1000 * needs.weights), ""),
    ):
        host = make_host(tmp_path, nvml=FakeNvml([gpu]), programs={"docker": '{"nvidia":{}}'})
        finding = one(report_on(host, needs), "GPU 0")
        assert found in finding.found
        assert finding.status == ("problem" if found else "ok")


def test_embedded_engine_with_cpu_ranks(tmp_path: Path) -> None:
    needs = needs_of(recipe(parallel={"tp": 2, "pp": 2}, engine={"backend": "torch", "device": "cpu"}))
    assert (needs.ranks, needs.gpus, needs.python_models) == (4, 0, 5)
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, cpus=2), needs)
    assert one(report, "CPU").found.endswith("; 4 ranks share them")
    assert report.problems == ()


def test_model_is_described_or_not_here(tmp_path: Path) -> None:
    packages = FakePackages(VERSIONS | {"transformers": version("transformers")})
    host = make_host(tmp_path, nvml=CPU_ONLY, packages=packages)
    assert one(report_on(host, needs_of(recipe())), "model") == Finding(
        "model", "unknown", "nobody/nothing is not on this machine; the build fetches it"
    )
    here = needs_of(recipe(model={"source": str(DEMO_MODEL)}))
    assert one(report_on(host, here), "model").found == "LlamaForCausalLM, 4,065,536 parameters"


def test_model_that_cannot_be_built_is_a_problem(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY), needs_of(recipe(model={"source": str(source)})))
    assert one(report, "model").status == "problem"


def test_the_llm_api_needs_gpus_and_no_release_with_engines() -> None:
    engine = {"backend": "llmapi", "target": {"tensorrt_llm": "1.3.0"}}
    needs = needs_of(Recipe.parse({"name": "x", "model": {"source": "a/b"}, "engine": engine}, "test"))
    assert (needs.backend, needs.gpus, needs.release) == ("tensorrt_llm", 1, None)


def test_unknown_release_is_an_error() -> None:
    with pytest.raises(ForgeError, match=r"TensorRT-LLM 1\.9\.0 has no TensorRT engines"):
        on_tensorrt(version="1.9.0")
