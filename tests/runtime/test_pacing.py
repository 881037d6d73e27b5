"""Steps with prompts take about as long as the pace allows, whatever a token of a prompt costs."""

import random
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.pacing import Pace
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler

BASE = 0.01
"""Seconds of a step without prompts; one with prompts is planned to take 7 ms longer, and may take 10 ms longer."""


def paced(pace: Pace, steps: int, added: Callable[[int], float], base: float = BASE) -> list[int]:
    """The context tokens of steps as the pace chooses them, which take `added` seconds longer than without."""
    chosen = []
    for _ in range(steps):
        context = pace.most_context
        assert context is not None
        pace.observe(base + (added(context) if context else 0.0), context, alone=False)
        chosen.append(context)
    return chosen


def begun(seconds: float, tokens: int) -> Pace:
    """After steps without prompts and a prompt alone."""
    pace = Pace()
    for _ in range(5):
        pace.observe(BASE, 0, alone=False)
    assert pace.most_context == 12
    pace.observe(seconds, tokens, alone=True)
    return pace


def restoring(pace: Pace, steps: int, per_block: Callable[[int], float]) -> list[int]:
    """The blocks that steps restore as the pace chooses them; in a step, each takes `per_block` seconds."""
    chosen = []
    for step in range(steps):
        restored = pace.most_restored
        pace.observe(BASE + per_block(step) * restored, 0, alone=False, restored=restored)
        chosen.append(restored)
    return chosen


@pytest.mark.parametrize(
    ("fixed", "per_token", "settled"),
    [(0.0, 0.0001, 64), (0.0, 0.0008, 8), (0.004, 0.0001, 8), (0.004, 0.001, 4), (0.0, 0.000001, 6144)],
)
def test_the_size_settles_below_what_a_step_may_take(fixed: float, per_token: float, settled: int) -> None:
    """What a step costs at any size counts as its tokens' cost, so that it may settle early."""
    pace = begun(512 * 0.0003, 512)  # another price than that of small chunks
    chosen = paced(pace, 120, lambda context: fixed + per_token * context)
    assert {each for each in chosen[-48:] if each} == {settled}


def test_a_smaller_size_is_taken_where_tokens_cost_more() -> None:
    pace = begun(0.02, 100)
    assert paced(pace, 9, lambda context: 0.0001 * context) == [16] * 3 + [32] * 3 + [64] * 3
    assert paced(pace, 4, lambda context: 0.001 * context) == [64, 64, 64, 4], "most of five steps were slow"


def test_the_size_grows_no_faster_than_by_twice() -> None:
    pace = begun(1.0, 100)
    assert paced(pace, 13, lambda context: 0.0) == [4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64]


def test_the_size_stays_where_steps_take_somewhat_longer_than_planned() -> None:
    """Few tokens cost nothing, as products of up to 16 rows take as long as reading the weights."""
    pace = begun(0.05, 100)
    chosen = paced(pace, 99, lambda context: 0.0 if context <= 8 else 0.0006 * context)
    assert chosen == [4, 4, 4, 8, 8, 8, *([16] * 18), 0, *([16] * 24), 0, *([16] * 24), 0, *([16] * 24)]


def test_a_prompt_goes_on_however_much_it_costs() -> None:
    pace = Pace()
    pace.observe(0.001, 0, alone=False)
    pace.observe(1.0, 10, alone=False)
    assert pace.most_context == 4


def test_single_slow_steps_change_nothing() -> None:
    rng = random.Random(0)
    pace = begun(0.01, 100)
    before = paced(pace, 30, lambda context: 0.0001 * context)[-1]
    for turn in range(100):
        slow = 0.1 if turn % 5 == rng.randrange(2) else 0.0
        context = pace.most_context
        assert context in (0, before)
        pace.observe(BASE + 0.0001 * context + slow * bool(context), context, alone=False)
        pace.observe(BASE, 0, alone=False)


