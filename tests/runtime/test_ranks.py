import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.patience import PATIENCE, eventually
from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.runner import open_runner
from tests.runtime.test_engine import requests_for
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime import engine as engine_module
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate
from trtforge.runtime.ranks import rank_group

Tokens = tuple[int, ...]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Other tests' libraries may have started some before."""
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(pp=2),
        Layout(tp=2, pp=2, embedding_sharding_dim=0),
        Layout(tp=4, embedding_sharding_dim=1),
    ],
    ids=["tp2", "pp2", "tp2pp2-vocab-split", "tp4-more-ranks-than-kv-heads-hidden-split"],
)
def test_ranks_together_give_the_tokens_of_transformers(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], expected: list[Tokens], layout: Layout
) -> None:
    directory = write_engine(write_checkpoint(llama, tmp_path / "checkpoint", layout), tmp_path / "engine")
    assert [made.tokens for made in generate(directory, requests_for(prompts))] == expected


def test_row_parallel_biases_are_added_once(tmp_path: Path, prompts: list[list[int]]) -> None:
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(tp=2))
    made = generate(write_engine(checkpoint, tmp_path / "engine"), requests_for(prompts))
    assert [generation.tokens for generation in made] == greedy(model, prompts, 24)


def test_a_checkpoint_of_two_ranks_gives_the_logits_of_transformers(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]]
) -> None:
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint", Layout(tp=2))
    with open_runner(checkpoint) as runner, torch.no_grad():
        made, reference = runner.logits(prompts[7]), llama(torch.tensor([prompts[7]])).logits[0]
    assert made.shape == (90, 131)
    assert float((made - reference).norm() / reference.norm()) < 1e-4


@pytest.fixture
def two_ranks(llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_engine(write_checkpoint(llama, tmp_path / "checkpoint", Layout(tp=2)), tmp_path / "engine")


def test_a_dead_rank_ends_every_request_with_its_name(two_ranks: Path) -> None:
    """It does not die of Ctrl-C, which a terminal sends to all of a program's processes."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(two_ranks) as engine:
        os.kill(engine.worker_pids[0], signal.SIGINT)
        engine.submit((GenerationRequest("interrupted", (1, 2, 3), 2), outputs.put))
        assert [outputs.get(timeout=PATIENCE).finish_reason for _ in range(2)] == [None, "length"]
        engine.submit((GenerationRequest("a", (1, 2, 3), 100), outputs.put))
        outputs.get(timeout=PATIENCE)
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        engine.submit((GenerationRequest("b", (1, 2, 3), 180), outputs.put))
        ended = {}
        while len(ended) < 2:
            output = outputs.get(timeout=PATIENCE)
            if output.finish_reason:
                ended[output.request_id] = output
        assert str(ended["b"].error) == "rank 1 ended: it was killed, probably because memory ran out"
        engine.submit((GenerationRequest("c", (1, 2, 3), 4), outputs.put))
        assert "rank 1 ended" in str(outputs.get(timeout=PATIENCE).error)


def test_an_engine_whose_rank_hangs_is_closed_with_its_own_words(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(rank_group, "_END_TIMEOUT", 0.2)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(two_ranks) as engine:
        engine.submit((GenerationRequest("a", (1, 2, 3), 180), outputs.put))
        outputs.get(timeout=PATIENCE)
        os.kill(engine.worker_pids[0], signal.SIGSTOP)
    output = outputs.get(timeout=PATIENCE)
    while output.finish_reason is None:
        output = outputs.get(timeout=PATIENCE)
    if output.finish_reason == "error":  # not where the step before had ended
        assert str(output.error) == "the engine was closed while a rank did not answer"
    else:
        assert output.finish_reason == "cancelled"
    assert caplog.messages == []


def test_a_signal_that_ends_a_rank_is_named(two_ranks: Path) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(two_ranks) as engine:
        os.kill(engine.worker_pids[0], signal.SIGTERM)
        engine.submit((GenerationRequest("a", (1, 2, 3), 180), outputs.put))
        output = outputs.get(timeout=PATIENCE)
        while output.finish_reason is None:
            output = outputs.get(timeout=PATIENCE)
    assert str(output.error) == "rank 1 ended: signal 15 (SIGTERM)"


def test_a_rank_that_cannot_load_says_why(two_ranks: Path) -> None:
    (two_ranks / "rank1.safetensors").unlink()
    with pytest.raises(ForgeError, match=r"rank 1 ended: .*rank1.safetensors is missing"):
        Engine.load(two_ranks)


def test_ranks_end_when_their_parent_is_killed(two_ranks: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from trtforge.runtime.engine import Engine\n"
        "engine = Engine.load(Path(sys.argv[1])); print(*engine.worker_pids, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent: Any = subprocess.Popen(
        [sys.executable, "-c", program, str(two_ranks)], stdout=subprocess.PIPE, text=True, env=environment
    )
    worker = psutil.Process(int(parent.stdout.readline()))
    assert worker.is_running()
    parent.kill()
    parent.wait()
    assert eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_the_ranks_listen_on_the_loopback_interface_only(two_ranks: Path) -> None:
    with Engine.load(two_ranks) as engine:
        processes = [psutil.Process(), *(psutil.Process(pid) for pid in engine.worker_pids)]
        listening = [c for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
