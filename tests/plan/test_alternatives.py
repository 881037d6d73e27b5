"""Alternatives are legal, and ranked for their goal."""

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, MIXTRAL, asked, known
from trtforge.plan.alternatives import COMMON_GPUS, GOALS, Goal, alternatives, fits_on
from trtforge.plan.evaluate import evaluate
from trtforge.plan.formats import WEIGHTS


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("hub_id", [LLAMA_70B, MIXTRAL, "Qwen/Qwen2.5-7B"])
def test_all_are_legal_and_differ(hub_id: str, goal: Goal) -> None:
    model = known(hub_id)
    found = alternatives(model, asked(model, gpu="h100-80gb"), goal)
    assert found
    assert all(evaluate(model, one.evaluation.request).legal for one in found)
    assert len({one.evaluation.request for one in found}) == len(found)
    assert all(one.why for one in found)


def best(goal: Goal, **options: object) -> tuple[int, str, str]:
    model = known(LLAMA_70B)
    request = alternatives(model, asked(model, gpu="h100-80gb", **options), goal)[0].evaluation.request
    return request.tp * request.pp, request.quant, request.kv_cache


def test_goals_choose_as_serving_practice_does() -> None:
    assert best("quality") == (2, "none", "none")
    assert best("memory")[:2] == (1, "int4_awq")
    assert best("throughput")[1] in ("fp8", "fp8_rowwise")
    gpus, quant, _ = best("latency")
    assert gpus == 8
    assert quant != "none"


def test_no_choice_is_shown_that_an_earlier_one_beats_in_every_respect() -> None:
    model = known(LLAMA_70B)
    for goal in GOALS:
        found = alternatives(model, asked(model, gpu="h100-80gb"), goal)
        for index, one in enumerate(found):
            assert not any(other.beats(one) for other in found[:index])


def test_formats_of_a_high_loss_are_never_proposed() -> None:
    model = known(LLAMA_8B)
    for goal in GOALS:
        found = alternatives(model, asked(model, gpu="l4"), goal)
        assert all(WEIGHTS[one.evaluation.request.quant].loss < 4 for one in found)


def test_wanted_concurrency_is_kept() -> None:
    model = known(LLAMA_8B)
    found = alternatives(model, asked(model, gpu="l4", concurrency=200), "memory")
    assert found
    assert all((one.evaluation.typical_requests or 0) >= 200 for one in found)
    assert all(one.performance.concurrency == 200 for one in found)


def test_without_a_gpu_each_common_one_has_its_best() -> None:
    model = known(LLAMA_8B)
    found = alternatives(model, asked(model), "throughput")
    assert [one.evaluation.request.engine.target.gpu for one in found] == list(COMMON_GPUS)


def test_the_fewest_gpus_are_found() -> None:
    model = known(LLAMA_70B)
    found = {one.request.engine.target.gpu: one.request.tp * one.request.pp for one in fits_on(model, asked(model))}
    assert found["h100-80gb"] == 2
    assert found["h200"] == 1
    assert found["b200"] == 1
    assert found["l4"] == 8


def test_a_gpu_without_bfloat16_has_alternatives_in_float16() -> None:
    model = known(LLAMA_70B)
    request = asked(model, gpu="t4", quant="fp8", kv_cache="fp8")
    assert {problem.rule for problem in evaluate(model, request).problems} >= {"gpu_format", "gpu_kv_cache", "dtype"}
    found = alternatives(model, request, "throughput")
    assert {one.evaluation.request.dtype for one in found} == {"float16"}
    assert all(one.why.endswith("; with --dtype float16") for one in found)
    in_float16 = alternatives(model, asked(model, gpu="t4", dtype="float16"), "throughput")
    assert [one.evaluation.request for one in found] == [one.evaluation.request for one in in_float16]
    assert not any("--dtype" in one.why for one in in_float16)
