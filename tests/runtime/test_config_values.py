"""Values of config.json that few published models have: the logits are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.families import TINY
from tests.runtime.converted import LONG, Family, computed, error
from tests.runtime.test_families import TOLERANCE
from trtforge.core.errors import ForgeError
from trtforge.runtime.ranks.source import open_model

_WHOLE = ["full_attention"] * 4
_LONGROPE = {
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9],
    "long_factor": [1.1, 1.4, 2.0, 3.5, 6.0, 9.0, 12.0, 16.0],
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2_window", {"layer_types": _WHOLE}),
        ("gemma2", {"layer_types": _WHOLE}),
        ("gemma3", {"layer_types": _WHOLE}),
        ("qwen3", {"mlp_bias": True}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"activation_function": "swish"}),
        ("gpt_bigcode", {"activation_function": "gelu"}),
        ("gpt_bigcode", {"activation_function": "relu2"}),
        ("phi", {"hidden_act": "gelu"}),
        ("phi", {"hidden_act": "gelu_python"}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_logits_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    family = Family(TINY[name](**changes), tmp_path)
    assert error(computed(family.checkpoint(), LONG)[0], family.logits(LONG)) < TOLERANCE


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SLIDING = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("phi3", {"rope_scaling": {"type": "yarn", **_LONGROPE}, "original_max_position_embeddings": 64}),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64, **_LONGROPE},
                "original_max_position_embeddings": 128,
            },
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0, "rope_theta": 99.0}, "rope_theta": 500.0}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64}),
        ("llama", {"rope_scaling": _LLAMA3, "max_position_embeddings": 64}),
        ("phi", {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}}),
        ("gptj", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("gemma3", {"rope_parameters": _SLIDING}),
        ("qwen2_window", {"max_window_layers": 0, "layer_types": None}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "layer_types": None}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_config_json_is_read_as_transformers_reads_it(name: str, written: dict[str, Any], tmp_path: Path) -> None:
    """Values that transformers would write in another way."""
    family, source = Family(TINY[name](), tmp_path), tmp_path / "hf/config.json"
    family.model.save_pretrained(source.parent)
    source.write_text(json.dumps(json.loads(source.read_text()) | written))
    read = AutoModelForCausalLM.from_pretrained(source.parent, attn_implementation="eager").eval()
    expected = Family(read, tmp_path).logits(LONG)
    assert error(computed(family.checkpoint(), LONG)[0], expected) < TOLERANCE


def test_a_checkpoint_is_computed_up_to_its_scaled_length(tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    family = Family(TINY["llama"](max_position_embeddings=64, rope_parameters=scaled), tmp_path)
    assert open_model(family.checkpoint()).limits.max_seq_len == 128


@pytest.mark.parametrize("dim", [1, 17])
def test_no_checkpoint_rotates_more_elements_than_a_head_has(tmp_path: Path, dim: int) -> None:
    """The kernels would write beyond it."""
    checkpoint = Family(TINY["llama"](), tmp_path).checkpoint()
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(values | {"rotary_embedding_dim": dim}))
    with pytest.raises(ForgeError, match=f"{dim} elements of a head of 16 cannot be rotated"):
        open_model(checkpoint).spec(0)
