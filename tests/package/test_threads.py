"""The threads inside the models: requests served beside one another, clients that go away noticed."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trtforge.core.assets import asset_directory


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    path = str(asset_directory("model_repo_templates") / "lib")
    sys.path.insert(0, path)
    yield
    sys.path.remove(path)


def test_workers_run_as_many_at_once_as_they_may_and_all_in_the_end() -> None:
    from workers import Workers  # type: ignore[import-not-found]

    workers: Any = Workers(3)
    gate, running, most, finished = threading.Event(), 0, 0, threading.Semaphore(0)
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1
        finished.release()

    for _ in range(10):
        workers.submit(work)
    while running < 3:
        time.sleep(0.001)
    gate.set()
    for _ in range(10):
        assert finished.acquire(timeout=10)
    assert most == 3


def test_watcher_reports_a_cancelled_request_until_it_is_over() -> None:
    from watch import Watcher  # type: ignore[import-not-found]

    class Request:
        done = False
        gone = False

        def cancelled(self) -> bool:
            assert not self.done
            return self.gone

    stays, leaves = Request(), Request()
    seen: list[Request] = []

    def on_cancel(request: Request) -> None:
        seen.append(request)
        if len(seen) == 3:
            request.done = True

    watcher: Any = Watcher(5, on_cancel)
    watcher.add(stays)
    watcher.add(leaves)
    leaves.gone = True
    until = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.05)
    assert seen == [leaves] * 3
