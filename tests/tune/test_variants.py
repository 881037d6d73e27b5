"""The variants of a backend's serving settings."""

from typing import Any

import pytest

from trtforge.core.recipe import ResolvedBackend
from trtforge.core.serving import ServingConfig
from trtforge.serve.speed import Load
from trtforge.tune.result import recipe_lines, set_options
from trtforge.tune.variants import PRESENT, Limits, Variant, needless, variants

LOAD = Load(concurrency=(1, 16, 32), prompt_tokens=128, max_tokens=64)


def limits(backend: ResolvedBackend = "torch", *, chunked: bool = True, batch: int = 32) -> Limits:
    return Limits(backend, batch, 8192, chunked)


def names(serving: dict[str, Any], engine: Limits, load: Load = LOAD) -> list[str]:
    return [variant.name for variant in variants(ServingConfig.parse(serving, "test"), engine, load)]


@pytest.mark.parametrize("backend", ["torch", "llmapi"])
def test_limits_of_engines_that_are_not_compiled_for_them_can_be_lowered(backend: ResolvedBackend) -> None:
    assert names({}, limits(backend)) == [
        "max_batch_size 16",
        "max_batch_size 8",
        "max_num_tokens 1024",
        "max_num_tokens 256",
        "scheduler max_utilization",
        "kv_cache_fraction 0.95",
    ]


def test_a_tensorrt_engine_has_its_own() -> None:
    found = names({}, limits("tensorrt_llm"))
    assert found == ["scheduler max_utilization", "kv_cache_fraction 0.95", "cuda_graph_mode True"]
    assert names({"cuda_graph_mode": True, "kv_cache_fraction": 0.95}, limits("tensorrt_llm")) == found[:1]


def test_only_what_the_load_can_reach_is_varied() -> None:
    few = Load(concurrency=(1, 4), prompt_tokens=32)
    assert names({}, limits(), few) == ["scheduler max_utilization", "kv_cache_fraction 0.95"]
    assert "max_num_tokens 256" not in names({}, limits(chunked=False))  # it would refuse longer prompts
    assert names({}, limits(batch=1), few) == ["scheduler max_utilization", "kv_cache_fraction 0.95"]


def test_lowered_settings_are_also_tried_at_their_default() -> None:
    lowered = {"max_batch_size": 8, "max_num_tokens": 512, "kv_cache_tokens": 4096, "scheduler": "max_utilization"}
    assert names(lowered, limits()) == [
        "max_batch_size not set",
        "max_batch_size 4",
        "max_batch_size 2",
        "max_num_tokens not set",
        "max_num_tokens 256",
        "scheduler guaranteed_no_evict",
        "kv_cache_tokens not set",
    ]


def test_a_kv_cache_that_holds_every_request_makes_its_settings_needless() -> None:
    policy, batch = Variant(changes={"scheduler": "max_utilization"}), Variant(changes={"max_batch_size": 8})
    present = ServingConfig()
    said = needless(policy, present, limits(), LOAD, 6144)
    assert said == "the KV cache of 6,144 tokens holds all that runs at once (6,144 tokens)"
    assert needless(policy, present, limits(), LOAD, 6143) is None
    assert needless(policy, present, limits(), LOAD, None) is None
    assert needless(batch, present, limits(), LOAD, 6144) is None
    assert needless(policy, ServingConfig(max_batch_size=16), limits(), LOAD, 3072) is not None


def test_a_variant_as_settings_and_as_words() -> None:
    present = ServingConfig.parse({"kv_cache_tokens": 4096, "guided_decoding_backend": "xgrammar"}, "test")
    changed = Variant(changes={"kv_cache_tokens": None, "max_batch_size": 8})
    assert changed.name == "kv_cache_tokens not set, max_batch_size 8"
    applied = changed.applied(present)
    assert applied == ServingConfig(max_batch_size=8, guided_decoding_backend="xgrammar")
    assert set_options(applied) == [
        "--set",
        "serving.max_batch_size=8",
        "--set",
        "serving.guided_decoding_backend=xgrammar",
    ]
    assert set_options(ServingConfig(cuda_graph_mode=True, max_attention_window_size=(1, 2))) == [
        "--set",
        "serving.max_attention_window_size=[1, 2]",
        "--set",
        "serving.cuda_graph_mode=true",
    ]
    assert recipe_lines(changed) == ["serving:", "  kv_cache_tokens: null", "  max_batch_size: 8"]
    assert (Variant().name, Variant().applied(present)) == (PRESENT, present)
