"""Threads of one process: their results, their errors, and that none outlives its crew."""

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from trtforge.runtime.crew import Crew

ENDS_AT_ONCE = """
import torch
from trtforge.runtime.crew import Crew

def product(factors):
    result = factors[0]
    for factor in factors:
        result = result @ factor
    return result

crew = Crew(2, 1)
for _ in range(3):
    factors = [torch.randn(128, 128) for _ in range(400)]
    crew.run([lambda mine=[factor.clone() for factor in factors]: product(mine) for _ in range(2)])
    del factors
crew.close()
raise SystemExit(1)
"""


def double(value: int) -> int:
    return 2 * value


def test_results_come_in_the_order_of_tasks() -> None:
    before = threading.active_count()
    crew: Crew[int] = Crew(3, 1)
    assert crew.run([partial(double, value) for value in (1, 2, 3)]) == [2, 4, 6]
    assert crew.run([partial(double, 5)]) == [10]
    crew.close()
    assert threading.active_count() == before


def test_closing_waits_for_what_is_computed() -> None:
    before, ended = threading.active_count(), threading.Event()
    go_on = threading.Event()

    def slow() -> None:
        go_on.wait(30)
        ended.set()

    def fail() -> None:
        raise MemoryError("no room")

    crew: Crew[None] = Crew(2, 1)
    tasks: list[Callable[[], None]] = [slow, fail]
    with pytest.raises(MemoryError, match="no room"):
        crew.run(tasks)
    threading.Timer(0.2, go_on.set).start()
    crew.close()
    assert ended.is_set()
    assert threading.active_count() <= before + 1  # the timer may take its time


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_that_ends_at_once_ends_as_it_means_to(attempt: int) -> None:
    """Threads that free their last task's tensors while the interpreter ends would abort it."""
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
