"""The compile stage: what will be built is planned from metadata alone, for every backend; then it is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge import __version__
from trtforge.compile import llmapi, tensorrt_llm
from trtforge.compile.build_config import BuildPlan, build_config, in_flight_batching
from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_sources import CheckpointSource, HuggingFaceSource, Source, identity_of, write_engine
from trtforge.compile.torch import TorchPlan, build_rank, torch_plan
from trtforge.core.artifact import Produced, produce
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


@dataclass(frozen=True)
class CompileOptions:
    """How TensorRT-LLM's builder is run. `container`: the image to build in, None for this machine.

    `parallel`: the layout in which the LLM API runs a Hugging Face directory; a checkpoint has its own.
    """

    workers: int = 1
    container: str | None = None
    parallel: Parallel | None = None


@dataclass(frozen=True)
class TensorRTPlan:
    """A TensorRT-LLM build: its configuration and the commands, rank by rank."""

    build: BuildPlan
    commands: tuple[tensorrt_llm.RankCommand, ...]
    container: tuple[str, ...]
    image: str

    def as_json(self) -> dict[str, Any]:
        """What --dry-run prints."""
        return {
            "backend": "tensorrt_llm",
            "tensorrt_llm": self.build.release.version,
            "build_config": self.build.to_json(),
            "in_flight_batching": in_flight_batching(self.build),
            "longest_prompt": self.build.limits.longest_prompt,
            "ranks": [{"rank": c.rank, "command": list(c.argv), "writes": list(c.writes)} for c in self.commands],
            "one_run_builds_all_ranks": True,
            "image": self.image,
            "container_command": list(self.container),
            "warnings": list(self.build.warnings),
            "notes": list(self.build.notes),
        }


EnginePlan = TensorRTPlan | TorchPlan | LlmapiPlan


def plan_engine(config: EngineConfig, checkpoint: Path, out: Path, options: CompileOptions) -> EnginePlan:
    """What `compile_engine` would do for the checkpoint directory, from its config.json alone."""
    if config.backend == "llmapi" and is_hugging_face(checkpoint):
        return llmapi.plan_for_hugging_face(checkpoint, options.parallel or Parallel(), config)
    _require_own_layout(options)
    return plan_for(read_checkpoint_config(checkpoint), config, checkpoint, out, options)


def plan_for(
    model: CheckpointConfig, config: EngineConfig, checkpoint: Path, out: Path, options: CompileOptions
) -> EnginePlan:
    """What would be built for a checkpoint of this configuration, which need not exist yet.

    Raises ForgeError for limits that cannot be and for what the target release is known to refuse.
    """
    gpu = gpu_named(config.target.gpu) if config.target.gpu is not None else None
    if config.backend == "llmapi":
        if gpu is not None:
            require_formats(gpu, model.quantization)
        return llmapi.plan_for_checkpoint(model, config)
    limits = _limits(model, config)
    if _backend(config) == "torch":
        return torch_plan(model, config, limits)
    if gpu is not None:
        require_formats(gpu, model.quantization)
    target = release(config.target.tensorrt_llm)
    plan = build_config(model, config, limits, target)
    commands = tensorrt_llm.commands(checkpoint, out, plan, model.parallel.world_size, options.workers)
    image = options.container or tensorrt_llm.image_for(target)
    return TensorRTPlan(plan, commands, tensorrt_llm.in_container(commands[0], checkpoint, out, image), image)


def compile_engine(
    config: EngineConfig,
    checkpoint: Path,
    out: Path,
    options: CompileOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Produced:
    """Build the engine of `checkpoint` at `out`, or find it there.

    The llmapi backend also takes a Hugging Face directory. Raises ForgeError for a damaged checkpoint, impossible
    limits, and for the tensorrt_llm backend where it cannot run.
    """
    options, progress = options or CompileOptions(), progress or Silent()
    if config.backend == "llmapi":
        llmapi_plan = plan_engine(config, checkpoint, out, options)
        assert isinstance(llmapi_plan, LlmapiPlan)
        return compile_planned(llmapi_plan, checkpoint, out, force=force, progress=progress)
    manifest = open_artifact(checkpoint, "checkpoint")
    model = read_checkpoint_config(checkpoint)
    plan = plan_for(model, config, checkpoint, out, options)
    if isinstance(plan, TensorRTPlan):
        tensorrt_llm.require_available()
        raise ForgeError(
            "building TensorRT-LLM engines is not part of this release of trtforge",
            hint=f"--dry-run prints the exact command: {' '.join(plan.commands[0].argv[:1])} ...; run it yourself, "
            "or use --backend torch.",
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

    return produce(out, identity, write, force=force)


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


def _limits(model: CheckpointConfig, config: EngineConfig) -> Limits:
    default = release(config.target.tensorrt_llm).field("plugin_config", "tokens_per_block").default
    assert isinstance(default, int)
    return derive_limits(model, config, default)


def _backend(config: EngineConfig) -> str:
    """`auto` is torch as long as trtforge plans TensorRT-LLM builds but does not run them."""
    return "torch" if config.backend == "auto" else config.backend


def _copy_tokenizer(checkpoint: Path, directory: Path) -> None:
    """The tokenizer goes along, so that an engine can be packaged without the Hugging Face directory."""
    from shutil import copytree

    if (checkpoint / TOKENIZER_DIRECTORY).is_dir():
        copytree(checkpoint / TOKENIZER_DIRECTORY, directory / TOKENIZER_DIRECTORY)


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
