"""What a shell completes: recipes, GPUs, number formats, devices and the other words that options take.

Called at every press of the tab key, so each function imports only what it needs.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

Complete = Callable[[str], list[str]]
"""The words that continue what was typed."""


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes, recipe files and directories."""
    from trtforge.core.assets import asset_directory

    names = sorted(path.stem for path in asset_directory("recipes").glob("*.yaml"))
    return [*_starting(names, incomplete), *_paths(incomplete, (".yaml", ".yml"))]


def gpus(incomplete: str) -> list[str]:
    """Names of GPUs."""
    from trtforge.plan.gpus import ALIASES, GPUS

    return _starting((*(gpu.name for gpu in GPUS), *ALIASES), incomplete)


def formats(incomplete: str) -> list[str]:
    """Weight formats; after a comma the ones that were not given yet."""
    from trtforge.core.recipe import QuantFormat

    *given, last = incomplete.split(",")
    before = "".join(f"{word}," for word in given)
    return [f"{before}{name}" for name in _starting(get_args(QuantFormat), last) if name not in given]


def calibrated_formats(incomplete: str) -> list[str]:
    """Formats that need a calibration, or get better by one."""
    from trtforge.core.recipe import CalibratedFormat

    return _starting(get_args(CalibratedFormat), incomplete)


def kv_formats(incomplete: str) -> list[str]:
    """Formats of the KV cache."""
    from trtforge.core.recipe import KvCacheFormat

    return _starting(get_args(KvCacheFormat), incomplete)


def dtypes(incomplete: str) -> list[str]:
    """Data types of a model."""
    from trtforge.core.recipe import DtypeChoice

    return _starting(get_args(DtypeChoice), incomplete)


def roundings(incomplete: str) -> list[str]:
    """How weights can be rounded."""
    from trtforge.core.recipe import RoundingChoice

    return _starting(get_args(RoundingChoice), incomplete)


def devices(incomplete: str) -> list[str]:
    """Devices of the torch backend."""
    from trtforge.core.recipe import Device

    return _starting(get_args(Device), incomplete)


def backends(incomplete: str) -> list[str]:
    """Backends of an engine."""
    from trtforge.core.recipe import Backend

    return _starting(get_args(Backend), incomplete)


def launchers(incomplete: str) -> list[str]:
    """How a server is started."""
    from trtforge.serve.config import Launcher

    return _starting(get_args(Launcher), incomplete)


def servers(incomplete: str) -> list[str]:
    """Names of servers in the background."""
    from trtforge.core.errors import ForgeError
    from trtforge.serve.detached.places import server_names, servers_directory

    try:
        return _starting(server_names(servers_directory()), incomplete)
    except ForgeError:
        return []


def goals(incomplete: str) -> list[str]:
    """Goals of a plan."""
    from trtforge.plan.alternatives import GOALS

    return _starting(GOALS, incomplete)


def stages(incomplete: str) -> list[str]:
    """Stages of a build."""
    from trtforge.pipeline.stages import STAGES

    return _starting(STAGES, incomplete)


def words(*choices: str) -> Complete:
    """Completes one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _starting(choices, incomplete)

    return complete


def _starting(names: Iterable[Any], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """Directories, and files with these endings, whose path starts with `incomplete`; none if they cannot be read."""
    try:
        return _paths_there(incomplete, endings)
    except OSError:
        return []


def _paths_there(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    directory, _, start = incomplete.rpartition("/")
    place = Path(directory or ("/" if incomplete.startswith("/") else "."))
    if not place.is_dir():
        return []
    found = sorted(path for path in place.iterdir() if path.name.startswith(start) and not path.name.startswith("."))
    before = incomplete[: len(incomplete) - len(start)]
    return [
        f"{before}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.is_dir() or path.name.endswith(endings)
    ]
