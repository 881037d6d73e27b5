"""The C++ compiler of a machine, which builds the embedded engine's CPU kernels."""

import shlex

from trtforge.machine.host import Host

_NAMES = ("c++", "g++")


def find_compiler(host: Host) -> tuple[str, ...] | None:
    """Its command words: $CXX, which may be `ccache g++`, else the first of c++ and g++ on PATH; None without one."""
    try:
        chosen = shlex.split(host.environment.get("CXX", ""))
    except ValueError:  # an unterminated quotation
        return None
    for name, *arguments in [chosen] if chosen else [[name] for name in _NAMES]:
        path = host.program(name)
        if path is not None:
            return path, *arguments
    return None
