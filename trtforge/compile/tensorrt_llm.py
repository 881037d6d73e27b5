"""TensorRT-LLM's own program: the exact `trtllm-build` command for an engine, to be run where trtforge is not."""

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
    """How one rank's engine comes about. `writes`: its files, by name in the output directory.

    trtllm-build has no option for one rank: a single run builds them all, `--workers` at a time (serial at 1), so
    the commands of an engine have equal `argv`, to be run once.
    """

    rank: int
    argv: tuple[str, ...]
    writes: tuple[str, ...]


def commands(checkpoint: Path, out: Path, plan: BuildPlan, world_size: int, workers: int) -> tuple[RankCommand, ...]:
    """What to run for every rank of the engine `out`; see RankCommand.

    Options, not `--build_config FILE`: their names are seen in the releases' own output, and an unknown one is an
    error, while the rules for that file changed three times and an unknown key in it is skipped in silence.
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
    """The container image that carries `release`. Raises ForgeError where none is known."""
    containers = containers_of(release)
    if not containers:
        raise ForgeError(
            f"no Triton container with TensorRT-LLM {release.version} is known", hint="Name one with --container IMAGE."
        )
    return containers[0].image


def in_container(command: RankCommand, checkpoint: Path, out: Path, image: str) -> tuple[str, ...]:
    """`command` in a container of `image`. Both directories must exist; they keep their paths inside."""
    return (
        *docker_run("all"),
        *("--mount", mount(checkpoint, read_only=True)),
        *("--mount", mount(out)),
        image,
        *command.argv,
    )


def _options(release: Release, section: Section, settings: dict[str, JsonValue]) -> tuple[str, ...]:
    """The options that say `settings`. A setting without one is the release's default or follows from another.

    The options of LoRA are called as its fields are. An option that is a switch is there or not, without a value.
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
    """A value as trtllm-build's options spell it; plugin options say enable and disable."""
    if section == "plugin_config" and (value is None or isinstance(value, bool)):
        return "enable" if value else "disable"
    return value.lower() if isinstance(value, str) else str(value)
