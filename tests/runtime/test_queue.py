"""What waits, and what a limit of the queue's time ends: nothing that runs or has run."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Guide, Output
from trtforge.runtime.engine import Engine, EngineOptions


class Ends:
    """The outputs of requests: how each ended, in their order."""

    def __init__(self, count: int) -> None:
        self.reasons: dict[str, str] = {}
        self._left = threading.Semaphore(0)
        self._count = count

    def take(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason
            self._left.release()

    def wait(self) -> dict[str, str]:
        for _ in range(self._count):
            assert self._left.acquire(timeout=PATIENCE)
        return self.reasons


def run(engine: Engine, asked: Sequence[GenerationRequest], expire: Sequence[str], after: int = 1) -> dict[str, str]:
    """Submit all together; when `after` iterations are done, end those of `expire` that wait."""
    ends = Ends(len(asked))
    seen: list[int] = []

    def on_step() -> None:
        if len(seen) < 2 and engine.statistics().iterations >= after:
            seen.append(1)
            for name in expire if len(seen) == 1 else ():
                engine.cancel(name, only_waiting=True)

    engine.after_steps(on_step)
    engine.submit(*((request, ends.take) for request in asked))
    return ends.wait()


def plain(name: str, tokens: int = 12) -> GenerationRequest:
    return GenerationRequest(name, (5, 17, 9), tokens)


def test_time_in_the_queue_ends_what_waits_and_no_beam_search(checkpoint: Path, tmp_path: Path) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_beam_width=3, max_batch_size=3)
    beams = replace(plain("beams"), beams=BeamParams(3, 3))
    with Engine.load(directory) as engine:
        found = run(engine, [beams, plain("waits")], ["beams", "waits"], after=3)
    assert found == {"waits": "cancelled", "beams": "length"}


def test_a_paused_request_has_begun(checkpoint: Path, tmp_path: Path) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    options = EngineOptions(scheduler="max_utilization", kv_cache_tokens=40, kv_reuse=False)
    with Engine.load(directory, options) as engine:
        names = ["a", "b", "c"]
        assert run(engine, [plain(name, 30) for name in names], names, after=12) == dict.fromkeys(names, "length")
        assert engine.statistics().paused_requests > 0


def test_a_guide_that_is_compiled_waits(engine_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(engine_directory) as engine:
        monkeypatch.setattr(engine._guides, "prepare", lambda sequence, on_prepared: False)
        guided = replace(plain("guided"), guide=Guide("json"), end_ids=frozenset({2}))
        assert run(engine, [guided, plain("other")], ["guided"]) == {"guided": "cancelled", "other": "length"}


def test_copies_of_an_ended_original_keep_their_place(engine_directory: Path) -> None:
    with Engine.load(engine_directory, EngineOptions(max_batch_size=1)) as engine:
        asked = [
            plain("runs"),
            plain("original"),
            replace(plain("first"), copy_of="original"),
            replace(plain("second"), copy_of="original"),
            plain("later"),
        ]
        found = run(engine, asked, ["original"])
    assert list(found) == ["original", "runs", "first", "second", "later"]
