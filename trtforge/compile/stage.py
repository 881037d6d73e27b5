"""The compile stage: what will be built is planned from metadata alone, for every backend; then it is built."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtforge import __version__
from trtforge.compile import llmapi, tensorrt_llm
from trtforge.compile.about import about_engine
from trtforge.compile.build_config import BuildPlan, build_config, in_flight_batching
from trtforge.compile.engine_build import EngineBuild, build_config_of, rank_directory
from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_sources import CheckpointSource, HuggingFaceSource, Source, identity_of, write_engine
from trtforge.compile.machine import Machine, this_machine
from trtforge.compile.place import Container, Place, chosen_gpus, lanes
from trtforge.compile.places import NO_CONTAINER, chosen_place, require_place
from trtforge.compile.tensorrt_engine import build_engine
from trtforge.compile.torch import TorchPlan, build_rank, torch_plan
from trtforge.core.artifact import Produced, partial_directory, produce
from trtforge.core.cache import cache_for
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import FileRecord, Identity, open_artifact
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import EngineConfig
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.releases import release
from trtforge.formats.trtllm import (
    CONFIG_FILE,
    CheckpointConfig,
    is_hugging_face,
    rank_file,
    read_checkpoint_config,
)
from trtforge.plan.gpus import gpu_named, require_formats
from trtforge.plan.limits import Limits, derive_limits
from trtforge.plan.runtime_keys import runtime_keys


@dataclass(frozen=True)
class CompileOptions:
    """How TensorRT-LLM's builder is run. `container`: the image to build in, `none` for this machine; see places.py.

    `parallel`: the layout in which the LLM API runs a Hugging Face directory; a checkpoint has its own.
    """

    workers: int = 1
    container: str | None = None
    parallel: Parallel | None = None


@dataclass(frozen=True)
class TensorRTPlan:
    """A TensorRT-LLM build: its configuration, where it goes on, and the commands of TensorRT-LLM's own program."""

    build: BuildPlan
    commands: tuple[tensorrt_llm.RankCommand, ...]
    container: tuple[str, ...]
    image: str
    place: Place
    checkpoint: Path
    out: Path
    workers: int

    def as_json(self) -> dict[str, Any]:
        """What --dry-run prints."""
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
        """What trtforge itself starts for each rank, if the GPUs are those of CUDA_VISIBLE_DEVICES, or enough."""
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


EnginePlan = TensorRTPlan | TorchPlan | LlmapiPlan


def plan_engine(
    config: EngineConfig, checkpoint: Path, out: Path, options: CompileOptions, *, machine: Machine | None = None
) -> EnginePlan:
    """What `compile_engine` would do for the checkpoint directory, from its config.json alone."""
    if config.backend == "llmapi" and is_hugging_face(checkpoint):
        _require_no_container(options, "llmapi")
        return llmapi.plan_for_hugging_face(checkpoint, options.parallel or Parallel(), config)
    _require_own_layout(options)
    return plan_for(read_checkpoint_config(checkpoint), config, checkpoint, out, options, machine=machine)


def plan_for(
    model: CheckpointConfig,
    config: EngineConfig,
    checkpoint: Path,
    out: Path,
    options: CompileOptions,
    *,
    machine: Machine | None = None,
) -> EnginePlan:
    """What would be built on `machine` (None: this one) for a checkpoint so configured, which need not exist yet.

    Raises ForgeError for limits that cannot be and for what the target release is known to refuse.
    """
    gpu = gpu_named(config.target.gpu) if config.target.gpu is not None else None
    if config.backend == "llmapi":
        _require_no_container(options, "llmapi")
        if gpu is not None:
            require_formats(gpu, model.quantization)
        return llmapi.plan_for_checkpoint(model, config)
    limits = _limits(model, config)
    machine = machine or this_machine()
    if backend_of(config, machine) == "torch":
        _require_no_container(options, "torch")
        return torch_plan(model, config, limits)
    if gpu is not None:
        require_formats(gpu, model.quantization)
    target = release(config.target.tensorrt_llm)
    plan = build_config(model, config, limits, target)
    commands = tensorrt_llm.commands(checkpoint, out, plan, model.parallel.world_size, options.workers)
    place = chosen_place(options.container, target, machine, out)
    image = place.image if isinstance(place, Container) else tensorrt_llm.image_for(target)
    return TensorRTPlan(
        build=plan,
        commands=commands,
        container=tensorrt_llm.in_container(commands[0], checkpoint, out, image),
        image=image,
        place=place,
        checkpoint=checkpoint,
        out=out,
        workers=options.workers,
    )


