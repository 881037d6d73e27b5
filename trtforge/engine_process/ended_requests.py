"""Counts how the requests of an engine process have ended, since the start."""

from dataclasses import dataclass

from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import Output


@dataclass
class EndedRequests:
    """Numbers of requests, and `seconds`: from the arrival to the end of those that were answered, together.

    `refused`: by the queue's limits, because they are invalid, or because the server stops or the engine has failed;
    `late`: a deadline or the longest waiting time passed; `failed`: admitted ones that ended with the engine or with
    the server. Requests that their clients gave up are not counted.
    """

    answered: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0
    seconds: float = 0.0

    def count(self, output: Output, *, expired: bool, seconds: float) -> None:
        """Count a request by its last output. `expired`: it was cancelled because it had waited too long."""
        if output.error is not None:
            refused = isinstance(output.error, RequestError)
            self.refused, self.failed = self.refused + refused, self.failed + (not refused)
        elif output.finish_reason == "cancelled":
            self.late += expired
        else:
            self.answered += 1
            self.seconds += seconds

    def figures(self) -> dict[str, float]:
        """The figures of the metrics."""
        return {
            "answered_requests": self.answered,
            "refused_requests": self.refused,
            "late_requests": self.late,
            "failed_requests": self.failed,
            "answered_seconds": self.seconds,
        }
