"""The embedded engine as an engine process: `python -m trtforge.runtime.hosted JOB`."""

import os
import sys
from pathlib import Path
from typing import Literal

from trtforge.core.config_model import Config
from trtforge.engine_process.admission import DEFAULT_QUEUE_SIZE, QueueLimits
from trtforge.engine_process.host import host
from trtforge.engine_process.requests import RequestEngine
from trtforge.runtime.engine import Engine, EngineOptions


class HostJob(Config):
    """What the process is told on its command line, as JSON."""

    engine: str
    socket: str
    scheduler: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    kv_cache_fraction: float = 0.9
    kv_cache_tokens: int | None = None
    kv_reuse: bool = True
    chunked_context: bool = False
    max_queue_size: int = DEFAULT_QUEUE_SIZE
    max_queue_seconds: float | None = None

    def options(self) -> EngineOptions:
        """What the engine is loaded with."""
        return EngineOptions(
            scheduler=self.scheduler,
            kv_cache_fraction=self.kv_cache_fraction,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_reuse=self.kv_reuse,
            chunked_context=self.chunked_context,
        )

    def limits(self) -> QueueLimits:
        """Bounds of what waits."""
        return QueueLimits(size=self.max_queue_size, seconds=self.max_queue_seconds)


def main() -> int:
    """Serve the engine; the exit status."""
    job = HostJob.model_validate_json(sys.argv[1])

    def load() -> RequestEngine:
        return Engine.load(Path(job.engine), job.options())

    return host(load, Path(job.socket), job.limits())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of torch that end after the interpreter abort the process
