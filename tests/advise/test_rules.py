"""Each rule gives its advice where the figures show it, and none where they do not."""

from collections.abc import Mapping

import pytest

from tests.advise.texts import observed, text
from trtforge.advise.advice import Advice
from trtforge.advise.readings import Observation
from trtforge.advise.rules import RULES, judged

KNOWN = {"enable_kv_cache_reuse": "true", "max_num_tokens": "8192", "batch_scheduler_policy": "guaranteed_no_evict"}
FULL_BATCH = {'request_type="waiting"': 5, 'request_type="scheduled"': 4, 'block_type="used"': 40}
FULL_KV = {'request_type="waiting"': 5, 'request_type="scheduled"': 3, 'block_type="used"': 2040}
RESERVED = {'request_type="waiting"': 5, 'request_type="scheduled"': 3, 'block_type="used"': 1000}
NOTHING = {'request_type="waiting"': 0, 'request_type="scheduled"': 3, 'request_type="active"': 3}


def advice(seen: Observation) -> dict[str, Advice]:
    return {each.rule: each for each in judged(seen)[0]}


def lacks(seen: Observation) -> set[str]:
    return {each.rule for each in judged(seen)[1]}


def steady(figures: Mapping[str, float], kind: str = "embedded", **settings: str) -> Observation:
    """The same figures in every reading, of a server whose settings are known."""
    return observed(*[text(kind, figures)] * 4, settings=KNOWN | settings)


def growing(before: Mapping[str, float], after: Mapping[str, float], kind: str = "embedded") -> Observation:
    """Figures that change between the readings, beside ordinary ones."""
    usual = NOTHING if kind == "embedded" else {}
    return observed(text(kind, usual | before), text(kind, usual | after), settings=KNOWN)


def test_ordinary_figures_give_no_advice() -> None:
    assert advice(steady(NOTHING)) == {}
    assert advice(steady({}, "tensorrt_llm")) == {}
    assert lacks(steady(NOTHING)) == set()
    assert lacks(observed(*[text("embedded", NOTHING)] * 2)) == {"tokens"}
    assert lacks(steady({}, "tensorrt_llm")) == {"refused"}


def test_metrics_without_an_engine_say_so() -> None:
    before = text("gateway")
    gateway = observed("", "", beside=(before, before.replace('"200"} 2.0', '"200"} 90.0')))
    advice, missing = judged(gateway)
    assert advice == []
    assert [each.lacks for each in missing] == ["engines: there are no gauges of any in these metrics"]


def test_a_model_is_named_as_a_terminal_shows_it() -> None:
    hostile = 'nv_trt_llm_request_metrics{model="a\x1b[31m",request_type="max",version="1"} 4\n'
    assert [engine.name for engine in observed(hostile, hostile).engines] == ["a?[31m"]


def test_an_idle_server_gets_no_other_advice() -> None:
    still = {**FULL_BATCH, 'request_type="waiting"': 0, 'request_type="scheduled"': 0, 'request_type="active"': 0}
    assert list(advice(steady(still))) == ["idle"]
    assert lacks(steady(still)) == set()
    served = observed(text("embedded", still), text("embedded", still | {"total_context_tokens": 10**6}))
    assert "idle" not in advice(served)
    probed = observed(text("embedded", still), text("embedded", still | {'inference_count "ensemble"': 460}))
    assert "idle" in advice(probed)  # probes compute no prompt
    quiet = {'request_type="scheduled"': 0, 'request_type="active"': 0}
    assert "idle" in advice(steady(quiet, "tensorrt_llm"))
    assert "idle" not in advice(growing(quiet, quiet | {'inference_count "tensorrt_llm"': 1010}, "tensorrt_llm"))


def test_a_full_batch() -> None:
    found = advice(steady(FULL_BATCH))["batch"]
    assert found.evidence == (
        "requests waited while 4 of 4 ran in 100% of the readings (5.0 waiting on average), and 2% of the KV blocks "
        "were in use"
    )
    assert (found.setting, found.confidence) == ("engine.max_batch_size", "certain")
    lowered = advice(steady(FULL_BATCH, max_batch_size="4"))["batch"]
    assert (lowered.setting, lowered.change) == ("serving.max_batch_size", "Raise the lowered limit, or leave it out.")
    unknown = advice(observed(*[text("embedded", FULL_BATCH)] * 2))["batch"]
    assert unknown.setting == "serving.max_batch_size, engine.max_batch_size"
    half = [text("embedded", FULL_BATCH), text("embedded", NOTHING)]
    assert advice(observed(*half, settings=KNOWN))["batch"].confidence == "likely"
    assert "batch" not in advice(observed(*half, half[1], settings=KNOWN))
    assert "batch" not in advice(steady(FULL_KV))
    triton = {'request_type="waiting"': 9, 'request_type="scheduled"': 64}
    assert set(advice(steady(triton, "tensorrt_llm"))) == {"batch"}


