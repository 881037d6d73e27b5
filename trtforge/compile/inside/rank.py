"""Build one rank with TensorRT-LLM's Python API; the only module that imports tensorrt_llm.

It runs as a separate program, also in containers without trtforge, and imports nothing of trtforge:

    rank.py target                                       print versions and GPUs as JSON
    rank.py build CHECKPOINT BUILD_CONFIG.json RANK OUT  write the rank's files into the directory OUT

Sources: `build_model` and `build_and_save` in tensorrt_llm/commands/build.py, `BuildConfig`, `build` and `Engine.save`
in tensorrt_llm/builder.py, `from_checkpoint` in tensorrt_llm/models/modeling_utils.py, 0.17 to 1.2.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

STEPS = ("loading TensorRT-LLM", "reading the checkpoint", "building", "saving")
STEP_FILE = "step"
"""File in the working directory with the number of the current step, for progress bars."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="rank.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("target")
    build = commands.add_parser("build")
    build.add_argument("checkpoint", type=Path)
    build.add_argument("build_config", type=Path)
    build.add_argument("rank", type=int)
    build.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "target":
        print(json.dumps(target()))
    else:
        build_rank(given.checkpoint, given.build_config, given.rank, given.out)


def target() -> "dict[str, object]":
    """Versions, and every visible GPU (`sm`: compute capability x 10, memory: bytes).

    TensorRT-LLM's version is taken from package metadata, since importing it takes half a minute.
    """
    import tensorrt
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "tensorrt_llm": version("tensorrt_llm"),
        "tensorrt": str(tensorrt.__version__),
        "cuda": torch.version.cuda,
        "gpus": [{"gpu": gpu.name, "sm": f"{gpu.major}{gpu.minor}", "memory": gpu.total_memory} for gpu in gpus],
    }


def build_rank(checkpoint: Path, build_config: Path, rank: int, out: Path) -> None:
    """Build one rank on the visible GPU and write its files into `out`; rank 0 writes config.json too.

    `build_config` is read by `from_json_file`, as every release reads its engines' `build_config`.
    """
    _begin(0)
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.logger import logger
    from tensorrt_llm.models import MODEL_MAP

    logger.set_level("info")
    _begin(1)
    architecture = json.loads((checkpoint / "config.json").read_text())["architecture"]
    if architecture not in MODEL_MAP:
        raise ValueError(f"Unsupported model architecture: {architecture}")
    model = MODEL_MAP[architecture].from_checkpoint(str(checkpoint), rank=rank)
    _begin(2)
    engine = build(model, BuildConfig.from_json_file(str(build_config)))
    _begin(3)
    engine.save(str(out))


def _begin(step: int) -> None:
    print(f"{STEPS[step]} ...", flush=True)
    Path(STEP_FILE).write_text(str(step))


if __name__ == "__main__":
    main()
