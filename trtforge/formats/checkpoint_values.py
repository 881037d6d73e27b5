"""Checks nested values of a checkpoint's config.json that are sizes or scales, also of foreign checkpoints."""

from collections.abc import Mapping
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.plausible import LARGEST

_WHOLE = {
    "moe": (
        "num_experts",
        "top_k",
        "normalization_mode",
        "shared_expert_intermediate_size",
        "device_limited_n_group",
        "device_limited_topk_group",
    )
}
_NUMBERS = {
    "moe": ("device_limited_routed_scaling_factor",),
    "rotary_scaling": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ),
}
_WORDS = {"rotary_scaling": ("type", "rope_type")}
_POSITIVE = ("q_scaling", "query_pre_attn_scalar", "floor_scale")
_LARGEST = float(max(LARGEST.values()))


def require_values(values: Mapping[str, Any], where: str) -> None:
    """Raises ForgeError, naming `where` and the key, for a value of another type. Absent and null ones are accepted."""
    for key in {*_WHOLE, *_NUMBERS, *_WORDS}:
        part = values.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise _wrong(where, key, part, "an object")
        for name in _WHOLE.get(key, ()):
            _require(part.get(name), f"{key}.{name}", where, whole=True)
        for name in _NUMBERS.get(key, ()):
            _require(part.get(name), f"{key}.{name}", where)
        for name in _WORDS.get(key, ()):
            if not isinstance(part.get(name), str | None):
                raise _wrong(where, f"{key}.{name}", part[name], "a word")
    for key in _POSITIVE:
        value = values.get(key)
        if isinstance(value, int | float) and value <= 0:
            raise _wrong(where, key, value, "a number above zero")


def require_choice(experts: int, top_k: int, groups: int = 1, top_groups: int = 1, *, by_two: bool = False) -> None:
    """Raises ForgeError unless `top_k` experts can be chosen from the `top_groups` best of `groups` equal groups.

    `by_two`: a group's score is the sum of its two best experts (DeepSeek-V3), so it must have two.
    """
    if experts % groups or not 0 < top_groups <= groups or not 0 < top_k <= experts // groups * top_groups:
        of_groups = f" in {top_groups} of {groups} groups" if groups > 1 else ""
        fault = f"a token cannot get {top_k} of {experts} experts{of_groups}"
    elif by_two and experts < 2 * groups:
        fault = f"{groups} groups of {experts // groups} experts: the two best of a group are its score"
    else:
        return
    raise ForgeError(f"config.json: {fault}", hint="Use the config.json that came with the model.")


def _require(value: object, key: str, where: str, *, whole: bool = False) -> None:
    kinds = int if whole else int | float
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= _LARGEST):
        return
    raise _wrong(where, key, value, "a whole number from zero on" if whole else "a number from zero on")


def _wrong(where: str, key: str, value: object, expected: str) -> ForgeError:
    return ForgeError(
        f"{where}: {key} is {value!r:.60}, {expected} is expected", hint="Make the directory again with trtforge."
    )
