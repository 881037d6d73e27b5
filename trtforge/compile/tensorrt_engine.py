"""Build a TensorRT-LLM engine. Versions and GPU are part of its identity, so they are queried first."""

from collections.abc import Mapping
from pathlib import Path

from trtforge import __version__
from trtforge.compile.about import about_checkpoint
from trtforge.compile.asked_target import asked_target
from trtforge.compile.engine_build import EngineBuild
from trtforge.compile.rank_builds import build_ranks
from trtforge.compile.timing_cache import TimingCache
from trtforge.core.artifact import Produced, produce
from trtforge.core.cache import cache_for
from trtforge.core.clone import copy_directory
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.progress import Progress
from trtforge.formats.hf import TOKENIZER_DIRECTORY


def build_engine(build: EngineBuild, *, force: bool, progress: Progress) -> Produced:
    """Build the engine, or reuse it from `build.out`.

    Raises LoggedError for a rank that failed; finished ranks are kept for the next run. Raises ForgeError if the build
    site has another release or GPU, or if the engine differs from the plan.
    """
    asked = asked_target(build)
    identity = Identity(
        stage="engine",
        config={
            "backend": "tensorrt_llm",
            "build_config": build.build_config,
            "features": build.plan.features.model_dump(mode="json"),
            **({"runtime_defaults": build.plan.runtime_defaults} if build.plan.runtime_defaults else {}),
        },
        inputs={"checkpoint": build.digest},
        versions={"trtforge": __version__, **asked.target.versions},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        build.logs.mkdir(exist_ok=True)
        records = build_ranks(build, directory, asked.gpus, TimingCache.of(asked.target), progress)
        tokenizer = build.checkpoint / TOKENIZER_DIRECTORY
        if tokenizer.is_dir():
            copy_directory(tokenizer, directory / TOKENIZER_DIRECTORY)
        return records

    about = about_checkpoint(build.model, f"TensorRT-LLM {build.plan.release.version}")
    return produce(build.out, identity, write, force=force, cache=cache_for(about))
