from pathlib import Path
from typing import Any

import pytest

from tests.runtime.converted import TOKENS, Families, computed, edited
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import CheckpointConfig, read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec


def config_of(families: Families, directory: Path, name: str, changes: dict[str, Any]) -> CheckpointConfig:
    return read_checkpoint_config(edited(families(name).checkpoint(), directory, changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"architecture": "MambaForCausalLM"}, "architecture MambaForCausalLM is not supported"),
        ("llama", {"hidden_act": "mish"}, "hidden_act mish is not supported"),
        ("llama", {"position_embedding_type": "relative"}, "position_embedding_type relative is not supported"),
        ("llama", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("llama", {"residual_mlp": True}, "residual_mlp True is not supported"),
        ("gpt2", {"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling True is not supported"),
        (
            "llama",
            {"quantization": {"quant_algo": "W4A8_QSERVE_PER_GROUP"}},
            "quantization.quant_algo W4A8_QSERVE_PER_GROUP is not supported by the embedded engine",
        ),
        (
            "llama",
            {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "quantization.kv_cache_quant_algo NVFP4 is not supported by the embedded engine",
        ),
        ("llama", {"mapping": {"tp_size": 8}}, "mapping.tp_size 8 is not supported"),
        ("gemma2", {"sliding_window": "long"}, "sliding_window is 'long', a number is expected"),
        ("gemma2", {"sliding_window": 1.5}, r"sliding_window is 1.5, an integer is expected"),
        ("gemma2", {"sliding_window_layers": 3}, "sliding_window_layers is 3, a list of numbers is expected"),
        ("falcon_7b", {"bias": "no"}, "bias is 'no', true or false is expected"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(
    families: Families, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ForgeError, match=message):
        DecoderSpec.of(config_of(families, tmp_path, name, changes), 0)


def test_windows_are_those_of_the_layers_of_the_stage(families: Families) -> None:
    config = read_checkpoint_config(families("gemma3").checkpoint(pp=2))
    first, second = (DecoderSpec.of(config, index).layers for index in (0, 1))
    assert [(layer.window, layer.rotary) for layer in first] == [(16, 1), (16, 1)]
    assert [(layer.window, layer.rotary) for layer in second] == [(None, 0), (16, 1)]


def test_a_window_pattern_stands_in_for_a_list_of_layers(families: Families, tmp_path: Path) -> None:
    """As in the checkpoints that TensorRT-LLM itself writes of Gemma 3."""
    changes = {"sliding_window_layers": None, "_sliding_window_pattern": 2}
    spec = DecoderSpec.of(config_of(families, tmp_path, "gemma3", changes), 0)
    assert [layer.window for layer in spec.layers] == [16, None, 16, None]


def test_tensors_of_another_network_are_refused(families: Families, tmp_path: Path) -> None:
    checkpoint = families("gpt_neox").checkpoint()
    with pytest.raises(ForgeError, match=r"layers.0.post_layernorm.weight is missing"):
        computed(edited(checkpoint, tmp_path, {"architecture": "BloomForCausalLM"}), TOKENS)
