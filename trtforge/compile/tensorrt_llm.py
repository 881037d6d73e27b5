"""The exact `trtllm-build` command of an engine, for machines without trtforge."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from trtforge.compile.build_config import BuildPlan
from trtforge.compile.build_site import docker_run, mount
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Release, Section, containers_of

_PROGRAM = "trtllm-build"


@dataclass(frozen=True)
class RankCommand:
    """The command that builds one rank. `writes`: its files in the output directory.

    trtllm-build has no option for a single rank: one run builds all ranks, `--workers` at a time. All commands of an
    engine therefore have the same `argv`, to be run once.
    """

    rank: int
    argv: tuple[str, ...]
    writes: tuple[str, ...]


def commands(checkpoint: Path, out: Path, plan: BuildPlan, world_size: int, workers: int) -> tuple[RankCommand, ...]:
    """The commands of every rank of the engine `out`; see RankCommand.

    They use options instead of `--build_config FILE`: unknown options are errors, while unknown keys in the file are
    silently ignored, and its rules changed three times.
    """
    if workers < 1:
        raise ForgeError(f"--workers must be at least 1, not {workers}", hint="1 builds one rank after the other.")
    argv = (
        _PROGRAM,
        *("--checkpoint_dir", str(checkpoint.absolute())),
        *("--output_dir", str(out.absolute())),
        *_options(plan.release, "build_config", plan.build_settings),
        *_options(plan.release, "plugin_config", plan.plugin_settings),
        *_options(plan.release, "lora_config", plan.lora_settings),
        *("--workers", str(min(workers, world_size))),
    )
    return tuple(
        RankCommand(rank, argv, (f"rank{rank}.engine", *(("config.json",) if rank == 0 else ())))
        for rank in range(world_size)
    )


def image_for(release: Release) -> str:
    """The container image with `release`. Raises ForgeError if none is known."""
    containers = containers_of(release)
    if not containers:
        raise ForgeError(
            f"no Triton container with TensorRT-LLM {release.version} is known",
            hint="Give an image with --container IMAGE.",
        )
    return containers[0].image


def in_container(command: RankCommand, checkpoint: Path, out: Path, image: str) -> tuple[str, ...]:
    """`command` in a container of `image`. Both directories must exist; their paths are the same inside."""
    return (
        *docker_run("all"),
        *("--mount", mount(checkpoint, read_only=True)),
        *("--mount", mount(out)),
        image,
        *command.argv,
    )


def _options(release: Release, section: Section, settings: dict[str, JsonValue]) -> tuple[str, ...]:
    """The options for `settings`. A setting without an option has the release's default or follows from another
    setting.

    LoRA options have the names of their fields. A flag has no value.
    """
    options: list[str] = []
    for name, value in settings.items():
        flag = f"--{name}" if section == "lora_config" else release.field(section, name).flag
        if flag is None:
            continue
        if release.flags()[flag].type == "flag":
            options += [flag] if value else []
        elif isinstance(value, list):
            options += [flag, *map(str, value)]
        else:
            options += [flag, _argument(section, value)]
    return tuple(options)


def _argument(section: Section, value: JsonValue) -> str:
    """A value in the syntax of trtllm-build's options; plugin options use enable and disable."""
    if section == "plugin_config" and (value is None or isinstance(value, bool)):
        return "enable" if value else "disable"
    return value.lower() if isinstance(value, str) else str(value)
