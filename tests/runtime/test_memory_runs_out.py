"""Memory that runs out while an engine is loaded or computes: told with a hint, by every rank."""

import queue
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.patience import PATIENCE
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.decoder import block_copies
from trtforge.runtime.engine import Engine
from trtforge.runtime.ranks import rank_group, worker_main
from trtforge.runtime.ranks.rank_model import RankModel
from trtforge.runtime.ranks.worker_process import WorkerJob

_TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB."
_SAID = f"there is not enough GPU memory: {_TORCH}"


def _run_out(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError(_TORCH)


def test_of_rank_0_while_loading(engine_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "RankModel", _run_out)
    with pytest.raises(ForgeError) as raised:
        Engine.load(engine_directory)
    assert raised.value.message == _SAID
    assert "nvidia-smi" in str(raised.value.hint)


def test_of_another_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["worker_main", "a job"])
    monkeypatch.setattr(WorkerJob, "model_validate_json", lambda _: None)
    monkeypatch.setattr(worker_main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "_end_with_parent", lambda: None)
    monkeypatch.setattr(worker_main, "_run", _run_out)
    assert worker_main.main() == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {_SAID}"
    assert hint.startswith("hint: Free the GPU")


def test_in_a_step(engine_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(engine_directory) as engine:
        monkeypatch.setattr(RankModel, "execute", _run_out)
        engine.submit((GenerationRequest("a", (1, 2, 3), 4), outputs.put))
        output = outputs.get(timeout=PATIENCE)
    assert (output.finish_reason, str(output.error)) == ("error", _SAID)


def test_of_host_memory_that_the_driver_does_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    def refuse(_: torch.Tensor) -> NoReturn:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(block_copies, "pin", refuse)
    layer = torch.zeros(2, 4).as_subclass(OnGpu)
    with pytest.raises(ForgeError) as raised:
        block_copies.BlockCopies([layer], 2, 3)
    assert raised.value.message == (
        "the driver cannot pin 48 bytes of host memory for KV blocks: CUDA error: out of memory"
    )
    assert "kv_cache_host_memory_bytes" in str(raised.value.hint)
