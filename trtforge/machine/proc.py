"""TCP listeners and ports, NVIDIA devices and the NVIDIA kernel module, read from /proc and /sys."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.machine.host import Host, read_stripped

_LISTENING = "0A"
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MODULE = re.compile(r"Kernel Module(?: +for \S+)? +(?P<version>\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Listener:
    """A process that listens on a TCP port; `pid` and `program` are None if /proc hides them."""

    pid: int | None
    program: str | None


def read_listeners(host: Host, port: int) -> tuple[Listener, ...] | None:
    """The processes that listen on 127.0.0.1:`port`; None if /proc/net cannot be read."""
    tables = [text for name in ("tcp", "tcp6") if (text := host.text(f"proc/net/{name}")) is not None]
    if not tables:
        return None
    inodes = {inode for text in tables for address, inode in _listening(text, port) if _takes_loopback(address)}
    return tuple(_listener(host, inode) for inode in sorted(inodes))


def listens(process: int, port: int) -> bool:
    """Whether this process itself listens on a TCP port, which another program could have taken."""
    files = set[str]()
    try:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # it may close a file meanwhile
                files.add(os.readlink(link))
        tables = [Path(f"/proc/{process}/net/{name}") for name in ("tcp", "tcp6")]
        texts = [table.read_text() for table in tables if table.exists()]
    except OSError:  # it may end meanwhile
        return False
    return any(f"socket:[{inode}]" in files for text in texts for _, inode in _listening(text, port))


def ports_of_connections() -> range | None:
    """The kernel's ephemeral TCP port range (ip(7)); None if /proc does not have it."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return None
    return range(first, last + 1)


def has_nvidia_gpu(host: Host) -> bool:
    """Whether the machine has an NVIDIA GPU, with or without a driver."""
    devices = (host.root / "sys/bus/pci/devices").glob("*")
    return any(
        (read_stripped(device / "vendor") or "") == _NVIDIA
        and (read_stripped(device / "class") or "").startswith(_DISPLAY)
        for device in devices
    )


def kernel_driver(host: Host) -> str | None:
    """The version of NVIDIA's kernel module, read without the management library; None if it is not loaded."""
    match = _MODULE.search(host.text("proc/driver/nvidia/version") or "")
    return match["version"] if match else None


def _listening(table: str, port: int) -> Iterator[tuple[str, str]]:
    """Address and socket of the entries in a table of /proc/net that listen on `port`."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != _LISTENING:
            continue
        address, _, number = words[1].rpartition(":")
        if int(number, 16) == port:
            yield address, words[9]


def _takes_loopback(address: str) -> bool:
    """Whether a listening address accepts loopback connections; it is hexadecimal, each word in little-endian order."""
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
            return Listener(int(process.name), read_stripped(process / "comm"))
    return Listener(None, None)
