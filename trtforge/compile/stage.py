"""The compile stage, for every backend: plan the engine from metadata alone, then build it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from trtforge.compile import llmapi
from trtforge.compile.build_site_choice import NO_CONTAINER, require_site
from trtforge.compile.engine_build import EngineBuild
from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_engine import write_llmapi_engine
from trtforge.compile.machine import Machine, this_machine
from trtforge.compile.tensorrt_engine import build_engine
from trtforge.compile.tensorrt_plan import TensorRTPlan, tensorrt_plan
from trtforge.compile.torch import TorchPlan, torch_plan
from trtforge.compile.torch_engine import build_torch_engine
from trtforge.core.artifact import Produced
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import EngineConfig, ResolvedBackend
from trtforge.formats.foreign import checkpoint_manifest, foreign_note
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.tokenizer import require_tokenizer
from trtforge.formats.triton import target_release
from trtforge.formats.trtllm import (
    CheckpointConfig,
    is_hugging_face,
    read_checkpoint_config,
)
from trtforge.plan.gpus import gpu_named, require_formats
from trtforge.plan.limits import EngineLimits, derive_limits
from trtforge.plan.speculation import with_stored_heads


@dataclass(frozen=True)
class CompileOptions:
    """How TensorRT-LLM's builder is run. `container`: image to build in, `none` for this machine; see build_site.py.

    `parallel`: the layout in which the LLM API runs a Hugging Face checkpoint, `fp8_cache`: whether its KV cache is
    FP8; TensorRT-LLM checkpoints have their own.
    """

    workers: int = 1
    container: str | None = None
    parallel: Parallel | None = None
    fp8_cache: bool = False


EnginePlan = TensorRTPlan | TorchPlan | LlmapiPlan

_NOT_TENSORRT = (
    "backend auto: TensorRT-LLM is not installed here beside a GPU, so this is the embedded engine. Backend "
    "tensorrt_llm (engine.backend in a recipe) builds TensorRT-LLM's, in NVIDIA's container if need be"
)


def plan_engine(
    config: EngineConfig, checkpoint: Path, out: Path, options: CompileOptions, *, machine: Machine | None = None
) -> EnginePlan:
    """The plan of `compile_engine` for a checkpoint directory, from its config.json alone."""
    if config.backend == "llmapi" and is_hugging_face(checkpoint):
        _require_no_container(options, "llmapi")
        parallel = options.parallel or Parallel()
        return llmapi.plan_for_hugging_face(checkpoint, parallel, config, fp8_cache=options.fp8_cache)
    _require_own_layout(options)
    return engine_plan_for(read_checkpoint_config(checkpoint), config, checkpoint, out, options, machine=machine)


def engine_plan_for(
    model: CheckpointConfig,
    config: EngineConfig,
    checkpoint: Path,
    out: Path,
    options: CompileOptions,
    *,
    machine: Machine | None = None,
) -> EnginePlan:
    """The plan of a build on `machine` (None: this one) for a checkpoint configuration; its files need not exist yet.

    Raises ForgeError for impossible limits and for settings that the target release refuses.
    """
    gpu = gpu_named(config.target.gpu) if config.target.gpu is not None else None
    if config.backend == "llmapi":
        _require_no_container(options, "llmapi")
        if gpu is not None:
            require_formats(gpu, model.quantization)
        return llmapi.plan_for_checkpoint(model, config)
    machine = machine or this_machine()
    embedded = backend_of(config, machine) == "torch"
    features = with_stored_heads(config.features, model, embedded=embedded)
    config = config.model_copy(update={"features": features})
    limits = _limits(model, config)
    if embedded:
        _require_no_container(options, "torch")
        plan = torch_plan(model, config, limits)
        return replace(plan, warnings=(_NOT_TENSORRT,)) if config.backend == "auto" and gpu is not None else plan
    if gpu is not None:
        require_formats(gpu, model.quantization)
    return tensorrt_plan(model, config, limits, checkpoint, out, options.workers, options.container, machine)


def warnings_of(plan: EnginePlan) -> tuple[str, ...]:
    """The warnings of a plan, to show before it is built."""
    return tuple(plan.as_json()["warnings"])


def require_buildable(plan: EnginePlan, machine: Machine | None = None) -> None:
    """Raise ForgeError if `machine` (None: this one) cannot build the plan."""
    if isinstance(plan, TensorRTPlan):
        require_site(plan.place, plan.build.release, machine or this_machine())


def compile_engine(
    config: EngineConfig,
    checkpoint: Path,
    out: Path,
    options: CompileOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    machine: Machine | None = None,
    warn: Callable[[str], object] = lambda warning: None,
) -> Produced:
    """Build the engine of `checkpoint` at `out` on `machine` (None: this one), or reuse it.

    `warn` gets the note on a foreign checkpoint and each warning of the plan before the work. The llmapi backend also
    accepts a Hugging Face checkpoint. Raises ForgeError for a damaged checkpoint, impossible limits, or a machine that
    cannot build for the tensorrt_llm backend; LoggedError if TensorRT-LLM fails to build a rank.
    """
    options, progress, machine = options or CompileOptions(), progress or Silent(), machine or this_machine()
    if (note := foreign_note(checkpoint)) is not None:
        warn(note)
    if config.backend == "llmapi":
        llmapi_plan = plan_engine(config, checkpoint, out, options)
        assert isinstance(llmapi_plan, LlmapiPlan)
        _tell(llmapi_plan, warn)
        return write_llmapi_engine(llmapi_plan, checkpoint, out, force=force, progress=progress)
    _require_own_layout(options)
    if is_hugging_face(checkpoint):
        raise ForgeError(
            f"{checkpoint} is a Hugging Face checkpoint",
            hint=f"Run `trtforge convert {quote(str(checkpoint))} CHECKPOINT` and give its result; only the llmapi "
            "backend takes a Hugging Face checkpoint.",
        )
    manifest = checkpoint_manifest(checkpoint)
    model = read_checkpoint_config(checkpoint)
    plan = engine_plan_for(model, config, checkpoint, out, options, machine=machine)
    require_tokenizer(checkpoint / TOKENIZER_DIRECTORY, model.vocab_size)
    if isinstance(plan, TensorRTPlan):
        require_buildable(plan, machine)
    _tell(plan, warn)
    if isinstance(plan, TensorRTPlan):
        gpu = gpu_named(config.target.gpu) if config.target.gpu is not None else None
        return build_engine(
            EngineBuild(plan.build, model, checkpoint, manifest.digest, out, plan.place, plan.workers, gpu),
            force=force,
            progress=progress,
        )
    assert isinstance(plan, TorchPlan)
    return build_torch_engine(
        plan, checkpoint, manifest.digest, config.target.tensorrt_llm, out, force=force, progress=progress
    )


def _tell(plan: EnginePlan, warn: Callable[[str], object]) -> None:
    for warning in warnings_of(plan):
        warn(warning)


def _require_own_layout(options: CompileOptions) -> None:
    if options.parallel is not None:
        raise UsageError(
            "--tp, --pp and --ep apply only to a Hugging Face checkpoint with the llmapi backend",
            hint="Leave them out; to change the layout of a TensorRT-LLM checkpoint, convert again.",
        )


def _require_no_container(options: CompileOptions, backend: str) -> None:
    if options.container not in (None, NO_CONTAINER):
        raise ForgeError(
            f"--container applies only to the tensorrt_llm backend, not to {backend}",
            hint="Add --backend tensorrt_llm, or leave it out.",
        )


def _limits(model: CheckpointConfig, config: EngineConfig) -> EngineLimits:
    target = target_release(config.target.tensorrt_llm, embedded=backend_of(config) == "torch")
    default = target.field("plugin_config", "tokens_per_block").default
    assert isinstance(default, int)
    return derive_limits(model, config, default)


def backend_of(config: EngineConfig, machine: Machine | None = None) -> ResolvedBackend:
    """The backend of the build; `auto` is resolved for `machine` (None: this one)."""
    return (machine or this_machine()).backend if config.backend == "auto" else config.backend
