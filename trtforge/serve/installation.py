"""The Triton server of this machine: `tritonserver` on PATH, or the one that the nvidia-pytriton wheel carries.

The wheel keeps its Python backend and the process stubs (one for each Python) apart. They are put together by symbolic
links in the server's runtime directory; the wheel itself stays as it is. The stub is an isolated Python: it ignores
PYTHONPATH and finds the packages of this environment only through the `python3` that is first on PATH.
"""

import os
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.packages import installed_version
from trtforge.formats.triton_holes import release_of_server, release_of_wheel

_STUB = "triton_python_backend_stub"
_VERSION_FILE = Path("/opt/tritonserver/TRITON_VERSION")


@dataclass(frozen=True)
class Installation:
    """A Triton server. `links` are to be made below the runtime directory before it starts.

    `release`: such as 24.10; None where nothing tells it.
    """

    program: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    links: dict[Path, Path]
    release: str | None = None

    def prepare(self) -> None:
        """Make the links."""
        for link, target in self.links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


def find_installation(runtime: Path) -> Installation:
    """The server to use, with `runtime` for what it needs on disk. Raises ForgeError if there is none here."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Installation(Path(on_path), (), {"PATH": _this_python_first()}, {}, _release_here())
    package = find_spec("pytriton")
    if package is None or package.origin is None:
        raise ForgeError(
            "there is no Triton server here",
            hint="Install the serve extra (pip install 'trtforge[serve]'), or work in NVIDIA's Triton container.",
        )
    return _of_wheel(Path(package.origin).parent, runtime)


def _of_wheel(package: Path, runtime: Path) -> Installation:
    server = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        raise ForgeError(
            f"the nvidia-pytriton wheel has no Triton stub for Python {version}",
            hint="Use a Python version that it supports.",
        )
    backend = runtime / "backends" / "python"
    files = [path for path in (server / "backends" / "python").iterdir() if path.is_file()]
    libraries = [package.parent / "nvidia_pytriton.libs", *_python_library()]
    return Installation(
        program=server / "bin" / "tritonserver",
        arguments=(f"--backend-directory={runtime / 'backends'}",),
        environment={
            "PATH": _this_python_first(),
            "LD_LIBRARY_PATH": _prepended(libraries, "LD_LIBRARY_PATH"),
        },
        links={**{backend / path.name: path for path in files}, backend / _STUB: stub},
        release=release_of_wheel(installed_version("nvidia-pytriton")),
    )


def _release_here() -> str | None:
    """What NVIDIA's containers tell of their server."""
    told = os.environ.get("NVIDIA_TRITON_SERVER_VERSION") or os.environ.get("TRITON_SERVER_VERSION")
    if told is None:
        with suppress(OSError):
            told = _VERSION_FILE.read_text(encoding="utf-8").strip()
    return None if told is None else release_of_server(told)


def _this_python_first() -> str:
    return _prepended([Path(sys.executable).parent], "PATH")


def _python_library() -> list[Path]:
    """Where this Python's shared library is, which the stub needs; nothing if the system's loader finds it itself."""
    directory, name = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    return [Path(directory)] if directory and name and (Path(directory) / name).is_file() else []


def _prepended(directories: list[Path], variable: str) -> str:
    there = os.environ.get(variable)
    return os.pathsep.join([*map(str, directories), *([there] if there else [])])
