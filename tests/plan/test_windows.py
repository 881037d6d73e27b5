"""KV memory of models with sliding windows: how many requests fit, for each backend and release."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.models import asked, known
from trtforge.formats.attention_windows import Pools, pools_of
from trtforge.formats.releases import release
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.kv import requests_that_fit
from trtforge.plan.planner import plan
from trtforge.plan.windows import CacheWindows

MISTRAL, WINDOW = "mistralai/Mistral-7B-v0.1", 4096
POOLS: tuple[Pools, ...] = ("one", "weighted", "equal")


def planned(hub_id: str = MISTRAL, version: str = "1.2.1", backend: str = "tensorrt_llm", **options: Any) -> Evaluation:
    engine = {"backend": backend, "max_seq_len": 32768, "target": {"tensorrt_llm": version}}
    model = known(hub_id)
    return evaluate(model, asked(model, recipe={"engine": engine}, **({"gpu": "h100-80gb"} | options)))


def full_length(found: Evaluation) -> int:
    assert found.full_length_requests is not None
    return found.full_length_requests


def test_a_window_in_every_layer_bounds_what_a_request_keeps() -> None:
    windowed, full = planned(), planned("mistralai/Mistral-7B-Instruct-v0.2")
    assert windowed.memory is not None
    assert full.memory is not None
    assert windowed.memory.kv_tokens == full.memory.kv_tokens
    assert full_length(full) == full.memory.kv_tokens // 32768
    blocks = WINDOW // 32 + 1
    assert full_length(windowed) == windowed.memory.kv_tokens // 32 // blocks
    assert full_length(windowed) > 7 * full_length(full)
    assert windowed.memory.windows is not None
    assert windowed.memory.windows.as_json() == {"pools": "equal", "layers": {"4096": 32}}


def test_a_window_that_no_request_reaches_changes_nothing() -> None:
    model = known(MISTRAL)
    short = evaluate(model, asked(model, recipe={"engine": {"max_seq_len": WINDOW}}, gpu="h100-80gb"))
    assert short.memory is not None
    assert short.memory.windows is None


def test_the_embedded_engine_frees_blocks_behind_a_window_of_every_layer() -> None:
    found = planned(backend="torch")
    assert found.memory is not None
    assert found.memory.windows is not None
    assert found.memory.windows.as_json() == {"pools": "one", "layers": {"4096": 32}}
    assert found.full_length_requests == found.memory.kv_tokens // 32 // (4096 // 32 + 1)


@pytest.mark.parametrize(
    ("name", "chunked", "serving"),
    [(MISTRAL, False, {}), ("google/gemma-2-9b-it", True, {"kv_cache_host_memory_bytes": 1 << 30})],
)
def test_the_embedded_engine_keeps_every_token_of_whole_prompts_and_beside_host_memory(
    name: str, chunked: bool, serving: dict[str, Any]
) -> None:
    model = known(name)
    engine = {"backend": "torch", "max_seq_len": 32768, "features": {"chunked_context": chunked}}
    found = evaluate(model, asked(model, recipe={"engine": engine, "serving": serving}, gpu="h100-80gb"))
    assert found.memory is not None
    assert found.memory.windows is None


def test_the_embedded_engine_gives_layers_with_windows_what_a_full_batch_keeps() -> None:
    """Gemma 2 9B: 21 of 42 layers have a window of 4,096 tokens; 8 KV heads of 256 numbers in 2 bytes."""
    model, batch, length, block = known("google/gemma-2-9b-it"), 16, 8192, 32
    engine = {"backend": "torch", "max_seq_len": length, "max_batch_size": batch, "max_num_tokens": 2048}
    found = evaluate(model, asked(model, recipe={"engine": engine}, gpu="h200"))
    assert found.memory is not None
    assert found.memory.windows is not None
    assert found.memory.windows.as_json() == {"pools": "full_batch", "layers": {"4096": 21, "8192": 21}}
    assert found.memory.kv_tokens == batch * length
    window_tokens = (batch * (4096 // block + 3) + 2048 // block) * block
    of_a_layer = 2 * 8 * 256 * 2
    assert found.memory.stages[0].kv_pool == 21 * of_a_layer * (batch * length + window_tokens)
    assert found.full_length_requests == batch


def test_what_layers_with_windows_spare_holds_more_tokens() -> None:
    """On a GPU with too little memory for a full batch at full length."""
    model, block = known("google/gemma-2-9b-it"), 32
    engine = {"backend": "torch", "max_seq_len": 8192, "max_batch_size": 12, "max_num_tokens": 2048}
    found = evaluate(model, asked(model, recipe={"engine": engine}, gpu="l40s"))
    assert found.memory is not None
    (rank,) = found.memory.stages
    windows = (12 * (4096 // block + 3) + 2048 // block) * block
    assert windows < found.memory.kv_tokens < 12 * 8192
    assert rank.kv_pool == 21 * 2 * 8 * 256 * 2 * (found.memory.kv_tokens + windows)
    gpu = found.request.gpu
    assert gpu is not None
    room = (gpu.memory - rank.fixed) * found.request.serving.kv_cache_fraction
    assert 0 <= room - rank.kv_pool < 21 * 2 * 8 * 256 * 2 * block


@pytest.mark.parametrize(("version", "windows"), [("1.2.1", False), ("1.3.0", True)])
def test_the_llm_api_frees_blocks_only_where_its_network_has_the_window(version: str, windows: bool) -> None:
    found = planned(backend="llmapi", version=version)
    assert found.memory is not None
    assert (found.memory.windows is not None) is windows


def test_a_plan_without_a_gpu_has_the_pool_that_its_requests_need() -> None:
    found = planned(gpu=None, concurrency=8)
    assert found.memory is not None
    assert found.memory.kv_tokens == 8 * (WINDOW + 32)
    assert full_length(found) == 8


def test_the_plan_says_it() -> None:
    model = known(MISTRAL)
    recipe = {"engine": {"backend": "tensorrt_llm", "max_seq_len": 32768}}
    written = plan(model, asked(model, recipe=recipe, gpu="h100-80gb"), "throughput").as_json()
    assert written["kv_windows"] == {"pools": "equal", "layers": {"4096": 32}}
    assert written["longest_prompt"] == 32767


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.17.0", "one"), ("0.19.0", "one"), ("0.20.0", "weighted"), ("1.1.0", "weighted"), ("1.2.1", "equal")],
)
def test_releases_divide_the_cache_differently(version: str, expected: str) -> None:
    assert pools_of(release(version)) == expected


# Five of six layers have a window of 96 tokens, 3 blocks and 1 to spare; the sixth keeps all 100 blocks of a sequence.
# A cache of 1,000 blocks of all layers is 6,000 of one layer.
@pytest.mark.parametrize(
    ("pools", "requests"),
    [
        ("one", 1000 // 100),
        ("weighted", min(6000 * 480 // 3680 // 5 // 4, 6000 * 3200 // 3680 // 100)),
        ("equal", min(3000 // 5 // 4, 3000 // 100)),
    ],
)
def test_requests_by_hand(pools: Pools, requests: int) -> None:
    windows = CacheWindows((96, 96, 96, 96, 96, 3200), pools, 3200)
    assert windows.requests(32_000, 3200, 32) == requests


layers = st.lists(st.integers(1, 4096), min_size=1, max_size=8)


@given(layers, st.sampled_from(POOLS), st.integers(1, 4096), st.integers(1, 64), st.sampled_from([16, 32, 64]))
def test_a_pool_for_requests_holds_them_and_no_smaller_one_does(
    given_layers: list[int], pools: Pools, length: int, requests: int, block: int
) -> None:
    windows = CacheWindows(tuple(given_layers), pools, 4096)
    tokens = windows.tokens_for(requests, length, block)
    assert windows.requests(tokens, length, block) >= requests
    assert windows.requests(tokens - block, length, block) < requests


@given(layers, st.sampled_from(POOLS), st.integers(1, 10**6), st.sampled_from([16, 32]))
def test_the_longest_sequence_fits(given_layers: list[int], pools: Pools, tokens: int, block: int) -> None:
    windows = CacheWindows(tuple(given_layers), pools, 4096)
    longest = windows.longest(tokens, block)
    assert 0 <= longest <= 4096
    assert longest == 0 or windows.requests(tokens, longest, block) >= 1


@given(st.integers(0, 10**6), st.integers(1, 4096), st.sampled_from([16, 32]), st.sampled_from(POOLS))
def test_full_layers_are_counted_as_without_windows(tokens: int, length: int, block: int, pools: Pools) -> None:
    windows = CacheWindows((4096,) * 4, pools, 4096)
    assert windows.requests(tokens, length, block) == requests_that_fit(tokens // block * block, length, block)
