"""Threads of one process: their results, their errors, and that none outlives the object that started it."""

import subprocess
import sys
import threading
from functools import partial

import pytest

from trtforge.runtime.ranks.rank_threads import RankThreads, Task

ENDS_AT_ONCE = """
import torch
from trtforge.runtime.ranks.rank_threads import RankThreads, Task

def product(factors):
    result = factors[0]
    for factor in factors:
        result = result @ factor
    return result

threads = RankThreads(2, 1)
for _ in range(3):
    factors = [torch.randn(128, 128) for _ in range(400)]
    threads.run([Task(lambda mine=[factor.clone() for factor in factors]: product(mine)) for _ in range(2)])
    del factors
threads.close()
raise SystemExit(1)
"""


def double(value: int) -> int:
    return 2 * value


def test_results_come_in_the_order_of_tasks() -> None:
    before = threading.active_count()
    threads: RankThreads[int] = RankThreads(3, 1)
    assert threads.run([Task(partial(double, value)) for value in (1, 2, 3)]) == [2, 4, 6]
    assert threads.run([Task(partial(double, 5))]) == [10]
    threads.close()
    assert threading.active_count() <= before


def test_closing_waits_for_what_is_computed() -> None:
    before, ended, go_on = threading.active_count(), threading.Event(), threading.Event()

    def slow() -> None:
        go_on.wait(30)
        ended.set()

    def fail() -> None:
        raise MemoryError("no room")

    threads: RankThreads[None] = RankThreads(2, 1)
    with pytest.raises(MemoryError, match="no room"):
        threads.run([Task(slow), Task(fail)])
    threading.Timer(0.2, go_on.set).start()
    threads.close()
    assert ended.is_set()
    assert threading.active_count() <= before + 1  # the timer may take its time


def test_the_error_that_came_first_is_raised_not_what_it_causes() -> None:
    for _ in range(50):
        gone = threading.Event()

        def wait(gone: threading.Event = gone) -> None:
            gone.wait(30)
            raise ConnectionError("the other is gone")

        def fail() -> None:
            raise MemoryError("no room")

        threads: RankThreads[None] = RankThreads(2, 1)
        with pytest.raises(MemoryError, match="no room"):
            threads.run([Task(wait), Task(fail, leave=gone.set)])
        threads.close()


def test_an_interruption_before_all_have_begun_lets_the_rest_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()

    def wait() -> None:
        gone.wait(30)

    class Interrupting:
        def put(self, task: object) -> None:
            if task is not None:
                raise KeyboardInterrupt

    threads: RankThreads[None] = RankThreads(3, 1)
    started, inbox = threads._threads, threads._inboxes[1]
    monkeypatch.setattr(threads, "_inboxes", [threads._inboxes[0], Interrupting(), threads._inboxes[2]])
    with pytest.raises(KeyboardInterrupt):
        threads.run([Task(wait), Task(wait), Task(wait, leave=gone.set)])
    assert gone.is_set()
    inbox.put(None)
    threads.close()
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_that_ends_at_once_ends_as_it_means_to(attempt: int) -> None:
    """Threads that free their last task's tensors while the interpreter ends would abort it."""
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
