"""Reads and checks RoPE scaling in a Hugging Face config.json: known type, valid numbers.

Names and required keys: transformers/modeling_rope_utils.py; `RotaryScalingType` in tensorrt_llm/functional.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import ITS_OWN_CONFIG, HfConfig

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "mrope": (),
}
_ORIGINAL = "original_max_position_embeddings"
_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
"""Types for which `original_max_position_embeddings` beside the scaling object takes precedence over that inside it."""
_POSITIVE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
_NOT_NEGATIVE = ("mscale", "mscale_all_dim")  # 0 counts as absent
_FACTORS = ("short_factor", "long_factor")
_LENGTH_INCLUDES_SCALING = frozenset({"su", "longrope", "llama3"})
"""Types whose max_position_embeddings already includes the factor."""


def rope_scaling(config: HfConfig, *, also: tuple[str, ...] = (), abrupt: bool = False) -> dict[str, Any] | None:
    """The scaling as transformers reads it, None if there is none. `also`: additional types that this family supports.

    `abrupt`: for rope_type llama3, high_freq_factor may equal low_freq_factor, with no frequencies in between.

    Raises ForgeError for an unknown `rope_type`, a missing key, and an invalid number.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str) or kind not in (*_REQUIRED, *also):
        raise ForgeError(
            f"{config.path}: rope_type {kind!r} is not known", hint=f"Known: {', '.join((*_REQUIRED, *also))}."
        )
    original = config.values.get(_ORIGINAL)
    _check(config, _ORIGINAL, original)
    if kind in _FROM_ORIGINAL and original is not None:
        scaling = {**scaling, _ORIGINAL: original}
    elif kind == "llama3" and scaling.get(_ORIGINAL) is None:
        scaling = {**scaling, _ORIGINAL: config.integer("max_position_embeddings", 2048)}
    required = _REQUIRED.get(kind, ())
    if kind == "yarn" and scaling.get(_ORIGINAL) is not None:  # determines the factor
        required = ()
    missing = [key for key in required if scaling.get(key) is None]
    if missing:
        raise _wrong(config, f"rope_type {kind} needs {missing[0]}")
    for key, value in scaling.items():
        _check(config, key, value)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if high < low or (high == low and not abrupt):
            raise _wrong(config, f"high_freq_factor {high} is not above low_freq_factor {low}")
    return scaling


def require_factors(config: HfConfig, scaling: Mapping[str, Any], dim: int) -> None:
    """Raises ForgeError if longrope's lists do not have a factor for each pair of the `dim` rotated elements."""
    wanted = (dim + 1) // 2
    for key in _FACTORS:
        given = scaling.get(key)
        if isinstance(given, list) and len(given) != wanted:
            raise _wrong(config, f"{key} has {len(given)} numbers, {dim} rotated elements need {wanted}")


def scaled_length(positions: int | None, scaling: Mapping[str, Any] | None) -> int | None:
    """The context length of a model with `positions` positions and this RoPE scaling; None without positions."""
    if positions is None or not scaling:
        return positions
    kind = scaling.get("type", scaling.get("rope_type"))
    return positions if kind in _LENGTH_INCLUDES_SCALING else int(positions * float(scaling.get("factor") or 1.0))


def longrope_factor(scaling: Mapping[str, Any], positions: int, original: int) -> float:
    """Longrope's factor on cosines and sines: the `attention_factor` of `scaling`, else computed from its `factor`.

    Without either, computed from `positions` / `original`.
    """
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    stretch = float(scaling.get("factor") or positions / original)
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def _check(config: HfConfig, key: str, value: object) -> None:
    """Raises ForgeError for a value that is invalid for this key; null counts as absent."""
    if value is None:
        return
    if key == _ORIGINAL and not _is_number(value, above=1.0):
        raise _wrong(config, f"{key} is {value!r}, not a number above one")
    if key in _POSITIVE and not _is_number(value, above=0.0):
        raise _wrong(config, f"{key} is {value!r}, not a number above zero")
    if key in _NOT_NEGATIVE and not _is_number(value, above=-math.ulp(0.0)):
        raise _wrong(config, f"{key} is {value!r}, not a non-negative number")
    if key in _FACTORS:
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(value, list) or not _is_number(item, above=0.0):
                raise _wrong(config, f"{key} holds {item!r}, not numbers above zero")


def _is_number(value: object, *, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _wrong(config: HfConfig, what: str) -> ForgeError:
    return ForgeError(f"{config.path}: rope_scaling: {what}", hint=ITS_OWN_CONFIG)
