import json
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import llama
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity
from trtforge.core.parallel import Parallel
from trtforge.formats.trtllm import read_checkpoint_config, read_engine_config

MAPPING = {
    **Parallel(tp=2).mapping(),
    "rank": 0,
    "moe_cluster_size": 1,
    "attn_tp_size": 2,
    "attn_cp_size": 1,
    "cp_config": {},
    "enable_attention_dp": False,
    "enable_lm_head_tp_in_adp": False,
}
"""As `to_dict` in tensorrt_llm/mapping.py of 1.2 writes it."""


def test_the_mapping_of_an_engine_of_1_2_is_read(tmp_path: Path) -> None:
    model = llama(mapping=MAPPING).model_dump(mode="json")
    (tmp_path / "config.json").write_text(
        json.dumps({"version": "1.2.1", "pretrained_config": model, "build_config": {}})
    )
    read, _ = read_engine_config(tmp_path)
    assert read.mapping == MAPPING
    assert read.parallel == Parallel(tp=2)


def test_another_stages_artifact_is_named(tmp_path: Path) -> None:
    produce(tmp_path / "made", Identity(stage="calibration"), lambda _: {})
    with pytest.raises(ForgeError) as caught:
        read_checkpoint_config(tmp_path / "made")
    assert caught.value.hint == (
        f"It is a calibration: `trtforge convert HF_DIR OUT --calibration {tmp_path}/made`. "
        "Give a checkpoint or engine directory."
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe": [8]}, r"moe is \[8\], an object is expected"),
        ({"moe": {"num_experts": "8"}}, r"moe\.num_experts is '8', a whole number from zero on is expected"),
        ({"moe": {"top_k": 1.5}}, r"moe\.top_k is 1\.5, a whole number"),
        ({"rotary_scaling": {"factor": True}}, r"rotary_scaling\.factor is True, a number from zero on is expected"),
        ({"rotary_scaling": {"rope_type": ["yarn"]}}, r"rotary_scaling\.rope_type is \['yarn'\], a word is expected"),
        ({"q_scaling": 0}, "q_scaling is 0, a number above zero is expected"),
        ({"query_pre_attn_scalar": -1.0}, r"query_pre_attn_scalar is -1\.0, a number above zero"),
    ],
)
def test_values_that_size_or_scale_are_judged(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama().model_dump(mode="json") | values))
    with pytest.raises(ForgeError, match=rf"config\.json: {message}"):
        read_checkpoint_config(tmp_path)


def test_absent_values_are_those_of_tensorrt_llm(tmp_path: Path) -> None:
    """An explicit value wins, null included."""
    values = llama().model_dump(mode="json")
    for key in ("num_key_value_heads", "head_size", "intermediate_size", "attn_bias", "moe"):
        values.pop(key, None)
    expected = {
        "LlamaForCausalLM": {"attn_bias": False},
        "Qwen2ForCausalLM": {"attn_bias": True},
        "Starcoder2ForCausalLM": {"bias": True},
        "CohereForCausalLM": {"output_multiplier_scale": 0.0625, "attn_bias": False},
        "FalconForCausalLM": {"parallel_attention": False},
    }
    for architecture, wanted in expected.items():
        (tmp_path / "config.json").write_text(json.dumps(values | {"architecture": architecture}))
        found = read_checkpoint_config(tmp_path)
        assert {key: getattr(found, key) for key in wanted} == wanted
        assert found.num_key_value_heads == values["num_attention_heads"]
        assert found.head_size == values["hidden_size"] // values["num_attention_heads"]
        assert found.intermediate_size == 4 * values["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"architecture": "Qwen2ForCausalLM", "attn_bias": False}))
    assert not read_checkpoint_config(tmp_path).attn_bias
