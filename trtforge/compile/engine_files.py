"""The files of an engine that TensorRT-LLM writes, and what trtforge adds to its config.json."""

import json
import re
from pathlib import Path

from trtforge.compile.build_config import BuildPlan
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import files_below
from trtforge.formats.trtllm import CONFIG_FILE, read_engine_config

_BESIDE = re.compile(r"rank\d+_managed_weights\.safetensors|quant_cfg\.json|lora/.+")
"""What `Engine.save` may write besides config.json and the engines (tensorrt_llm/builder.py)."""


def engine_file(rank: int) -> str:
    """File name of a rank's engine."""
    return f"rank{rank}.engine"


def check_rank(directory: Path, rank: int) -> tuple[str, ...]:
    """The files of one rank. Raises ForgeError for missing (engine, config.json of rank 0) and unexpected files."""
    names = tuple(files_below(directory)) if directory.is_dir() else ()
    expected = (engine_file(rank), *((CONFIG_FILE,) if rank == 0 else ()))
    for name in expected:
        if name not in names or not (directory / name).stat().st_size:
            raise _unexpected(f"TensorRT-LLM finished rank {rank} without an error, but did not write {name}")
    for name in names:
        if name not in expected and _BESIDE.fullmatch(name) is None:
            raise _unexpected(f"TensorRT-LLM wrote an unexpected file for rank {rank}: {name}")
    return names


def add_runtime_defaults(directory: Path, plan: BuildPlan) -> None:
    """Write the plan's runtime defaults into the engine's config.json, which TensorRT-LLM has just written.

    They are not passed to the build, as it is unknown whether every release can write them.
    """
    if not plan.runtime_defaults:
        return
    _, values = read_engine_config(directory)
    pretrained = {**values["pretrained_config"], "runtime_defaults": plan.runtime_defaults}
    text = json.dumps({**values, "pretrained_config": pretrained}, indent=4)
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _unexpected(message: str) -> ForgeError:
    return ForgeError(message, hint="Nothing was published. See the rank's log for the reason, or use another release.")
