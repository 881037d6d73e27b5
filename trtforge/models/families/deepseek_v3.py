"""DeepSeek-V3 and R1: DeepSeek-V2 with experts chosen by sigmoid scores, and layers for multi-token prediction (MTP).

Only TensorRT-LLM's PyTorch backend runs it (_torch/models/modeling_deepseekv3.py). The checkpoint has the same matrices
as Hugging Face's, without the product of query and key expansion that engines need, so it can be exported again.
"""

from dataclasses import replace
from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.models.families import deepseek_v2
from trtforge.models.families.common import ROUTER_BIAS, require, with_defaults
from trtforge.models.families.glm4_moe import sigmoid_moe
from trtforge.models.family import AbsorbedQuery, Facts, Linear, Row

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
}
"""DeepseekV3Config's."""


def _layer() -> tuple[Row, ...]:
    rows: list[Row] = []
    for row in deepseek_v2.LAYER:
        if not isinstance(row, AbsorbedQuery):
            rows.append(row)
        if isinstance(row, Linear) and row.target == "mlp.router":
            rows.append(ROUTER_BIAS)
    return tuple(rows)


def facts(config: HfConfig) -> Facts:
    """The facts of a DeepSeek-V3 config.json."""
    require(config, "scoring_func", "sigmoid", ("sigmoid",), "DeepSeek-V3 has sigmoid scores")
    require(config, "rope_interleave", True, (True,), "TensorRT-LLM's DeepSeek-V3 rotates pairs of elements")
    require(config, "topk_method", "noaux_tc", ("noaux_tc",), "DeepSeek-V3 chooses experts by score plus bias")
    config = with_defaults(config, _DEFAULTS)
    values: dict[str, Any] = {**config.values, "topk_method": "greedy", "routed_scaling_factor": 1.0}
    base = deepseek_v2.facts(HfConfig(values, config.path))
    moe = sigmoid_moe(config, base.sizes.of("shared_intermediate"))
    more = {
        **moe,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": config.count("num_nextn_predict_layers"),
    }
    kept = {key: value for key, value in base.config.items() if not key.startswith("moe_") or key == "moe_inter_size"}
    return replace(base, config={**kept, "moe_layer_freq": 1, **more})


FAMILY = replace(
    deepseek_v2.FAMILY,
    name="deepseek_v3",
    architectures={"DeepseekV3ForCausalLM": "DeepseekV3ForCausalLM"},
    layer=_layer(),
    facts=facts,
    engines=False,
    carries_layers=True,
)
