"""Bounds of what files may ask us to size."""

import json
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.plausible import require_plausible
from trtforge.plan.known import known_config, known_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_key_value_heads": 10**12}, "x: num_key_value_heads is 1,000,000,000,000, .* the limit is 4,096"),
        ({"text_config": {"vocab_size": 1 << 24}}, r"x: text_config\.vocab_size is 16,777,216"),
        ({"hidden_size": float("inf")}, "x: hidden_size is inf"),
        ({"mapping": {"tp_size": 4096}}, r"x: mapping\.tp_size is 4,096, .* the limit is 1,024"),
        ({"num_hidden_layers": 1000, "num_local_experts": 1000}, "1,000 layers of 1,000 experts"),
    ],
)
def test_what_is_too_large_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        require_plausible(values, "x", "mend it")


def test_known_models_are_plausible() -> None:
    require_plausible(json.loads((DEMO_MODEL / "config.json").read_text()), "demo", "-")
    for name in known_ids():
        config = known_config(name)
        assert config is not None
        require_plausible(config.values, name, "-")
    deepseek_v3 = {"num_hidden_layers": 61, "n_routed_experts": 256, "vocab_size": 129_280}
    kimi_k2 = {"num_hidden_layers": 61, "n_routed_experts": 384, "vocab_size": 163_840}
    llama4 = {"text_config": {"max_position_embeddings": 10_485_760, "num_local_experts": 128}}
    for values in (deepseek_v3, kimi_k2, llama4):
        require_plausible(values, "x", "-")


def test_other_types_and_small_numbers_are_left_to_others() -> None:
    require_plausible({"hidden_size": "x", "num_hidden_layers": -1, "vocab_size": True}, "x", "-")


def test_a_layout_has_bounds_too() -> None:
    with pytest.raises(ForgeError, match="tp 2000 is implausible: the limit is 1,024"):
        Parallel(tp=2000)
    with pytest.raises(ForgeError, match=r"mapping\.pp_size is '2', not an integer"):
        Parallel.of_mapping({"pp_size": "2"})
