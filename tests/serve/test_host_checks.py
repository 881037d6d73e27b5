"""An engine is not started where it cannot run: the message says which field, both values and what to do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from tests.machine.hosts import FakeGpu, FakeNvml
from tests.package.engines import H100, tensorrt_engine
from tests.serve.test_launchers import facts_of
from trtforge.cli.app import app
from trtforge.core import packages
from trtforge.core.errors import ForgeError
from trtforge.formats.engine_target import EngineTarget
from trtforge.machine.nvml import Nvml
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve import host_checks
from trtforge.serve.config import ServeConfig
from trtforge.serve.host_checks import check_gpus, check_versions, installed, visible_gpus
from trtforge.serve.launchers import Launch, plan_launch

HERE = Launch("mpi", ("mpirun",))


def repository_of(tmp_path: Path, target: EngineTarget = H100, tp: int = 1) -> Path:
    assert target.tensorrt_llm is not None
    engine = tensorrt_engine(tmp_path / "engine", tp, target.tensorrt_llm, target=target)
    return package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository").path


def serve(repository: Path, *options: str) -> str:
    return CliRunner().invoke(app, ["serve", str(repository), *options], catch_exceptions=False).stdout


def driver(*gpus: FakeGpu) -> Nvml:
    library = FakeNvml(gpus=gpus)
    return library  # type: ignore[return-value]


def no_library() -> Nvml:
    raise ImportError("pynvml")


def test_engine_is_served_with_the_image_that_has_its_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = serve(repository_of(tmp_path), "--launcher", "docker", "--dry-run")
    assert "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in shown
    assert caplog.messages == []


def test_image_with_another_tensorrt_is_refused(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, H100.model_copy(update={"tensorrt": "10.14.1.47"}))
    with pytest.raises(ForgeError) as caught:
        serve(repository, "--launcher", "docker", "--dry-run")
    assert caught.value.message == (
        "the engine was built with TensorRT 10.14.1.47, the image nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 "
        "has TensorRT 10.14.1.48"
    )
    assert "run `trtforge compile CHECKPOINT OUT --backend tensorrt_llm` there" in caught.value.hint


def test_image_with_another_patch_release_is_refused(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, EngineTarget(tensorrt_llm="1.0.7", tensorrt="10.11.0.33", sm="90"))
    with pytest.raises(
        ForgeError, match=r"built with TensorRT-LLM 1\.0\.7, the image .*25\.10.* has TensorRT-LLM 1\.0\.0"
    ):
        serve(repository, "--launcher", "docker", "--dry-run")


def test_installation_with_other_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tensorrt_llm": "1.2.1", "tensorrt": "10.13.3.9"}
    monkeypatch.setattr(host_checks, "installed_release", versions.get)
    facts = facts_of(repository_of(tmp_path))
    launch = plan_launch(ServeConfig(launcher="mpi"), tmp_path / "repository", facts, tmp_path / "runtime")
    with pytest.raises(ForgeError) as caught:
        check_versions(facts, launch)
    assert caught.value.message == "the engine was built with TensorRT 10.14.1.48, this machine has TensorRT 10.13.3.9"
    assert caught.value.hint.endswith("or serve it with nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3.")


def test_installation_is_read_from_packages_and_the_containers_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VERSION", "13.1.0.036")
    versions = {"tensorrt_llm": "1.2.1+cu130", "tensorrt": "10.14.1.48.post1"}
    monkeypatch.setattr(packages, "version", versions.__getitem__)
    here = installed()
    assert here.offers == EngineTarget(tensorrt_llm="1.2.1", tensorrt="10.14.1.48.post1", cuda="13.1.0.036")
    assert (here.name, here.sure) == ("this machine", True)


def test_package_that_is_not_installed_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VERSION", raising=False)
    assert installed().offers == EngineTarget()


def test_engine_of_unknown_origin_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = repository_of(tmp_path, EngineTarget(tensorrt_llm="1.2.1"))
    caplog.clear()
    serve(repository, "--launcher", "docker", "--dry-run")
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "the engine does not record its TensorRT and SM"
    ]


def test_gpu_of_the_build_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_gpus(facts_of(repository_of(tmp_path)), HERE, lambda: driver(FakeGpu()))
    assert caplog.messages == []


def test_gpu_of_another_compute_capability_is_refused(tmp_path: Path) -> None:
    facts = facts_of(repository_of(tmp_path, tp=2))
    gpus = (FakeGpu(), FakeGpu("NVIDIA L40S", (8, 9)))
    with pytest.raises(ForgeError) as caught:
        check_gpus(facts, HERE, lambda: driver(*gpus))
    assert caught.value.message == "the engine was built for SM 90, GPU 1 here has SM 89"
    assert "use one with SM 90" in caught.value.hint


def test_another_gpu_of_the_same_compute_capability_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_gpus(facts_of(repository_of(tmp_path)), HERE, lambda: driver(FakeGpu("NVIDIA H200")))
    assert caplog.messages == [
        "the engine was built for GPU NVIDIA H100 80GB HBM3, GPU 0 here has GPU NVIDIA H200: it runs, with kernels "
        "tuned for another GPU"
    ]


def test_too_few_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    facts = facts_of(repository_of(tmp_path, tp=2))
    with pytest.raises(ForgeError, match="the engine has 2 ranks, 1 GPUs are visible here"):
        check_gpus(facts, HERE, lambda: driver(FakeGpu(), FakeGpu()))


def test_hidden_gpu_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    check_gpus(facts_of(repository_of(tmp_path)), HERE, lambda: driver(FakeGpu("NVIDIA L40S", (8, 9)), FakeGpu()))


def test_container_gets_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    facts = facts_of(repository_of(tmp_path, tp=2))
    check_gpus(facts, Launch("docker", ("docker",)), lambda: driver(FakeGpu(), FakeGpu()))


def test_gpus_that_cannot_be_listed_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_gpus(facts_of(repository_of(tmp_path)), HERE, no_library)
    assert caplog.messages == ["the engine is not checked against the GPUs: listing them needs nvidia-ml-py"]


def test_driver_that_does_not_work_shows_no_gpu() -> None:
    library = FakeNvml(gpus=(FakeGpu(),), broken="Driver/library version mismatch")
    assert visible_gpus(lambda: library, None) == ()  # type: ignore[arg-type, return-value]
