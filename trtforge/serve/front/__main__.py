"""`python -m trtforge.serve.front`: the front as a process."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.host_check import HostCheck
from trtforge.launch.doors import DOORS
from trtforge.machine.processes import end_with_parent
from trtforge.serve.address import Address
from trtforge.serve.front.handler import Policy
from trtforge.serve.front.keys import read_keys
from trtforge.serve.front.server import Front


def main() -> int:
    """Serve until SIGTERM, which lets running requests finish. Returns 1 if it cannot listen or read the keys."""
    parser = argparse.ArgumentParser(prog="python -m trtforge.serve.front", description="Bounded HTTP for Triton.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--upstream", type=Address.parse, required=True, help="Triton's HTTP: unix:/PATH or HOST:PORT")
    parser.add_argument("--open", action="append", default=[], choices=DOORS, help="an endpoint group to open")
    parser.add_argument("--api-key-file", type=Path, help="API keys, one per line")
    parser.add_argument("--allow-host", action="append", default=[], help="a host name beside localhost")
    options = parser.parse_args()
    end_with_parent()
    try:
        keys = None if options.api_key_file is None else read_keys(options.api_key_file)
        hosts = HostCheck.of(options.host, options.allow_host, with_keys=keys is not None)
        policy = Policy(options.upstream, frozenset(options.open), keys, hosts=hosts)
        asyncio.run(_serve(policy, options.host, options.port))
    except ForgeError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the front cannot listen on {options.host}:{options.port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


async def _serve(policy: Policy, host: str, port: int) -> None:
    front = Front(policy, host, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, front.stop)
    await front.run()


if __name__ == "__main__":
    sys.exit(main())
