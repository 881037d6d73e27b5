"""Builds engines of the checkpoint in `tmp_path`, and looks at what is there."""

from pathlib import Path
from typing import Any

from tests.compile.checkpoints import engine
from tests.compile.trtllm import MACHINE
from trtforge.compile.machine import Machine
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.core.artifact import Produced
from trtforge.core.recipe import EngineConfig


def build(
    tmp_path: Path, *, workers: int = 1, machine: Machine = MACHINE, config: EngineConfig | None = None, **rest: Any
) -> Produced:
    config = config or engine(backend="tensorrt_llm", max_batch_size=8, max_seq_len=4096)
    options = CompileOptions(workers=workers)
    return compile_engine(config, tmp_path / "checkpoint", tmp_path / "engine", options, machine=machine, **rest)


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