def test_a_full_kv_cache() -> None:
    found = advice(steady(FULL_KV))
    assert set(found) == {"kv_full"}
    assert found["kv_full"].confidence == "certain"
    assert "in 100% of the readings (100% on average)" in found["kv_full"].evidence
    triton = {'request_type="waiting"': 9, 'block_type="used"': 6200}
    assert advice(steady(triton, "tensorrt_llm"))["kv_full"].confidence == "likely"
    assert "kv_full" not in advice(steady(FULL_BATCH))
    assert "kv_full" not in advice(steady(FULL_KV | {'request_type="waiting"': 0}))


def test_reserved_kv_blocks() -> None:
    found = advice(steady(RESERVED))
    assert set(found) == {"kv_reserved"}
    assert found["kv_reserved"].confidence == "likely"
    assert advice(observed(*[text("embedded", RESERVED)] * 2))["kv_reserved"].confidence == "possible"
    assert advice(steady(RESERVED, batch_scheduler_policy="max_utilization")) == {}
    assert "kv_reserved" not in advice(steady(FULL_BATCH))


def test_paused_requests() -> None:
    paused = "inflight_batcher paused_requests"
    found = advice(growing({paused: 3}, {paused: 10}))
    assert set(found) == {"paused"}
    assert found["paused"].evidence.startswith("7 pauses in 0 s")
    assert advice(growing({paused: 3}, {paused: 3})) == {}
    assert advice(growing({paused: 3}, {paused: 0}, "tensorrt_llm"))["paused"].evidence.startswith(
        "requests were paused in 50% of the readings"
    )
    assert advice(growing({paused: 0}, {paused: 0}, "tensorrt_llm")) == {}


def test_no_reuse_of_kv_blocks() -> None:
    count = {'inference_count "ensemble"': 500}
    before, after = text("embedded", NOTHING), text("embedded", NOTHING | count)
    assert advice(observed(before, after))["reuse"].confidence == "possible"
    off = advice(observed(before, after, settings=KNOWN | {"enable_kv_cache_reuse": "false"}))["reuse"]
    assert off.confidence == "likely"
    assert off.evidence == "no KV block was reused by 50 requests in 0 s; KV reuse is off"
    assert advice(observed(before, after, settings=KNOWN)) == {}  # prompts differ
    assert advice(observed(before, text("embedded", NOTHING | count | {'block_type="reused"': 9}))) == {}
    assert advice(observed(before, before)) == {}
    older = "\n".join(line for line in after.splitlines() if "reused" not in line) + "\n"
    assert "reuse" in lacks(observed(older, older))


def test_drafts_in_vain() -> None:
    drafted, accepted = '"drafted"', '"accepted"'
    found = advice(growing({}, {drafted: 1000, accepted: 120}))["drafts"]
    assert found.evidence == "120 of 1000 draft tokens were accepted (12%)"
    assert advice(growing({}, {drafted: 1000, accepted: 600})) == {}
    assert advice(growing({}, {drafted: 100, accepted: 1})) == {}
    assert advice(growing({drafted: 5000, accepted: 0}, {drafted: 5000, accepted: 0})) == {}


def test_steps_full_of_prompts() -> None:
    waiting = {'request_type="waiting"': 2}
    context, steps = "total_context_tokens", "iteration_counter"
    before = {context: 0, steps: 0} | waiting
    found = advice(growing(before, {context: 80_000, steps: 10} | waiting))
    assert found["tokens"].evidence.startswith("a step computed 8000 prompt tokens on average, and takes 8192")
    assert "tokens" not in advice(growing(before, {context: 40_000, steps: 10} | waiting))
    assert "tokens" not in advice(growing({context: 0, steps: 0}, {context: 80_000, steps: 10}))
    triton = {'request_type="waiting"': 2, context: 8192}
    assert set(advice(steady(triton, "tensorrt_llm"))) == {"tokens"}


