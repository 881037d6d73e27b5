"""Whether an engine with unfinished requests still works on them."""

from collections.abc import Iterable

from trtforge.machine.processes import stat_of

_BUSY_SHARE = 0.2  # of one core: a long step computes, a deadlock does not
_PATIENCE_BUSY = 300.0  # seconds that computing without a result counts as progress


class Progress:
    """Seconds without progress: no finished step and no computing for it."""

    def __init__(self, now: float) -> None:
        self._steps = -1.0
        self._stepped_at = self._moved_at = self._sampled_at = now
        self._cpu = 0.0

    def sample(self, now: float, *, steps: float, unfinished: int, cpu_seconds: float) -> None:
        """Take a sample; `steps` counts iterations or tokens, `cpu_seconds` those of all of the engine's processes."""
        if unfinished == 0 or steps != self._steps:
            self._stepped_at = self._moved_at = now
        elif cpu_seconds - self._cpu > _BUSY_SHARE * (now - self._sampled_at) and (
            now - self._stepped_at < _PATIENCE_BUSY
        ):
            self._moved_at = now
        self._steps, self._cpu, self._sampled_at = steps, cpu_seconds, now

    def stalled_seconds(self, now: float) -> float:
        """Seconds since the last progress; 0 if nothing was unfinished at the last sample."""
        return now - self._moved_at if self._moved_at < self._sampled_at else 0.0


def cpu_seconds(processes: Iterable[int]) -> float:
    """User and system time of processes so far; one that is gone counts nothing."""
    stats = (stat_of(process) for process in processes)
    return sum(stat.cpu_seconds for stat in stats if stat is not None)
