"""The Python interpreter for child processes."""

import os
import shutil
import sys
from pathlib import Path

from trtforge.core.errors import ForgeError


def python_interpreter() -> str:
    """A Python of this version. In an embedded Python, as in a Triton backend, sys.executable is another program.

    Raises ForgeError if there is none.
    """
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    beside = Path(sys.prefix) / "bin" / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ForgeError(f"{name} was not found to start a child process", hint=f"Put {name} on the PATH.")
    return found


def module_arguments(module: str) -> tuple[str, ...]:
    """What an interpreter is given to run a module. Modules in the current directory, which may be anybody's, are not
    found, unless this package itself is there."""
    if Path(__file__).parents[2] == Path.cwd():
        return "-m", module
    if sys.version_info >= (3, 11):
        return "-P", "-m", module
    start = f"import runpy, sys; sys.path.remove(''); runpy.run_module({module!r}, None, '__main__', True)"
    return "-c", start


def python_environment() -> dict[str, str]:
    """This process's environment, with its module search path, for a child interpreter."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
