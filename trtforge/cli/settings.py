"""`--set serving.KEY=VALUE` outside a recipe."""

from collections.abc import Sequence
from typing import Any

from trtforge.core.config_model import Location, parse_value
from trtforge.core.errors import UsageError
from trtforge.core.serving import ServingConfig


def serving_settings(words: Sequence[str]) -> ServingConfig:
    """The serving configuration with these settings. Raises UsageError for an unknown key or a malformed setting."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.startswith("serving."):
            raise UsageError(f"--set {word}: not serving.KEY=VALUE", hint="For example --set serving.streaming=false.")
        values[key.removeprefix("serving.")] = parse_value(text, f"--set {key}")
    given = {word.partition("=")[0]: f"--set {word}" for word in words}

    def option(location: Location) -> str | None:
        return given.get(f"serving.{location[0]}") if location else None

    return ServingConfig.parse(values, "--set", lambda key: f"serving.{key}", given=option)
