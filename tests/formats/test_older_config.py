"""Configurations saved by transformers 5 get the names that transformers 4 reads, and both mean the same."""

import json
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from trtforge.formats.older_config import with_older_names

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "default": LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 250000.0}),
    "llama3": LlamaConfig(rope_parameters=LLAMA3, max_position_embeddings=131072),
    "partial": GlmConfig(),
    "experts": Qwen3MoeConfig(),
    "yarn": GptOssConfig(),
    "by layer type": Gemma3TextConfig(),
}


def saved(config: PreTrainedConfig) -> dict[str, Any]:
    """The config.json that transformers 5 writes."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key != "transformers_version"}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_same_rotation(name: str) -> None:
    values = saved(CONFIGS[name])
    assert "rope_theta" not in values
    named = with_older_names(values)
    assert {key: named[key] for key in values} == values
    again = AutoConfig.for_model(**named)
    assert again.rope_parameters == CONFIGS[name].rope_parameters


def test_values_are_those_of_the_rotation() -> None:
    named = with_older_names({"dtype": "bfloat16", "rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}})
    assert named["torch_dtype"] == "bfloat16"
    assert (named["rope_theta"], named["partial_rotary_factor"]) == (500000.0, 0.5)
    assert named["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def test_a_rotation_without_scaling_gets_none() -> None:
    named = with_older_names({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert named == {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}


def test_layers_with_and_without_windows_have_their_own_bases() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    rope = {"full_attention": {**scaled, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    named = with_older_names({"text_config": {"rope_parameters": rope}})["text_config"]
    assert (named["rope_theta"], named["rope_local_base_freq"], named["rope_scaling"]) == (1e6, 1e4, scaled)


def test_names_that_are_there_stay() -> None:
    values = {"torch_dtype": "float16", "dtype": "bfloat16", "rope_theta": 1.0, "rope_scaling": None}
    values |= {"rope_parameters": LLAMA3}
    assert with_older_names(values) == values
