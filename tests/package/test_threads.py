"""The threads inside the models: requests served beside one another, clients that go away noticed."""

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("library")


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


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_is_cancelled_gets_its_last_piece(*, begun: bool) -> None:
    from model_config import ModelConfig  # type: ignore[import-not-found]
    from triton_engine import TritonEngine  # type: ignore[import-not-found]

    class Waiting(TritonEngine):  # type: ignore[misc]
        """An engine whose answer never comes."""

        async def _pass_on(self, inputs: object, receiver: object) -> dict[int, int]:
            running.set()
            await asyncio.sleep(PATIENCE)
            return {}

    class Received:
        pieces: tuple[Any, ...] = ()

        def take(self, pieces: list[Any]) -> None:
            self.pieces += tuple(pieces)

    running, received = threading.Event(), Received()
    config = {"parameters": {"engine_to_text": {"string_value": "output_ids:output_ids"}}}
    place = {"model_repository": "", "model_version": "1", "model_name": "ensemble"}
    engine: Any = Waiting(ModelConfig({"model_config": json.dumps(config), **place}))
    if not begun:  # the event loop is busy
        engine._loop.call_soon_threadsafe(running.wait, PATIENCE)
    started = engine.start({}, received, None, model_end_ids=False, watched=False)
    if begun:
        assert running.wait(PATIENCE)
    engine.cancel(started)
    running.set()
    assert eventually(lambda: bool(received.pieces))
    engine.close()
    (piece,) = received.pieces
    assert (piece.finished, piece.failure) == (True, ("the request was cancelled", "CANCELLED"))
