"""The embedded engine as an engine process: `python -m trtforge.runtime.hosted JOB`."""

import os
import sys
from itertools import chain, count
from pathlib import Path

from trtforge.core.config_model import Config
from trtforge.core.defaults import KV_CACHE_DIR_BYTES
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.admission import DEFAULT_QUEUE_SIZE, QueueLimits
from trtforge.engine_process.host import host
from trtforge.engine_process.requests import RequestEngine
from trtforge.engine_process.start import KV_STORE_BYTES_VARIABLE, KV_STORE_VARIABLE, TRACE_VARIABLE, trace_of
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.kv_store import KvStoreOptions


class HostJob(Config):
    """The process's command-line argument, as JSON. `model`: the engine model's name, which repositories of trtforge
    before 0.2.5 do not give; `drafts`: whether it drafts for the served engine.
    """

    engine: str
    socket: str
    model: str = ""
    drafts: bool = False
    scheduler: SchedulerPolicy = "guaranteed_no_evict"
    kv_cache_fraction: float = 0.9
    kv_cache_tokens: int | None = None
    kv_cache_host_memory_bytes: int = 0
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    kv_reuse: bool = True
    chunked_context: bool = False
    max_queue_size: int = DEFAULT_QUEUE_SIZE
    max_queue_seconds: float | None = None

    def options(self) -> EngineOptions:
        """Options for loading the engine; options for a single run of the server come from its environment."""
        trace, store = os.environ.get(TRACE_VARIABLE), os.environ.get(KV_STORE_VARIABLE)
        size = os.environ.get(KV_STORE_BYTES_VARIABLE, KV_CACHE_DIR_BYTES)
        return EngineOptions(
            scheduler=self.scheduler,
            kv_cache_fraction=self.kv_cache_fraction,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_cache_host_memory_bytes=self.kv_cache_host_memory_bytes,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            kv_reuse=self.kv_reuse,
            chunked_context=self.chunked_context,
            trace=_unwritten(trace_of(Path(trace), self.model if self.drafts else None)) if trace else None,
            name=f"engine {self.model}".strip(),
            kv_store=KvStoreOptions(Path(store), int(size)) if store else None,
        )

    def limits(self) -> QueueLimits:
        """Limits of the request queue."""
        return QueueLimits(size=self.max_queue_size, seconds=self.max_queue_seconds)


def _unwritten(trace: Path) -> Path:
    """The path, or FILE.2.json and so on if an earlier engine has already written FILE.json."""
    tried = chain((trace,), (trace.with_suffix(f".{number}{trace.suffix}") for number in count(2)))
    return next(path for path in tried if not (path.is_file() and path.stat().st_size))


def main() -> int:
    """Serve the engine; returns the exit status."""
    job = HostJob.model_validate_json(sys.argv[1])

    def load() -> RequestEngine:
        return Engine.load(Path(job.engine), job.options())

    return host(load, Path(job.socket), job.limits())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch threads that outlive the interpreter abort the process
