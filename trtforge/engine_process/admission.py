"""How much may run and wait in an engine process, and what a refused client is told."""

import math
from collections import deque
from dataclasses import dataclass

from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import ErrorCode, RequestFailure

DEFAULT_QUEUE_SIZE = 2048
_LARGEST_QUEUE_BYTES = 256 << 20
_WINDOW = 10.0  # seconds over which the rate of finished sequences is taken
_LONGEST_RETRY = 60


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of what waits. `seconds`: longest time until a sequence begins to run; None is no limit."""

    size: int = DEFAULT_QUEUE_SIZE
    bytes: int = _LARGEST_QUEUE_BYTES
    seconds: float | None = None


class Admission:
    """Counts sequences and bytes from their arrival to their end. Used under the server's lock."""

    def __init__(self, limits: QueueLimits, max_running: int) -> None:
        self._limits = limits
        self._max_running = max_running
        self._ends: deque[float] = deque(maxlen=4096)
        self.sequences = 0
        self.bytes = 0

    def refuse(self, submission: Submission, now: float) -> RequestFailure | None:
        """Why the sequences of a submission cannot be taken now; None counts them in."""
        count = len(submission.requests)
        most = self._max_running + self._limits.size
        if self.sequences + count > most:
            return self._full(
                f"the queue is full: {self.sequences} sequences run or wait, at most {most} may "
                f"(max_batch_size {self._max_running} + max_queue_size {self._limits.size})",
                now,
            )
        if self.bytes + submission.size > self._limits.bytes:
            return self._full(
                f"the queue is full: {self.bytes + submission.size} bytes of prompts, at most {self._limits.bytes}", now
            )
        self.sequences += count
        self.bytes += submission.size
        return None

    def end(self, size: int, now: float) -> None:
        """A sequence of `size` bytes ended."""
        self.sequences -= 1
        self.bytes -= size
        self._ends.append(now)

    def retry_seconds(self, now: float) -> int:
        """A guess of when there is room again: the time that half of what waits takes at the present rate."""
        recent = sum(1 for end in self._ends if end > now - _WINDOW)
        if not recent:
            return 1
        return max(1, min(_LONGEST_RETRY, math.ceil(self.sequences / 2 * _WINDOW / recent)))

    def _full(self, what: str, now: float) -> RequestFailure:
        return RequestFailure(ErrorCode.UNAVAILABLE, f"{what}; retry in {self.retry_seconds(now)} s")
