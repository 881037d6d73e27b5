"""What a config.json says of a family, where it says something of the wrong kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families import TINY
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import read_config
from trtforge.models.family import Facts
from trtforge.models.registry import architectures, family_of, family_of_engine


def facts_of(family: str, changes: dict[str, Any], directory: Path) -> Facts:
    """The facts of a tiny model's config.json with these changes."""
    model = TINY[family]()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]} | changes
    (directory / "config.json").write_text(json.dumps(values))
    config = read_config(directory)
    return family_of(config.architecture).facts(config)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"n_shared_experts": "."}, "n_shared_experts is '.', not a whole number"),
        ("deepseek_v2", {"first_k_dense_replace": [1]}, r"first_k_dense_replace is \[1\], not a whole number"),
        ("deepseek_v2", {"q_lora_rank": " "}, "q_lora_rank is ' ', not a whole number"),
        ("qwen3_moe", {"mlp_only_layers": 131}, "mlp_only_layers is 131, not a list"),
        ("gemma3", {"layer_types": True}, "layer_types is True, not a list"),
        ("gemma3", {"_sliding_window_pattern": float("nan")}, "_sliding_window_pattern is nan, not a whole number"),
        ("exaone4", {"sliding_window_pattern": [4]}, r"sliding_window_pattern is \[4\], not a whole number above zero"),
        ("gemma3", {"rope_parameters": -1}, "rope_parameters is -1, not an object"),
        ("gptj", {"n_head": 4000}, "hidden size 64 is too small for 4000 attention heads"),
        ("llama", {"num_key_value_heads": 8}, "8 key-value heads are more than the 4 attention heads"),
        ("llama", {"num_hidden_layers": 10**6}, r"num_hidden_layers is 1,000,000, .* the limit is 1,024"),
    ],
)
def test_values_of_the_wrong_kind_are_named(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        facts_of(family, changes, tmp_path)
    assert caught.value.hint


_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"hidden_act": "gelu"}, "hidden_act gelu cannot be converted"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act gelu cannot be converted"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False cannot be converted"),
        ("deepseek_v2", {"rope_parameters": _YARN | {"attention_factor": 1.5}}, "attention_factor 1.5 cannot be"),
        ("deepseek_v3", {"rope_parameters": _YARN | {"truncate": False}}, "truncate False cannot be converted"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation gelu cannot be converted"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation gelu cannot be converted"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True cannot be converted"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type linear cannot be converted",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is not longrope"),
        ("phi3", {"rope_parameters": _LONGROPE | {"factor": 8.0}}, "attention_factor scales attention by 1\\.2247"),
        ("phi3", {"rope_parameters": _LONGROPE | {"attention_factor": 1.5}}, "scales attention by 1\\.5"),
    ],
)
def test_what_tensorrt_llm_does_not_compute_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    given = {"original_max_position_embeddings": 64} | changes if family == "phi3" else changes
    with pytest.raises(ForgeError, match=message) as caught:
        facts_of(family, given, tmp_path)
    assert caught.value.hint


def test_tensorrt_llm_names_architectures_as_hugging_face_does() -> None:
    for name in architectures():
        family = family_of(name)
        engine = family_of_engine(family.architectures[name])
        assert engine is not None
        assert engine.name == family.name
    assert family_of_engine("MedusaForCausalLM") is None
