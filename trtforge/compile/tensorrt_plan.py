"""The plan of a TensorRT-LLM build: configuration, build site and commands."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.compile import tensorrt_llm
from trtforge.compile.build_config import BuildPlan, build_config, in_flight_batching
from trtforge.compile.build_site import BuildSite, ContainerSite, chosen_gpus, lanes
from trtforge.compile.build_site_choice import chosen_site
from trtforge.compile.engine_build import build_config_of, rank_directory
from trtforge.compile.machine import Machine
from trtforge.core.artifact import partial_directory
from trtforge.core.recipe import EngineConfig
from trtforge.formats.releases import release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.limits import EngineLimits
from trtforge.plan.runtime_keys import runtime_keys


@dataclass(frozen=True)
class TensorRTPlan:
    """A TensorRT-LLM build: its configuration, build site, and equivalent trtllm-build commands."""

    build: BuildPlan
    commands: tuple[tensorrt_llm.RankCommand, ...]
    container: tuple[str, ...]
    image: str | None
    place: BuildSite
    checkpoint: Path
    out: Path
    workers: int

    def as_json(self) -> dict[str, Any]:
        """The output of --dry-run."""
        return {
            "backend": "tensorrt_llm",
            "tensorrt_llm": self.build.release.version,
            "build_config": build_config_of(self.build),
            "features": self.build.features.model_dump(mode="json", exclude_none=True),
            "runtime_keys": {key.key: key.value for key in runtime_keys(self.build.features)},
            "in_flight_batching": in_flight_batching(self.build),
            "longest_prompt": self.build.limits.longest_prompt,
            "ranks": [{"rank": c.rank, "command": list(c.argv), "writes": list(c.writes)} for c in self.commands],
            "one_run_builds_all_ranks": True,
            "place": self.place.name,
            "runs": self._runs(),
            "image": self.image,
            "container_command": list(self.container),
            "warnings": list(self.build.warnings),
            "notes": list(self.build.notes),
        }

    def _runs(self) -> list[dict[str, Any]]:
        """The processes that trtforge starts per rank, on the GPUs of CUDA_VISIBLE_DEVICES or one GPU per rank."""
        ranks = range(len(self.commands))
        gpus = chosen_gpus(os.environ) or tuple(map(str, ranks))
        partial = partial_directory(self.out)
        runs = []
        for gpu, dealt in lanes(ranks, gpus, self.workers):
            for rank in dealt:
                directory = rank_directory(partial, rank)
                run = self.place.rank(rank, gpu, self.checkpoint, directory)
                runs.append(
                    {
                        "rank": rank,
                        "gpu": gpu,
                        "directory": str(directory),
                        "environment": dict(run.environment),
                        "command": list(run.argv),
                    }
                )
        return sorted(runs, key=lambda run: run["rank"])


def tensorrt_plan(
    model: CheckpointConfig,
    config: EngineConfig,
    limits: EngineLimits,
    checkpoint: Path,
    out: Path,
    workers: int,
    container: str | None,
    machine: Machine,
) -> TensorRTPlan:
    """The plan of a build on `machine`. Raises ForgeError for settings that the target release refuses."""
    target = release(config.target.tensorrt_llm)
    plan = build_config(model, config, limits, target)
    commands = tensorrt_llm.commands(checkpoint, out, plan, model.parallel.world_size, workers)
    place = chosen_site(container, target, machine, out)
    image = place.image if isinstance(place, ContainerSite) else None
    return TensorRTPlan(
        build=plan,
        commands=commands,
        container=tensorrt_llm.in_container(commands[0], checkpoint, out, image) if image else (),
        image=image,
        place=place,
        checkpoint=checkpoint,
        out=out,
        workers=workers,
    )
