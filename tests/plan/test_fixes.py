"""What is refused comes with the nearest choice that is legal, and that is tried: every fix, applied, is legal."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, asked, known
from tests.plan.small_models import small
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.plan.choices import candidates
from trtforge.plan.evaluate import evaluate
from trtforge.plan.fixes import Fix, fixes
from trtforge.plan.gpus import GPUS
from trtforge.plan.known import known_ids

QWEN_14B, QWEN_32B, QWEN_72B = "Qwen/Qwen1.5-14B", "Qwen/Qwen1.5-32B", "Qwen/Qwen2-72B"
LLAMA_2_7B, LLAMA_2_13B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf"
NOT_FOR_THE_USER = {"head_size", "source"}
"""Rules that no choice of a deployment changes."""


def fixed(hub_id: str, **options: Any) -> dict[str, Fix]:
    """The fixes by rule, each of which was applied and judged again."""
    model = known(hub_id)
    evaluation = evaluate(model, asked(model, **options))
    found = fixes(model, evaluation)
    assert [fix.problem for fix in found] == list(evaluation.problems)
    for fix in found:
        assert fix.problem.rule in NOT_FOR_THE_USER or fix.changes, fix
        assert not fix.changes or evaluate(model, evaluation.request.changed(*fix.changes)).legal, fix
    return {fix.problem.rule: fix for fix in found}


# (intermediate size / tp) % group, as users of TensorRT-LLM found out: issues 1636, 729, 2445; Qwen-TensorRT-LLM 58;
# lmdeploy 1560.
@pytest.mark.parametrize(
    ("hub_id", "tp", "per_rank", "by_128", "by_64"),
    [
        (LLAMA_2_7B, 4, 2752, False, True),
        (LLAMA_2_7B, 8, 1376, False, False),
        (LLAMA_2_13B, 4, 3456, True, True),
        (LLAMA_2_13B, 8, 1728, False, True),
        (QWEN_72B, 4, 7392, False, False),
        (QWEN_14B, 2, 6848, False, True),
        (QWEN_32B, 4, 6848, False, True),
    ],
)
def test_awq_groups(hub_id: str, tp: int, per_rank: int, by_128: bool, by_64: bool) -> None:
    for group, legal in ((128, by_128), (64, by_64)):
        found = fixed(hub_id, quant="int4_awq", tp=tp, group_size=group)
        assert set(found) == (set() if legal else {"awq_group"})
        for fix in found.values():
            says = f"{per_rank} inputs a rank at tp {tp} are not a multiple of the AWQ group size {group}"
            assert fix.problem.message == f"mlp.down_proj: {says}"


@pytest.mark.parametrize(("tp", "ep", "moe_tp"), [(2, 1, 2), (4, 2, 2), (8, 8, 1)])
def test_experts_and_their_parts_make_up_tensor_parallelism(tp: int, ep: int, moe_tp: int) -> None:
    """TensorRT-LLM issue 1939: moe_tp_size x moe_ep_size is tp_size."""
    assert fixed(MIXTRAL, tp=tp, ep=ep) == {}
    mapping = Parallel(tp=tp, ep=ep).mapping()
    assert (mapping["moe_tp_size"], mapping["moe_ep_size"]) == (moe_tp, ep)
    assert set(fixed(MIXTRAL, tp=tp, ep=2 * tp)) >= {"mapping"}


def test_the_users_own_way_out_is_proposed_first() -> None:
    """Less tensor and more pipeline parallelism on the same GPUs: issues 729 and 843."""
    assert fixed(LLAMA_2_7B, quant="int4_awq", tp=4)["awq_group"].text == "Use --tp 2 --pp 2."


@pytest.mark.parametrize(
    ("hub_id", "options", "rule", "text"),
    [
        (LLAMA_8B, {"tp": 3}, "heads", "Use --tp 4."),
        (LLAMA_8B, {"tp": 3}, "kv_heads", "Use --tp 4."),
        (LLAMA_8B, {"pp": 5}, "layers", "Use --pp 4."),
        (LLAMA_8B, {"tp": 2, "ep": 2}, "experts", "Use --ep 1."),
        (MIXTRAL, {"tp": 2, "ep": 4}, "mapping", "Use --ep 2."),
        (MIXTRAL, {"tp": 6, "ep": 3}, "experts", "Use --tp 8 --ep 4."),
        (MIXTRAL, {"quant": "fp8_rowwise"}, "quant", None),
        (LLAMA_8B, {"gpu": "a100-80gb", "quant": "fp8"}, "gpu_format", None),
        (LLAMA_8B, {"gpu": "rtx-a6000", "kv_cache": "fp8"}, "gpu_kv_cache", "Use --kv-cache none."),
        (LLAMA_8B, {"gpu": "b200", "quant": "int4_awq"}, "gpu_format", None),
        (LLAMA_8B, {"gpu": "t4"}, "dtype", "Use --dtype float16 --tp 2."),
        (LLAMA_70B, {"gpu": "h100-80gb"}, "memory", "Use --tp 2."),
        (LLAMA_405B, {"gpu": "h100-80gb", "tp": 8}, "memory", "Use --pp 2."),
        (LLAMA_8B, {"gpu": "l4", "max_seq_len": 100_000}, "kv_pool", None),
        (LLAMA_8B, {"gpu": "l4", "concurrency": 200}, "concurrency", None),
        (LLAMA_8B, {"max_num_tokens": 16}, "limits", "Use --max-num-tokens 64."),
        ("google/gemma-2-9b-it", {"quant": "int4_awq", "tp": 8, "gpu": "h100-80gb"}, "awq_padding", None),
    ],
)
def test_every_rule_has_a_fix(hub_id: str, options: dict[str, Any], rule: str, text: str | None) -> None:
    found = fixed(hub_id, **options)
    assert rule in found
    assert text is None or found[rule].text == text


def test_the_search_goes_back_to_what_it_left_out() -> None:
    """More stages fix groups and heads, but this network has no stages: the best ranked changes end there."""
    found = fixed("microsoft/Phi-4-mini-instruct", quant="int4_awq", tp=16, pp=2, gpu="b200")
    assert set(found) == {"heads", "awq_group", "gpu_format", "pipeline"}
    assert "--pp 1" in found["awq_group"].text


def test_another_gpu_is_the_last_thing_to_ask_for() -> None:
    fix = fixed(LLAMA_8B, gpu="a100-40gb", quant="fp8", kv_cache="fp8")["gpu_format"]
    assert {change.option for change in fix.changes} == {"--quant", "--kv-cache"}


def test_a_feature_that_cannot_be_had_is_switched_off() -> None:
    recipe = {"engine": {"features": {"kv_reuse": True}}}
    fix = fixed(LLAMA_8B, recipe=recipe, quant="int4_awq", kv_cache="fp8")["features"]
    assert fix.text == "Use --set engine.features.kv_reuse=false."


def test_lengths_that_disagree_are_made_to_agree() -> None:
    recipe = {"engine": {"max_input_len": 4096, "max_seq_len": 4096}}
    assert fixed(LLAMA_8B, recipe=recipe)["limits"].text == "Use --max-seq-len 4097."


@settings(max_examples=60)
@given(
    hub_id=st.sampled_from([name for name in known_ids() if known(name).family.engines]),
    tp=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]),
    pp=st.sampled_from([1, 2, 3, 4, 5]),
    ep=st.sampled_from([1, 1, 1, 2, 3]),
    quant=st.sampled_from(get_args(QuantFormat)),
    kv_cache=st.sampled_from(get_args(KvCacheFormat)),
    gpu=st.sampled_from([None, *(gpu.name for gpu in GPUS)]),
    concurrency=st.sampled_from([None, 1, 64, 1000]),
)
def test_every_fix_applied_is_legal(hub_id: str, **options: Any) -> None:
    fixed(hub_id, **options)


def engine(**features: Any) -> dict[str, Any]:
    return {"engine": {"backend": "tensorrt_llm", "features": features}}


LOOKAHEAD = engine(lookahead=True)
LORA: dict[str, Any] = {"max_rank": 8}


@pytest.mark.parametrize(
    ("recipe", "options", "rule", "text"),
    [
        (
            {"engine": {"backend": "torch", "features": {"eagle": True, "weights_on_gpu": 0.5}}},
            {},
            "backend",
            "Use --set engine.features.eagle=null --set engine.features.weights_on_gpu=1.0.",
        ),
        (
            {"engine": {"backend": "llmapi", "features": {"max_prompt_embedding_table_size": 640}}},
            {},
            "backend",
            "Use --set engine.features.max_prompt_embedding_table_size=0.",
        ),
        (
            {"engine": LOOKAHEAD["engine"] | {"max_beam_width": 2}},
            {},
            "speculation",
            "Use --set engine.max_beam_width=1.",
        ),
        (
            engine(lookahead=True, context_logits=True),
            {},
            "speculation",
            "Use --set engine.features.context_logits=false.",
        ),
        (engine(draft={"tokens": 4}, kv_reuse=False), {}, "speculation", "Use --set engine.features.kv_reuse=true."),
        (engine(draft={"tokens": 4}), {"kv_cache": "int8"}, "speculation", "Use --kv-cache none."),
        (
            engine(lora=LORA | {"modules": ["attn_qkv", "attn_q"]}),
            {},
            "lora",
            "Use --set 'engine.features.lora.modules=[attn_q,attn_k,attn_v]'.",
        ),
        (engine(lora=LORA), {"quant": "fp8_rowwise"}, "lora", "Use --quant fp8."),
        (engine(lora=LORA | {"host_memory": 1000}), {}, "lora_cache", "Use --set engine.features.lora.host_memory="),
        (engine(weights_on_gpu=0.5), {"quant": "int8_wo"}, "weights_on_gpu", "Use --quant fp8."),
        (engine(eagle=True), {"concurrency": 1024}, "speculation", "Use --concurrency 512."),
        (
            {"engine": {"backend": "tensorrt_llm", "max_batch_size": 1024, "features": {"eagle": True}}},
            {},
            "speculation",
            "Use --set engine.max_batch_size=512.",
        ),
    ],
)
def test_features_have_fixes(recipe: dict[str, Any], options: dict[str, Any], rule: str, text: str) -> None:
    found = fixed(LLAMA_8B, recipe=recipe, **options)
    assert rule in found
    assert found[rule].text.startswith(text)


@pytest.mark.parametrize(
    ("hub_id", "least"),
    [
        (LLAMA_8B, 64 * 32 * (4096 + 14336) * 4),
        ("microsoft/phi-4", 64 * 40 * (5120 + 2 * 17920) * 4),  # up and gate in one matrix
    ],
)
def test_host_memory_for_an_adapter_of_the_embedded_engine(hub_id: str, least: int) -> None:
    """In float32, in which it computes on a CPU."""
    values = {"backend": "torch", "compute_dtype": "float32", "device": "cpu"}
    recipe = {"engine": values | {"features": {"lora": {"modules": ["mlp_h_to_4h"], "host_memory": 1000}}}}
    fix = fixed(hub_id, recipe=recipe)["lora_cache"]
    assert fix.text == f"Use --set engine.features.lora.host_memory={least}."


def test_experts_take_no_adapters_and_attention_does() -> None:
    recipe = engine(lora=LORA | {"modules": ["attn_q", "mlp_h_to_4h"]})
    assert (
        fixed(MIXTRAL, recipe=recipe)["lora"].text == "Use --set 'engine.features.lora.modules=[attn_q,attn_k,attn_v]'."
    )


def test_no_choice_of_modules_leaves_out_those_of_an_adapter(tmp_path: Path) -> None:
    """Nemotron's up_proj, whose MLP has no gate; without an adapter, modules of the attention are proposed."""
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj", "up_proj"]}')
    model = small("nemotron")
    for lora, text in (
        ({"modules": ["attn_q", "mlp_gate"]}, "Use --set 'engine.features.lora.modules=[attn_q,attn_k,attn_v]'."),
        ({"adapters": [str(tmp_path)]}, "Use mlp_h_to_4h, leave it out, or merge the adapters into the model."),
    ):
        recipe = {"engine": {"backend": "torch", "features": {"lora": lora}}}
        (fix,) = fixes(model, evaluate(model, asked(model, recipe=recipe)))
        assert fix.text == text


def test_sizes_of_servers_are_proposed_first() -> None:
    """14 is nearer to 12 than 4 is, but servers have 1, 2, 4 or 8 GPUs."""
    model = known("Qwen/Qwen2.5-7B")
    evaluation = evaluate(model, asked(model, tp=12))
    (first, *_) = candidates(model, evaluation, "heads", frozenset())
    assert [str(change) for change in first] == ["--tp 4"]
    assert fixed("Qwen/Qwen2.5-7B", tp=12)["heads"].text == "Use --tp 4."
