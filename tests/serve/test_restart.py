"""How often and how fast a server that broke is started again."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.serve.restart import RestartPolicy, ServerFailed, run_with_restarts

POLICY = RestartPolicy()


class FakeStop:
    """Time that passes by waiting; stopped at some time."""

    def __init__(self, stop_at: float = float("inf")) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._stop_at = stop_at

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return self.now >= self._stop_at


def failing(stop: FakeStop, lasts: list[float], *, was_ready: bool = True) -> int:
    """One run that lasts as long as the next of `lasts` and fails; without one left, it ends well."""
    if not lasts:
        return 0
    stop.now += lasts.pop(0)
    raise ServerFailed("the engine ended:\nOut of memory", hint="Lower it.", was_ready=was_ready)


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=30))
def test_starts_are_bounded_in_every_window_and_never_hurried(lasts: list[float]) -> None:
    stop, starts, said = FakeStop(), list[float](), list[str]()
    left = list(lasts)

    def run() -> int:
        starts.append(stop.now)
        return failing(stop, left)

    with suppress(ServerFailed):
        assert run_with_restarts(run, POLICY, stop, say=said.append, clock=lambda: stop.now) == 0
        assert len(starts) == len(lasts) + 1
    failed_at = [start + last for start, last in zip(starts, lasts, strict=False)]
    if len(starts) == len(stop.waits) + 1 and len(failed_at) == len(starts):  # it gave up
        assert sum(stop.now - failure <= 600 for failure in failed_at) == POLICY.limit + 1
    assert all(POLICY.shortest <= wait <= POLICY.longest for wait in stop.waits)
    restarts = starts[1:]
    assert all(sum(0 <= later - start < 600 for later in restarts) <= POLICY.limit + 1 for start in restarts)
    assert len(said) == len(stop.waits)


@pytest.mark.parametrize(("races", "ends_well"), [(1, True), (2, True), (3, False)])
def test_a_known_race_of_triton_is_tried_again_without_a_policy(races: int, ends_well: bool) -> None:
    said, left = list[str](), [True] * races

    def run() -> int:
        if left:
            left.pop()
            raise ServerFailed("the Triton server ended:\nlock_exception", hint="-", was_ready=False, by_chance=True)
        return 0

    stop = FakeStop()
    if ends_well:
        assert run_with_restarts(run, None, stop, say=said.append, clock=lambda: stop.now) == 0
    else:
        with pytest.raises(ServerFailed, match="lock_exception"):
            run_with_restarts(run, None, stop, say=said.append, clock=lambda: stop.now)
    assert said == ["starting again: the Triton server ended: lock_exception"] * min(races, 2)


@given(st.integers(1, 5))
def test_the_pause_doubles_with_each_failure_in_the_window(count: int) -> None:
    assert POLICY.delay([float(i) for i in range(count)], 10.0) == 2.0 ** (count - 1)
    assert POLICY.delay([*range(count), 1000.0], 1000.0) == 1.0


def test_the_pause_has_a_limit() -> None:
    assert RestartPolicy(limit=20).delay([0.0] * 9, 0.0) == 30.0


def test_a_restart_says_the_error_on_its_own_line() -> None:
    stop, said, failures = FakeStop(), list[str](), list[ServerFailed]()
    lasts = [5.0, 5.0]
    ended = run_with_restarts(
        lambda: failing(stop, lasts),
        POLICY,
        stop,
        say=said.append,
        clock=lambda: stop.now,
        restarting=failures.append,
    )
    assert ended == 0
    assert said == [f"restarting in {delay} s: the engine ended: Out of memory" for delay in (1, 2)]
    assert [failure.message for failure in failures] == ["the engine ended:\nOut of memory"] * 2


def test_the_limit_ends_it_with_the_last_error() -> None:
    stop, said = FakeStop(), list[str]()
    with pytest.raises(ServerFailed, match=r"Out of memory\ngave up: 5 restarts in 10 minutes$") as caught:
        run_with_restarts(lambda: failing(stop, [1.0]), POLICY, stop, say=said.append, clock=lambda: stop.now)
    assert caught.value.hint == "Lower it."
    assert stop.waits == [1, 2, 4, 8, 16]


def test_without_a_policy_the_first_failure_ends_it() -> None:
    stop = FakeStop()
    with pytest.raises(ServerFailed, match="the engine ended") as caught:
        run_with_restarts(lambda: failing(stop, [1.0]), None, stop, say=pytest.fail, clock=lambda: stop.now)
    assert caught.value.hint == "Lower it."


def test_a_server_that_never_was_ready_is_not_started_again() -> None:
    stop = FakeStop()
    with pytest.raises(ServerFailed):
        run_with_restarts(
            lambda: failing(stop, [1.0], was_ready=False), POLICY, stop, say=pytest.fail, clock=lambda: stop.now
        )


def test_a_signal_ends_the_wait() -> None:
    stop, said = FakeStop(stop_at=2.0), list[str]()
    lasts = [1.5] * 5
    assert run_with_restarts(lambda: failing(stop, lasts), POLICY, stop, say=said.append, clock=lambda: stop.now) == 0
    assert len(lasts) == 4
