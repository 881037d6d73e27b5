"""The threads that compute for a thread: OpenMP's for torch's operations, a team of their own for the kernels."""

from trtforge.runtime.native.bindings import Native


def release_threads(kernels: Native) -> None:
    """End the threads that have computed for the calling one, which leaves the computing to another thread.

    Each thread that computes has its own. While a process has more of OpenMP's threads than processors, those that wait
    sleep instead of spinning (libgomp's env.c, `gomp_throttled_spin_count_var`), and waking one takes longer than many
    an operation.
    """
    kernels.functions.release_threads()
