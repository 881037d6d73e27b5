"""TensorRT-LLM's tensors that say how long a request's KV blocks are kept for later ones.

Read as `getKvCacheRetentionConfigFromTensors` does (inflight_batcher_llm/src/utils.cc of its Triton backend), but what
is said of generated tokens counts without ranges too.
"""

from collections.abc import Mapping

from input_values import InputValues
from responder import RequestFailed

from trtforge.engine_process.retention import (
    DEFAULT_RETENTION,
    HIGHEST_RETENTION,
    KvCacheRetention,
    TokenRangeRetention,
    wrong_retention,
)

_STARTS, _ENDS, _PRIORITIES, _DURATIONS = (
    f"retention_token_range_{name}" for name in ("starts", "ends", "priorities", "durations_ms")
)
_DECODE_PRIORITY, _DECODE_DURATION = "retention_decode_priority", "retention_decode_duration_ms"
RETENTION_INPUTS = (_STARTS, _ENDS, _PRIORITIES, _DURATIONS, _DECODE_PRIORITY, _DECODE_DURATION)
_NONE = -1
"""An end: the prompt's; a duration: it never ends (`kRetentionNoRangeEnd` and `kRetentionNoExpirationTime`)."""
_NAMES: Mapping[str, str] = {
    "ranges": _STARTS,
    "start": _STARTS,
    "end": _ENDS,
    "priority": _PRIORITIES,
    "duration_ms": _DURATIONS,
    "decode_priority": _DECODE_PRIORITY,
    "decode_duration_ms": _DECODE_DURATION,
}
"""The tensors of the values of a `KvCacheRetention`."""


def retention_of(values: InputValues, item: int) -> KvCacheRetention | None:
    """The setting of one prompt, None if there is none. Raises RequestFailed."""
    if not any(name in values for name in RETENTION_INPUTS):
        return None
    starts = values.integers(_STARTS, item)
    ends = _as_many(values, _ENDS, item, len(starts))
    priorities = _as_many(values, _PRIORITIES, item, len(starts))
    durations = _as_many(values, _DURATIONS, item, len(starts)) if _DURATIONS in values else [_NONE] * len(starts)
    ranges = zip(starts, ends, priorities, durations, strict=True)
    found = KvCacheRetention(
        tuple(TokenRangeRetention(start, _given(end), priority, _given(ms)) for start, end, priority, ms in ranges),
        values.integer(_DECODE_PRIORITY, item, DEFAULT_RETENTION, 0, HIGHEST_RETENTION),
        _given(values.integers(_DECODE_DURATION, item)[0]) if _DECODE_DURATION in values else None,
    )
    wrong = wrong_retention(found)
    if wrong is not None:
        raise RequestFailed(f"{values.shown(_NAMES[wrong.name])} {wrong.problem}")
    return found


def _as_many(values: InputValues, name: str, item: int, count: int) -> list[int]:
    """The values of a tensor that has one for each range."""
    found = values.integers(name, item)
    if len(found) != count:
        raise RequestFailed(f"{values.shown(name)} has {len(found)} values, {values.shown(_STARTS)} has {count}")
    return found


def _given(value: int) -> int | None:
    return None if value == _NONE else value
