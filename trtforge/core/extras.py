"""The extras of trtforge: finds the extra of a missing package, and the command that installs it."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json

PROJECT = "trtforge"
"""The name of trtforge's own distribution."""
_RECORD = "direct_url.json"
_EXTRAS = ("engine", "calibrate", "hub-data", "sentencepiece", "serve", "guided", "openai")
"""Extras that commands need, in the order in which they are proposed."""
_PACKAGES = {"google": "tritonclient", "grpc": "tritonclient", "pytriton": "nvidia-pytriton"}
"""Packages by module, if their names differ."""


def install_command(extra: str) -> str:
    """The command that installs an extra from trtforge's own source: a directory, a repository or an index.

    Source: PEP 610.
    """
    found = _direct_url()
    url = str(found.get("url", ""))
    if "vcs_info" in found:
        kind = found["vcs_info"].get("vcs")
        return f"pip install {quote(f'{PROJECT}[{extra}] @ {kind}+{url}')}"
    if urlsplit(url).scheme != "file":
        return f"pip install {quote(f'{PROJECT}[{extra}]')}"
    place = url2pathname(urlsplit(url).path)
    place = "." if place == str(Path.cwd()) else place
    editable = "-e " if found.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{quote(f'{place}[{extra}]')}"


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


def _direct_url() -> dict[str, Any]:
    """The source from which trtforge was installed; empty for an index, or if it is not recorded."""
    try:
        text = distribution(PROJECT).read_text(_RECORD)
    except PackageNotFoundError:
        return {}
    if not text:
        return {}
    found = parse_json(text, f"{_RECORD} of {PROJECT}", hint=f"Install {PROJECT} again.")
    return found if isinstance(found, dict) else {}


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