def test_refusals_are_counted_by_engines_gateway_and_triton() -> None:
    found = advice(growing({'"refused"': 3}, {'"refused"': 8}))
    assert set(found) == {"refused"}
    assert found["refused"].evidence == "5 requests to tensorrt_llm were refused in 0 s"
    assert advice(growing({'"refused"': 8}, {'"refused"': 8})) == {}
    assert advice(growing({'"invalid"': 3}, {'"invalid"': 8})) == {}
    served, before = text("tensorrt_llm"), text("gateway")
    after = before.replace('"400"} 1.0', '"429"} 6.0')
    gateway = advice(observed(served, served, settings=KNOWN, beside=(before, after)))
    assert gateway["refused"].evidence == "OpenAI's API answered 429 to 6 of 6 requests in 0 s"
    assert lacks(observed(served, served, settings=KNOWN, beside=(before, before))) == set()
    assert advice(observed(served, served, settings=KNOWN, beside=(before, before))) == {}
    rejected = 'failure "tensorrt_llm" REJECTED'
    triton = advice(growing({rejected: 1}, {rejected: 4}, "tensorrt_llm"))["refused"]
    assert triton.evidence == "3 requests to tensorrt_llm were rejected by Triton in 0 s"
    assert "refused" not in advice(growing({rejected: 4}, {rejected: 4}, "tensorrt_llm"))


def test_deadlines_and_clients_that_leave() -> None:
    found = advice(growing({'"late"': 1}, {'"late"': 3}))
    assert set(found) == {"deadlines"}
    assert found["deadlines"].evidence == "2 requests to tensorrt_llm were too late in 0 s"
    served, before = text("embedded", NOTHING), text("gateway")

    def with_status(status: int, count: int) -> dict[str, Advice]:
        after = before.replace('"200"} 2.0', '"200"} 90.0').replace('"400"} 1.0', f'"{status}"}} {count}.0')
        return advice(observed(served, served, settings=KNOWN, beside=(before, after)))

    assert set(with_status(504, 3)) == {"deadlines"}
    assert with_status(499, 12)["leaving"].evidence == "12 of 100 requests left in 0 s (499)"
    assert with_status(499, 2) == {}


def test_a_python_model_that_requests_wait_for() -> None:
    def queue(milliseconds: float, compute: float) -> dict[str, Advice]:
        count, model = 100, '"preprocessing"'
        after = {
            f"inference_count {model}": 1000 + count,
            f"queue_duration {model}": 600_000 + 1e3 * count * milliseconds,
            f"compute_infer {model}": 2_000_000 + 1e3 * count * compute,
        }
        return advice(growing({}, after, "tensorrt_llm"))

    found = queue(200, 4)["python_models"]
    assert found.evidence == (
        "100 requests waited 200.0 ms each in Triton's queue of preprocessing, and were computed for 4.0 ms"
    )
    assert queue(5, 1) == {}
    assert queue(30, 40) == {}
    counted = ("count", 200.0), ("queue_duration_us", 1e8), ("compute_infer_duration_us", 1e6)
    split = text("tensorrt_llm") + "".join(  # Triton counts instances on different GPUs apart
        f'nv_inference_{name}{{model="preprocessing",version="1",gpu_uuid="GPU-{gpu}"}} {value}\n'
        for name, value in counted
        for gpu in range(2)
    )
    both = advice(observed(text("tensorrt_llm"), split, settings=KNOWN))["python_models"]
    assert both.evidence.startswith("400 requests waited 500.0 ms each in Triton's queue of preprocessing")
    engine = {'inference_count "tensorrt_llm"': 2000, 'queue_duration "tensorrt_llm"': 10**12}
    assert advice(growing({}, engine, "tensorrt_llm")) == {}


def test_gpus_that_wait() -> None:
    found = advice(steady({"gpu_utilization": 0.2}, "tensorrt_llm"))
    assert set(found) == {"gpu"}
    assert "the busiest GPU was used 20% of the time" in found["gpu"].evidence
    beside = text("tensorrt_llm") + "".join(f'nv_gpu_utilization{{gpu_uuid="GPU-{n}"}} 0\n' for n in range(7))
    assert "gpu" not in advice(observed(beside, beside, settings=KNOWN))  # the engine uses one of eight GPUs
    still = {"gpu_utilization": 0.2, 'request_type="scheduled"': 0, 'request_type="active"': 0}
    assert "gpu" not in advice(steady(still, "tensorrt_llm"))


def test_the_surest_advice_is_first() -> None:
    full = text("embedded", FULL_BATCH)
    order = [
        each.confidence for each in judged(observed(full, full, text("embedded", NOTHING | {'"drafted"': 900})))[0]
    ]
    assert order == ["certain", "likely"]


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.looks_at for rule in RULES)


@pytest.mark.parametrize("kind", ["embedded", "tensorrt_llm"])
def test_metrics_of_another_server_are_no_reason_to_fail(kind: str) -> None:
    """Of Triton without an engine, each rule can be judged too."""
    bare = "\n".join(line for line in text(kind).splitlines() if "nv_trt_llm" not in line and "trtforge_" not in line)
    assert [each.rule for each in judged(observed(bare + "\n", bare + "\n"))[0]] == ["idle"]
