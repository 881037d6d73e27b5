"""Events of KV block contents, for routers that send a request to the engine that has its prefix in the cache.

Names, and dictionaries for JSON, are those of TensorRT-LLM 1.3.0rc3: `KVCacheEvent` and the others of cpp/include/
tensorrt_llm/executor/executor.h, `KVCacheEventSerializer` of tensorrt_llm/_utils.py.
"""

from dataclasses import dataclass
from typing import Any

DEVICE_LEVEL, HOST_LEVEL = 0, 1
"""Cache levels: `kPrimaryLevel` and `kSecondaryLevel` of TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class KvCacheEventDiff:
    """A value that has changed."""

    old_value: int
    new_value: int

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        return {"type": "event_diff", "new_value": self.new_value, "old_value": self.old_value}


@dataclass(frozen=True, slots=True)
class KvCacheCreated:
    """The first event: the cache exists, with these numbers of blocks on the device and in host memory."""

    num_blocks_per_cache_level: tuple[int, int]

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        return {"type": "created", "num_blocks_per_cache_level": list(self.num_blocks_per_cache_level)}


@dataclass(frozen=True, slots=True)
class KvCacheStoredBlock:
    """A full block that requests can find from now on.

    `block_hash`: unsigned 64 bits, of all tokens up to the block's end and of the request's adapter and cache salt.
    `token_ids`: one for each of the block's tokens; the vocabulary's size for rows of prompt tables, whose contents
    (and extra ids) `token_extra_ids` identify; 0 for other tokens. `lora_id`: task id of the LoRA adapter; not in
    TensorRT-LLM's JSON. `cache_level`: 0 on the device, 1 in host memory. `priority`: from 0 to 100.
    """

    block_hash: int
    token_ids: tuple[int, ...]
    token_extra_ids: tuple[int, ...]
    lora_id: int | None
    cache_level: int
    priority: int

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        tokens = zip(self.token_ids, self.token_extra_ids, strict=True)
        return {
            "type": "stored_block",
            "block_hash": self.block_hash,
            "tokens": [{"type": "unique_token", "token_id": own, "token_extra_id": extra} for own, extra in tokens],
            "cache_level": self.cache_level,
            "priority": self.priority,
            "mm_keys": [],
        }


@dataclass(frozen=True, slots=True)
class KvCacheStored:
    """Consecutive blocks. `parent_hash`: hash of the block before the first; None at the start of a prompt."""

    parent_hash: int | None
    blocks: tuple[KvCacheStoredBlock, ...]

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        blocks = [block.as_dict() for block in self.blocks]
        return {"type": "stored", "parent_hash": self.parent_hash, "blocks": blocks}


@dataclass(frozen=True, slots=True)
class KvCacheRemoved:
    """Blocks whose contents are no longer on the device or in host memory."""

    block_hashes: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        return {"type": "removed", "block_hashes": list(self.block_hashes)}


@dataclass(frozen=True, slots=True)
class KvCacheUpdated:
    """A block whose cache level or priority changed; None for what did not change.

    TensorRT-LLM 1.3.0rc3 fails to serialise an unchanged value; here it is null.
    """

    block_hash: int
    cache_level: KvCacheEventDiff | None = None
    priority: KvCacheEventDiff | None = None

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON."""
        level, priority = (None if diff is None else diff.as_dict() for diff in (self.cache_level, self.priority))
        return {"type": "updated", "block_hash": self.block_hash, "cache_level": level, "priority": priority}


@dataclass(frozen=True, slots=True)
class KvCacheEvent:
    """One event. Ids count from 0; a missing id means that events were dropped.

    `window_size`: maximum number of tokens that a token attends to in any layer.
    """

    event_id: int
    data: KvCacheCreated | KvCacheStored | KvCacheRemoved | KvCacheUpdated
    window_size: int

    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON, for `json.dumps`."""
        return {"event_id": self.event_id, "data": self.data.as_dict(), "window_size": self.window_size}
