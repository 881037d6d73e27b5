"""The processes of a server, read from /proc: who they are, what they hold, which of them ended."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import sysconf
from pathlib import Path

_PAGE = sysconf("SC_PAGE_SIZE")
_TICKS = sysconf("SC_CLK_TCK")
_SEGFAULT = re.compile(r"^\[\s*([\d.]+)\].*\[(\d+)\]: segfault")


@dataclass(frozen=True)
class Process:
    """A process at one moment. `rss` in bytes, `cpu` in seconds since it started, `started` in clock ticks."""

    pid: int
    parent: int
    session: int
    started: int
    state: str
    name: str
    rss: int
    cpu: float
    threads: int
    fds: int

    @property
    def identity(self) -> tuple[int, int]:
        """What a reused process id does not share."""
        return self.pid, self.started


class Tree:
    """A process, all that it started and all that those started, also after they lost their parents."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.known: dict[tuple[int, int], str] = {}
        self.threads_seen: set[int] = {root}
        self.peak_rss = 0
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)

    def sample(self) -> dict[int, Process]:
        """The living members by process id. A member that has not got a name of its own gets a number."""
        stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
        member = {pid for pid, stat in stats.items() if pid == self.root or (pid, stat.started) in self.known}
        sessions = {stats[pid].session for pid in member if stats[pid].session == pid}
        sessions |= {pid for pid, _ in self.known}
        grown = True
        while grown:
            more = {
                pid
                for pid, stat in stats.items()
                if pid not in member and (stat.parent in member or stat.session in sessions)
            }
            member |= more
            sessions |= {pid for pid in more if stats[pid].session == pid}
            grown = bool(more)
        found = {}
        for pid in sorted(member):
            if stats[pid].state not in "ZX":
                identity = pid, stats[pid].started
                name = self.known.get(identity) or self._name(pid)
                self.known[identity] = name
                found[pid] = _filled(stats[pid], name)
                with suppress(OSError):
                    self.threads_seen |= {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
        self.peak_rss = max(self.peak_rss, sum(process.rss for process in found.values()))
        return found

    def alive(self) -> dict[int, str]:
        """Members that were ever seen and have not ended: process id to name."""
        return {pid: process.name for pid, process in self.sample().items()}

    def segfaults(self) -> list[str]:
        """Lines of the kernel's log about members of this tree; empty where the log cannot be read."""
        done = subprocess.run(["dmesg"], capture_output=True, text=True, check=False, timeout=10)
        lines = [(line, _SEGFAULT.match(line)) for line in done.stdout.splitlines()]
        return [
            line
            for line, found in lines
            if found and float(found[1]) >= self._since - 1 and int(found[2]) in self.threads_seen
        ]

    def _name(self, pid: int) -> str:
        name = _role(pid)
        taken = set(self.known.values())
        number = 2
        unique = name
        while unique in taken:
            unique, number = f"{name}#{number}", number + 1
        return unique


@contextmanager
def sampled(tree: Tree, period: float = 0.25) -> Iterator[Tree]:
    """Samples the tree while this lasts, so that `peak_rss` and `threads_seen` know what happened meanwhile."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(period):
            with suppress(OSError, RuntimeError):
                tree.sample()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield tree
    finally:
        ended.set()
        thread.join(timeout=10)


def total_rss(processes: dict[int, Process]) -> int:
    """Bytes of all of them; shared pages count once for each."""
    return sum(process.rss for process in processes.values())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _stat(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    rest = text.rpartition(")")[2].split()
    return Process(
        pid=pid,
        parent=int(rest[1]),
        session=int(rest[3]),
        started=int(rest[19]),
        state=rest[0],
        name="",
        rss=int(rest[21]) * _PAGE,
        cpu=(int(rest[11]) + int(rest[12])) / _TICKS,
        threads=int(rest[17]),
        fds=0,
    )


def _filled(stat: Process, name: str) -> Process:
    fds = 0
    with suppress(OSError):
        fds = sum(1 for _ in Path(f"/proc/{stat.pid}/fd").iterdir())
    return Process(**{**vars(stat), "name": name, "fds": fds})


def _role(pid: int) -> str:
    """What a process is for, as far as its command line says."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "unknown"
    program = Path(words[0]).name
    if program == "triton_python_backend_stub":
        model = next((Path(word).parent.parent.name for word in words if word.endswith("model.py")), "?")
        return f"stub {model}"
    if program == "tritonserver" or not program.startswith(("python", "trtforge")):
        return program or "unknown"
    rest = [word for word in words[1:] if not word.startswith("-") or word in ("-m", "-c")]
    if rest and rest[0] == "-m":
        return " ".join(rest[1:3]) if rest[1:2] == ["trtforge"] else rest[1]
    if rest and rest[0] == "-c":
        return "python -c"
    return " ".join(Path(word).name for word in rest[:2]) or program
