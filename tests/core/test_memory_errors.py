"""Exceptions that mean that memory ran out, in the words that Python, the C library and torch use for them."""

import errno

import pytest
import torch

from trtforge.core.memory_errors import out_of_memory

_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "there is not enough memory"),
        (RuntimeError(f"{_CPU} 8 bytes."), f"there is not enough memory: {_CPU} 8 bytes."),
        (RuntimeError("std::bad_alloc"), "there is not enough memory: std::bad_alloc"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
            "there is not enough GPU memory: CUDA out of memory. Tried to allocate 20.00 MiB.",
        ),
        *(
            (RuntimeError(f"{said}\nmore"), f"there is not enough GPU memory: {said}")
            for said in (
                "CUDA error: out of memory",
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                "Triton Error [CUDA]: out of memory",
            )
        ),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "a library cannot be loaded: libtorch_cpu.so: failed to map segment from shared object",
        ),
    ],
)
def test_memory_that_ran_out(error: Exception, said: str) -> None:
    failure = out_of_memory(error)
    assert failure is not None
    assert failure.message == said


def test_torch_says_so_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    failure = out_of_memory(caught.value)
    assert failure is not None
    assert failure.message.startswith("there is not enough memory: [enforce fail at alloc_cpu.cpp")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("can't allocate memory"),
        RuntimeError("a bug"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        OSError(errno.EIO, "x"),
        ImportError("x"),
    ],
)
def test_other_errors(error: Exception) -> None:
    assert out_of_memory(error) is None
