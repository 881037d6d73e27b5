"""The demo: build the demo model in INT4-AWQ, serve it with Triton on free ports, stream one answer, shut down.

Types what a user would type, so what it prints is what a user sees.
"""

import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

BUILD = Path("build/demo-int4awq")
PROMPT = "The function returns a new"
# A model this small repeats itself when it is greedy.
SAMPLING = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "7")
PROGRAM = [sys.executable, "-m", "trtforge"]
LAST_HINT = "python -c "
"""How the last line begins that a server writes when all of it is ready."""
HINT_TIMEOUT = 60.0  # seconds


def main() -> int:
    """Run the demo; the exit status of the first command that fails, else 0."""
    if status := _run("build", "demo-int4awq", "--out", str(BUILD)):
        return status
    http, grpc, metrics = (str(port) for port in _free_ports(3))
    command = ["serve", str(BUILD / "repository"), "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    print(f"\n$ trtforge {' '.join(command)}", flush=True)
    server = subprocess.Popen(
        [*PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert server.stdout is not None
    assert server.stderr is not None
    hinted = threading.Event()
    messages = threading.Thread(target=_show, args=(server.stderr, hinted), daemon=True)
    messages.start()
    try:
        line = server.stdout.readline()
        print(line, end="", flush=True)
        if not line.startswith("ready "):
            return server.wait() or 1
        hinted.wait(HINT_TIMEOUT)
        return _run("infer", PROMPT, "--url", f"127.0.0.1:{grpc}", "--max-tokens", "64", *SAMPLING)
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        status = server.wait()
        messages.join(timeout=5)
        print(f"server ended with status {status}")


def _show(messages: TextIO, hinted: threading.Event) -> None:
    """Print what the server writes to stderr. `hinted` is set after its last hint, or when it ends."""
    for line in messages:
        with suppress(OSError):  # nobody reads any more; the server goes on
            print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(LAST_HINT):
            hinted.set()
    hinted.set()


def _run(*words: str) -> int:
    shown = " ".join(f'"{word}"' if " " in word else word for word in words)
    print(f"\n$ trtforge {shown}", flush=True)
    return subprocess.run([*PROGRAM, *words], check=False).returncode


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held until the last is known, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    sys.exit(main())
