"""The embedded engine is not started where its device, kernels or compute type are missing."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.machine.hosts import FakeGpu, FakeNvml
from tests.package.engines import FORGE, engine_config, write_engine
from trtforge import __version__
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import open_artifact
from trtforge.formats.triton import read_facts
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.runtime.native import compiler
from trtforge.serve.config import ServeConfig
from trtforge.serve.embedded import check_embedded, compile_kernels
from trtforge.serve.stage import serve, warn_of_batcher, warn_of_version


def repository_of(tmp_path: Path, **forge: Any) -> Path:
    engine = write_engine(tmp_path / "engine", engine_config(forge=FORGE | forge))
    return package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository").path


def check(repository: Path, *gpus: FakeGpu) -> None:
    facts = read_facts(open_artifact(repository, "repository"))
    check_embedded(facts, repository, lambda: FakeNvml(gpus=gpus))  # type: ignore[arg-type, return-value]


def test_engine_for_the_cpu_runs_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository = repository_of(tmp_path, kernels={"quantized": "int4_dense"})
    check(repository)
    assert caplog.messages == []
    monkeypatch.setattr("trtforge.serve.embedded.find_compiler", lambda host: None)
    check(repository)
    assert [message.partition(":")[0] for message in caplog.messages] == ["there is no C++ compiler here"]


@pytest.mark.parametrize(("kernels", "compiles"), [("native", 1), ("torch", 0)])
def test_kernels_are_compiled_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, compiles: int
) -> None:
    calls: list[None] = []

    def fails() -> Path:
        calls.append(None)
        raise compiler.CompileError("no space left on the device")

    monkeypatch.setattr(compiler, "compiled", fails)
    monkeypatch.setenv(compiler.VARIABLE, kernels)
    repository = repository_of(tmp_path, kernels={"quantized": "int4_dense"})
    compile_kernels(read_facts(open_artifact(repository, "repository")))
    assert len(calls) == compiles


def test_a_repository_before_whose_models_triton_batches_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = repository_of(tmp_path)
    facts = read_facts(open_artifact(repository, "repository"))
    warn_of_batcher(facts, repository)
    assert caplog.messages == []
    config = repository / "ensemble" / "config.pbtxt"
    config.write_text(config.read_text() + "dynamic_batching { preferred_batch_size: [ 8 ] }\n")
    warn_of_batcher(facts, repository)
    (message,) = caplog.messages
    assert "requests with different options wait for Triton's batcher, half a second at a time; package" in message


def test_a_repository_of_another_version_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = open_artifact(repository_of(tmp_path), "repository")
    warn_of_version(manifest)
    assert caplog.messages == []
    identity = manifest.identity.model_copy(update={"versions": {"trtforge": "0.1.0"}})
    warn_of_version(manifest.model_copy(update={"identity": identity}))
    (message,) = caplog.messages
    assert message.startswith(
        f"trtforge 0.1.0 packaged the repository, this is {__version__}: package its engine again"
    )


def test_engine_for_cuda_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ForgeError) as caught:
        check(repository_of(tmp_path, device="cuda"))
    assert caught.value.message == "the engine was compiled for device cuda, this machine has no visible GPU"
    assert "trtforge compile CHECKPOINT OUT --backend torch" in caught.value.hint


@pytest.mark.parametrize(
    ("kernel", "gpu", "said"),
    [
        (
            "fp8_scaled_mm",
            FakeGpu("NVIDIA A100-SXM4-80GB", (8, 0)),
            "needs SM 89; this machine's NVIDIA A100-SXM4-80GB",
        ),
        ("int4_packed_cuda", FakeGpu("Tesla T4", (7, 5)), "needs SM 80; this machine's Tesla T4 has SM 75"),
    ],
)
def test_kernel_that_the_gpu_lacks_is_named(tmp_path: Path, kernel: str, gpu: FakeGpu, said: str) -> None:
    with pytest.raises(ForgeError, match=f"the engine was compiled with the kernel {kernel}, which {said}"):
        check(repository_of(tmp_path, device="cuda", kernels={"quantized": kernel}), gpu)


def test_a_kernel_of_mixed_precision_is_named_too(tmp_path: Path) -> None:
    kernels = {"quantized": "int4_packed_cuda", "fp8": "fp8_scaled_mm"}
    with pytest.raises(ForgeError, match="compiled with the kernel fp8_scaled_mm, which needs SM 89"):
        check(repository_of(tmp_path, device="cuda", kernels=kernels), FakeGpu("NVIDIA A100-SXM4-80GB", (8, 0)))


def test_compute_type_that_the_gpu_emulates_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(repository_of(tmp_path, device="cuda", compute_dtype="bfloat16"), FakeGpu("Tesla T4", (7, 5)))
    assert ["the engine computes in bfloat16, Tesla T4 (SM 75) only emulates it" in m for m in caplog.messages] == [
        True
    ]


def test_gpu_that_has_everything_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forge = {"device": "cuda", "compute_dtype": "bfloat16", "kernels": {"quantized": "fp8_scaled_mm"}}
    check(repository_of(tmp_path, **forge), FakeGpu())
    assert caplog.messages == []


def test_weights_packed_for_another_cpu_are_refused_before_the_server_starts(tmp_path: Path) -> None:
    kernels = {"quantized": "int4_packed_cpu", "cpu_capability": "SVE256"}
    repository = repository_of(tmp_path, compute_dtype="bfloat16", kernels=kernels)
    with pytest.raises(ForgeError, match="the engine's weights were packed for SVE256 CPUs, this one is"):
        serve(ServeConfig(), repository)
