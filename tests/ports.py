"""Ports for servers of the tests.

A port that the kernel chose and a test gave back can go to anybody's next connection before the server takes it. These
lie below the kernel's range; every pytest-xdist worker has its own, and none comes again soon.
"""

import os
import random
import socket
from collections.abc import Iterator
from itertools import cycle, islice

_FIRST, _END = 12_000, 32_000
_GAP = 5
"""Ports left out after each choice: `trtforge serve` takes the first free one above its own for OpenAI's API."""


def _candidates() -> Iterator[int]:
    """This worker's ports over and over, from a random one on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = (_END - _FIRST) // count
    own = range(_FIRST + worker * size, _FIRST + (worker + 1) * size)
    return islice(cycle(own), random.SystemRandom().randrange(size), None)


_CANDIDATES = _candidates()


def free_ports(count: int) -> list[int]:
    """Ports in ascending order that nobody listens on now, and nobody else is given."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_CANDIDATES)
        if _is_free(port):
            ports.append(port)
        if len(ports) == count:
            for _ in range(_GAP):
                next(_CANDIDATES)
    return sorted(ports)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
