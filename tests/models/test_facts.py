"""What a config.json says of a family, where it says something of the wrong kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, Ministral3Config, PreTrainedConfig

from tests.families import TINY
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import read_config
from trtforge.models.family import Facts
from trtforge.models.registry import architectures, family_of, family_of_config, family_of_engine


def facts_of(family: str, changes: dict[str, Any], directory: Path, absent: tuple[str, ...] = ()) -> Facts:
    """The facts of a tiny model's config.json with these changes and without the absent keys."""
    model = TINY[family]()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]} | changes
    written = {key: value for key, value in values.items() if key not in absent}
    (directory / "config.json").write_text(json.dumps(written))
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
        ("mixtral", {"num_experts_per_tok": 5}, "a token cannot get 5 of 4 experts$"),
        ("deepseek_v2", {"topk_group": 1}, "a token cannot get 3 of 8 experts in 1 of 4 groups"),
        ("deepseek_v3", {"n_group": 3}, "a token cannot get 3 of 8 experts in 2 of 3 groups"),
        ("glm4_moe", {"topk_group": 3}, "a token cannot get 3 of 8 experts in 3 of 2 groups"),
        ("glm4_moe", {"n_group": 8, "topk_group": 3}, "8 groups of 1 experts: the two best of a group are its score"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "8 groups of 1 experts: the two best of a group"),
        (
            "gemma3",
            {"layer_types": ["full_attention"] * 2},
            "layer_types is not full_attention or sliding_attention for",
        ),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "for each of 4 layers"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1, not a whole number above zero"),
        ("phi3", {"sliding_window": "7"}, "sliding_window is '7', not a whole number"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "24 elements of a head of 16 cannot be rotated"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 0.01}}, "0 elements of a head of 16 cannot be rotated"),
        ("gptj", {"rotary_dim": None}, "64 elements of a head of 16 cannot be rotated"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 9}},
            "long_factor has 9 numbers, 16 rotated elements need 8",
        ),
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
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"hidden_act": "gelu"}, "hidden_act gelu cannot be converted"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act gelu cannot be converted"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False cannot be converted"),
        ("deepseek_v2", {"rope_parameters": _YARN | {"attention_factor": 1.5}}, "attention_factor 1.5 cannot be"),
        ("deepseek_v3", {"rope_parameters": _YARN | {"truncate": False}}, "truncate False cannot be converted"),
        ("gemma", {"hidden_activation": "gelu", "hidden_act": "silu"}, "hidden_act silu cannot be converted"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation gelu cannot be converted"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation gelu cannot be converted"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True cannot be converted"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type linear cannot be converted",
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "rope_type linear cannot be converted",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True cannot be converted"),
        *(
            (family, {"is_causal": False}, "is_causal False cannot be converted")
            for family in ("qwen2", "gpt2", "gptj", "opt", "bloom", "falcon_rw", "deepseek_v2", "deepseek_v3")
        ),
        ("gptj", {"activation_function": "relu"}, "activation_function relu cannot be converted"),
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


def _defaults(config: PreTrainedConfig) -> dict[str, Any]:
    """What the configuration class itself gives to absent keys."""
    own = type(config)
    fields = {key: getattr(own, key, None) for key in config.to_dict() if key not in ("dtype", "model_type")}
    plain = {key: value for key, value in fields.items() if isinstance(value, int | float | str)}
    theta = getattr(own, "default_theta", None) if getattr(config, "rope_parameters", None) else None
    return plain | ({"rope_theta": theta} if isinstance(theta, float) else {})


def _read(values: dict[str, Any], directory: Path) -> Facts | str:
    """The facts, or why there are none."""
    (directory / "config.json").write_text(json.dumps(values))
    config = read_config(directory)
    try:
        return family_of(config.architecture).facts(config)
    except ForgeError as error:
        return error.message


@pytest.mark.parametrize("family", TINY)
def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    """Of the keys that may be absent: without sizes that all models name, config.json is refused."""
    model = TINY[family]()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    checked = []
    for key, default in _defaults(model.config).items():
        rope = {"rope_parameters": None, "rope_scaling": _LINEAR} if key == "rope_theta" else {}
        others = {name: value for name, value in (values | rope).items() if name != key}
        found = _read(others, tmp_path)
        if isinstance(found, str) and f"{key} is missing" in found:
            continue
        assert found == _read(others | {key: default}, tmp_path), key
        checked.append(key)
    assert checked


def test_gemma_3_with_vision_as_it_is_published(tmp_path: Path) -> None:
    """google/gemma-3-12b-it leaves out what its configuration class knows."""
    text = {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    facts = family_of("Gemma3ForConditionalGeneration").facts(read_config(tmp_path))
    expected = Gemma3TextConfig(**text)
    sizes = facts.sizes
    assert (sizes.vocab, sizes.head_size, sizes.num_kv_heads) == (expected.vocab_size, expected.head_dim, 8)
    assert (sizes.max_positions, facts.tied_embeddings) == (expected.max_position_embeddings, True)
    assert facts.config["rotary_base"] == expected.rope_parameters["full_attention"]["rope_theta"]
    assert facts.config["rope_local_base_freq"] == expected.rope_parameters["sliding_attention"]["rope_theta"]
    kinds = [
        "sliding_attention" if layer in facts.config["sliding_window_layers"] else "full_attention"
        for layer in range(48)
    ]
    assert kinds == expected.layer_types


def test_capped_logits_of_gemma_3_with_vision_are_refused(tmp_path: Path) -> None:
    """transformers computes them without the cap."""
    text = TINY["gemma3"]().config.to_dict() | {"final_logit_softcapping": 30.0}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ForgeError, match=r"final_logit_softcapping 30\.0 cannot be converted"):
        family_of("Gemma3ForConditionalGeneration").facts(read_config(tmp_path))


def test_queries_that_grow_with_their_position_are_refused(tmp_path: Path) -> None:
    """Keys of mistralai/Devstral-Small-2-24B-Instruct-2512 and of the Ministral 3 models."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 100000000.0,
        "factor": 48.0,
        "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1,
    }
    text = {
        "model_type": "ministral3",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 393216,
        "sliding_window": None,
        "rope_parameters": rope,
    }
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    family, config = family_of("Mistral3ForConditionalGeneration"), tmp_path / "config.json"
    config.write_text(json.dumps(values))
    with pytest.raises(ForgeError, match=r"llama_4_scaling_beta 0\.1 cannot be converted") as caught:
        family.facts(read_config(tmp_path))
    assert "does not scale queries by their position" in (caught.value.hint or "")
    config.write_text(
        json.dumps(values | {"text_config": text | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.0}}})
    )
    assert family.facts(read_config(tmp_path)).config["rotary_scaling"]["factor"] == 48.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "mistral4"}, "model_type mistral4 cannot be converted"),
        ({"model_type": "ministral3"}, "llama_4_scaling_beta 0.1 cannot be converted"),
        ({"model_type": "ministral3", "rope_parameters": {"rope_theta": 1e6}}, None),
    ],
)
def test_the_language_model_of_mistral_3_is_of_its_text_configs_type(
    tmp_path: Path, text: dict[str, Any], message: str | None
) -> None:
    """Mistral Small 4 has another one, and a Ministral 3 other defaults."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": sizes | {"vocab_size": 131} | text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    family, config = family_of("Mistral3ForConditionalGeneration"), read_config(tmp_path)
    if message is not None:
        with pytest.raises(ForgeError, match=message):
            family.facts(config)
        return
    facts, expected = family.facts(config), Ministral3Config(**sizes, **text)
    assert facts.sizes.head_size == expected.head_dim
    assert facts.config["norm_epsilon"] == expected.rms_norm_eps
    assert facts.config["sliding_window"] == expected.sliding_window
    assert facts.sizes.max_positions == expected.max_position_embeddings
    assert facts.sizes.num_kv_heads == expected.num_key_value_heads


def test_layer_types_are_those_of_a_ministral_only(tmp_path: Path) -> None:
    """transformers ignores them in a Mixtral, and in the Mistral of a Mistral 3."""
    kinds = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}
    text = {**TINY["mistral"]().config.to_dict(), **kinds}
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    mistral3 = family_of("Mistral3ForConditionalGeneration").facts(read_config(tmp_path))
    assert facts_of("mistral", kinds, tmp_path).config["sliding_window_layers"] == [1, 3]
    for facts in (mistral3, facts_of("mixtral", kinds, tmp_path)):
        assert (facts.config["sliding_window"], facts.config["sliding_window_layers"]) == (16, None)


def test_a_gptj_has_its_own_rotation(tmp_path: Path) -> None:
    """transformers/models/gptj/modeling_gptj.py reads no base and no scaling."""
    changes = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    facts = facts_of("gptj", changes, tmp_path)
    assert (facts.config["rotary_base"], facts.config["rotary_scaling"]) == (10000.0, None)


@pytest.mark.parametrize("family", TINY)
def test_the_model_type_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    model = TINY[family]()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    own = family_of_config(read_config(tmp_path))
    other = "gpt2" if own.name == "llama" else "llama"
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": other}))
    with pytest.raises(ForgeError, match=f"model_type {other} is of another one") as caught:
        family_of_config(read_config(tmp_path))
    assert f'"{model.config.model_type}"' in (caught.value.hint or "")


def test_tensorrt_llm_names_architectures_as_hugging_face_does() -> None:
    for name in architectures():
        family = family_of(name)
        engine = family_of_engine(family.architectures[name])
        assert engine is not None
        assert engine.name == family.name
    assert family_of_engine("MedusaForCausalLM") is None
