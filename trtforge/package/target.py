"""The release and GPU that will serve a repository, and whether the engine can run there, by versions and names."""

from dataclasses import replace

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.formats.engine_target import EngineTarget, TargetEnvironment, images_for, require_fit, unknown_origin
from trtforge.formats.releases import containers_of, release
from trtforge.package.engine_facts import EngineFacts
from trtforge.plan.gpus import gpu_named


class PackageTarget(Config):
    """The release and GPU that serve the engine. None: as the engine was built."""

    tensorrt_llm: str | None = Field(None, description="TensorRT-LLM release that serves it.")
    gpu: str | None = Field(None, description="GPU that serves it, such as h100-80gb.")


def check_target(engine: EngineFacts, wanted: PackageTarget) -> tuple[str, ...]:
    """Warnings about serving `engine` on the target `wanted`. Raises ForgeError if it cannot run there.

    A release implies the TensorRT version of its containers. Other backends have no TensorRT to compare.
    """
    if engine.backend != "tensorrt_llm":
        return ()
    built, warnings = engine.target, []
    if (unknown := unknown_origin(built)) is not None:
        warnings.append(unknown)
    if wanted.gpu is not None:
        gpu = gpu_named(wanted.gpu)
        warnings += require_fit(built, TargetEnvironment(f"the target {gpu.name}", EngineTarget(sm=str(gpu.sm))))
    if wanted.tensorrt_llm is not None:
        asked = EngineTarget(tensorrt_llm=release(wanted.tensorrt_llm).version)
        warnings += require_fit(built, TargetEnvironment("the target release", asked))
    containers = containers_of(engine.release)
    if containers and not images_for(built):
        image = TargetEnvironment.of_container(containers[0])
        warnings += require_fit(built, image if wanted.tensorrt_llm is not None else replace(image, sure=False))
    return tuple(warnings)
