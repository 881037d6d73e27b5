"""Which exceptions mean that memory ran out: Python's, the system's, torch's, and those of the loader of libraries."""

import errno
import re

from trtforge.core.errors import ForgeError, first_line

_GIVE_MORE = "Give it more (the limit of the container or of `ulimit -v`), or work on a smaller part."
_ALLOCATION = re.compile(r"can't allocate memory|[Cc]annot allocate memory$|std::bad_alloc")
_GPU = (  # of torch's allocator, of the driver, of cuBLAS and of Triton's kernels
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_LOADER = (
    "failed to map segment from shared object"  # without a reason: of memory, or of a file system without execution
)


def out_of_memory(error: BaseException) -> ForgeError | None:
    """What to tell of an error that means that memory ran out; None if it means something else."""
    said = first_line(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return ForgeError("there is not enough memory", hint=_GIVE_MORE)
    if isinstance(error, RuntimeError) and said.startswith(_GPU):
        return ForgeError(
            f"there is not enough GPU memory: {said}",
            hint="Free the GPU (`nvidia-smi` lists what uses it), use --device cpu, or work on a smaller part.",
        )
    if isinstance(error, RuntimeError) and _ALLOCATION.search(said):
        return ForgeError(f"there is not enough memory: {said}", hint=_GIVE_MORE)
    if isinstance(error, ImportError) and _LOADER in said:
        return ForgeError(
            f"a library cannot be loaded: {said}",
            hint="Give the program more memory (the limit of the container or of `ulimit -v`); the file system of "
            "Python's packages must allow execution.",
        )
    return None
