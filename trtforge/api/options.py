"""The options of `Engine.load`, checked."""

import math
import os
import threading
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import SchedulerPolicy
from trtforge.core.sizes import Bytes
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.options import EngineOptions


def _nameable(path: Path) -> Path:
    """Raises ValueError for what is no file's name."""
    if b"\0" in os.fsencode(path):
        raise ValueError("it holds a null character")
    return path


_MOST_KEPT = 100_000_000
"""Events and iterations that wait to be read, which all take memory."""
_Nameable = Annotated[Path, AfterValidator(_nameable)]


def seconds_of(timeout: object) -> float | None:
    """What a thread can wait for. Raises ForgeError for what is no time."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ForgeError(
            f"timeout is {timeout!r}, which is no time", hint="Give seconds, or None to wait for any time."
        )
    return min(max(timeout, 0.0), threading.TIMEOUT_MAX)


class LoadOptions(Config):
    """Arguments of `Engine.load`, which has their defaults."""

    directory: _Nameable
    scheduler: SchedulerPolicy
    kv_cache_fraction: float = Field(gt=0, le=1)
    kv_cache_tokens: int | None = Field(ge=1)
    kv_cache_host_memory_bytes: Bytes | None
    kv_reuse: bool | None
    chunked_context: bool | None
    threads: int | None = Field(ge=1, le=1024)
    max_batch_size: int | None = Field(ge=1)
    max_num_tokens: int | None = Field(ge=1)
    trace: _Nameable | None
    kv_cache_dir: _Nameable | None
    kv_cache_dir_bytes: Bytes
    kv_event_buffer_max_size: int = Field(ge=0, le=_MOST_KEPT)
    iter_stats_max_iterations: int = Field(ge=0, le=_MOST_KEPT)

    def for_engine(self, compiled: FeaturesConfig) -> EngineOptions:
        """The options of an engine with these features."""
        store = None if self.kv_cache_dir is None else KvStoreOptions(self.kv_cache_dir, self.kv_cache_dir_bytes)
        return EngineOptions(
            scheduler=self.scheduler,
            kv_cache_fraction=self.kv_cache_fraction,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_cache_host_memory_bytes=self.kv_cache_host_memory_bytes or 0,
            kv_reuse=compiled.kv_reuse if self.kv_reuse is None else self.kv_reuse,
            chunked_context=compiled.chunked_context if self.chunked_context is None else self.chunked_context,
            threads=self.threads,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            trace=self.trace,
            kv_store=store,
            kv_event_buffer_max_size=self.kv_event_buffer_max_size,
            iter_stats_max_iterations=self.iter_stats_max_iterations,
        )
