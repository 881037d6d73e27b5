"""Query a build site for its versions and GPUs, and check them against the engine's target."""

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
    """The versions and GPUs that the build site reports, and the GPUs to build on, named as in CUDA_VISIBLE_DEVICES."""

    target: EngineTarget
    gpus: tuple[str, ...]


class _FoundGpu(Config):
    gpu: str
    sm: str
    memory: int

    @property
    def kind(self) -> tuple[str, str]:
        """The properties that all ranks' GPUs must share; equal GPUs may report slightly different memory sizes."""
        return self.gpu, self.sm


class _Found(Config):
    """The output of `target` in inside/rank.py."""

    tensorrt_llm: str
    tensorrt: str
    cuda: str | None
    gpus: list[_FoundGpu] = Field(default_factory=list)


def asked_target(build: EngineBuild) -> AskedTarget:
    """Query the build site for its versions and GPUs.

    Raises LoggedError if it does not answer; ForgeError if TensorRT-LLM is another release, the GPUs differ from each
    other, or their SM or number formats do not match the target. Another GPU of the target's SM is a warning.
    """
    place, release, gpu, chosen = build.place, build.plan.release, build.gpu, chosen_gpus(os.environ)
    if chosen == ():
        raise ForgeError("CUDA_VISIBLE_DEVICES is empty: it hides every GPU", hint="Unset it, or list the GPUs to use.")
    found = _ask(place, chosen, build.logs)
    version = release_of(found.tensorrt_llm)
    if version != release.version:
        raise ForgeError(
            f"{place.name} has TensorRT-LLM {version}, the engine is for {release.version}",
            hint=f"Use --target-version {version}, or another image with --container IMAGE.",
        )
    if not found.gpus:
        raise ForgeError(f"{place.name} has no GPU", hint="Check `nvidia-smi` and CUDA_VISIBLE_DEVICES.")
    first, *others = found.gpus[: min(build.workers, len(build.ranks))]
    if any(other.kind != first.kind for other in others):
        raise ForgeError(
            f"the GPUs are of different kinds: {', '.join(each.gpu for each in (first, *others))}",
            hint="All ranks must be tuned on their target GPU: select equal GPUs with CUDA_VISIBLE_DEVICES.",
        )
    if gpu is not None:
        _require_target(gpu, first)
    require_formats(replace(GPUS[0], name=first.gpu, sm=int(first.sm)), build.model.quantization)
    target = EngineTarget(tensorrt_llm=version, tensorrt=found.tensorrt, cuda=found.cuda, sm=first.sm, gpu=first.gpu)
    names = chosen if chosen is not None else tuple(map(str, range(len(found.gpus))))
    return AskedTarget(target, names[: len(found.gpus)])


def _require_target(gpu: Gpu, found: _FoundGpu) -> None:
    """Raises ForgeError for another SM, on which the engine cannot run. Warns of another GPU with the target's SM: the
    engine runs, with kernels tuned for the build's GPU."""
    if str(gpu.sm) != found.sm:
        raise ForgeError(
            f"the engine is for {gpu.name} (SM {gpu.sm}), and the GPU here is {found.gpu} (SM {found.sm})",
            hint="TensorRT tunes an engine on its target GPU: build there, or choose another target GPU.",
        )
    if product_of(found.gpu, found.memory) != gpu:
        _LOG.warning(
            f"the engine is for {gpu.name}, and the GPU here is {found.gpu} with {found.memory / 1e9:.1f} GB (both SM "
            f"{gpu.sm}): it runs on {gpu.name}, with kernels that were selected on the GPU here"
        )


def _ask(place: BuildSite, chosen: Sequence[str] | None, logs: Path) -> _Found:
    """Parse the last JSON line, after the banners of images and libraries. The log of a failure is kept in `logs`."""
    with TemporaryDirectory(prefix="trtforge-") as scratch:
        job = Job("the query for versions and GPUs", place.target(chosen), Path(scratch), Path(scratch) / "target.log")
        try:
            run_jobs([[job]], Observer())
        except LoggedError as error:
            raise _failure(error.message, job.log, logs) from None
        lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        try:
            return _Found.parse(parse_json(lines[-1], place.name, hint=""), place.name)
        except (IndexError, ValueError, TypeError, ForgeError):
            raise _failure(f"{place.name} did not report its versions and GPUs", job.log, logs) from None


def _failure(message: str, log: Path, logs: Path) -> LoggedError:
    logs.mkdir(parents=True, exist_ok=True)
    kept = Path(shutil.copy(log, logs))
    return LoggedError(
        message,
        hint=f"TensorRT-LLM, TensorRT and torch must load there, with a GPU. The output is in {kept}.",
        log=kept,
    )
