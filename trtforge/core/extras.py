"""The extras of trtforge: finds the extra of a missing package, and the command that installs it."""

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trtforge.core.errors import ForgeError

PROJECT = "trtforge"
"""The name of trtforge's own distribution."""
_EXTRAS = ("engine", "calibrate", "hub-data", "sentencepiece", "serve", "guided", "openai")
"""Extras that commands need, in the order in which they are proposed."""
_PACKAGES = {"google": "tritonclient", "grpc": "tritonclient", "pytriton": "nvidia-pytriton"}
"""Packages by module, if their names differ."""


def install_command(extra: str) -> str:
    """The command that installs an extra. As trtforge itself is installed, pip adds packages and keeps its version."""
    return f"pip install '{PROJECT}[{extra}]'"


def missing_package(error: ModuleNotFoundError, what: str) -> ForgeError | None:
    """The error of a command or import, `what`, that needs a missing package; None if no extra has the package."""
    module = (error.name or "").partition(".")[0]
    package = canonicalize_name(_PACKAGES.get(module, module))
    extra = next((extra for extra in _EXTRAS if package in _packages_of(extra)), None)
    if extra is None:
        return None
    return ForgeError(
        f"{what} needs the package {package}, which is not installed", hint=f"Run `{install_command(extra)}`."
    )


def _packages_of(extra: str) -> set[str]:
    """The packages that an extra installs; none if trtforge is not installed."""
    try:
        lines = distribution(PROJECT).requires or []
    except PackageNotFoundError:
        return set()
    wanted = [(each.name, each.marker) for each in map(Requirement, lines) if each.marker is not None]
    return {
        canonicalize_name(name)
        for name, marker in wanted
        if marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    }
