"""In a control group with a memory limit, doctor and the KV pool see the same free memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tests.machine.hosts import make_host
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.runtime.decoder.kv_capacity import free_memory

GIB = 1 << 30
LIMIT = 2 * GIB
_CPU = torch.device("cpu")
_MEASURE = """
import json, torch
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.runtime.decoder.kv_capacity import free_memory
cache = bytearray(64 << 20)
memory = read_memory(Host())
print(json.dumps([memory.limit, memory.available, free_memory(torch.device("cpu"))]))
"""


@contextmanager
def limited_group() -> Iterator[Path | None]:
    """A control group of this process's own group with a limit of LIMIT bytes; None where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    second = next((path for _, controllers, path in lines if not controllers), "/")
    base = Path("/sys/fs/cgroup/memory", first.lstrip("/")) if first else Path("/sys/fs/cgroup", second.lstrip("/"))
    group = base / f"trtforge-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(LIMIT))
        made: Path | None = group
    except OSError:
        made = None
    try:
        yield made
    finally:
        with suppress(OSError):
            group.rmdir()


def test_a_limited_process_sees_its_limit(tmp_path: Path) -> None:
    with limited_group() as group:
        if group is None:  # no right to make a group here: the same on files like the kernel's
            limit, available, free = _in_described_group(tmp_path)
        else:
            limit, available, free = _in_group(group)
    assert limit == LIMIT
    assert 0 < available < LIMIT
    assert abs(free - available) < 64 << 20, "doctor's reader and the KV pool's differ"


def test_droppable_page_cache_counts_as_free(tmp_path: Path) -> None:
    limit, available, free = _in_described_group(tmp_path)
    assert (limit, available, free) == (LIMIT, LIMIT - GIB + GIB // 2, LIMIT - GIB + GIB // 2)


def test_an_outer_group_that_is_nearly_full_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{4 * GIB - 1000}\n",
        "sys/fs/cgroup/pod/container/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/pod/container/memory.current": f"{GIB}\n",
    }
    memory = read_memory(make_host(tmp_path, files=files))
    assert memory is not None
    assert (memory.limit, memory.available) == (2 * GIB, 1000)


def _in_group(group: Path) -> tuple[int, int, int]:
    """Limit, available bytes and the KV pool's free bytes as a process in `group` reads them."""
    joined = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    done = subprocess.run([sys.executable, "-c", joined + _MEASURE], capture_output=True, text=True, check=True)
    limit, available, free = json.loads(done.stdout)
    return limit, available, free


def _in_described_group(root: Path) -> tuple[int, int, int]:
    files = {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{LIMIT}\n",
        "sys/fs/cgroup/box/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
    }
    host: Host = make_host(root, files=files)
    memory = read_memory(host)
    assert memory is not None
    assert memory.limit is not None
    return memory.limit, memory.available, free_memory(_CPU, host)
