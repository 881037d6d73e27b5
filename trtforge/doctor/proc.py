"""What Linux tells in /proc and /sys: memory and its limits, processors, ports, PCI devices."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtforge.doctor.host import Host

_UNLIMITED = 1 << 60
_LISTENING = "0A"
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MODULE = re.compile(r"Kernel Module(?: +for \S+)? +(?P<version>\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes. `limit`: the control group's, None without one. `available` respects it."""

    total: int
    available: int
    limit: int | None

    @property
    def most(self) -> int:
        """What a process can get at most."""
        return self.total if self.limit is None else min(self.total, self.limit)


@dataclass(frozen=True)
class Listener:
    """A process that listens on a TCP port; `pid` and `program` None where /proc does not allow to see them."""

    pid: int | None
    program: str | None


@dataclass(frozen=True)
class _Group:
    """The directory of a control group. `second`: version 2 of the interface, with other file names."""

    directory: Path
    second: bool


def read_memory(host: Host) -> Memory | None:
    """Memory of the machine and of this process's control group; None where /proc does not tell."""
    values = dict(re.findall(r"^(\w+): +(\d+) kB", host.text("proc/meminfo") or "", flags=re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= values.keys():
        return None
    total, available = int(values["MemTotal"]) * 1024, int(values["MemAvailable"]) * 1024
    limits = [(limit, group) for group in _groups(host, "memory") if (limit := _limit(group)) is not None]
    if not limits:
        return Memory(total, available, None)
    limit, group = min(limits, key=lambda each: each[0])
    return Memory(total, min(available, max(0, limit - _in_use(group))), limit)


def read_cpu_quota(host: Host) -> float | None:
    """The number of processors whose time this process's control group may use; None without a limit."""
    quotas = []
    for group in _groups(host, "cpu"):
        if group.second:
            quota, _, period = (_read(group.directory / "cpu.max") or "max").partition(" ")
        else:
            quota = _read(group.directory / "cpu.cfs_quota_us") or "-1"
            period = _read(group.directory / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read_instruction_sets(host: Host) -> frozenset[str]:
    """The processor's features as Linux names them; empty where /proc does not tell."""
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", host.text("proc/cpuinfo") or "", flags=re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def read_listeners(host: Host, port: int) -> tuple[Listener, ...] | None:
    """Who keeps a server from 127.0.0.1:`port`; None where /proc does not tell."""
    tables = [text for name in ("tcp", "tcp6") if (text := host.text(f"proc/net/{name}")) is not None]
    if not tables:
        return None
    inodes = {inode for text in tables for inode in _listening(text, port)}
    return tuple(_listener(host, inode) for inode in sorted(inodes))


def has_nvidia_gpu(host: Host) -> bool:
    """Whether an NVIDIA GPU is in the machine, driver or not."""
    devices = (host.root / "sys/bus/pci/devices").glob("*")
    return any(
        (_read(device / "vendor") or "") == _NVIDIA and (_read(device / "class") or "").startswith(_DISPLAY)
        for device in devices
    )


def kernel_driver(host: Host) -> str | None:
    """The version of NVIDIA's kernel module, which is there without the management library too."""
    match = _MODULE.search(host.text("proc/driver/nvidia/version") or "")
    return match["version"] if match else None


def _groups(host: Host, controller: str) -> Iterator[_Group]:
    """The control groups that bound this process: its own and those around it, as far as they are visible.

    In a container the path is the host's, and what is mounted begins with the container's own group.
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
    text = _read(group.directory / ("memory.max" if group.second else "memory.limit_in_bytes")) or ""
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _in_use(group: _Group) -> int:
    """What cannot be given back: the page cache that was not used for long can."""
    used = _read(group.directory / ("memory.current" if group.second else "memory.usage_in_bytes")) or "0"
    cached = re.search(
        rf"^{'' if group.second else 'total_'}inactive_file (\d+)$",
        _read(group.directory / "memory.stat") or "",
        flags=re.MULTILINE,
    )
    return int(used) - int(cached[1]) if used.isdecimal() and cached else int(used) if used.isdecimal() else 0


def _listening(table: str, port: int) -> Iterator[str]:
    """The sockets of a table of /proc/net that take connections to the loopback address on `port`."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != _LISTENING:
            continue
        address, _, number = words[1].rpartition(":")
        if int(number, 16) == port and _takes_loopback(address):
            yield words[9]


def _takes_loopback(address: str) -> bool:
    """The kernel writes addresses in hexadecimal, each word with its lowest byte first."""
    last = address[-8:]
    mapped = address[:-8] in ("", "0" * 16 + "FFFF0000")
    return set(address) == {"0"} or (mapped and (last == "0" * 8 or last.endswith("7F")))


def _listener(host: Host, inode: str) -> Listener:
    target = f"socket:[{inode}]"
    for process in (host.root / "proc").glob("[0-9]*"):
        try:
            found = any(os.readlink(descriptor) == target for descriptor in (process / "fd").iterdir())
        except OSError:
            continue
        if found:
            return Listener(int(process.name), _read(process / "comm"))
    return Listener(None, None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
