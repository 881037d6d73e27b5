"""Host memory: of the machine, and what is left to this process within its control group."""

import re
from dataclasses import dataclass

from trtforge.machine.cgroups import lowest_memory_limit, tightest_memory_group
from trtforge.machine.host import Host


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes. `limit`: the control group's, None without one. `available` respects it."""

    total: int
    available: int
    limit: int | None

    @property
    def most(self) -> int:
        """The most memory that a process can get."""
        return self.total if self.limit is None else min(self.total, self.limit)


def read_memory(host: Host) -> Memory | None:
    """Memory of the machine and of this process's control group; None if /proc/meminfo cannot be read."""
    values = dict(re.findall(r"^(\w+): +(\d+) kB", host.text("proc/meminfo") or "", flags=re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= values.keys():
        return None
    total, available = int(values["MemTotal"]) * 1024, int(values["MemAvailable"]) * 1024
    group = tightest_memory_group(host)
    if group is not None:
        available = min(available, max(0, group.limit - group.used))
    return Memory(total, available, lowest_memory_limit(host))
