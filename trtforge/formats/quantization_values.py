"""Typed access to the JSON objects that describe a quantisation; errors name the location in the file."""

import json
import re
from collections.abc import Mapping
from typing import Any

from trtforge.core.errors import ForgeError

ORIGINAL = "Convert the original float16 or bfloat16 checkpoint; trtforge quantises it."
DAMAGED = "Fetch the file again."
_GROUPS = (64, 128)


_KEYS = ("quantization_config", "compression_config")
"""Where a config.json describes its quantisation; the latter is that of compressed-tensors before 0.6."""


def quantization_of(config: Mapping[str, Any]) -> Any:
    """The quantisation in a config.json or its text_config; None for an unquantised model."""
    text = config.get("text_config")
    places = (config, text) if isinstance(text, dict) else (config,)
    return next((place[key] for place in places for key in _KEYS if place.get(key) is not None), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without its quantisation."""
    found = {key: value for key, value in config.items() if key not in _KEYS}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = without_quantization(text)
    return found


_FLAGS = re.compile(r"\(\?([aimsux]+)\)")  # at the start of an expression, for the whole expression


class Values:
    """A JSON object and its location, for error messages."""

    def __init__(self, values: object, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise self.refusal(f"an object is expected, not {shown(values)}", DAMAGED)
        self.values: Mapping[str, Any] = values

    def refusal(self, reason: str, hint: str = ORIGINAL) -> ForgeError:
        """The error to raise for a quantisation that is not converted."""
        return ForgeError(f"{self.where}: {reason}", hint=hint)

    def get(self, *keys: str) -> Any:
        """The value of the first key that is present."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def part(self, key: str) -> "Values":
        """The object at a key. Raises ForgeError if it is not an object."""
        return Values(self.values.get(key), f"{self.where}.{key}")

    def names(self, *keys: str) -> tuple[str, ...]:
        """The list of strings at the first key that is present, else empty. Raises ForgeError for another type."""
        found = self.get(*keys) or []
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise self.refusal(f"{keys[0]} is {shown(found)}, a list of names is expected", DAMAGED)
        return tuple(found)

    def require(self, key: str, value: object, allowed: tuple[object, ...], why: str) -> None:
        """Raises ForgeError with the reason if the value is not allowed."""
        if isinstance(value, bool) or value not in allowed:
            raise self.refusal(f"{key} is {shown(value)}: {why}")

    def require_int4(self, *keys: str) -> None:
        """Raises ForgeError unless codes have 4 bits."""
        self.require(keys[0], self.get(*keys), (4,), "only 4-bit codes have a TensorRT-LLM layout for every GPU")

    def int4_groups(self, *keys: str) -> tuple[int, bool]:
        """The group size of 4-bit codes, and whether it is -1: one scale per output, read as equal scales of all
        groups."""
        size = self.get(*keys)
        per_output = size == -1 and not isinstance(size, bool)
        return (_GROUPS[-1], True) if per_output else (self.group_size(*keys), False)

    def group_size(self, *keys: str, algorithm: str = "W4A16_AWQ") -> int:
        """The group size, 128 if absent. Raises ForgeError for one that TensorRT-LLM does not support."""
        size = self.get(*keys)
        size = 128 if size is None else size
        self.require(keys[0], size, _GROUPS, f"TensorRT-LLM's {algorithm} has groups of 64 or 128 inputs")
        assert isinstance(size, int)
        return size

    def regex(self, pattern: str) -> str:
        """A regular expression from the file, matched from a name's start. Raises ForgeError if it is invalid."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.refusal(f"{pattern} is not a regular expression: {error}", DAMAGED) from None
        flags = _FLAGS.match(pattern)  # allowed only at the start of an expression
        return f"^(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"^(?:{pattern})"


def static_fp8_kv_cache(values: Values) -> bool:
    """Whether there is a `kv_cache_scheme`. Raises ForgeError unless it is static FP8 with one scale per layer."""
    if values.get("kv_cache_scheme") is None:
        return False
    scheme = values.part("kv_cache_scheme")
    said = (scheme.get("num_bits"), scheme.get("type"), bool(scheme.get("dynamic")))
    if said != (8, "float", False):
        raise scheme.refusal("only a static 8-bit float KV cache is converted")
    strategy = scheme.get("strategy") or "tensor"
    scheme.require("strategy", strategy, ("tensor",), "TensorRT-LLM has one KV scale for a layer")
    return True


def shown(value: object) -> str:
    """The value in JSON notation."""
    return json.dumps(value, default=repr)
