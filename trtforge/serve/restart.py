"""Whether and when a failed server is restarted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtforge.core.errors import ForgeError

_CHANCES = 2
"""Number of repeated starts after a known race of Triton, also without a restart policy."""


class ServerFailed(ForgeError):
    """A server ended by itself or was ended as broken. `was_ready`: it had become ready before.

    `by_chance`: it hit a known race of Triton while starting, so the next start will very likely succeed.
    """

    def __init__(self, message: str, *, hint: str, was_ready: bool, by_chance: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.was_ready = was_ready
        self.by_chance = by_chance


@dataclass(frozen=True)
class RestartPolicy:
    """Exponential backoff with a limit. All times in seconds; `limit`: restarts within `window`."""

    limit: int = 5
    window: float = 600.0
    shortest: float = 1.0
    longest: float = 30.0

    def delay(self, failures: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start; None to give up. `failures`: times of all failures, including the
        last."""
        recent = sum(now - failure <= self.window for failure in failures)
        if recent > self.limit:
            return None
        return float(min(self.longest, self.shortest * 2 ** max(0, recent - 1)))


class Waiting(Protocol):
    """Waits for a request to stop."""

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True as soon as a stop is requested."""


def run_with_restarts(
    run: Callable[[], int],
    policy: RestartPolicy | None,
    stop: Waiting,
    *,
    say: Callable[[str], None],
    clock: Callable[[], float],
    restarting: Callable[[ServerFailed], None] = lambda failure: None,
) -> int:
    """Run a server, and again after each ServerFailed if `policy` allows; returns the exit status of the last run.

    `restarting` is called with each failure that leads to a restart.

    Raises the ServerFailed of `run` if there is no policy, if the first start never became ready (another would not
    either), and when the policy gives up. Returns 0 if a stop is requested during a pause.
    """
    failures: list[float] = []
    chances = _CHANCES
    while True:
        try:
            return run()
        except ServerFailed as failure:
            if failure.by_chance and chances:
                chances -= 1
                say(f"starting again: {_on_one_line(failure.message)}")
                continue
            if policy is None or (not failures and not failure.was_ready):
                raise
            failures.append(clock())
            delay = policy.delay(failures, failures[-1])
            if delay is None:
                raise ServerFailed(
                    f"{failure.message}\ngave up: {policy.limit} restarts in {policy.window / 60:.0f} minutes",
                    hint=failure.hint,
                    was_ready=failure.was_ready,
                ) from failure
            restarting(failure)
            say(f"restarting in {delay:.0f} s: {_on_one_line(failure.message)}")
            if stop.wait(delay):
                say("stopped before it was restarted")
                return 0


def _on_one_line(message: str) -> str:
    """The failure and its error on one line, as a supervisor's log has one line per restart."""
    return " ".join(line.strip() for line in message.splitlines())
