"""Deadlines of requests with an allotted time."""

from time import monotonic

from trtforge.runtime.scheduling.sequence import Sequence

_LONGEST = 10**12  # milliseconds, 30 years: threads cannot wait for much longer


class Deadlines:
    """The unfinished sequences whose requests have an `allotted_time_ms`, counted from when they are added."""

    def __init__(self) -> None:
        self._ends: dict[Sequence, float] = {}
        self._next = float("inf")  # not later than the earliest deadline

    def add(self, sequence: Sequence) -> None:
        """Start the time of a request with an allotted time."""
        allotted = sequence.request.allotted_time_ms
        if allotted is not None:
            self._ends[sequence] = end = monotonic() + min(allotted, _LONGEST) / 1000
            self._next = min(self._next, end)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        self._ends.pop(sequence, None)

    def seconds_left(self) -> float | None:
        """Seconds until `passed` may return a sequence; None if there is no deadline."""
        return max(self._next - monotonic(), 0.0) if self._ends else None

    def passed(self) -> list[Sequence]:
        """The sequences whose time has passed and which must end now."""
        now = monotonic()
        if now < self._next:
            return []
        found = [sequence for sequence, end in self._ends.items() if end <= now]
        self._next = min((end for end in self._ends.values() if end > now), default=float("inf"))
        return found
