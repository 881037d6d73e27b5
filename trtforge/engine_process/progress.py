"""Detects whether an engine with unfinished requests still makes progress."""

from collections.abc import Iterable

from trtforge.machine.processes import stat_of

_BUSY_SHARE = 0.2  # of one core; a long step uses the CPU, a deadlock does not
_BUSY_TIMEOUT = 300.0  # seconds for which CPU use without a finished step counts as progress


class Progress:
    """Measures seconds without progress: no finished step and no CPU use."""

    def __init__(self, now: float) -> None:
        self._steps = -1.0
        self._stepped_at = self._moved_at = self._sampled_at = now
        self._cpu = 0.0

    def sample(self, now: float, *, steps: float, unfinished: int, cpu_seconds: float) -> None:
        """Take a sample. `steps`: iterations or tokens so far; `cpu_seconds`: CPU time of all engine processes."""
        if unfinished == 0 or steps != self._steps:
            self._stepped_at = self._moved_at = now
        elif cpu_seconds - self._cpu > _BUSY_SHARE * (now - self._sampled_at) and (
            now - self._stepped_at < _BUSY_TIMEOUT
        ):
            self._moved_at = now
        self._steps, self._cpu, self._sampled_at = steps, cpu_seconds, now

    def stalled_seconds(self, now: float) -> float:
        """Seconds since the last progress; 0 if nothing was unfinished at the last sample."""
        return now - self._moved_at if self._moved_at < self._sampled_at else 0.0


def cpu_seconds(processes: Iterable[int]) -> float:
    """User and system time of processes so far; ended ones count as 0."""
    stats = (stat_of(process) for process in processes)
    return sum(stat.cpu_seconds for stat in stats if stat is not None)
