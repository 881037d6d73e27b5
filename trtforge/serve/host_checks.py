"""Checks the versions and GPUs of the serving machine or image against what the engine needs."""

import logging
import os
from collections.abc import Iterator

from trtforge.core.errors import ForgeError
from trtforge.core.packages import installed_release, same_minor
from trtforge.formats.engine_target import EngineTarget, TargetEnvironment, require_fit, unknown_origin
from trtforge.formats.releases import containers_with
from trtforge.formats.triton import RepositoryFacts
from trtforge.machine.nvml import VISIBLE_DEVICES, GpuFacts, LoadNvml, load_nvml, read_driver
from trtforge.serve.launchers import Launch

_LOG = logging.getLogger(__name__)


def check_versions(facts: RepositoryFacts, launch: Launch) -> None:
    """Compare a TensorRT-LLM engine with the versions of the launch: the image's, or those installed here.

    Raises ForgeError naming the field that prevents the engine from running; logs a warning for a field that may
    prevent it.
    """
    if facts.backend == "llmapi" and launch.container is None:
        _check_llm_api(facts)
    if facts.backend != "tensorrt_llm":
        return
    if (unknown := unknown_origin(facts.target)) is not None:
        _LOG.warning(unknown)
    environment = TargetEnvironment.of_container(launch.container) if launch.container is not None else installed()
    for warning in require_fit(facts.target, environment):
        _LOG.warning(warning)


def check_gpus(facts: RepositoryFacts, launch: Launch, load: LoadNvml = load_nvml) -> None:
    """Compare a TensorRT-LLM engine with the GPUs of its ranks: the first ones visible to the launch.

    Raises ForgeError for too few GPUs and for another compute capability; logs a warning for another GPU model.
    """
    if facts.backend != "tensorrt_llm":
        return
    chosen = None if launch.launcher == "docker" else os.environ.get(VISIBLE_DEVICES)  # a container gets all GPUs
    gpus = visible_gpus(load, chosen)
    needed = facts.world_size // len(launch.hostfile) if launch.hostfile else facts.gpu_count
    if gpus is None:
        _LOG.warning("the engine is not checked against the GPUs: listing them needs nvidia-ml-py")
        return
    if len(gpus) < needed:
        raise ForgeError(
            f"the engine has {needed} ranks, {len(gpus)} GPUs are visible here",
            hint="Serve it with a GPU per rank (CUDA_VISIBLE_DEVICES may hide some), or convert with a lower --tp.",
        )
    for warning in dict.fromkeys(_warnings(facts, gpus[:needed])):
        _LOG.warning(warning)


def installed() -> TargetEnvironment:
    """This machine's versions, from its Python packages and the CUDA_VERSION of NVIDIA's containers."""
    offers = EngineTarget(
        tensorrt_llm=installed_release("tensorrt_llm"),
        tensorrt=installed_release("tensorrt"),
        cuda=os.environ.get("CUDA_VERSION") or None,
    )
    return TargetEnvironment("this machine", offers)


def visible_gpus(load: LoadNvml, chosen: str | None) -> tuple[GpuFacts, ...] | None:
    """The GPUs that are visible with CUDA_VISIBLE_DEVICES=`chosen`, in the driver's order.

    Empty without a working driver; None if nvidia-ml-py is not installed.
    """
    try:
        nvml = load()
    except ImportError:
        return None
    try:
        driver = read_driver(nvml)
    except nvml.NVMLError:
        return ()
    by_index = {gpu.index: gpu for gpu in driver.gpus}
    return tuple(by_index[index] for index in driver.visible(chosen))


def _check_llm_api(facts: RepositoryFacts) -> None:
    """Raises ForgeError if another release is installed here; a missing one is reported by `require_runnable`."""
    here = installed_release("tensorrt_llm")
    if here is None or same_minor(here, facts.tensorrt_llm):
        return
    images = containers_with(facts.tensorrt_llm)
    instead = f"use --launcher docker ({images[0].image})" if images else "serve it where that release is installed"
    raise ForgeError(
        f"the engine is for TensorRT-LLM {facts.tensorrt_llm}, this machine has TensorRT-LLM {here}",
        hint="The LLM API's arguments differ between releases: "
        f"run `trtforge compile CHECKPOINT OUT --backend llmapi --target-version {here}`, or {instead}.",
    )


def _warnings(facts: RepositoryFacts, gpus: tuple[GpuFacts, ...]) -> Iterator[str]:
    for gpu in gpus:
        offers = EngineTarget(sm=str(gpu.sm) if gpu.sm is not None else None, gpu=gpu.name)
        yield from require_fit(facts.target, TargetEnvironment(f"GPU {gpu.index} here", offers))
