"""The main function of an engine process: load, serve, end.

The parent process reads one line of JSON from standard output: `{"ready": true}`, or the error that kept the engine
from loading. Everything else that is printed goes to standard error. The process exits when its standard input is
closed.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from trtforge.core.errors import ForgeError
from trtforge.core.memory_errors import out_of_memory
from trtforge.engine_process.admission import QueueLimits
from trtforge.engine_process.requests import RequestEngine
from trtforge.engine_process.server import EngineServer

_CLOSE_TIMEOUT = 3.0  # seconds that an engine has to close
_SWITCH_INTERVAL = 0.0005  # seconds; by default, the engine's thread may wait 5 ms for the one that reads requests


def host(load: Callable[[], RequestEngine], path: Path, limits: QueueLimits) -> int:
    """Serve the engine that `load` returns on the socket `path`; returns the exit status."""
    reply = _reserve_stdout()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole process group; the server decides
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        engine = load()
        server = EngineServer(engine, path, limits)
    except Exception as error:
        failure = _failure_of(error)
        if failure is None:
            raise
        print(json.dumps({"error": failure.message, "hint": failure.hint}), file=reply, flush=True)
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    threading.Thread(target=_stop_with_parent, args=(server,), name="lifeline", daemon=True).start()
    print(json.dumps({"ready": True}), file=reply, flush=True)
    failure = server.run()
    _exit_within(_CLOSE_TIMEOUT, 1 if failure else 0)
    engine.close()
    return 1 if failure else 0


def _failure_of(error: Exception) -> ForgeError | None:
    """What to tell of an engine that cannot be loaded; None for a mistake of the program."""
    if isinstance(error, ForgeError):
        return error
    failure = out_of_memory(error)
    if failure is None and isinstance(error, OSError):
        return ForgeError(str(error), hint="See the server's log.")
    return failure


def _reserve_stdout() -> TextIO:
    """Standard output as it is now; what this process and its children print from now on goes to standard error.

    Importing tensorrt_llm prints a line to standard output, of which the parent reads only the first line.
    """
    reserved = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)
    return reserved


def _stop_with_parent(server: EngineServer) -> None:
    """Stop when the parent process closes our standard input."""
    while os.read(0, 4096):
        pass
    server.stop()


def _exit_within(seconds: float, status: int) -> None:
    """Exit after `seconds` even if the engine has not closed: a step may take long, a rank may hang."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()
