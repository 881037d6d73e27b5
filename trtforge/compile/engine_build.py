"""One TensorRT-LLM engine to build: what it is, where it comes from, where it goes, and where that happens."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from trtforge.compile.build_config import BuildPlan
from trtforge.compile.build_site import BuildSite
from trtforge.compile.timing_cache import SETTINGS
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.gpus import Gpu


@dataclass(frozen=True)
class EngineBuild:
    """`checkpoint` was checked, and `digest` is its manifest's. `gpu`: what the engine is for, None for any."""

    plan: BuildPlan
    model: CheckpointConfig
    checkpoint: Path
    digest: str
    out: Path
    place: BuildSite
    workers: int
    gpu: Gpu | None

    @property
    def build_config(self) -> dict[str, JsonValue]:
        """The exact BuildConfig of every rank."""
        return build_config_of(self.plan)

    @property
    def logs(self) -> Path:
        """The directory of the logs: beside the engine, since an artifact holds no times."""
        return self.out.parent / f"{self.out.name}.logs"

    @property
    def ranks(self) -> range:
        """Every rank has an engine file, context-parallel ones too."""
        return range(self.model.parallel.world_size)


def build_config_of(plan: BuildPlan) -> dict[str, JsonValue]:
    """The BuildConfig that a rank of `plan` is built with."""
    return {**plan.to_json(), **SETTINGS}


def rank_directory(partial: Path, rank: int) -> Path:
    """Where a rank is built while its engine grows in `partial`."""
    return partial / f".rank{rank}"
