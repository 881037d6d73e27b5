"""Releases the worker threads of a thread: OpenMP's for torch operations, and a separate team for the kernels."""

from trtforge.runtime.native.bindings import Native


def release_threads(kernels: Native) -> None:
    """End the worker threads of the calling thread, when another thread takes over the computing.

    Each computing thread has its own workers. While a process has more OpenMP threads than processors, waiting threads
    sleep instead of spinning (libgomp's env.c, `gomp_throttled_spin_count_var`), and waking one takes longer than many
    operations do.
    """
    kernels.functions.release_threads()
