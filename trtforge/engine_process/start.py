"""Starts an engine process from a model process and waits until it serves; closing its standard input ends it."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError, killed
from trtforge.core.interpreter import python_environment, python_interpreter

TRACE_VARIABLE = "TRTFORGE_TRACE"
"""Names the file that an embedded engine writes its iterations to."""

KV_STORE_VARIABLE, KV_STORE_BYTES_VARIABLE = "TRTFORGE_KV_CACHE_DIR", "TRTFORGE_KV_CACHE_DIR_BYTES"
"""Name the directory in which an embedded engine stores KV blocks, and how many bytes at most."""


def trace_of(trace: Path, draft_model: str | None) -> Path:
    """The file of an engine's trace: for a draft engine FILE.MODEL.json beside FILE.json. `draft_model`: its model."""
    return trace if draft_model is None else trace.with_suffix(f".{draft_model}{trace.suffix}")


class EngineProcess:
    """A running engine process. It never outlives the process that started it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: those of the interpreter. Returns when the process serves; raises ForgeError if it fails."""
        self._process = subprocess.Popen(
            [python_interpreter(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment(),
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        reply = _reply(self._process.stdout)
        if "ready" not in reply:
            status = self._process.wait()
            if "error" not in reply and (failure := killed("the engine process", status)) is not None:
                raise failure
            raise ForgeError(
                reply.get("error", f"the engine process ended with status {status} while loading"),
                hint=reply.get("hint", "See the server's log."),
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def watch(self, on_end: Callable[[int], None]) -> None:
        """Call `on_end` with the exit status, on a thread, when the process ends."""

        def wait() -> None:
            on_end(self._process.wait())

        threading.Thread(target=wait, name="engine-process", daemon=True).start()

    def end(self, patience: float = 4.0) -> None:
        """End the process; kill it after `patience` seconds."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _reply(lines: Iterable[str]) -> dict[str, Any]:
    """The process's reply, empty if it ends without one. What else it printed goes to standard error."""
    for line in lines:
        with suppress(ValueError):
            reply = json.loads(line)
            if isinstance(reply, dict) and not reply.keys().isdisjoint(("ready", "error")):
                return reply
        sys.stderr.write(line)
    return {}
