"""`--feature NAME[=VALUE]` as the recipe's `engine.features`."""

from collections.abc import Sequence
from typing import Any

from trtforge.core.config import parse_value


def parse_features(words: Sequence[str]) -> dict[str, Any]:
    """`kv_reuse` is true, `kv_reuse=false` what it says. Names and values are checked by the configuration model."""
    pairs = (word.partition("=") for word in words)
    return {name: parse_value(value, f"--feature {name}") if equals else True for name, equals, value in pairs}
