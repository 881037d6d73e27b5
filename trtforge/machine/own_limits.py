"""Limits of this process itself, for work whose time and memory cannot be foreseen. They end the process, so it is a
process for that work alone."""

import math
import resource

NO_MEMORY = 3
"""Exit status for a process that `limit_memory` ends."""


def limit_processor_time(seconds: int) -> None:
    """Limit this process to `seconds` more of CPU time; SIGXCPU ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)


def limit_memory(size: int) -> None:
    """Limit this process to `size` bytes of memory that it may write to, what it has included; more is MemoryError."""
    _lower(resource.RLIMIT_DATA, size)


def write_no_core_dump() -> None:
    """Write no core dump when a limit ends this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lower(limit: int, wanted: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
