"""Machines that cannot build the engine that was asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine
from tests.compile.engines import build, names
from tests.compile.trtllm import H100, L4, Trtllm, write_checkpoint
from trtforge.core.errors import ForgeError, LoggedError


def test_another_release_than_the_target(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    Trtllm.install(trtllm.site, "1.2.0")
    with pytest.raises(ForgeError, match=r"this machine has TensorRT-LLM 1\.2\.0, the engine is for 1\.2\.1") as caught:
        build(tmp_path)
    assert "--target-version 1.2.0" in caught.value.hint


def test_gpus_of_two_kinds(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.has_gpus({"name": "NVIDIA H100", "major": 9, "minor": 0}, L4)
    with pytest.raises(ForgeError, match="of different kinds: NVIDIA H100, NVIDIA L4") as caught:
        build(tmp_path, workers=2)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    assert build(tmp_path, workers=1).manifest.identity.versions["gpu"] == "NVIDIA H100"


def test_another_gpu_than_the_target(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", target={"gpu": "l4"})
    with pytest.raises(ForgeError, match=r"for l4 \(SM 89\), and the GPU here is NVIDIA H100 80GB HBM3 \(SM 90\)"):
        build(tmp_path, config=config)


@pytest.mark.parametrize(
    ("asked", "found", "said"),
    [
        ("l4", L4, None),
        ("h100-80gb", H100, None),
        ("l40s", L4, "the engine is for l40s, and the GPU here is NVIDIA L4 with 23.6 GB (both SM 89)"),
        ("h200", H100, "the engine is for h200, and the GPU here is NVIDIA H100 80GB HBM3 with 84.9 GB (both SM 90)"),
    ],
)
def test_another_gpu_of_the_same_sm_is_a_warning(
    tmp_path: Path,
    trtllm: Trtllm,
    caplog: pytest.LogCaptureFixture,
    asked: str,
    found: Mapping[str, Any],
    said: str | None,
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.has_gpus(found)
    made = build(tmp_path, config=engine(backend="tensorrt_llm", target={"gpu": asked}))
    assert made.manifest.identity.versions["gpu"] == found["name"]
    why = f": it runs on {asked}, with kernels that were selected on the GPU here"
    assert caplog.messages == ([] if said is None else [said + why])


def test_formats_that_the_gpu_does_not_have(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", "FP8")
    trtllm.has_gpus({"name": "NVIDIA A100-SXM4-80GB", "major": 8, "minor": 0})
    with pytest.raises(
        ForgeError, match=r"NVIDIA A100-SXM4-80GB has compute capability 8\.0: fp8 needs 8\.9"
    ) as caught:
        build(tmp_path)
    assert "int4_awq" in caught.value.hint
    assert trtllm.calls() == []


def test_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ForgeError, match="CUDA_VISIBLE_DEVICES is empty"):
        build(tmp_path)


def test_a_driver_without_gpus(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.has_gpus()
    with pytest.raises(ForgeError, match="this machine has no GPU") as caught:
        build(tmp_path)
    assert "nvidia-smi" in caught.value.hint


def test_a_tensorrt_llm_that_does_not_load(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (trtllm.site / "tensorrt.py").write_text('raise ImportError("libnvinfer.so.10: cannot open shared object file")\n')
    with pytest.raises(LoggedError, match="the query for versions and GPUs ended with status 1") as caught:
        build(tmp_path)
    assert "libnvinfer.so.10" in caught.value.log.read_text()
    assert names(tmp_path) == ["checkpoint", "engine.logs", "site"]