def test_ends_of_prompts_and_steps_that_are_not_paced_tell_nothing() -> None:
    pace = begun(0.01, 100)
    size = pace.most_context
    assert size == 32
    for context in (1, size // 2, size + 1, 1000) * 5:
        pace.observe(9.0, context, alone=False)
        pace.observe(BASE, 0, alone=False)
    assert pace.most_context == size


def test_chunks_that_end_with_a_block_count_by_their_tokens() -> None:
    pace = begun(0.01, 100)
    for _ in range(3):
        pace.observe(BASE + 0.001 * 20, 20, alone=False)
    assert pace.most_context == 4, "a token takes 1 ms, and 7 ms are planned"


def test_steps_without_prompts_tell_how_long_these_take_now() -> None:
    """More sequences run than when a prompt came: a step may take longer. The first such step is not believed alone."""
    pace = begun(0.05, 100)
    chosen = paced(pace, 199, lambda context: 0.0005 * context, base=0.03)
    assert [index for index, each in enumerate(chosen) if each == 0] == [24, 25, *(50 + 25 * turn for turn in range(6))]
    assert chosen[10] == 4
    assert chosen[-1] == 32


def test_fewer_tokens_are_taken_at_once_where_fewer_sequences_run() -> None:
    """Steps with prompts are faster now than those without were, which asks for two without."""
    pace = begun(0.01, 100)
    assert paced(pace, 18, lambda context: 0.0001 * context)[-1] == 64
    assert paced(pace, 6, lambda context: 0.0001 * context, base=0.002) == [64, 64, 0, 0, 12, 12]


def test_a_single_step_without_prompts_that_took_another_time_changes_nothing() -> None:
    pace = begun(0.01, 100)
    before = paced(pace, 24, lambda context: 0.0001 * context)[-1]
    for seconds in (0.1, BASE, 0.001, BASE):
        pace.observe(seconds, 0, alone=False)
    assert paced(pace, 24, lambda context: 0.0001 * context) == [before] * 24


def test_prompts_go_on_however_much_steps_without_them_differ() -> None:
    pace = begun(0.01, 100)
    rng = random.Random(0)
    chosen = [paced(pace, 1, lambda context: 0.0001 * context, base=rng.uniform(0.001, 0.1))[0] for _ in range(500)]
    assert sum(size > 0 for size in chosen) > 500 * 24 // 27


def test_a_size_that_took_too_long_is_tried_again_after_a_while() -> None:
    """Up to 8 tokens cost nothing, so that more seem to cost little."""
    pace = begun(1.0, 100)
    chosen = [size for size in paced(pace, 300, lambda context: 0.0 if context <= 8 else 0.02) if size]
    assert chosen[:12] == [4] * 3 + [8] * 3 + [16] * 3 + [4] * 3
    assert chosen[12:18] == [8] * 3 + [12] * 3
    tried = [index for index, size in enumerate(chosen) if size > 8]
    assert tried[:6] == [6, 7, 8, 15, 16, 17]
    assert tried[6] > 17 + 4 * 24


def test_steps_with_prompts_that_were_faster_ask_for_one_without() -> None:
    """That cannot take longer. A prompt counts as free until then."""
    pace = begun(1.0, 100)
    assert paced(pace, 6, lambda context: -0.004) == [4, 4, 0, 4, 8, 0]
    assert paced(pace, 6, lambda context: 0.0001 * context, base=0.006) == [8, 8, 0, 0, 16, 16]


def test_two_slow_steps_without_prompts_are_found_out() -> None:
    """They are taken for usual, so that larger sizes seem to fit, until steps with prompts are faster."""
    pace = begun(0.01, 100)
    assert paced(pace, 24, lambda context: 0.0001 * context)[-1] == 64
    assert paced(pace, 2, lambda context: 0.0, base=0.03) == [0, 0]
    assert paced(pace, 8, lambda context: 0.0001 * context) == [64, 128, 0, 0, 128, 128, 64, 64]


def test_unusual_steps_that_differ_from_each_other_change_nothing() -> None:
    pace = begun(0.01, 100)
    before = paced(pace, 24, lambda context: 0.0001 * context)[-1]
    for seconds in (0.05, 0.005, 0.005, BASE, 0.05):
        pace.observe(seconds, 0, alone=False)
    pace.observe(1.0, 4096, alone=True)
    pace.observe(0.05, 0, alone=False)
    assert paced(pace, 1, lambda context: 0.0) == [0]
    assert paced(pace, 24, lambda context: 0.0001 * context) == [before] * 24


def test_the_size_grows_again_after_slow_times() -> None:
    """Steps that other work on the machine makes slow for a while are no reason to leave a size alone."""
    pace, sizes = begun(0.01, 100), []
    for step in range(1000):
        context = pace.most_context
        assert context is not None
        slow = 3 if step % 60 < 4 else 1
        pace.observe(slow * (BASE + 0.0001 * context), context, alone=False)
        sizes.append(context)
    assert set(sizes[200:]) == {0, 8, 16, 32, 64}
    assert sum(sizes[200:]) > 800 * 32


def test_short_prompts_between_different_loads_are_learned_from_too() -> None:
    pace, sizes = begun(0.05, 100), []
    for turn in range(100):
        base = (0.01, 0.03)[turn % 2]
        for _ in range(3):
            pace.observe(base, 0, alone=False)
        for _ in range(2):
            context = pace.most_context
            assert context
            pace.observe(base + 0.0001 * context, context, alone=False)
            sizes.append(context)
    assert min(sizes[100:]) >= 32


def test_blocks_are_restored_in_the_time_that_a_step_may_take_longer() -> None:
    assert restoring(begun(0.01, 100), 24, lambda step: 0.0004) == [4, 8, 16, *([17] * 21)]
    assert restoring(begun(0.01, 100), 3, lambda step: 9.0) == [4, 1, 1], "one at least"
    assert restoring(begun(0.01, 100), 5, lambda step: 0.0) == [4, 8, 16, 32, 64]


def test_blocks_in_new_pages_take_longer_and_make_the_next_steps_restore_fewer() -> None:
    chosen = restoring(begun(0.01, 100), 20, lambda step: 0.004 if step == 4 else 0.0004)
    assert chosen[:5] == [4, 8, 16, 17, 17]
    assert chosen[5:10] == [5, 5, 4, 4, 3]
    assert chosen[-5:] == [17] * 5


def test_after_some_steps_that_restored_one_that_does_not_is_measured() -> None:
    pace = begun(0.01, 100)
    assert restoring(pace, 25, lambda step: 0.0004)[-1] == 0
    assert restoring(pace, 1, lambda step: 0.0004) == [17]


def test_the_end_of_a_prefix_tells_nothing_of_what_a_block_takes() -> None:
    pace = begun(0.01, 100)
    assert restoring(pace, 4, lambda step: 0.0004)[-1] == 17
    for restored, context in ((8, 0), (17, 3), (3, 60)):
        pace.observe(9.0, context, alone=False, restored=restored)
    assert pace.most_restored == 17


def test_steps_that_restore_tell_nothing_of_others() -> None:
    pace, other = begun(0.01, 100), begun(0.01, 100)
    for _ in range(20):
        pace.observe(9.0, 0, alone=False, restored=4)
        pace.observe(9.0, 50, alone=False, restored=4)
        pace.observe(9.0, 50, alone=True, restored=400)
        pace.observe(BASE, 0, alone=False)
    assert pace.most_context == other.most_context == 32


@pytest.mark.parametrize("streamed", [False, True])
def test_only_beside_streamed_requests_prompts_are_computed_in_parts(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    counts, schedule = [], Scheduler.schedule

    def noted(self: Scheduler) -> list[Row]:
        rows = schedule(self)
        counts.append([row.count for row in rows])
        return rows

    monkeypatch.setattr(Pace, "most_context", 4)
    monkeypatch.setattr(Scheduler, "schedule", noted)
    beside, ended = GenerationRequest("beside", tuple(range(3, 23)), 1, streamed=False), Event()

    def took(output: Output) -> None:
        if len(counts) == 1:
            engine.submit((beside, lambda output: None))
        if output.finish_reason is not None:
            ended.set()

    with Engine.load(engine_directory, EngineOptions(kv_reuse=False, chunked_context=True)) as engine:
        engine.submit((GenerationRequest("running", (5, 6, 7), 20, streamed=streamed), took))
        assert ended.wait(60)
    parts = [count for rows in counts[1:] for count in rows if count > 1]
    assert parts == ([4] * 5 if streamed else [20])
