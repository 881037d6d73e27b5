"""What config.json says so that TensorRT-LLM's networks of every release load the tensors."""

from typing import Any

import pytest

from tests.plan.small_models import small
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout


def written(name: str, quant: QuantFormat = "none", **changes: Any) -> CheckpointConfig:
    model = small(name, **changes)
    layout = Layout(Parallel(), "bfloat16", quant)
    return checkpoint_config(model.family, model.facts, model.config.architecture, layout)


@pytest.mark.parametrize(
    ("name", "quant", "added"),
    [
        ("llama", "fp8", []),
        ("llama", "fp8_rowwise", ["*ln_f", "*ln_embed"]),
        ("llama", "int8_wo", ["*shared_expert_gate.weight"]),
        ("deepseek_v2", "int8_wo", ["*shared_expert_gate.weight", "*fused_a", "*fused_a.weight"]),
        ("deepseek_v2", "int4_wo", ["*shared_expert_gate.weight", "*fused_a", "*fused_a.weight"]),
    ],
)
def test_excluded_modules_beside_tensorrt_llms_defaults(name: str, quant: QuantFormat, added: list[str]) -> None:
    assert written(name, quant).quantization.exclude_modules == [*UNQUANTIZED_MODULES, *added]


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers_of_a_qwen_mixture_are_named(name: str) -> None:
    plain = written(name).model_dump()
    assert (plain["decoder_sparse_step"], plain["mlp_only_layers"]) == (1, [])
    mixed = written(name, mlp_only_layers=[1], decoder_sparse_step=2).model_dump()
    assert (mixed["decoder_sparse_step"], mixed["mlp_only_layers"]) == (2, [1])


def test_deepseeks_experts_are_described_for_both_generations_of_its_network() -> None:
    """0.17 and 0.18 read the flat fields, the DeepSeek branch and later releases the object."""
    limits = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 16.0}
    values = written("deepseek_v2", **limits, norm_topk_prob=True).model_dump()
    flat = {name: value for name, value in values.items() if name.startswith("moe_")}
    assert flat == {
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_renorm_mode": 4,
        "moe_n_group": 2,
        "moe_topk_group": 1,
        "moe_routed_scaling_factor": 16.0,
        "moe_num_shared_experts": 1,
        "moe_inter_size": 256,
        "moe_layer_freq": 1,
    }
    moe = values["moe"]
    assert (moe["num_experts"], moe["top_k"], moe["normalization_mode"]) == (4, 2, 4)
    assert moe["shared_expert_intermediate_size"] == 256
