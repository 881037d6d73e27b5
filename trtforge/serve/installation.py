"""The Triton server of this machine: `tritonserver` on PATH, or that of the nvidia-pytriton wheel.

The wheel keeps its Python backend and the process stubs (one per Python version) in separate directories. Symbolic
links in the server's runtime directory join them; the wheel is not modified. The stub is an isolated Python: it ignores
PYTHONPATH and finds the packages of this environment only through the first `python3` on PATH.
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
from trtforge.core.extras import install_command
from trtforge.core.packages import installed_version
from trtforge.formats.triton_holes import release_of_server, release_of_wheel

STUB = "triton_python_backend_stub"
_VERSION_FILE = Path("/opt/tritonserver/TRITON_VERSION")


@dataclass(frozen=True)
class Installation:
    """A Triton server. `prepare` must create `links`, below the runtime directory, before it starts.

    `release`: such as 24.10; None if unknown.
    """

    program: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    links: dict[Path, Path]
    release: str | None = None

    @property
    def preparation(self) -> tuple[tuple[str, ...], ...]:
        """The commands equivalent to `prepare`."""
        commands: list[tuple[str, ...]] = []
        for directory in dict.fromkeys(link.parent for link in self.links):
            targets = [str(target) for link, target in sorted(self.links.items()) if link.parent == directory]
            commands += [("mkdir", "-p", str(directory)), ("ln", "-s", *targets, str(directory))]
        return tuple(commands)

    def prepare(self) -> None:
        """Create the links."""
        for link, target in self.links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


def find_installation(runtime: Path) -> Installation:
    """The server to use, with its files below `runtime`. Raises ForgeError if none is installed."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Installation(Path(on_path), (), {"PATH": _this_python_first()}, {}, _release_here())
    package = find_spec("pytriton")
    if package is None or package.origin is None:
        raise ForgeError(
            "no Triton server is installed here",
            hint=f"Run `{install_command('serve')}`, or use NVIDIA's Triton container.",
        )
    return _of_wheel(Path(package.origin).parent, runtime)


def _of_wheel(package: Path, runtime: Path) -> Installation:
    server = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / STUB
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
        links={**{backend / path.name: path for path in files}, backend / STUB: stub},
        release=release_of_wheel(installed_version("nvidia-pytriton")),
    )


def _release_here() -> str | None:
    """The release of an NVIDIA container, from its variables or version file; None elsewhere."""
    version = os.environ.get("NVIDIA_TRITON_SERVER_VERSION") or os.environ.get("TRITON_SERVER_VERSION")
    if version is None:
        with suppress(OSError):
            version = _VERSION_FILE.read_text(encoding="utf-8").strip()
    return None if version is None else release_of_server(version)


def _this_python_first() -> str:
    return _prepended([Path(sys.executable).parent], "PATH")


def _python_library() -> list[Path]:
    """Directory of this Python's shared library, which the stub needs; empty if the system's loader must find it."""
    directory, name = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    return [Path(directory)] if directory and name and (Path(directory) / name).is_file() else []


def _prepended(directories: list[Path], variable: str) -> str:
    current = os.environ.get(variable)
    return os.pathsep.join([*map(str, directories), *([current] if current else [])])
