"""Memory of the ranks: exact where it is arithmetic, above what logs show where it is a bound."""

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, asked, known
from trtforge.core.parallel import Parallel
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.gpus import gpu_named
from trtforge.plan.memory import WORKSPACE_BYTES, activation_bytes, logits_bytes

MIB = 1 << 20


def planned(hub_id: str, **options: object) -> Evaluation:
    model = known(hub_id)
    return evaluate(model, asked(model, **options))


def test_llama_70b() -> None:
    memory = planned(LLAMA_70B).memory
    assert memory is not None
    assert memory.weights == pytest.approx(141.1e9, rel=0.005)
    assert memory.kv_per_token == 327_680


# Execution context of Qwen2.5-0.5B in TensorRT-LLM issue 1188: at the default sizes, and at 512 tokens and batch 1.
@pytest.mark.parametrize(("tokens", "batch", "logged"), [(8192, 2048, 773.51 * MIB), (512, 1, 43.26 * MIB)])
def test_activations_bound_what_an_engine_allocates(tokens: int, batch: int, logged: float) -> None:
    facts = known("Qwen/Qwen2.5-0.5B").facts
    head = batch * facts.sizes.vocab * 2
    bound = activation_bytes(facts, Parallel(), 2, tokens) + head + WORKSPACE_BYTES
    assert logged <= bound <= 1.05 * logged


def test_activations_bound_a_step_of_128000_tokens() -> None:
    """TensorRT-LLM issue 3636: 37,812.51 MiB for Llama-3.1-8B with the logits of every prompt token in float16."""
    facts = known(LLAMA_8B).facts
    bound = activation_bytes(facts, Parallel(), 2, 128_000) + 128_000 * facts.sizes.vocab * 2 + WORKSPACE_BYTES
    assert 37_812.51 * MIB <= bound <= 1.1 * 37_812.51 * MIB


def test_logits_are_float32_rows_of_the_vocabulary() -> None:
    assert logits_bytes(128_256, 64) == 64 * 128_256 * 4


def test_the_pool_is_a_share_of_what_is_left() -> None:
    found = planned(LLAMA_8B, gpu="h100-80gb", quant="fp8", kv_cache="fp8")
    assert found.memory is not None
    rank = found.memory.fullest
    free = gpu_named("h100-80gb").memory - rank.fixed
    assert rank.kv_pool == found.memory.kv_tokens * 65_536
    assert 0 <= rank.kv_pool - 0.9 * free < 32 * 65_536


def test_parts_add_up() -> None:
    memory = planned(LLAMA_405B, gpu="h100-80gb", tp=8, pp=2, quant="fp8").memory
    assert memory is not None
    found = memory.as_json()
    parts = ("weights", "replicated", "kv_pool", "activations", "logits", "decoder", "runtime")
    assert found["total"] == sum(found[name] for name in parts)
    gpu = ("weights", "kv_pool", "activations", "logits", "decoder", "runtime")
    assert found["per_gpu"] == sum(found["gpu"][name] for name in gpu)
    assert found["per_gpu"] <= gpu_named("h100-80gb").memory


def test_an_fp8_cache_halves_a_token() -> None:
    plain, halved = (planned(LLAMA_8B, gpu="h100-80gb", quant="fp8", kv_cache=cache) for cache in ("none", "fp8"))
    assert plain.memory is not None
    assert halved.memory is not None
    assert halved.memory.kv_per_token * 2 == plain.memory.kv_per_token
    assert halved.memory.kv_tokens == pytest.approx(2 * plain.memory.kv_tokens, rel=0.001)


def test_a_cap_on_the_pool_is_kept() -> None:
    model = known(LLAMA_8B)
    recipe = {"serving": {"kv_cache_tokens": 10_000}, "engine": {"max_seq_len": 4096}}
    found = evaluate(model, asked(model, recipe=recipe, gpu="h100-80gb"))
    assert found.memory is not None
    assert found.memory.kv_tokens == 10_016
    assert found.full_length_requests == 2


def test_without_a_gpu_the_pool_is_what_the_requests_need() -> None:
    found = planned(LLAMA_8B, concurrency=3, max_seq_len=1000)
    assert found.legal
    assert found.memory is not None
    assert (found.memory.kv_tokens, found.full_length_requests) == (3 * 1024, 3)