def compile_engine(
    config: EngineConfig,
    checkpoint: Path,
    out: Path,
    options: CompileOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> Produced:
    """Build the engine of `checkpoint` at `out` on `machine` (None: this one), or find it there.

    The llmapi backend also takes a Hugging Face directory. Raises ForgeError for a damaged checkpoint, impossible
    limits, and for the tensorrt_llm backend where it cannot run; LoggedError for a rank that TensorRT-LLM failed to
    build.
    """
    options, progress, machine = options or CompileOptions(), progress or Silent(), machine or this_machine()
    if config.backend == "llmapi":
        llmapi_plan = plan_engine(config, checkpoint, out, options)
        assert isinstance(llmapi_plan, LlmapiPlan)
        return compile_planned(llmapi_plan, checkpoint, out, force=force, progress=progress)
    _require_own_layout(options)
    manifest = open_artifact(checkpoint, "checkpoint")
    model = read_checkpoint_config(checkpoint)
    plan = plan_for(model, config, checkpoint, out, options, machine=machine)
    if isinstance(plan, TensorRTPlan):
        require_place(plan.place, plan.build.release, machine)
        gpu = gpu_named(config.target.gpu) if config.target.gpu is not None else None
        return build_engine(
            EngineBuild(plan.build, model, checkpoint, manifest.digest, out, plan.place, plan.workers, gpu),
            force=force,
            progress=progress or Silent(),
        )
    assert isinstance(plan, TorchPlan)
    identity = Identity(
        stage="engine",
        config=plan.identity() | {"target": config.target.tensorrt_llm},
        inputs={"checkpoint": manifest.digest},
        versions={"trtforge": __version__, "torch": _torch_version()},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        (directory / CONFIG_FILE).write_text(plan.config_json(target=config.target.tensorrt_llm))
        _copy_tokenizer(checkpoint, directory)
        ranks = model.parallel.ranks
        with progress.bar("Compiling", len(ranks), "ranks") as bar:
            for rank in ranks:
                build_rank(plan, checkpoint, rank.index, directory / rank_file(rank.index))
                bar.advance(1)
        return {}

    return produce(out, identity, write, force=force, cache=cache_for(about_engine(model, "torch")))


def compile_planned(
    plan: LlmapiPlan, checkpoint: Path, out: Path, *, force: bool = False, progress: Progress | None = None
) -> Produced:
    """Write an llmapi engine by its plan at `out`, or find it there."""
    source: Source
    if plan.made_from == "hugging_face":
        source = HuggingFaceSource.open(checkpoint)
    else:
        manifest = open_artifact(checkpoint, "checkpoint")
        source = CheckpointSource.open(checkpoint, manifest, read_checkpoint_config(checkpoint))

    def write(directory: Path) -> Mapping[str, FileRecord]:
        return write_engine(plan, source, directory, progress or Silent())

    return produce(out, identity_of(plan, source), write, force=force)


def _require_own_layout(options: CompileOptions) -> None:
    if options.parallel is not None:
        raise UsageError(
            "--tp, --pp and --ep are of a Hugging Face directory that backend llmapi runs; a checkpoint has its layout",
            hint="Leave them out, or convert to another layout.",
        )


def _require_no_container(options: CompileOptions, backend: str) -> None:
    if options.container not in (None, NO_CONTAINER):
        raise ForgeError(
            f"--container: the {backend} backend builds in no container",
            hint="Add --backend tensorrt_llm, or leave it out.",
        )


def _limits(model: CheckpointConfig, config: EngineConfig) -> Limits:
    default = release(config.target.tensorrt_llm).field("plugin_config", "tokens_per_block").default
    assert isinstance(default, int)
    return derive_limits(model, config, default)


def backend_of(config: EngineConfig, machine: Machine | None = None) -> Literal["tensorrt_llm", "torch", "llmapi"]:
    """The backend that builds; `auto` is that of `machine` (None: this one)."""
    return (machine or this_machine()).backend if config.backend == "auto" else config.backend


def _copy_tokenizer(checkpoint: Path, directory: Path) -> None:
    """The tokenizer goes along, so that an engine can be packaged without the Hugging Face directory."""
    from shutil import copytree

    if (checkpoint / TOKENIZER_DIRECTORY).is_dir():
        copytree(checkpoint / TOKENIZER_DIRECTORY, directory / TOKENIZER_DIRECTORY)


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
