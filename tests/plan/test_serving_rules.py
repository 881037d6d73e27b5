"""Serving settings in a plan: refused by name before anything is built, and their memory."""

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.models import LLAMA_8B, asked, known
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.roofline import Workload

GIB = 1 << 30


def planned(
    serving: dict[str, Any], backend: str = "tensorrt_llm", version: str = "1.2.1", **options: Any
) -> Evaluation:
    model = known(LLAMA_8B)
    engine = {"backend": backend, "max_seq_len": 32768, "target": {"tensorrt_llm": version}}
    recipe = {"engine": engine, "serving": serving}
    return evaluate(model, asked(model, recipe=recipe, **({"gpu": "h100-80gb"} | options)))


def messages(found: Evaluation) -> list[str]:
    return [problem.message for problem in found.problems if problem.rule == "serving"]


@pytest.mark.parametrize("backend", ["tensorrt_llm", "torch"])
def test_offloaded_kv_blocks_take_host_memory_of_every_rank(backend: str) -> None:
    plain, offloaded = (planned(serving, backend, tp=2) for serving in ({}, {"kv_cache_host_memory_bytes": "16GiB"}))
    assert messages(offloaded) == []
    assert plain.memory is not None
    assert offloaded.memory is not None
    assert offloaded.memory.as_json()["host"] == plain.memory.as_json()["host"] + 2 * 16 * GIB
    assert offloaded.memory.fullest.total == plain.memory.fullest.total


def test_limits_of_the_embedded_engine_bound_what_serving_asks_for() -> None:
    small = planned({"kv_cache_tokens": 31}, "torch")
    assert messages(small) == ["serving.kv_cache_tokens is 31, less than a KV block of 32 tokens"]
    assert messages(planned({"kv_cache_tokens": 32768}, "torch")) == []
    large = planned({"max_batch_size": 5000}, "torch")
    assert messages(large) == []
    assert any("serving.max_batch_size 5000 has no effect: the engine's is" in text for text in large.warnings)


def test_lengths_that_are_asked_for_and_do_not_fit_are_said() -> None:
    model = known(LLAMA_8B)
    request = asked(model, gpu="h100-80gb", recipe={"engine": {"max_seq_len": 512}})
    usual = evaluate(model, request)
    assert not [text for text in usual.warnings if "are planned" in text]
    for prompt, output, said in (
        (100, 400, []),
        (
            10_000,
            300,
            ["prompts of 10,000 tokens are refused, the longest have 511: prompts of 256 and answers of 256"],
        ),
        (300, 300, ["prompts of 300 and answers of 300 tokens are longer than max_seq_len 512: prompts of 256 and"]),
    ):
        found = evaluate(model, replace(request, typical=Workload(prompt, output))).warnings
        found = tuple(text for text in found if "are planned" in text)
        assert len(found) == len(said)
        assert all(text.startswith(words) for text, words in zip(found, said, strict=True))


def test_a_window_that_serving_asks_for_bounds_what_requests_keep() -> None:
    plain, windowed = planned({}), planned({"max_attention_window_size": 4096})
    assert plain.memory is not None
    assert windowed.memory is not None
    assert windowed.memory.kv_tokens == plain.memory.kv_tokens
    assert windowed.full_length_requests == plain.memory.kv_tokens // 32 // (4096 // 32 + 1)


@pytest.mark.parametrize(
    ("serving", "where", "message"),
    [
        ({"enable_trt_overlap": True, "cuda_graph_mode": True}, {"version": "1.1.0"}, "was added in 1.2.1"),
        ({"num_nodes": 1}, {"version": "0.17.0"}, "num_nodes was added in 0.19.0"),
        ({"cuda_graph_mode": True}, {"backend": "torch"}, "cuda_graph_mode: the embedded engine has no such setting"),
        ({"cuda_graph_mode": True}, {"backend": "llmapi"}, "cuda_graph_mode: the LLM API has no such setting"),
        ({"gpu_device_ids": "0"}, {"tp": 2}, "an instance has 1 ids, the engine 2 ranks"),
        ({"lora_prefetch_dir": "/a"}, {}, "the engine does not support adapters"),
    ],
)
def test_what_a_backend_or_release_lacks_is_refused(
    serving: dict[str, Any], where: dict[str, Any], message: str
) -> None:
    (found,) = messages(planned(serving, **where))
    assert message in found


def test_a_backend_that_is_not_chosen_is_not_judged() -> None:
    model = known(LLAMA_8B)
    found = evaluate(model, asked(model, recipe={"serving": {"cuda_graph_mode": True}}))
    assert messages(found) == []


def test_the_memory_of_cuda_graphs_is_said_to_be_unknown() -> None:
    assert any(
        "the plan does not include the GPU memory of CUDA graphs" in warning
        for warning in planned({"cuda_graph_mode": True}).warnings
    )


def test_a_known_issue_is_a_warning() -> None:
    found = planned({"sink_token_length": 4})
    assert messages(found) == []
    assert any("sink tokens are not kept" in warning for warning in found.warnings)
