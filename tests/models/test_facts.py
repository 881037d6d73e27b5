"""What a config.json says of a family, where it says something of the wrong kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families import TINY
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import read_config
from trtforge.models.registry import architectures, family_of, family_of_engine


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
    model = TINY[family]()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]} | changes
    (tmp_path / "config.json").write_text(json.dumps(values))

    def read() -> None:
        config = read_config(tmp_path)
        family_of(config.architecture).facts(config)

    with pytest.raises(ForgeError, match=message) as caught:
        read()
    assert caught.value.hint


def test_tensorrt_llm_names_architectures_as_hugging_face_does() -> None:
    for name in architectures():
        family = family_of(name)
        engine = family_of_engine(family.architectures[name])
        assert engine is not None
        assert engine.name == family.name
    assert family_of_engine("MedusaForCausalLM") is None
