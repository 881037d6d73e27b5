"""Features of the LLM API as `plan` judges them, and their memory, worked out by hand for Llama 3.1 8B: hidden 4096,
32 heads and 8 KV heads of 128, 32 layers, 14336 inner units, 128256 tokens, 2 bytes a value."""

from typing import Any

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, MIXTRAL, asked, known
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import fixes
from trtforge.plan.memory import RankMemory

LAYER = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
KV = 2 * 8 * 128 * 2
BATCH = 8


def judged(hub_id: str, features: dict[str, Any], backend: str = "llmapi", **options: Any) -> Evaluation:
    model, serving = known(hub_id), options.pop("serving", {})
    version = options.pop("version", "1.3.0")
    target = {"tensorrt_llm": version if backend == "llmapi" else "1.2.1"}
    engine = {"backend": backend, "max_batch_size": BATCH, "max_seq_len": 4096, "features": features, "target": target}
    return evaluate(model, asked(model, recipe={"engine": engine, "serving": serving}, dtype="float16", **options))


def last(features: dict[str, Any], **options: Any) -> RankMemory:
    found = judged(LLAMA_8B, features, **options)
    assert found.legal, found.problems
    assert found.memory is not None
    return found.memory.stages[-1]


def test_an_eagle3_network_takes_a_wider_layer_and_an_lm_head() -> None:
    plain, drafted = last({}), last({"eagle3": {"model": "org/net", "draft_tokens": 4}})
    network = LAYER + 2 * (4096 * 6144 + 3 * 4096 * 4096 + 128256 * 4096)
    assert drafted.draft - plain.draft == network + BATCH * 4 * 128256 * 4
    assert drafted.kv_per_token - plain.kv_per_token == KV
    assert drafted.weights == plain.weights


def test_a_draft_model_takes_its_weights_and_cache() -> None:
    model = known(LLAMA_70B)
    engine = {"backend": "llmapi", "max_batch_size": BATCH, "max_seq_len": 4096, "target": {"tensorrt_llm": "1.3.0"}}
    features = {"draft": {"model": LLAMA_8B, "tokens": 3}}
    found = evaluate(model, asked(model, recipe={"engine": {**engine, "features": features}}, dtype="float16", tp=4))
    alone = evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16", tp=4))
    assert found.legal
    assert found.memory is not None
    assert alone.memory is not None
    drafted, plain = found.memory.stages[0], alone.memory.stages[0]
    assert drafted.kv_per_token - plain.kv_per_token == 32 * KV // 4
    assert drafted.draft > 8_000_000_000 * 2 // 4


def test_ngrams_take_logits_only() -> None:
    plain, drafted = last({}), last({"ngram": {"draft_tokens": 5}})
    assert drafted.draft - plain.draft == BATCH * 5 * 128256 * 4
    assert drafted.kv_per_token == plain.kv_per_token


def test_adapters_and_offloaded_blocks_take_host_memory() -> None:
    plain = last({})
    found = last({"lora": {"host_memory": 1 << 30}}, serving={"kv_cache_host_memory_bytes": "2GiB"})
    assert found.host - plain.host == 3 << 30
    assert found.lora > 0


@pytest.mark.parametrize(
    ("backend", "feature"),
    [
        ("tensorrt_llm", "ngram"),
        *(
            (backend, feature)
            for backend in ("tensorrt_llm", "torch")
            for feature in ("moe", "attention_dp", "cuda_graphs")
        ),
    ],
)
def test_other_backends_refuse_them_by_name_and_the_fix_drops_them(feature: str, backend: str) -> None:
    value = {"max_num_tokens": 8} if feature == "moe" else True
    found = judged(MIXTRAL, {feature: value}, backend, tp=2)
    assert [(problem.rule, problem.message.partition(":")[0]) for problem in found.problems] == [
        ("backend", f"engine.features.{feature}")
    ]
    assert "llmapi" in found.problems[0].fix
    offered = [str(change) for fix in fixes(known(MIXTRAL), found) for change in fix.changes]
    assert f"--set engine.features.{feature}=null" in offered


def test_engines_features_are_dropped_by_the_fix_and_shared_ones_stay() -> None:
    found = judged(LLAMA_8B, {"lookahead": True, "lora": True})
    assert [problem.rule for problem in found.problems] == ["backend"]
    offered = [str(change) for fix in fixes(known(LLAMA_8B), found) for change in fix.changes]
    assert offered == ["--set engine.features.lookahead=null"]


@pytest.mark.parametrize(
    ("features", "rule", "fixed"),
    [
        ({"moe": {"max_num_tokens": 8}}, "moe", "--set engine.features.moe=null"),
        ({"attention_dp": True}, "attention_dp", "--set engine.features.attention_dp=null"),
    ],
)
def test_settings_without_effect_are_refused(features: dict[str, Any], rule: str, fixed: str) -> None:
    found = judged(LLAMA_8B, features)
    assert [problem.rule for problem in found.problems] == [rule]
    assert fixed in [str(change) for fix in fixes(known(LLAMA_8B), found) for change in fix.changes]


def test_a_dense_model_has_no_mtp_layers_and_an_old_release_no_balance() -> None:
    (problem,) = judged(LLAMA_8B, {"mtp": True}).problems
    assert problem.message == "engine.features.mtp: the model has no MTP layers (num_nextn_predict_layers)"
    (problem,) = judged(LLAMA_8B, {"attention_dp": {"balance": True}}, version="1.0.0", tp=2).problems
    assert "has no LLM argument attention_dp_config.enable_balance" in problem.message


@pytest.mark.parametrize("name", ["eagle3", "mtp", "ngram"])
def test_networks_that_draft_are_warned_of_with_pipeline_stages(name: str) -> None:
    value = {"model": "org/net"} if name == "eagle3" else True
    found = [each for each in judged(LLAMA_8B, {name: value}, pp=2).warnings if "pp 2" in each]
    told = f"engine.features.{name}: not supported with pp 2, by TensorRT-LLM's documentation"
    assert [each[: len(told)] for each in found] == ([] if name == "ngram" else [told])


def test_llguidance_is_the_llm_apis_alone() -> None:
    serving = {"guided_decoding_backend": "llguidance"}
    assert judged(LLAMA_8B, {}, serving=serving).legal
    (problem,) = judged(LLAMA_8B, {}, "tensorrt_llm", serving=serving).problems
    assert "TensorRT engines support xgrammar only, the LLM API also llguidance" in problem.message
