"""Counts how the requests of an engine process have ended, since the start."""

from dataclasses import dataclass
from typing import Literal, get_args

from trtforge.core.errors import BusyError, RequestError, UnclearError
from trtforge.engine_process.requests import ErrorCode, Output, RequestFailure

End = Literal["failed", "invalid", "refused", "late", "cancelled", "answered"]
_PRECEDENCE: tuple[End, ...] = get_args(End)
Counted = Literal["all", "failures", "nothing"]
"""Which ends of a submission are counted; other ends are those of a part of a request, which its client counts."""


@dataclass(eq=False)
class AdmittedRequest:
    """An admitted submission. `left`: its unfinished sequences; `since`: its arrival, by `monotonic`."""

    left: int
    since: float
    counted: Counted = "all"
    end: End = "answered"


@dataclass
class EndedRequests:
    """Numbers of requests, and `seconds`: from the arrival to the end of those that were answered, together.

    `refused`: by the queue's limits, or because the server stops or the engine has failed; `invalid`: the engine cannot
    serve such a request; `late`: a deadline or the longest waiting time passed; `failed`: admitted ones that ended with
    the engine or with the server, or for a reason that is unclear. Requests that their clients gave up are not counted.
    """

    answered: int = 0
    refused: int = 0
    invalid: int = 0
    late: int = 0
    failed: int = 0
    seconds: float = 0.0

    def refuse(self, failure: RequestFailure, counted: Counted) -> None:
        """Count a submission that was not admitted."""
        self._add("invalid" if failure.code is ErrorCode.INVALID_ARGUMENT else "refused", counted)

    def end_sequence(self, request: AdmittedRequest, end: End, now: float) -> None:
        """One of a request's sequences has ended. With the last one the request is counted, by its first end of `End`.

        `now`: by `monotonic`.
        """
        request.left -= 1
        request.end = min(request.end, end, key=_PRECEDENCE.index)
        if request.left:
            return
        if request.end != "answered":
            self._add(request.end, request.counted)
        elif request.counted == "all":
            self.answer(now - request.since)

    def answer(self, seconds: float) -> None:
        """Count an answered request."""
        self.answered += 1
        self.seconds += seconds

    def _add(self, end: End, counted: Counted) -> None:
        if counted == "nothing":
            return
        self.refused += end == "refused"
        self.invalid += end == "invalid"
        self.late += end == "late"
        self.failed += end == "failed"

    def figures(self) -> dict[str, float]:
        """The figures of the metrics."""
        return {
            "answered_requests": self.answered,
            "refused_requests": self.refused,
            "invalid_requests": self.invalid,
            "late_requests": self.late,
            "failed_requests": self.failed,
            "answered_seconds": self.seconds,
        }


def end_of(output: Output, *, expired: bool) -> End:
    """How a sequence ended, by its last output. `expired`: it was cancelled because it had waited too long."""
    if isinstance(output.error, BusyError):
        return "refused"
    if output.error is not None:
        invalid = isinstance(output.error, RequestError) and not isinstance(output.error, UnclearError)
        return "invalid" if invalid else "failed"
    if output.finish_reason == "cancelled":
        return "late" if expired else "cancelled"
    return "answered"
