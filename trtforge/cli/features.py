"""`--feature NAME[=VALUE]` as the recipe's `engine.features`."""

from collections.abc import Sequence
from typing import Any

from trtforge.core.config_model import parse_value
from trtforge.core.errors import UsageError


def parse_features(words: Sequence[str]) -> dict[str, Any]:
    """Parse `kv_reuse` (true), `kv_reuse=false`, and `lookahead.window=7` (one key of a feature).

    The configuration model checks names and values. Raises UsageError for contradicting values.
    """
    features: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        value = parse_value(text, f"--feature {name}") if equals else True
        feature, dot, key = name.partition(".")
        if not dot:
            known = features.setdefault(feature, value)
            if known != value and not (isinstance(known, dict) and value is True):
                raise UsageError(f"--feature {name} is given twice, with different values", hint="Give it once.")
            continue
        keys = features.setdefault(feature, {})
        if keys is True:
            keys = features[feature] = {}
        if not isinstance(keys, dict):
            raise UsageError(
                f"--feature {name}: {feature} is already {keys!r}",
                hint=f"Leave out --feature {feature}.",
            )
        keys[key] = value
    return features
