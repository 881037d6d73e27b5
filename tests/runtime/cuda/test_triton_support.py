"""Triton's kernels are used where Triton can launch them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from trtforge.runtime.cuda.triton_support import _works, runs_triton
from trtforge.runtime.native.compiler import VARIABLE

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of SM 9.0, whose driver Triton reaches."""
    _works.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    set_driver(monkeypatch, lambda: 0)
    yield
    _works.cache_clear()


def set_driver(monkeypatch: pytest.MonkeyPatch, get_current_device: object) -> None:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=get_current_device))
    monkeypatch.setattr("triton.runtime.driver", driver)


def test_kernels_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_triton(CUDA)
    assert not runs_triton(torch.device("cpu"))
    monkeypatch.setenv(VARIABLE, "torch")
    assert not runs_triton(CUDA)


def test_older_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert not runs_triton(CUDA)


def test_without_a_c_compiler_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    set_driver(monkeypatch, fail)
    assert not runs_triton(CUDA)
    assert not runs_triton(CUDA)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "Triton does not work here, torch's slower operations are used"
    ]


def test_an_old_triton_is_left_to_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triton.__version__", "3.4.0")
    assert not runs_triton(CUDA)
    assert [message.partition(",")[0] for message in caplog.messages] == ["Triton 3.4.0 is older than 3.5"]
