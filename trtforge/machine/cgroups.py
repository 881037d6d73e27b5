"""The control groups (versions 1 and 2) that bound this process: memory limit and use, CPU quota."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from trtforge.machine.host import Host, read_stripped

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryGroup:
    """A group with a memory limit. `limit` and `used` in bytes; `used` without reclaimable page cache."""

    limit: int
    used: int


@dataclass(frozen=True)
class _Group:
    """The directory of a control group. `second`: cgroup version 2, with other file names."""

    directory: Path
    second: bool


def read_memory_groups(host: Host) -> list[MemoryGroup]:
    """The groups around this process that limit its memory, the innermost first."""
    groups = _groups(host, "memory")
    return [MemoryGroup(limit, _in_use(group)) for group in groups if (limit := _limit(group)) is not None]


def read_cpu_quota(host: Host) -> float | None:
    """The number of processors whose time this process's control group may use; None without a limit."""
    quotas = []
    for group in _groups(host, "cpu"):
        if group.second:
            quota, _, period = (read_stripped(group.directory / "cpu.max") or "max").partition(" ")
        else:
            quota = read_stripped(group.directory / "cpu.cfs_quota_us") or "-1"
            period = read_stripped(group.directory / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def processors(host: Host | None = None) -> int:
    """The number of processors whose time this process may use, rounded up: by its CPU affinity and its group's quota.

    Without the quota, a container with the time of 2 processors out of 64 would run 64 threads that wait for one
    another.
    """
    host = host or Host()
    quota = read_cpu_quota(host)
    return host.cpus if quota is None else max(1, min(host.cpus, ceil(quota)))


def heed_quota(host: Host | None = None) -> None:
    """Limit OpenMP to `processors` threads if a quota makes them fewer than its default.

    Must be called before torch is imported; children inherit it, and a value set by the user is kept.
    """
    host = host or Host()
    if (usable := processors(host)) < host.cpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(usable))


def _groups(host: Host, controller: str) -> Iterator[_Group]:
    """The control groups that bound this process: its own and its visible ancestors.

    In a container the path is the host's, but the mount starts at the container's own group.
    """
    base = host.root / "sys/fs/cgroup"
    for line in (host.text("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        below = top / path.lstrip("/")
        for directory in (below, *below.parents):
            if directory.is_dir():
                yield _Group(directory, second=not controllers)
            if directory == top:
                break


def _limit(group: _Group) -> int | None:
    text = read_stripped(group.directory / ("memory.max" if group.second else "memory.limit_in_bytes")) or ""
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _in_use(group: _Group) -> int:
    """Bytes in use, without inactive page cache, which the kernel can reclaim."""
    used = read_stripped(group.directory / ("memory.current" if group.second else "memory.usage_in_bytes")) or "0"
    cached = re.search(
        rf"^{'' if group.second else 'total_'}inactive_file (\d+)$",
        read_stripped(group.directory / "memory.stat") or "",
        flags=re.MULTILINE,
    )
    return int(used) - int(cached[1]) if used.isdecimal() and cached else int(used) if used.isdecimal() else 0
