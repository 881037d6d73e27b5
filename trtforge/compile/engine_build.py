"""One TensorRT-LLM engine to build: its plan, input, output and build site."""

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
    """`checkpoint` is verified, `digest` is its manifest's. `gpu`: the target GPU, None for any."""

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
        """The directory of the logs: beside the engine, since logs are not reproducible."""
        return self.out.parent / f"{self.out.name}.logs"

    @property
    def ranks(self) -> range:
        """All ranks; context-parallel ranks have engine files too."""
        return range(self.model.parallel.world_size)


def build_config_of(plan: BuildPlan) -> dict[str, JsonValue]:
    """The BuildConfig of the ranks of `plan`."""
    return {**plan.to_json(), **SETTINGS}


def rank_directory(partial: Path, rank: int) -> Path:
    """The working directory of a rank in the engine's partial directory."""
    return partial / f".rank{rank}"
