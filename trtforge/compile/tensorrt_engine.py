"""A TensorRT-LLM engine, built: with what is asked for where that is done, and what came of it is held to the plan."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from trtforge import __version__
from trtforge.compile.asked_target import asked_target
from trtforge.compile.build_config import BuildPlan
from trtforge.compile.place import Place
from trtforge.compile.rank_builds import RankBuilds
from trtforge.compile.timing_cache import SETTINGS, TimingCache
from trtforge.core.artifact import Produced, produce
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.progress import Progress
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.gpus import Gpu


@dataclass(frozen=True)
class EngineBuild:
    """One engine to build. `checkpoint` was checked, `digest` is its manifest's; `gpu` is what the engine is for."""

    plan: BuildPlan
    model: CheckpointConfig
    checkpoint: Path
    digest: str
    out: Path
    place: Place
    workers: int
    gpu: Gpu | None


def build_config_of(plan: BuildPlan) -> dict[str, JsonValue]:
    """The exact BuildConfig that every rank is built with."""
    return {**plan.to_json(), **SETTINGS}


def logs_of(out: Path) -> Path:
    """The directory of the logs of the engine `out`: beside it, since an artifact holds no times."""
    return out.parent / f"{out.name}.logs"


def build_engine(build: EngineBuild, *, force: bool, progress: Progress) -> Produced:
    """Build the engine, or find it at `build.out`.

    Raises LoggedError for a rank that failed; the finished ones stay for the next run. Raises ForgeError for a place of
    another release or GPU, and for an engine that is not as planned.
    """
    logs = logs_of(build.out)
    workers = min(build.workers, build.model.parallel.world_size)
    asked = asked_target(build.place, build.plan.release, workers, build.gpu, logs)
    identity = Identity(
        stage="engine",
        config={"backend": "tensorrt_llm", "build_config": build_config_of(build.plan)},
        inputs={"checkpoint": build.digest},
        versions={"trtforge": __version__, **asked.target.versions},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        logs.mkdir(exist_ok=True)
        ranks = RankBuilds(
            build.plan, build.model, build.checkpoint, directory, build.place, TimingCache.of(asked.target), logs
        )
        records = ranks.run(asked.gpus, workers, build_config_of(build.plan), build.digest, progress)
        tokenizer = build.checkpoint / TOKENIZER_DIRECTORY
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, directory / TOKENIZER_DIRECTORY)
        return records

    return produce(build.out, identity, write, force=force)
