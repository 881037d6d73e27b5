"""What is admitted, and what counts as progress."""

from hypothesis import given
from hypothesis import strategies as st

from trtforge.engine_process.admission import Admission, QueueLimits
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.progress import Progress
from trtforge.engine_process.requests import ErrorCode, GenerationRequest


def submission(sequences: int, tokens: int) -> Submission:
    return Submission(tuple(GenerationRequest(str(i), (1,) * tokens, 5) for i in range(sequences)))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 40)), max_size=60))
def test_admission_never_exceeds_its_bounds_and_returns_to_zero(events: list[tuple[bool, int, int]]) -> None:
    admission = Admission(QueueLimits(size=10, bytes=1000), max_running=4)
    admitted: list[tuple[int, int]] = []
    for number, (arrives, sequences, tokens) in enumerate(events):
        if arrives:
            asked = submission(sequences, tokens)
            fits = admission.sequences + sequences <= 14 and admission.bytes + asked.size <= 1000
            failure = admission.refuse(asked, number)
            assert (failure is None) == fits
            if failure is None:
                admitted += [(tokens * 4, number)] * sequences
            else:
                assert failure.code is ErrorCode.UNAVAILABLE
                assert "the queue is full" in failure.message
                assert "retry in " in failure.message
        elif admitted:
            admission.end(admitted.pop()[0], number)
        assert 0 <= admission.sequences <= 14
        assert 0 <= admission.bytes <= 1000
    for size, _ in admitted:
        admission.end(size, len(events))
    assert (admission.sequences, admission.bytes) == (0, 0)


def test_a_refusal_says_the_bound_and_when_to_come_again() -> None:
    admission = Admission(QueueLimits(size=98), max_running=2)
    assert admission.refuse(submission(100, 1), 0.0) is None
    for second in range(10):
        admission.end(4, second)
        assert admission.refuse(submission(1, 1), second) is None
    failure = admission.refuse(submission(1, 1), 9.0)
    assert failure is not None
    assert failure.message == (
        "the queue is full: 100 sequences run or wait, at most 100 may (max_batch_size 2 + max_queue_size 98); "
        "retry in 50 s"
    )


def test_more_sequences_than_ever_fit_are_no_matter_of_time() -> None:
    failure = Admission(QueueLimits(size=3), max_running=2).refuse(submission(6, 1), 0.0)
    assert failure is not None
    assert failure.code is ErrorCode.INVALID_ARGUMENT
    assert failure.message == (
        "the request has 6 sequences, at most 5 may run or wait (max_batch_size 2 + max_queue_size 3)"
    )


def test_steps_and_computing_are_progress_and_waiting_is_none() -> None:
    progress = Progress(0.0)
    progress.sample(1.0, steps=1, unfinished=1, cpu_seconds=0.0)
    assert progress.stalled_seconds(1.0) == 0.0
    for second in range(2, 8):  # a long step computes
        progress.sample(second, steps=1, unfinished=1, cpu_seconds=float(second))
    assert progress.stalled_seconds(7.0) == 0.0
    for second in range(8, 20):  # a deadlock does not
        progress.sample(second, steps=1, unfinished=1, cpu_seconds=7.0)
    assert progress.stalled_seconds(19.0) == 12.0
    progress.sample(20.0, steps=1, unfinished=0, cpu_seconds=7.0)
    assert progress.stalled_seconds(20.0) == 0.0


def test_computing_without_a_result_does_not_count_for_ever() -> None:
    progress = Progress(0.0)
    for second in range(1, 400):
        progress.sample(second, steps=1, unfinished=1, cpu_seconds=float(second))
    assert progress.stalled_seconds(399.0) > 90
