"""The threads inside the models: requests served beside one another, clients that go away noticed."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE, eventually
from trtforge.core.assets import asset_directory


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    path = str(asset_directory("model_repo_templates") / "lib")
    sys.path.insert(0, path)
    yield
    sys.path.remove(path)


def test_background_runs_in_order_and_refuses_what_is_too_much() -> None:
    from background import Background  # type: ignore[import-not-found]

    background: Any = Background(2)
    begun, gate, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait()
        done.append(0)

    assert background.submit(first)
    assert begun.wait(PATIENCE)
    assert [background.submit(lambda number=number: done.append(number)) for number in (1, 2, 3)] == [True, True, False]
    gate.set()
    assert eventually(lambda: len(done) == 3)
    background.close()
    assert done == [0, 1, 2]


def test_watcher_reports_a_cancelled_request_once_and_asks_no_finished_one() -> None:
    from watch import Watcher  # type: ignore[import-not-found]

    class Request:
        done = False
        gone = False
        asked = 0

        def cancelled(self) -> bool:
            assert not self.done
            self.asked += 1
            return self.gone

    requests = [Request() for _ in range(40)]
    seen: list[Request] = []
    watcher: Any = Watcher(2, seen.append)
    for request in requests:
        watcher.add(request)
    assert eventually(lambda: min(request.asked for request in requests) >= 2)
    requests[0].done = True
    for request in requests[1:4]:
        request.gone = True
    assert eventually(lambda: len(seen) == 3)
    watcher.close()
    assert set(seen) == set(requests[1:4])
    assert len(seen) == 3
    counts = [request.asked for request in requests[4:]]
    assert max(counts) - min(counts) <= 1
