"""The watchdog's verdicts over time: none while a server works, one in time when it does not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.statuses import ENGINE, client
from trtforge.engine_process.control import EngineStatus
from trtforge.serve.watchdog import IdleClock, ProcessSample, Sample, Verdict, Watchdog, WatchdogLimits

TRITON = ProcessSample("the Triton server", 1, "running")
HEALTHY = Sample(0.0, (TRITON, ProcessSample("the engine process", 10, "running")), ENGINE)


def first_verdict(samples: Iterator[Sample]) -> tuple[float, Verdict]:
    watchdog = Watchdog()
    for sample in samples:
        verdict = watchdog.judge(sample)
        if verdict is not None:
            return sample.time, verdict
    raise AssertionError("no verdict")


def every_tenth(sample: Sample, seconds: float = 60.0) -> Iterator[Sample]:
    """The same state of a server for a while, its silences growing with the time."""
    for tick in range(int(seconds * 10)):
        yield replace(sample, time=tick / 10)


def with_cpu(sample: Sample, pid: int, share: float) -> Sample:
    """`sample`, in which a process has used `share` of a core all the time."""
    processes = (replace(p, cpu_seconds=share * sample.time) if p.pid == pid else p for p in sample.processes)
    return replace(sample, processes=tuple(processes))


working = st.builds(
    lambda running, waiting, stalled, unanswered, silent: replace(
        ENGINE,
        running=running,
        waiting=waiting,
        stalled_seconds=stalled,
        clients=(client(unanswered, silent),),
    ),
    st.integers(0, 1000),
    st.integers(0, 10_000),
    st.floats(0, WatchdogLimits.stalled),
    st.integers(0, 1000),
    st.floats(0, WatchdogLimits.silent),
)


@given(
    st.lists(
        st.tuples(
            working, st.floats(0, WatchdogLimits.silent), st.floats(0, WatchdogLimits.health), st.floats(0.01, 3.0)
        ),
        min_size=1,
        max_size=40,
    )
)
def test_a_server_within_all_limits_is_left_alone(
    moments: list[tuple[EngineStatus, float, float, float]],
) -> None:
    watchdog, now = Watchdog(), 0.0
    for engine, engine_silent, health_silent, step in moments:
        now += step
        sample = replace(HEALTHY, time=now, engine=engine, engine_silent=engine_silent, health_silent=health_silent)
        assert watchdog.judge(sample) is None


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.05, 0.5)), max_size=120),
)
def test_a_process_is_frozen_when_it_was_stopped_for_longer_than_the_limit(steps: list[tuple[bool, float]]) -> None:
    watchdog, now, since = Watchdog(), 0.0, None
    for stopped, step in steps:
        now += step
        since = (now if since is None else since) if stopped else None
        process = replace(TRITON, state="stopped" if stopped else "running")
        verdict = watchdog.judge(Sample(now, (process,)))
        assert (verdict is not None) == (since is not None and now - since > WatchdogLimits.stopped)
        if verdict is not None:
            assert (verdict.kind, verdict.reason) == ("frozen", "the Triton server (process 1) is stopped")


def test_a_process_that_ended_is_seen_at_once_with_its_status() -> None:
    gone = replace(TRITON, state="ended", exit_status=-9)
    verdict = Watchdog().judge(replace(HEALTHY, processes=(gone,)))
    assert verdict == Verdict("died", "the Triton server (process 1) ended with status -9", pid=1)


def test_the_engines_own_error_comes_before_what_follows_from_it() -> None:
    failed = replace(ENGINE, state="failed", error="rank 1 ended: out of memory", hint="Lower it.")
    gone = ProcessSample("rank 1 of the engine", 11, "ended")
    verdict = Watchdog().judge(replace(HEALTHY, engine=failed, processes=(gone,)))
    assert verdict == Verdict("failed", "the engine failed", "rank 1 ended: out of memory", "Lower it.", 10)


@given(st.floats(0.0, 2.0))
def test_a_silent_engine_has_longer_while_it_computes(share: float) -> None:
    samples = (replace(s, engine_silent=s.time) for s in every_tenth(HEALTHY))
    when, verdict = first_verdict(with_cpu(sample, 10, share) for sample in samples)
    assert verdict.kind == "frozen"
    assert verdict.pid == 10
    if share > WatchdogLimits.computing + 0.05:
        assert WatchdogLimits.silent_computing < when < WatchdogLimits.silent_computing + 1
    elif share < WatchdogLimits.computing - 0.05:
        assert WatchdogLimits.silent < when < WatchdogLimits.silent + 1.2


def test_a_model_process_without_heartbeats_is_frozen() -> None:
    silent = (
        replace(sample, engine=replace(ENGINE, clients=(client(0, sample.time),))) for sample in every_tenth(HEALTHY)
    )
    when, verdict = first_verdict(silent)
    assert (verdict.kind, verdict.reason) == (
        "frozen",
        "the process of model ensemble (20) has sent nothing for 5 s",
    )
    assert WatchdogLimits.silent < when < WatchdogLimits.silent + 0.2


def test_an_old_answer_of_the_engine_accuses_no_client() -> None:
    old = replace(HEALTHY, engine=replace(ENGINE, clients=(client(0, 9.0),)), engine_silent=4.0)
    assert all(Watchdog().judge(sample) is None for sample in every_tenth(old))


def test_a_computing_model_process_with_unanswered_requests_is_wedged_after_ten_seconds() -> None:
    stub = ProcessSample("the process of model ensemble", 20, "running")
    samples = (
        replace(s, processes=(stub,), engine=replace(ENGINE, clients=(client(3, s.time),)))
        for s in every_tenth(HEALTHY)
    )
    when, verdict = first_verdict(with_cpu(sample, 20, 1.0) for sample in samples)
    assert verdict.kind == "wedged"
    assert verdict.reason.startswith("the process of model ensemble (20) has 3 requests unanswered")
    assert 10 < when < 10.2


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (32, 900)])
def test_requests_without_tokens_are_a_wedge(running: int, waiting: int) -> None:
    stalled = replace(ENGINE, running=running, waiting=waiting, stalled_seconds=10.1)
    verdict = Watchdog().judge(replace(HEALTHY, engine=stalled))
    assert verdict is not None
    assert verdict.kind == "wedged"
    assert verdict.reason == f"no token was generated for 10 s while {running} requests run and {waiting} wait"


def test_silence_of_triton_and_a_request_that_does_not_come_back_are_wedges() -> None:
    silent = Watchdog().judge(replace(HEALTHY, health_silent=10.1))
    assert silent == Verdict("wedged", "the Triton server's health endpoint has not answered for 10 s")
    lost = Watchdog().judge(replace(HEALTHY, path_error="no answer"))
    assert lost == Verdict("wedged", "the idle server did not answer a request: no answer")


@given(st.lists(st.tuples(st.floats(0.05, 5.0), st.booleans()), max_size=100))
def test_a_request_is_sent_only_when_nothing_has_run_for_a_period(steps: list[tuple[float, bool]]) -> None:
    clock, now, tokens, quiet_since = IdleClock(), 0.0, 0, None
    for step, working_now in steps:
        now += step
        tokens += working_now
        due = clock.due(now, replace(ENGINE, generated_tokens=tokens))
        if working_now or quiet_since is None:
            quiet_since = now
        assert due == (now - quiet_since >= 30.0)
        if due:
            quiet_since = now


def test_no_request_is_sent_through_an_engine_that_cannot_tell_whether_it_is_idle() -> None:
    clock = IdleClock()
    assert not any(clock.due(float(now), None) for now in range(100))


def test_unanswered_requests_are_work() -> None:
    clock = IdleClock()
    busy = replace(ENGINE, clients=(client(1),))
    assert not any(clock.due(float(now), busy) for now in range(100))


def test_on_a_machine_that_gives_no_cpu_time_silence_may_last_longer() -> None:
    """This process comes late too; what is silent without using the CPU may wait for it."""
    watchdog = Watchdog()
    for second in range(0, 29, 2):  # instead of every tenth of one
        silent = replace(ENGINE, clients=(client(3, float(second)),))
        assert watchdog.judge(replace(HEALTHY, time=second, engine=silent, engine_silent=0.0)) is None
        assert watchdog.judge(replace(HEALTHY, time=second, engine_silent=float(second))) is None
    verdict = watchdog.judge(replace(HEALTHY, time=31.0, engine_silent=31.0))
    assert verdict is not None
    assert verdict.reason == "the engine process (10) has not answered for 31 s"


def test_a_machine_that_was_loaded_once_is_watched_as_before_soon() -> None:
    watchdog = Watchdog()
    assert watchdog.judge(replace(HEALTHY, time=0.0)) is None
    for tick in range(40, 400):  # 4 s late, then in time
        now = tick / 10
        verdict = watchdog.judge(replace(HEALTHY, time=now, engine_silent=now))
        if verdict is not None:
            break
    assert verdict is not None
    assert 13.9 <= now <= 14.2
