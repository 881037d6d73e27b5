"""`plan`, `convert` and `compile` take and refuse the same combinations of release, family, format and layout."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.plan.models import asked
from tests.plan.small_models import CONFIGS, small
from trtforge.compile.build_config import build_config
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.releases import engine_releases, release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.exclusions import inseparable
from trtforge.models.formats import CACHE_ALGORITHMS, FORMATS
from trtforge.plan.evaluate import evaluate
from trtforge.plan.legality import require_legal
from trtforge.plan.limits import derive_limits
from trtforge.plan.model import Model

RELEASES = [each.version for each in engine_releases()]
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in CONFIGS),
    ("gpt_neox", {"intermediate_size": 1536}),
    ("gptj", {"n_inner": 768}),
    ("llama", {"intermediate_size": 11008, "hidden_size": 4096, "num_attention_heads": 32}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192, "intermediate_size": 576}),
    ("qwen2_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("deepseek_v2", {"first_k_dense_replace": 0}),
    ("deepseek_v2", {"v_head_dim": 64}),
)
ODD = {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 576}


def planned(model: Model, version: str, **options: Any) -> list[str]:
    """The messages of `plan` for an engine of TensorRT-LLM."""
    recipe: dict[str, Any] = {"engine": {"backend": "tensorrt_llm", "target": {"tensorrt_llm": version}}}
    recipe["quantization"] = {"exclude_modules": list(options.pop("exclude_modules", ()))}
    return [problem.message for problem in evaluate(model, asked(model, recipe=recipe, **options)).problems]


def converted(model: Model, layout: Layout) -> CheckpointConfig:
    """The config.json that `convert` writes. Raises ForgeError as it does."""
    require_legal(model.family, model.facts, layout)
    return checkpoint_config(model.family, model.facts, model.config.architecture, layout)


def compiled(checkpoint: CheckpointConfig, version: str) -> list[str]:
    """What `compile` refuses."""
    engine = EngineConfig.parse({"backend": "tensorrt_llm"}, "engine")
    try:
        build_config(checkpoint, engine, derive_limits(checkpoint, engine, 32), release(version))
    except ForgeError as error:
        return [error.message]
    return []


def refused(model: Model, version: str, layout: Layout) -> list[str]:
    """What `convert` refuses, else `compile`."""
    try:
        return compiled(converted(model, layout), version)
    except ForgeError as error:
        return [error.message]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    excluded=st.sampled_from([None, None, 0, 1, -1, -2]),
    chosen=st.sampled_from(CHANGES),
    version=st.sampled_from(RELEASES),
    quant=st.sampled_from(sorted(FORMATS)),
    kv_cache=st.sampled_from(sorted(CACHE_ALGORITHMS)),
    group_size=st.sampled_from([64, 128]),
    sizes=st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2), (4, 2, 4)]),
)
def test_a_combination_is_legal_for_all_or_refused_by_all(
    chosen: tuple[str, dict[str, Any]],
    version: str,
    quant: Any,
    kv_cache: Any,
    group_size: int,
    sizes: tuple[int, int, int],
    excluded: int | None,
) -> None:
    """`excluded`: which group of linear layers stays unquantised."""
    name, changes = chosen
    tp, pp, ep = sizes
    model = small(name, **changes)
    groups = list(inseparable(model.family, model.facts))
    left = () if excluded is None or quant == "none" or len(groups) < 2 else groups[excluded]
    layout = Layout(Parallel(tp, pp, ep), "bfloat16", quant, kv_cache, group_size, exclude_modules=left)
    options = {"quant": quant, "kv_cache": kv_cache, "group_size": group_size, "tp": tp, "pp": pp, "ep": ep}

    by_plan = planned(model, version, dtype="bfloat16", exclude_modules=left, **options)

    by_stages = refused(model, version, layout)
    assert bool(by_plan) == bool(by_stages), (by_plan, by_stages)
    assert set(by_stages) <= set(by_plan)


@pytest.mark.parametrize(
    ("name", "changes", "version", "quant", "tp", "pp", "message"),
    [
        (
            "mixtral", {}, "0.17.0", "int4_awq", 1, 1,
            "TensorRT-LLM 0.17.0: the mixture of experts has INT4-AWQ from 0.19.0 on",
        ),
        (
            "llama", ODD, "1.2.1", "int4_wo", 1, 1,
            "self_attn.q_proj: 288 inputs are not a multiple of 64 x tp 1: TensorRT-LLM pads the int4_wo layer, and "
            "the checkpoint no longer fits",
        ),
        (
            "gpt_neox", {"intermediate_size": 1536}, "1.2.1", "none", 1, 1,
            "TensorRT-LLM 1.2.1: the gpt_neox network has an FFN of four times the hidden size, whatever "
            "config.json says",
        ),
        (
            "llama", {"head_dim": 40}, "1.2.1", "none", 1, 1,
            "head size 40: TensorRT-LLM's attention kernels support only 32, 48, 64, 80, 96, 104, 112, 128, 144, 160, "
            "192, 224, 256",
        ),
    ],
)  # fmt: skip
def test_compile_gives_the_reason_of_plan(
    name: str, changes: dict[str, Any], version: str, quant: Any, tp: int, pp: int, message: str
) -> None:
    model = small(name, **changes)
    layout = Layout(Parallel(tp, pp), "bfloat16", quant)

    assert message in planned(model, version, quant=quant, tp=tp, pp=pp, dtype="bfloat16")
    assert compiled(converted(model, layout), version) == [message]
