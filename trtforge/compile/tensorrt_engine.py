"""A TensorRT-LLM engine, built: what it is built with is part of what it is, so that is asked for first."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trtforge import __version__
from trtforge.compile.about import about_engine
from trtforge.compile.asked_target import asked_target
from trtforge.compile.engine_build import EngineBuild
from trtforge.compile.rank_builds import build_ranks
from trtforge.compile.timing_cache import TimingCache
from trtforge.core.artifact import Produced, produce
from trtforge.core.cache import cache_for
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.progress import Progress
from trtforge.formats.hf import TOKENIZER_DIRECTORY


def build_engine(build: EngineBuild, *, force: bool, progress: Progress) -> Produced:
    """Build the engine, or find it at `build.out`.

    Raises LoggedError for a rank that failed; the finished ones stay for the next run. Raises ForgeError for a place of
    another release or GPU, and for an engine that is not as planned.
    """
    asked = asked_target(build)
    identity = Identity(
        stage="engine",
        config={
            "backend": "tensorrt_llm",
            "build_config": build.build_config,
            "features": build.plan.features.model_dump(mode="json"),
        },
        inputs={"checkpoint": build.digest},
        versions={"trtforge": __version__, **asked.target.versions},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        build.logs.mkdir(exist_ok=True)
        records = build_ranks(build, directory, asked.gpus, TimingCache.of(asked.target), progress)
        tokenizer = build.checkpoint / TOKENIZER_DIRECTORY
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, directory / TOKENIZER_DIRECTORY)
        return records

    about = about_engine(build.model, f"TensorRT-LLM {build.plan.release.version}")
    return produce(build.out, identity, write, force=force, cache=cache_for(about))
