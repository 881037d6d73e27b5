"""The embedded engine on two ranks behind the server."""

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from tests.serve.conftest import Start
from tests.serve.test_supervision import assert_nothing_left
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.machine.processes import session_processes
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.client import Sampling, generate


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The demo model, split over two ranks."""
    convert(ConvertConfig(dtype="float32", tp=2), DEMO_MODEL, tmp_path / "checkpoint")
    engine = EngineConfig(backend="torch", device="cpu", compute_dtype="float32", max_batch_size=4, max_seq_len=256)
    compile_engine(engine, tmp_path / "checkpoint", tmp_path / "engine")
    config = PackageConfig.parse({"serving": {"kv_cache_tokens": 2048}}, "test")
    return package(config, tmp_path / "engine", None, tmp_path / "repository").path


def test_a_lost_rank_ends_the_idle_server_and_is_named(repository: Path, start: Start) -> None:
    server = start(repository)
    server.wait_ready()
    assert generate(server.grpc, "ensemble", "Return the number of", Sampling(max_tokens=8)).output_tokens == 8
    triton = server.triton()
    ranks = [
        process
        for process in session_processes(triton)
        if b"trtforge.runtime.ranks.worker_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    assert server.process.wait(timeout=PATIENCE) == 1
    assert "rank 1 ended" in server.process.communicate()[1]
    assert_nothing_left(server, triton)
