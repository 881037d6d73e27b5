"""Starts, watches and ends the worker process of one rank, on behalf of rank 0."""

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from trtforge.core.config_model import Config
from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError, ending, killed
from trtforge.core.interpreter import module_arguments, python_environment, python_interpreter
from trtforge.runtime.decoder.kv_capacity import KvMemory
from trtforge.runtime.ranks.source import DrafterBytes

_KEPT_LINES = 40


class WorkerJob(Config):
    """A worker's command-line argument, as JSON."""

    directory: str
    sent_adapters: str | None
    beside: tuple[DrafterBytes, ...]
    device: UsableDevice
    compute_dtype: ModelDtype
    index: int
    port: int
    threads: int
    memory: KvMemory
    shared_sums: int | None
    """File descriptor of `SharedSums`, which the worker inherits."""


class WorkerProcess:
    """A worker process. It exits when its standard input is closed, so it ends with this process, even after SIGKILL.

    PR_SET_PDEATHSIG does not work here: it is tied to the thread that started the worker, which may end earlier.
    """

    def __init__(self, job: WorkerJob, on_end: Callable[[], None] | None) -> None:
        """`on_end` is called by another thread when the worker has ended."""
        self.index = job.index
        self._on_end = on_end
        self.ended_at: float | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            [python_interpreter(), *module_arguments("trtforge.runtime.ranks.worker_main"), job.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=python_environment(),
            pass_fds=() if job.shared_sums is None else (job.shared_sums,),
            text=True,
            errors="replace",
        )
        self._watcher = threading.Thread(target=self._watch, name=f"rank{job.index}", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises ForgeError with the worker's message if it ended."""
        if self.ended_at is not None:
            raise self.failure()

    def failure(self) -> ForgeError:
        """Why the worker ended, from its standard error: `error: ...` and `hint: ...`, or a traceback's last line."""
        failure = killed(f"rank {self.index} ended: it", self._process.returncode)
        if failure is not None and not self._lines:
            return failure
        errors = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        hints = [line.removeprefix("hint: ") for line in self._lines if line.startswith("hint: ")]
        (reason, *_) = errors or list(self._lines)[-1:] or [ending(self._process.returncode)]
        return ForgeError(f"rank {self.index} ended: {reason}", hint=hints[0] if hints else "Start the engine again.")

    def release(self) -> None:
        """Close the worker's standard input, which ends it."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of time.monotonic) for its end, then kill it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.strip():
                    self._lines.append(line.rstrip())
        self._process.wait()
        self.ended_at = time.monotonic()
        if self._on_end is not None:
            self._on_end()
