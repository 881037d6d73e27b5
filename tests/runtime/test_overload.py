"""Ten thousand requests, for a while three times as many as an engine can serve: queue, refusals, ages, memory, blocks.

The engine, its scheduler and the server of its process are the real ones, the model is none. Requests arrive by a
Poisson process whose clock is the engine's iterations, so that nothing depends on the machine's speed.
"""

import math
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from tests.patience import PATIENCE, eventually
from tests.runtime.checkpoints import write_engine
from trtforge.engine_process.admission import QueueLimits
from trtforge.engine_process.client import EngineClient
from trtforge.engine_process.messages import Update
from trtforge.engine_process.requests import ErrorCode, GenerationRequest, OnOutput, Output, RequestFailure
from trtforge.engine_process.server import EngineServer
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step

COUNT, QUEUE, BATCH, BLOCKS = 10_000, 64, 16, 70
MOST_PROMPT, MOST_NEW, BLOCK = 12, 8, 4
CAPACITY = BATCH / ((1 + MOST_NEW) / 2)  # requests per iteration, when each takes as many iterations as tokens


class NoModel:
    """Ranks that compute nothing."""

    threads, num_blocks, num_host_blocks, num_window_blocks, computes_ahead = 1, BLOCKS, 0, 0, False
    worker_pids: tuple[int, ...] = ()

    def execute(self, step: Step, fills: object = None, latest: object = None) -> Tensor | None:
        wanted = int(step.wanted.sum())
        return torch.zeros(wanted, 131) if wanted else None

    def move(self, slots: object) -> None: ...

    def free(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class TimedEngine(Engine):
    """Measures the age of each request at its first token, in iterations."""

    ages: list[int]

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        super().submit(*((request, self._observed(on_output)) for request, on_output in requests))

    def _observed(self, on_output: OnOutput) -> OnOutput:
        begun: list[int] = []
        start = self.statistics().iterations

        def observed(output: Output) -> None:
            if not begun:
                begun.append(1)
                self.ages.append(self.statistics().iterations - start)
            on_output(output)

        return observed


@dataclass
class Answers:
    """The ends of all requests; takes what its client gets."""

    finished: int = 0
    refused: list[RequestFailure] = field(default_factory=list)

    def take(self, updates: list[tuple[int, Update]]) -> None:
        for _, update in updates:
            if update.failure is not None:
                self.refused.append(update.failure)
            elif update.finish_reason is not None:
                assert update.finish_reason == "length"
                self.finished += 1

    @property
    def ended(self) -> int:
        return self.finished + len(self.refused)


def poisson(rng: random.Random, mean: float) -> int:
    """Knuth's algorithm."""
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        count, product = count + 1, product * rng.random()
    return count


def test_ten_thousand_requests_some_time_above_capacity(checkpoint: Path, tmp_path: Path) -> None:
    limits = {"max_batch_size": BATCH, "tokens_per_block": BLOCK, "max_num_tokens": 256}
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", **limits))
    engine = TimedEngine(source, NoModel(), EngineOptions(kv_reuse=False))  # type: ignore[arg-type]
    engine.ages = []
    server = EngineServer(engine, tmp_path / "s", QueueLimits(size=QUEUE))
    thread = threading.Thread(target=server.run)
    thread.start()
    client, answers, rng = EngineClient(tmp_path / "s", "test", os.getpid()), Answers(), random.Random(1)
    assert eventually(lambda: client._socket is not None)
    submitted, iteration, waiting, memory = 0, 0, [0], []
    deadline = time.monotonic() + PATIENCE
    while answers.ended < COUNT:
        assert time.monotonic() < deadline, f"{answers.ended} of {submitted} requests ended"
        status = engine.statistics()
        waiting.append(status.waiting_requests)
        if submitted < COUNT and (status.iterations > iteration or not client.unanswered):
            load = 3.0 if COUNT * 0.3 < submitted < COUNT * 0.7 else 0.6
            arriving = sum(poisson(rng, load * CAPACITY) for _ in range(max(1, status.iterations - iteration)))
            iteration = status.iterations
            with client.together():
                for _ in range(min(arriving, COUNT - submitted)):
                    submitted += 1
                    prompt = tuple(rng.randrange(131) for _ in range(rng.randint(1, MOST_PROMPT)))
                    client.submit((GenerationRequest("", prompt, rng.randint(1, MOST_NEW)),), answers)
            if submitted % 100 < arriving:
                memory.append(psutil.Process().memory_info().rss)
        time.sleep(0.0002)
    client.close()
    server.stop()
    thread.join()
    statistic = engine.statistics()
    engine.close()

    assert answers.finished + len(answers.refused) == COUNT
    assert max(waiting) <= QUEUE + BATCH
    assert 0.05 * COUNT < len(answers.refused) < 0.5 * COUNT
    assert {failure.code for failure in answers.refused} == {ErrorCode.UNAVAILABLE}
    assert all("the queue is full: " in each.message and "retry in " in each.message for each in answers.refused)
    # First come, first served: at most QUEUE + BATCH requests are before one, and as many run at once as blocks allow.
    at_once = min(BATCH, BLOCKS // math.ceil((MOST_PROMPT + MOST_NEW - 1) / BLOCK))
    assert len(engine.ages) == answers.finished
    assert max(engine.ages) <= MOST_NEW * (math.ceil((QUEUE + BATCH) / at_once) + 1)
    assert statistics.median(memory[-20:]) - statistics.median(memory[20:40]) < 8 << 20
    assert (statistic.kv_blocks_used, statistic.active_requests, statistic.paused_requests) == (0, 0, 0)
