"""The threads of OpenMP, which torch's operations and the kernels share."""

from trtforge.runtime.native.bindings import Native


def release_threads(kernels: Native) -> None:
    """End the threads that have computed for the calling one, which leaves the computing to another thread.

    Each thread that computes has its own. While a process has more of them than processors, those that wait for the
    next kernel sleep instead of spinning (libgomp's env.c, `gomp_throttled_spin_count_var`), and waking one takes
    longer than many a kernel.
    """
    kernels.functions.release_threads()
