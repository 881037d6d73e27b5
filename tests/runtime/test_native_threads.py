"""The threads that compute for a thread end when it leaves the computing to another one."""

import time
from pathlib import Path

import torch

from trtforge.runtime.native.bindings import native
from trtforge.runtime.native.threads import release_threads


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_released_threads_end_and_come_again() -> None:
    kernels = native()
    assert kernels is not None, "these machines have a C++ compiler"
    x, weight, before = torch.randn(64, 1024), torch.ones(1024), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = kernels.rms_norm(x, weight, 1e-5)
        computing = tasks()
        release_threads(kernels)
        deadline = time.monotonic() + 10
        while tasks() > computing - 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tasks() <= computing - 2
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), expected)
        assert tasks() >= computing
    finally:
        torch.set_num_threads(before)
        release_threads(kernels)
