"""Time estimates: near what NVIDIA publishes, and moving the way that hardware makes them move."""

from dataclasses import replace
from math import log
from statistics import median

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, MIXTRAL, known
from tests.plan.published import LENGTHS, PUBLISHED, REQUESTS, Row
from trtforge.core.parallel import Parallel
from trtforge.models.checkpoint_plan import Layout
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import GPUS, gpu_named
from trtforge.plan.limits import EngineLimits
from trtforge.plan.memory import Held, memory_of, tokens_on
from trtforge.plan.roofline import Roofline, Workload
from trtforge.plan.weights import Stored

MAX_BATCH_SIZE = 2048
TYPICAL = Workload(1024, 256)


def roofline(
    hub_id: str, gpu: str, parallel: Parallel | None = None, quant: str = "none", cache: str = "none"
) -> Roofline:
    model, parallel = known(hub_id), parallel or Parallel()
    weights = model.weights(Layout(parallel, "bfloat16"))
    held = Held(weights, model.whole("bfloat16"), Stored(WEIGHTS[quant], 2), CACHES[cache])
    return Roofline(model.facts, held, parallel, gpu_named(gpu), 8192)


def ratios(row: Row) -> list[float]:
    """Estimate / published for each length, at the concurrency that the KV pool and the load allow."""
    time = roofline(row.model, row.gpu, Parallel(tp=row.tp, pp=row.pp), row.quant, "fp8")
    found = []
    for (prompt, output), load, measured in zip(LENGTHS, REQUESTS, row.tokens_per_second, strict=True):
        workload = Workload(prompt, output)
        limits = EngineLimits(MAX_BATCH_SIZE, 1, 8191, workload.length, 8192, 32, 8191)
        memory = memory_of(time.facts, time.held, time.parallel, limits)
        # the PyTorch backend, which these were measured with, has no decoder buffers
        memory = replace(memory, stages=tuple(replace(rank, decoder=0) for rank in memory.stages))
        tokens = tokens_on(memory, int(time.gpu.memory), 0.93, 32)
        at_once = max(1, min(tokens // workload.length, MAX_BATCH_SIZE * row.pp, load // 2))
        found.append(time.performance(at_once, workload).tokens_per_second / measured)
    return found


def test_throughput_is_near_what_nvidia_publishes() -> None:
    found = [ratio for row in PUBLISHED for ratio in ratios(row)]
    assert len(found) == 120
    assert min(found) > 1 / 1.7
    assert max(found) < 1.7
    assert 0.95 < median(found) < 1.05
    assert sum(abs(log(ratio)) < log(1.15) for ratio in found) > 0.6 * len(found)


def test_decode_reads_the_weights_and_prefill_computes() -> None:
    bf16, fp8 = roofline(LLAMA_8B, "h100-80gb"), roofline(LLAMA_8B, "h100-80gb", quant="fp8")
    assert bf16.performance(1, TYPICAL).tpot > 16.06e9 / 3.35e12
    assert 1.5 < bf16.performance(1, TYPICAL).tpot / fp8.performance(1, TYPICAL).tpot < 2.0
    assert 1.5 < bf16.prefill_seconds(Workload(8000, 1)) / fp8.prefill_seconds(Workload(8000, 1)) < 2.0


def test_weight_only_formats_speed_decode_up_and_not_prefill() -> None:
    plain, awq = roofline(LLAMA_8B, "a100-80gb"), roofline(LLAMA_8B, "a100-80gb", quant="int4_awq")
    assert awq.performance(1, TYPICAL).tpot < 0.5 * plain.performance(1, TYPICAL).tpot
    long = Workload(8000, 1)
    assert plain.prefill_seconds(long) < awq.prefill_seconds(long) < 1.3 * plain.prefill_seconds(long)


def test_more_requests_take_longer_each_and_yield_more_together() -> None:
    time = roofline(LLAMA_70B, "h100-80gb", Parallel(tp=4), "fp8", "fp8")
    points = [time.performance(number, TYPICAL) for number in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert [p.tpot for p in points] == sorted(p.tpot for p in points)
    assert [p.tokens_per_second for p in points] == sorted(p.tokens_per_second for p in points)


def test_tensor_parallelism_pays_over_nvlink_more_than_over_pcie() -> None:
    def gain(gpu: str) -> float:
        one, four = roofline(LLAMA_8B, gpu), roofline(LLAMA_8B, gpu, Parallel(tp=4))
        return one.prefill_seconds(TYPICAL) / four.prefill_seconds(TYPICAL)

    assert gain("h100-80gb") > 2
    assert gain("l40s") < gain("h100-80gb")


def test_pipeline_parallelism_shortens_no_single_answer() -> None:
    one, two = roofline(LLAMA_8B, "l40s"), roofline(LLAMA_8B, "l40s", Parallel(pp=2))
    assert two.performance(1, TYPICAL).tpot > 0.9 * one.performance(1, TYPICAL).tpot
    assert two.performance(256, TYPICAL).tokens_per_second > 1.5 * one.performance(256, TYPICAL).tokens_per_second


def test_a_single_token_reads_few_experts_and_a_full_batch_all() -> None:
    time = roofline(MIXTRAL, "h200")
    small, large = time.performance(1, Workload(1, 64)).tpot, time.performance(64, Workload(1, 64)).tpot
    assert large > 2 * small
    assert small < 0.5 * 93.4e9 / 4.8e12 / 0.7


def test_between_servers_it_is_slower() -> None:
    inside, across = (roofline(LLAMA_70B, "h100-80gb", Parallel(tp=tp)) for tp in (8, 16))
    assert across.prefill_seconds(TYPICAL) > inside.prefill_seconds(TYPICAL)


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_every_gpu_has_rates(gpu: str) -> None:
    point = roofline(LLAMA_8B, gpu).performance(1, TYPICAL)
    assert 0.001 < point.tpot < 1
    assert 0.001 < point.ttft < 10
