"""The C++ compiler of a machine, which builds the embedded engine's CPU kernels."""

from trtforge.machine.host import Host

_NAMES = ("c++", "g++")


def find_compiler(host: Host) -> str | None:
    """$CXX, or the first of c++ and g++ on PATH; None without one."""
    chosen = host.environment.get("CXX")
    return next((path for name in ((chosen,) if chosen else _NAMES) if (path := host.program(name))), None)
