"""Installed packages, and those that do not go together."""

from pathlib import Path

from tests.conftest import DEMO_MODEL
from tests.machine.hosts import (
    CPU_ONLY,
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
from trtforge.core.extras import install_command
from trtforge.doctor.finding import Finding
from trtforge.doctor.needs import needs_of


def test_numpy_that_is_too_new_is_a_problem(tmp_path: Path) -> None:
    packages = FakePackages(VERSIONS | {"numpy": "2.1.0"})
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, packages=packages))
    assert [finding.name for finding in report.problems] == ["numpy with trtforge", "numpy with nvidia-pytriton"]
    assert report.problems[1].found == "nvidia-pytriton 0.7.0 needs numpy <2.0.0,>=1.21; 2.1.0 is installed"
    assert report.problems[1].todo == "pip install 'numpy<2.0.0,>=1.21'"


def test_old_transformers_is_a_problem(tmp_path: Path) -> None:
    packages = FakePackages(VERSIONS | {"transformers": "4.57.1"})
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, packages=packages))
    assert [finding.name for finding in report.problems] == ["transformers with trtforge"]


def test_model_newer_than_transformers_is_a_warning(tmp_path: Path) -> None:
    needs = needs_of(recipe(model={"source": str(DEMO_MODEL)}))
    assert not isinstance(needs.model, ForgeError | None)
    packages = FakePackages(VERSIONS | {"transformers": "5.0.0"})
    finding = one(report_on(make_host(tmp_path, nvml=CPU_ONLY, packages=packages), needs), "model")
    assert finding.status == "warning"
    assert finding.found == (
        f"LlamaForCausalLM was saved by transformers {needs.model.transformers}, 5.0.0 is installed"
    )


def test_missing_packages_are_named_by_extra(tmp_path: Path) -> None:
    left = {name: version for name, version in VERSIONS.items() if name not in ("torch", "tritonclient")}
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, packages=FakePackages(left)))
    assert one(report, "trtforge[engine]") == Finding(
        "trtforge[engine]", "problem", "torch not installed", install_command("engine")
    )
    assert one(report, "trtforge[serve]").status == "warning"
    names = {finding.name for finding in report.findings}
    assert "tensorrt" in names, "whether it is installed is said"
    assert names.isdisjoint({"torch", "tritonclient"}), "what is missing is said once"


def test_tensorrt_llm_that_takes_another_transformers_is_a_warning(tmp_path: Path) -> None:
    packages = FakePackages(VERSIONS | {"tensorrt-llm": "1.2.1"}, {"tensorrt-llm": ("transformers==4.57.1", "torch")})
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, packages=packages))
    assert one(report, "transformers with tensorrt-llm").status == "warning"


def test_other_release_and_tensorrt_than_the_recipes(tmp_path: Path) -> None:
    packages = FakePackages(VERSIONS | {"tensorrt-llm": "1.1.0", "tensorrt": "10.13.3.9"})
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()]), packages=packages, programs={"docker": '{"nvidia":{}}'})
    report = report_on(host, on_tensorrt())
    assert one(report, "tensorrt-llm with the recipe").found == "the recipe's engine is for 1.2.1; 1.1.0 is installed"
    assert one(report, "tensorrt with the container").found.startswith(
        "26.07-trtllm-python-py3 has TensorRT 10.14.1.48, which engines must match; 10.13.3.9 is installed"
    )
    assert report.problems == ()
