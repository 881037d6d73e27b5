"""The embedded engine's memory by arithmetic; tests/runtime/test_planned_*.py hold it against loaded engines."""

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.models import LLAMA_8B, asked, known
from trtforge.machine.processor import Processor
from trtforge.plan.embedded import Embedded
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.gpus import gpu_named
from trtforge.plan.memory import Memory

PARAMETERS = 8_030_261_248
PLAIN, ABLE = Processor(bfloat16=False, vnni=False), Processor(bfloat16=True, vnni=True)
COMPILES = replace(PLAIN, kernels=True)


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a machine without bfloat16, whatever this one is."""
    monkeypatch.setattr(Processor, "of", lambda host: PLAIN)


def planned(serving: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **engine: Any) -> Evaluation:
    model = known(LLAMA_8B)
    recipe = {"engine": {"backend": "torch", **engine}, "serving": serving or {}}
    return evaluate(model, asked(model, recipe=recipe, **(options or {})))


def memory(found: Evaluation) -> Memory:
    assert found.memory is not None
    return found.memory


@pytest.mark.parametrize(
    ("quant", "target", "processor", "expected"),
    [
        ("none", None, PLAIN, ("cpu", "float32", "dense")),
        ("none", None, ABLE, ("cpu", "bfloat16", "dense")),
        ("int4_awq", None, ABLE, ("cpu", "bfloat16", "int4_packed_cpu")),
        ("int4_awq", None, PLAIN, ("cpu", "float32", "int4_dense")),
        ("int8_sq", None, ABLE, ("cpu", "bfloat16", "int8_sq_cpu")),
        ("int4_awq", None, COMPILES, ("cpu", "float32", "int4_native_cpu")),
        ("fp8", None, COMPILES, ("cpu", "float32", "fp8_native_cpu")),
        ("fp8", "h100-80gb", PLAIN, ("cuda", "bfloat16", "fp8_scaled_mm")),
        ("fp8", "a100-80gb", ABLE, ("cuda", "bfloat16", "fp8_codes_cuda")),
        ("int8_wo", "a100-80gb", ABLE, ("cuda", "bfloat16", "int8_codes_cuda")),
    ],
)
def test_how_it_computes(quant: str, target: str | None, processor: Processor, expected: tuple[str, str, str]) -> None:
    model = known(LLAMA_8B)
    request = asked(model, recipe={"engine": {"backend": "torch"}}, quant=quant, gpu=target)
    found = Embedded.of(request, processor)
    assert (found.device, found.compute_dtype, found.kernel) == expected


def test_rounded_activations_are_of_engines_on_the_cpu() -> None:
    recipe = {"engine": {"backend": "torch", "int8_activations": True}}
    for target, expected in ((None, "int4_coded_cpu"), ("a100-80gb", "int4_packed_cuda")):
        request = asked(known(LLAMA_8B), recipe=recipe, quant="int4_awq", gpu=target)
        assert Embedded.of(request, COMPILES).kernel == expected


def test_weights_are_those_of_the_compute_type_unless_a_kernel_takes_them_packed() -> None:
    assert memory(planned()).weights == 4 * PARAMETERS
    assert memory(planned(compute_dtype="bfloat16")).weights == 2 * PARAMETERS
    expanded = memory(planned(options={"quant": "fp8"})).weights
    assert expanded == pytest.approx(4 * PARAMETERS, rel=1e-6)
    on_gpu = memory(planned(options={"quant": "fp8", "gpu": "h100-80gb"})).weights
    assert on_gpu == pytest.approx(PARAMETERS + 2 * 128_256 * 4096, rel=1e-3)


def test_kernels_take_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the embedding and the norms, which are in float32. The LM head has a copy of 8 bits, with a scale and an
    error of each token."""
    monkeypatch.setattr(Processor, "of", lambda host: COMPILES)
    embedding, norms = 128_256 * 4096, 65 * 4096
    layers, head = PARAMETERS - 2 * embedding - norms, 3 * embedding + 128_256 * 8
    assert memory(planned()).weights == 4 * (embedding + norms) + 2 * layers + head
    fp8 = memory(planned(options={"quant": "fp8"})).weights
    assert fp8 == 4 * (embedding + norms) + head + layers + 32 * 5 * 8  # two scales of each linear layer
    assert memory(planned(compute_dtype="bfloat16")).weights == 2 * (PARAMETERS - embedding) + head


def test_a_token_is_cached_in_the_compute_type_or_in_a_byte() -> None:
    assert memory(planned()).kv_per_token == 2 * 32 * 8 * 128 * 4
    assert memory(planned(options={"kv_cache": "fp8"})).kv_per_token == 2 * 32 * 8 * 128


def test_the_pool_is_what_the_requests_can_use() -> None:
    found = planned(max_batch_size=3, max_seq_len=1000, tokens_per_block=64)
    assert memory(found).kv_tokens == 3 * 1024
    assert found.full_length_requests == 3
    assert memory(found).fullest.kv_pool == 3 * 1024 * 262_144


def test_a_cpus_pool_ends_at_4_gib_over_all_ranks() -> None:
    assert memory(planned(max_seq_len=4096)).kv_tokens == (4 << 30) // 262_144
    split = memory(planned(max_seq_len=4096, options={"tp": 2}))
    assert split.kv_tokens == (4 << 30) // 262_144
    assert split.over_all("kv_pool") == 4 << 30
    too_long = planned(max_seq_len=100_000)
    assert {problem.rule for problem in too_long.problems} == {"kv_pool"}


def test_a_pool_that_is_asked_for_is_taken_in_whole_blocks() -> None:
    found = planned({"kv_cache_tokens": 100_000}, max_seq_len=4096, tokens_per_block=64)
    assert memory(found).kv_tokens == 100_000 // 64 * 64


def test_a_gpus_pool_ends_at_its_share() -> None:
    found = planned(max_batch_size=512, max_seq_len=8192, options={"gpu": "l40s"})
    rank = memory(found).fullest
    free = gpu_named("l40s").memory - rank.fixed
    assert 0 <= 0.9 * free - rank.kv_pool < 64 * 131_072
    assert found.legal


def test_what_is_not_built_has_no_peak_of_building() -> None:
    from trtforge.plan.planner import plan

    model = known(LLAMA_8B)
    found = plan(model, asked(model, recipe={"engine": {"backend": "torch"}}, max_seq_len=4096), "throughput")
    assert (found.peaks.build_gpu, found.peaks.build_host_per_worker) == (None, None)
    assert found.as_json()["embedded"] == {"device": "cpu", "compute_dtype": "float32", "kernel": "dense"}
    of_llm_api = plan(model, asked(model, recipe={"engine": {"backend": "llmapi"}}, max_seq_len=4096), "throughput")
    assert of_llm_api.peaks.build_gpu is None
