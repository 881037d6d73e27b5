"""Advice about the real server with the demo model under load."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tests.conftest import DEMO_MODEL
from tests.patience import eventually
from trtforge.advise.rules import judged
from trtforge.advise.sources import Sources, observe
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.client import Sampling, generate
from trtforge.serve.local_server import local_server


def test_a_server_under_more_load_than_its_batch_holds(tmp_path: Path) -> None:
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, tmp_path / "checkpoint").path
    config = EngineConfig(backend="torch", device="cpu", max_batch_size=2, max_seq_len=512)
    engine = compile_engine(config, checkpoint, tmp_path / "engine").path
    repository = package(PackageConfig(), engine, None, tmp_path / "repository").path
    ended = Event()
    with local_server(repository, ready_timeout=600) as server, ThreadPoolExecutor(8) as pool:
        sources = Sources.at([server.metrics])
        # What asks a server at its start is counted late.
        assert eventually(lambda: [each.rule for each in judged(observe(sources, 1, lambda _: None)[0])[0]] == ["idle"])

        def ask() -> None:
            while not ended.is_set():
                generate(server.grpc, "ensemble", "Once", Sampling(400, min_tokens=400))

        asking = [pool.submit(ask) for _ in range(8)]
        try:

            def full() -> bool:
                advice, missing = judged(observe(sources, 2, lambda _: None)[0])
                return "batch" in {each.rule for each in advice} and {each.rule for each in missing} == {"tokens"}

            assert eventually(full)
        finally:
            ended.set()
        for each in asking:
            each.result()
