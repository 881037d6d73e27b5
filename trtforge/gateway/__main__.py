"""`python -m trtforge.gateway`: the gateway as a child process of `trtforge serve`."""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.reasoning import REASONING_PARSERS
from trtforge.machine.processes import end_with_parent

_POLL = 0.05


def main() -> int:
    """Serve until SIGTERM, which lets running requests finish. Returns 1 if it cannot listen or read the keys."""
    parser = argparse.ArgumentParser(prog="python -m trtforge.gateway", description="OpenAI's API for Triton.")
    parser.add_argument("--backend", action="append", required=True, help="HOST:PORT of gRPC")
    parser.add_argument("--model", action="append", default=[], help="a text model")
    parser.add_argument("--served-model-name", help="another name of the first model")
    parser.add_argument("--adapter", action="append", default=[], help="NAME:TASK of a LoRA adapter")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key-file", type=Path, help="API keys, one per line, each of at least 16 characters")
    parser.add_argument("--allow-host", action="append", default=[], help="a host name beside localhost")
    parser.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help="form of the reasoning")
    parser.add_argument("--drain-timeout", type=float, required=True, help="seconds for running requests")
    parser.add_argument("--wait", action="store_true", help="begin when the first backend listens")
    options = parser.parse_args()
    end_with_parent()
    if options.wait:
        _wait_for(options.backend[0])
    # Imported late, so as not to slow down the start of the server that it waits for.
    from trtforge.formats.adapter import named_adapters
    from trtforge.gateway.config import GatewayConfig
    from trtforge.gateway.server import run

    config = GatewayConfig(
        backends=tuple(options.backend),
        models=tuple(options.model),
        served_model_name=options.served_model_name,
        adapters=named_adapters(",".join(options.adapter)),
        host=options.host,
        port=options.port,
        api_key_file=options.api_key_file,
        allowed_hosts=tuple(options.allow_host),
        drain_timeout=options.drain_timeout,
        reasoning_parser=options.reasoning_parser,
    )
    try:
        run(config)
    except ForgeError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1
    return 0


def _wait_for(address: str) -> None:
    """Return when a program accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(_POLL)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # at once: `trtforge serve` waits for the end of this process
