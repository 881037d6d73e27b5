"""Limits the running and waiting sequences of an engine process."""

import math
from collections import deque
from dataclasses import dataclass

from trtforge.core.server_errors import QUEUE_FULL
from trtforge.engine_process.connection import Connection
from trtforge.engine_process.ended_requests import AdmittedRequest
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import ErrorCode, RequestFailure

DEFAULT_QUEUE_SIZE = 2048
_LARGEST_QUEUE_BYTES = 256 << 20
_WINDOW = 10.0  # seconds over which the rate of finished sequences is measured
_LONGEST_RETRY = 60


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue. `seconds`: maximum time until a sequence begins to run; None is no limit."""

    size: int = DEFAULT_QUEUE_SIZE
    bytes: int = _LARGEST_QUEUE_BYTES
    seconds: float | None = None


@dataclass(eq=False)
class AdmittedSequence:
    """An admitted sequence of `request`. `failure`: its error if the engine cancels it on behalf of the server.

    `brought`: its first token comes with the request, so it does not show that the sequence runs.
    """

    client: Connection
    name: int
    key: str
    size: int
    request: AdmittedRequest
    failure: RequestFailure | None = None
    brought: bool = False
    started: bool = False
    done: bool = False


class Admission:
    """Counts sequences and bytes from their arrival to their end. Used under the server's lock."""

    def __init__(self, limits: QueueLimits, max_running: int) -> None:
        self._limits = limits
        self._limit = max_running + limits.size
        self._sizes = f"(max_batch_size {max_running} + max_queue_size {limits.size})"
        self._ends: deque[float] = deque(maxlen=4096)
        self.sequences = 0
        self.bytes = 0

    def refuse(self, submission: Submission, now: float) -> RequestFailure | None:
        """Why a submission is refused now; if None, its sequences are counted as admitted."""
        count = len(submission.requests)
        if count > self._limit:
            return RequestFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"the request has {count} sequences, at most {self._limit} may run or wait {self._sizes}",
            )
        if self.sequences + count > self._limit:
            return self._full(
                f"{QUEUE_FULL}: {self.sequences} sequences run or wait, at most {self._limit} may {self._sizes}", now
            )
        if self.bytes + submission.size > self._limits.bytes:
            return self._full(
                f"{QUEUE_FULL}: {self.bytes + submission.size} bytes of prompts, at most {self._limits.bytes}", now
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
        """Estimated seconds until there is room: the time to finish half of the sequences at the present rate."""
        recent = sum(1 for end in self._ends if end > now - _WINDOW)
        if not recent:
            return 1
        return max(1, min(_LONGEST_RETRY, math.ceil(self.sequences / 2 * _WINDOW / recent)))

    def _full(self, what: str, now: float) -> RequestFailure:
        return RequestFailure(ErrorCode.UNAVAILABLE, f"{what}; retry in {self.retry_seconds(now)} s")
