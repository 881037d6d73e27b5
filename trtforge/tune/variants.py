"""The serving settings to compare with the present ones, by backend; they can be changed without compiling."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.recipe import ResolvedBackend
from trtforge.core.serving import ServingConfig
from trtforge.serve.speed import Load

PRESENT = "present settings"
_SHARES = (2, 4)  # of the batch size
_STEPS = (1024, 256)  # tokens per iteration
_LARGEST_FRACTION = 0.95  # of the free memory for the KV cache; the rest is for memory that grows later


class Variant(Config):
    """Changes of the present serving settings by key; None: the default. Without changes: the present settings."""

    changes: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The variant's name for display."""
        words = (f"{key} {'not set' if value is None else value}" for key, value in self.changes.items())
        return ", ".join(words) or PRESENT

    def applied(self, serving: ServingConfig) -> ServingConfig:
        """The settings with the changes; those that become their default are unset."""
        kept = serving.model_dump(exclude_unset=True) | self.changes
        return ServingConfig.parse({key: value for key, value in kept.items() if value is not None}, "serving")


@dataclass(frozen=True)
class Limits:
    """Limits of a served engine. `max_num_tokens`: None if unknown."""

    backend: ResolvedBackend
    max_batch_size: int
    max_num_tokens: int | None
    chunked_context: bool


def variants(serving: ServingConfig, engine: Limits, load: Load) -> tuple[Variant, ...]:
    """The variants to measure: each changes one setting, to values that matter for this load."""
    return tuple(Variant(changes={key: value}) for key, value in _changes(serving, engine, load))


def _changes(serving: ServingConfig, engine: Limits, load: Load) -> Iterator[tuple[str, Any]]:
    most = max(load.concurrency)
    if engine.backend != "tensorrt_llm":
        batch = min(engine.max_batch_size, serving.max_batch_size or engine.max_batch_size)
        if batch < min(most, engine.max_batch_size):
            yield "max_batch_size", None
        sizes = dict.fromkeys(batch // share for share in _SHARES)
        yield from (("max_batch_size", size) for size in sizes if 1 <= size < most)
        yield from _tokens(serving, engine, most * load.prompt_tokens)
    yield "scheduler", "guaranteed_no_evict" if serving.scheduler == "max_utilization" else "max_utilization"
    if serving.kv_cache_tokens is not None:
        yield "kv_cache_tokens", None
    elif serving.kv_cache_fraction < _LARGEST_FRACTION:
        yield "kv_cache_fraction", _LARGEST_FRACTION
    if engine.backend == "tensorrt_llm" and not serving.cuda_graph_mode:
        yield "cuda_graph_mode", True


def _tokens(serving: ServingConfig, engine: Limits, waiting: int) -> Iterator[tuple[str, Any]]:
    """Changes of max_num_tokens, only with chunked context, as a lower limit would otherwise refuse prompts. `waiting`:
    prompt tokens of all requests."""
    if not engine.chunked_context:
        return
    limit = serving.max_num_tokens or engine.max_num_tokens
    if serving.max_num_tokens is not None:
        yield "max_num_tokens", None
    batch = serving.max_batch_size or engine.max_batch_size
    for size in _STEPS:
        if batch < size < min(waiting, limit or waiting):
            yield "max_num_tokens", size


_OF_KV_MEMORY = frozenset({"scheduler", "kv_cache_tokens", "kv_cache_fraction"})


def needless(variant: Variant, serving: ServingConfig, engine: Limits, load: Load, kv_tokens: int | None) -> str | None:
    """Why a variant cannot make a difference; None if it can. `kv_tokens`: capacity of the KV cache, if known."""
    if not _OF_KV_MEMORY.issuperset(variant.changes) or kv_tokens is None:
        return None
    at_once = min(max(load.concurrency), serving.max_batch_size or engine.max_batch_size)
    needed = at_once * (load.prompt_tokens + load.max_tokens)
    if needed > kv_tokens:
        return None
    return f"the KV cache of {kv_tokens:,} tokens holds all that runs at once ({needed:,} tokens)"
