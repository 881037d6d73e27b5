"""Reads config.json files with a number in place of a boolean, which `transformers` 5 would refuse.

Llama 4 was published with `"attn_temperature_tuning": 4` (transformers pull request 37501).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.formats.hf import CONFIG, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FLAGS = ("attn_temperature_tuning",)


def config_with_flags(directory: Path) -> "PreTrainedConfig | None":
    """The directory's configuration with booleans for these numbers; None if there are none, or no config.json."""
    if not (directory / CONFIG).is_file():
        return None
    values = read_config(directory).values
    text = values.get("text_config")
    if not any(_numbers(part) for part in (values, text) if isinstance(part, dict)):
        return None
    from transformers import CONFIG_MAPPING

    found: PreTrainedConfig = CONFIG_MAPPING[values["model_type"]].from_dict(_with_flags(values))
    return found


def _numbers(values: Mapping[str, Any]) -> list[str]:
    return [key for key in _FLAGS if isinstance(values.get(key), int) and not isinstance(values[key], bool)]


def _with_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {**values, **{key: bool(values[key]) for key in _numbers(values)}}
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = _with_flags(found["text_config"])
    return found
