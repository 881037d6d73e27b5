"""The options of `Engine.load`, checked."""

from pathlib import Path

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.defaults import KV_CACHE_DIR_BYTES
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import SchedulerPolicy
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.options import EngineOptions


class LoadOptions(Config):
    """Options of `Engine.load`; None: as the engine was compiled, or the default."""

    scheduler: SchedulerPolicy = "guaranteed_no_evict"
    kv_cache_fraction: float = Field(0.9, gt=0, le=1)
    kv_cache_tokens: int | None = Field(None, ge=1)
    kv_cache_host_memory_bytes: int | None = Field(None, ge=0)
    kv_reuse: bool | None = None
    chunked_context: bool | None = None
    threads: int | None = Field(None, ge=1, le=1024)
    max_batch_size: int | None = Field(None, ge=1)
    trace: Path | None = None
    kv_cache_dir: Path | None = None
    kv_cache_dir_bytes: int = Field(KV_CACHE_DIR_BYTES, ge=1)

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
            trace=self.trace,
            kv_store=store,
        )
