"""Host memory of the machine, and the amount that this process may use within its control groups."""

import re
from dataclasses import dataclass

from trtforge.machine.cgroups import read_memory_groups
from trtforge.machine.host import Host


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes. `limit`: the lowest limit of the control groups, None without one.

    `available`: bytes that can be allocated now, within all limits.
    """

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
    groups = read_memory_groups(host)
    left = (max(0, group.limit - group.used) for group in groups)
    return Memory(total, min([available, *left]), min((group.limit for group in groups), default=None))
