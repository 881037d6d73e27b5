"""What an engine is built with, as the place says where it is built, and whether that is what the engine is for."""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import Field

from trtforge.compile.build_site import BuildSite, chosen_gpus
from trtforge.compile.engine_build import EngineBuild
from trtforge.compile.jobs import Job, Observer, run_jobs
from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, LoggedError
from trtforge.core.json_text import parse_json
from trtforge.core.packages import release_of
from trtforge.formats.engine_target import EngineTarget
from trtforge.plan.gpus import GPUS, Gpu, product_of, require_formats

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class AskedTarget:
    """The answer, and the GPUs to build on as CUDA_VISIBLE_DEVICES names them."""

    target: EngineTarget
    gpus: tuple[str, ...]


class _FoundGpu(Config):
    gpu: str
    sm: str
    memory: int

    @property
    def kind(self) -> tuple[str, str]:
        """What ranks must share; equal GPUs may report a little more or less memory."""
        return self.gpu, self.sm


class _Found(Config):
    """What `target` in inside/rank.py prints."""

    tensorrt_llm: str
    tensorrt: str
    cuda: str | None
    gpus: list[_FoundGpu] = Field(default_factory=list)


def asked_target(build: EngineBuild) -> AskedTarget:
    """Ask the place of the build for its versions and GPUs.

    Raises LoggedError if it does not answer, ForgeError where TensorRT-LLM is another release, the GPUs differ, have
    another SM than the one that the engine is for, or do not have its number formats. Another GPU of that SM is logged.
    """
    place, release, gpu, chosen = build.place, build.plan.release, build.gpu, chosen_gpus(os.environ)
    if chosen == ():
        raise ForgeError("CUDA_VISIBLE_DEVICES is empty: it hides every GPU", hint="Unset it, or name the GPUs in it.")
    found = _ask(place, chosen, build.logs)
    version = release_of(found.tensorrt_llm)
    if version != release.version:
        raise ForgeError(
            f"{place.name} has TensorRT-LLM {version}, the engine is for {release.version}",
            hint=f"Target that with --target-version {version}, or name another image with --container IMAGE.",
        )
    if not found.gpus:
        raise ForgeError(f"{place.name} has no GPU", hint="Check `nvidia-smi` and CUDA_VISIBLE_DEVICES.")
    first, *others = found.gpus[: min(build.workers, len(build.ranks))]
    if any(other.kind != first.kind for other in others):
        raise ForgeError(
            f"the GPUs are not of one kind: {', '.join(each.gpu for each in (first, *others))}",
            hint="All ranks must be tuned on the GPU they are for: choose equal ones with CUDA_VISIBLE_DEVICES.",
        )
    if gpu is not None:
        _require_target(gpu, first)
    require_formats(replace(GPUS[0], name=first.gpu, sm=int(first.sm)), build.model.quantization)
    target = EngineTarget(tensorrt_llm=version, tensorrt=found.tensorrt, cuda=found.cuda, sm=first.sm, gpu=first.gpu)
    names = chosen if chosen is not None else tuple(map(str, range(len(found.gpus))))
    return AskedTarget(target, names[: len(found.gpus)])


def _require_target(gpu: Gpu, found: _FoundGpu) -> None:
    """As for serving: another SM does not run the engine; another GPU of it does, with kernels tuned elsewhere."""
    if str(gpu.sm) != found.sm:
        raise ForgeError(
            f"the engine is for {gpu.name} (SM {gpu.sm}), and the GPU here is {found.gpu} (SM {found.sm})",
            hint="TensorRT tunes an engine on the GPU it is for: build it there, or choose another target GPU.",
        )
    if product_of(found.gpu, found.memory) != gpu:
        _LOG.warning(
            f"the engine is for {gpu.name}, and the GPU here is {found.gpu} with {found.memory / 1e9:.1f} GB (both SM "
            f"{gpu.sm}): it will run on {gpu.name}, with kernels that were the fastest on the GPU here"
        )


def _ask(place: BuildSite, chosen: Sequence[str] | None, logs: Path) -> _Found:
    """The last line that is an object: images and libraries greet before it. The log of a failure goes to `logs`."""
    with TemporaryDirectory(prefix="trtforge-") as scratch:
        job = Job("asking for versions and GPUs", place.target(chosen), Path(scratch), Path(scratch) / "target.log")
        try:
            run_jobs([[job]], Observer())
        except LoggedError as error:
            raise _failure(error.message, job.log, logs) from None
        lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        try:
            return _Found.parse(parse_json(lines[-1], place.name, hint=""), place.name)
        except (IndexError, ValueError, TypeError, ForgeError):
            raise _failure(f"{place.name} did not say its versions and GPUs", job.log, logs) from None


def _failure(message: str, log: Path, logs: Path) -> LoggedError:
    logs.mkdir(parents=True, exist_ok=True)
    kept = Path(shutil.copy(log, logs))
    return LoggedError(
        message,
        hint=f"TensorRT-LLM, TensorRT and torch must load there, with a GPU. What was said is in {kept}.",
        log=kept,
    )
