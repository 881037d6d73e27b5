"""The first process that ended is known as the first."""

import os
import subprocess

from tests.patience import eventually
from trtforge.serve.deaths import DeathOrder


def test_the_order_of_ends_is_kept() -> None:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    order = DeathOrder(process.pid for process in processes)
    first, second, third, survivor = (processes[index] for index in (2, 0, 3, 1))
    for place, process in enumerate((first, second, third)):
        process.kill()
        assert eventually(lambda place=place: order.place(survivor.pid) == place + 1)
    assert [order.place(process.pid) for process in (first, second, third, survivor)] == [0, 1, 2, 3]
    survivor.kill()
    for process in processes:
        process.wait()
    order.close()


def test_closing_it_closes_its_files() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    order = DeathOrder([os.getpid()])
    order.close()
    assert eventually(lambda: count() <= before)
