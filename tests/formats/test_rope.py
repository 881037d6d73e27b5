"""Rotary embeddings that a config.json cannot mean are refused; what models have passes as it is written."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeHf
from trtforge.convert.stage import ConvertConfig, plan_conversion
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.formats.rope import rope_scaling
from trtforge.models.registry import family_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GOOD: list[dict[str, Any]] = [
    LLAMA3,
    {"type": "linear", "factor": 2},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": None},
    {"rope_type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0, "beta_fast": 32, "truncate": False},
    {"type": "longrope", "short_factor": [1.0, 1], "long_factor": [2.0, 64.5]},
    {"type": "mrope", "mrope_section": [16, 24, 24]},
]


def config(**values: object) -> HfConfig:
    return HfConfig(values, Path("config.json"))


@pytest.mark.parametrize("scaling", GOOD, ids=lambda scaling: str(scaling.get("rope_type", scaling.get("type"))))
def test_what_models_have(scaling: dict[str, Any]) -> None:
    assert rope_scaling(config(rope_scaling=scaling)) == scaling


def test_none() -> None:
    assert rope_scaling(config()) is None
    assert rope_scaling(config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})) is None


@pytest.mark.parametrize("kind", ["ntk", "", 3, None, ["linear"]])
def test_an_unknown_kind_lists_those_that_are_known(kind: object) -> None:
    with pytest.raises(ForgeError) as caught:
        rope_scaling(config(rope_scaling={"rope_type": kind, "factor": 2.0}))
    assert caught.value.message == f"config.json: rope_type {kind!r} is not known"
    assert caught.value.hint == "Known: default, linear, dynamic, yarn, longrope, llama3, mrope."


def test_su_is_phi3s() -> None:
    scaling = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(ForgeError, match="rope_type 'su' is not known"):
        rope_scaling(config(rope_scaling=scaling))
    assert rope_scaling(config(rope_scaling=scaling), also=("su",)) == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": math.nan}, "factor is nan, not a number above zero"),
        ({"factor": math.inf}, "factor is inf, not a number above zero"),
        ({"factor": 0}, "factor is 0, not a number above zero"),
        ({"factor": -8.0}, "factor is -8.0, not a number above zero"),
        ({"factor": "8"}, "factor is '8', not a number above zero"),
        ({"factor": True}, "factor is True, not a number above zero"),
        ({"factor": None}, "rope_type llama3 needs factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1, not a number above one"),
        ({"low_freq_factor": 4.0}, "high_freq_factor 4.0 is not above low_freq_factor 4.0"),
        ({"mscale": -1}, "mscale is -1, not a non-negative number"),
        ({"attention_factor": math.nan}, "attention_factor is nan"),
        ({"long_factor": [1.0, math.nan]}, "long_factor holds nan, not numbers above zero"),
        ({"short_factor": 2.0}, "short_factor holds 2.0, not numbers above zero"),
    ],
)
def test_numbers_that_cannot_scale(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ForgeError, match=f"config.json: rope_scaling: {message}"):
        rope_scaling(config(rope_scaling=LLAMA3 | changes))


@pytest.mark.parametrize(
    ("scaling", "missing"),
    [
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "factor": 2.0}, "long_factor"),
        ({"rope_type": "linear"}, "factor"),
    ],
)
def test_what_transformers_requires_is_required(scaling: dict[str, object], missing: str) -> None:
    """transformers/modeling_rope_utils.py: `_validate_yarn_rope_parameters` and its like."""
    with pytest.raises(ForgeError, match=f"rope_type {scaling['rope_type']} needs {missing}"):
        rope_scaling(config(rope_scaling=scaling))


@pytest.mark.parametrize("theta", [math.nan, math.inf, -math.inf, 0, -10000.0, 10**400])
@pytest.mark.parametrize("nested", [False, True])
def test_theta(theta: float, nested: bool) -> None:
    values = {"rope_parameters": {"rope_theta": theta}} if nested else {"rope_theta": theta}
    with pytest.raises(ForgeError, match=r"config.json: rope_theta is .*, not a number"):
        _ = config(**values).rope_theta


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan, not a number"),
        ("LlamaForCausalLM", {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, not at least 0"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "ntk"}}, "rope_type 'ntk' is not known"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0, not a number above 0"),
        ("GraniteForCausalLM", {"embedding_multiplier": math.inf}, "embedding_multiplier is inf, not a number"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": math.nan}, "attn_logit_softcapping is nan"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0, not a number above 0"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": math.nan}, "rope_local_base_freq is nan"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": -0.5}, "partial_rotary_factor is -0.5, not a number above 0"),
    ],
)
def test_families(architecture: str, changes: dict[str, object], message: str) -> None:
    values = {
        "architectures": [architecture],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 97,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh" if architecture.startswith("Gemma") else None,
        "hidden_act": None if architecture.startswith("Gemma") else "silu",
    }
    family = family_of(architecture)
    family.facts(config(**values))
    with pytest.raises(ForgeError, match=message):
        family.facts(config(**values | changes))


def test_convert_says_so(make_hf: MakeHf) -> None:
    source = make_hf()
    path = source / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": NaN'))
    with pytest.raises(ForgeError, match=r"hf/config\.json: rope_theta is nan, not a number"):
        plan_conversion(ConvertConfig(), source)
