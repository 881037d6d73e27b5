"""The options of `Engine.load`, checked."""

import logging
import math
import os
import threading
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import SchedulerPolicy
from trtforge.core.sizes import Bytes
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.scheduling.batch_limits import BatchLimits

_LOG = logging.getLogger(__name__)


def _nameable(path: Path) -> Path:
    """Raises ValueError for an invalid file name."""
    if b"\0" in os.fsencode(path):
        raise ValueError("it contains a null character")
    return path


def _given(path: object) -> object:
    """Raises ValueError for an empty name, which would mean the current directory."""
    if path == "":
        raise ValueError("Input should not be empty")
    return path


def _plain(value: object) -> object:
    """numpy's numbers and booleans as Python's."""
    return value.item() if isinstance(value, np.generic) else value


_MOST_KEPT = 100_000_000
"""The most unread events or iterations, as they take memory."""
_Nameable = Annotated[Path, BeforeValidator(_given), AfterValidator(_nameable)]
_Switch = Annotated[bool, BeforeValidator(_plain), Field(strict=True)]
_Count = Annotated[int, BeforeValidator(_plain), Field(ge=1, strict=True)]
_Kept = Annotated[int, BeforeValidator(_plain), Field(ge=0, le=_MOST_KEPT, strict=True)]


def seconds_of(timeout: object) -> float | None:
    """A timeout that threads support. Raises ForgeError for an invalid one."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ForgeError(
            f"timeout is {timeout!r}, not a number of seconds", hint="Give seconds, or None to wait without a limit."
        )
    return min(max(timeout, 0.0), threading.TIMEOUT_MAX)


class LoadOptions(Config):
    """Arguments of `Engine.load`, which has their defaults."""

    directory: _Nameable
    scheduler: SchedulerPolicy
    kv_cache_fraction: float = Field(gt=0, le=1, strict=True)
    kv_cache_tokens: _Count | None
    kv_cache_host_memory_bytes: Bytes | None
    kv_reuse: _Switch | None
    chunked_context: _Switch | None
    threads: Annotated[_Count, Field(le=1024)] | None
    max_batch_size: _Count | None
    max_num_tokens: _Count | None
    trace: _Nameable | None
    kv_cache_dir: _Nameable | None
    kv_cache_dir_bytes: Bytes
    kv_event_buffer_max_size: _Kept
    iter_stats_max_iterations: _Kept

    def warn_of_limits(self, engine: BatchLimits) -> None:
        """Warn of limits larger than the engine's, as the engine's then apply."""
        for name in ("max_batch_size", "max_num_tokens"):
            asked, own = getattr(self, name), getattr(engine, name)
            if asked is not None and asked > own:
                _LOG.warning("%s %d has no effect: the engine's is %d", name, asked, own)

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
