"""The config.json of well-known models, so that they can be planned without a network.

`known_models.json` has only the keys that decide sizes and formats.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trtforge.core.json_text import REINSTALL, read_json_object
from trtforge.formats.hf import HfConfig

_FILE = Path(__file__).parent / "known_models.json"


def known_config(hub_id: str) -> HfConfig | None:
    """The config.json keys of a hub id; None if they are not shipped with trtforge."""
    values = _by_id().get(hub_id.lower())
    return None if values is None else HfConfig(values, Path(hub_id) / "config.json")


def known_ids() -> tuple[str, ...]:
    """The hub ids, as the hub spells them."""
    return tuple(hub_id for model in _models() for hub_id in model["ids"])


@cache
def _models() -> tuple[dict[str, Any], ...]:
    return tuple(read_json_object(_FILE, hint=REINSTALL)["models"])


@cache
def _by_id() -> Mapping[str, Mapping[str, Any]]:
    return {hub_id.lower(): MappingProxyType(model["config"]) for model in _models() for hub_id in model["ids"]}
