"""Requests that are cancelled, and engines that are closed or whose process ends."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE
from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Output, SamplingParams
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Sequence


def test_a_cancelled_request_ends_and_frees_its_blocks(engine_directory: Path, prompts: list[list[int]]) -> None:
    done = threading.Event()
    outputs: list[Output] = []
    with Engine.load(engine_directory) as engine:

        def receive(output: Output) -> None:
            outputs.append(output)
            if len(outputs) == 3:
                engine.cancel("x")
            if output.finish_reason:
                done.set()

        engine.cancel("unknown")
        engine.submit((GenerationRequest("x", tuple(prompts[0]), 150), receive))
        assert done.wait(30)
        assert outputs[-1].finish_reason == "cancelled"
        assert len(outputs) < 150
        idle = engine.statistics()
        assert (idle.kv_blocks_used, idle.active_requests, idle.scheduled_requests) == (0, 0, 0)


@pytest.mark.parametrize("error", [ValueError("receiver"), SystemExit(3)])
def test_a_receiver_that_raises_loses_only_its_own_request(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], error: BaseException
) -> None:
    def receive(output: Output) -> None:
        raise error

    with Engine.load(engine_directory) as engine:
        engine.submit((GenerationRequest("x", (1, 2, 3), 50), receive))
        assert generate_with(engine, requests_for(prompts[:1]))[0].tokens == expected[0]
        assert engine.statistics().active_requests == 0


@pytest.mark.parametrize("where", ["of", "before"])
def test_an_unexpected_error_about_a_request_ends_only_this_request(
    engine_directory: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the engine knows the request, and after."""
    of, add = Sequence.of, Scheduler.add

    def failing_of(request: GenerationRequest, *rest: Any) -> Sequence:
        if where == "of" and request.prompt == (1, 2, 3):
            raise OverflowError("of")
        return of(request, *rest)

    def failing_add(scheduler: Scheduler, sequence: Sequence) -> None:
        if where == "before" and sequence.request.prompt == (1, 2, 3):
            raise OverflowError("before")
        add(scheduler, sequence)

    monkeypatch.setattr(Sequence, "of", failing_of)
    monkeypatch.setattr(Scheduler, "add", failing_add)
    outputs: list[Output] = []
    with Engine.load(engine_directory) as engine:
        engine.submit((GenerationRequest("x", (1, 2, 3), 5), outputs.append))
        assert generate_with(engine, requests_for(prompts[:1]))[0].tokens == expected[0]
        assert engine.statistics().active_requests == 0
    assert [each.finish_reason for each in outputs] == ["error"]
    assert isinstance(outputs[0].error, RequestError)  # any other error ends a server
    assert f"the request could not be queued: OverflowError('{where}')" in str(outputs[0].error)


def test_closing_cancels_what_is_unfinished_and_later_requests_get_an_error(engine_directory: Path) -> None:
    outputs: list[Output] = []
    started = threading.Event()

    def receive(output: Output) -> None:
        outputs.append(output)
        started.set()

    engine = Engine.load(engine_directory)
    engine.submit((GenerationRequest("x", (1, 2, 3), 180), receive))
    assert started.wait(30)
    engine.close()
    engine.close()
    assert outputs[-1].finish_reason == "cancelled"
    engine.submit((GenerationRequest("y", (1, 2, 3), 4), outputs.append))
    assert str(outputs[-1].error) == "the engine is closed"


def test_a_forked_process_closes_nothing_of_its_parent(
    engine_directory: Path, tmp_path: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """It closes its copy of the engine when it exits. It has none of the threads, of which one may hold a lock."""
    trace = tmp_path / "trace.json"
    with Engine.load(engine_directory, EngineOptions(trace=trace)) as engine:
        with pytest.MonkeyPatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            engine.close()
        assert generate_with(engine, requests_for(prompts[:1]))[0].tokens == expected[0]
    (*_, ended, tokens) = json.loads(trace.read_text())
    assert (ended["name"], ended["args"]) == ("sequences", {"running": 0, "waiting": 0})
    assert tokens["name"] == "tokens"


def test_a_process_that_ends_while_its_engine_computes_ends_as_it_means_to(engine_directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from threading import Event\n"
        "from trtforge.runtime.engine import Engine; from trtforge.engine_process.requests import GenerationRequest\n"
        "started = Event(); engine = Engine.load(Path(sys.argv[1]))\n"
        "engine.submit((GenerationRequest('x', (1, 2, 3), 180), lambda output: started.set()))\n"
        "assert started.wait(30); sys.exit(3)"
    )
    command = [sys.executable, "-X", "faulthandler", "-c", program, str(engine_directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": SamplingParams(top_p=0.9, temperature=0.7, seed=1)},
    "of a few": {"sampling": SamplingParams(top_k=5, seed=1)},
    "likely": {"sampling": SamplingParams(temperature=1.0, min_p=0.1, seed=1)},
    "scored": {"sampling": SamplingParams(return_log_probs=True)},
    "penalised": {"sampling": SamplingParams(repetition_penalty=1.5)},
    "restricted": {"bad_words": ((5,),)},
    "beams": {"beams": BeamParams(2, 2)},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [131, 40_000])
def test_logits_that_are_no_numbers_end_a_request_with_the_reason(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    """Also where the LM head is screened."""
    model = tiny_llama(vocab_size=vocabulary)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout())
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype, max_beam_width=2)
    ended: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(engine) as running:
        for name, options in OPTIONS.items():
            running.submit((GenerationRequest(name, (1, 2, 3), 4, **options), ended.put))
        outputs = [ended.get(timeout=PATIENCE) for _ in OPTIONS]
        assert running.statistics().kv_blocks_used == 0
    assert {output.request_id for output in outputs} == OPTIONS.keys()
    for output in outputs:
        assert (output.finish_reason, output.tokens) == ("error", ())
        assert str(output.error).startswith("the model's logits are NaN"), output.request_id
