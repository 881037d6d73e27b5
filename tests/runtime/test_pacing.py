"""Steps with prompts take about as long as the pace allows, whatever a token of a prompt costs."""

import pytest

from trtforge.runtime.pacing import Pace


def step_seconds(context: int, *, fixed: float, per_token: float) -> float:
    """Of a model: 10 ms without a prompt, then what a prompt adds."""
    return 0.01 + (fixed + per_token * context if context else 0)


@pytest.mark.parametrize("fixed", [0.0, 0.004])
@pytest.mark.parametrize("per_token", [0.0001, 0.001])
def test_the_budget_settles_where_a_step_takes_as_long_as_it_may(fixed: float, per_token: float) -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(step_seconds(0, fixed=0, per_token=0), 0, alone=False)
    assert pace.most_context is None
    pace.observe(512 * 0.0003, 512, alone=True)  # another price than that of small chunks
    for _ in range(100):
        context = pace.most_context
        assert context is not None
        pace.observe(step_seconds(context, fixed=fixed, per_token=per_token), context, alone=False)
    assert pace.most_context == pytest.approx((0.009 - fixed) / per_token, rel=0.05, abs=1)


def test_a_prompt_goes_on_however_much_it_costs() -> None:
    pace = Pace()
    pace.observe(0.001, 0, alone=False)
    pace.observe(1.0, 10, alone=False)
    assert pace.most_context == 4


def test_single_slow_steps_change_nothing() -> None:
    pace = Pace()
    for _ in range(5):
        pace.observe(0.01, 0, alone=False)
        pace.observe(0.02, 10, alone=False)
    pace.observe(9.0, 0, alone=False)
    pace.observe(9.0, 10, alone=False)
    assert pace.most_context == 9


def test_tokens_are_not_taken_to_cost_more_where_chunks_were_small() -> None:
    """What a chunk costs at any size would otherwise make a small one smaller still."""
    pace = Pace()
    pace.observe(0.01, 0, alone=False)
    for context in (1, 8, 8, 8, 1):
        pace.observe(step_seconds(context, fixed=0.003, per_token=0.0005), context, alone=False)
    assert pace.most_context == 10  # 8 tokens took 7 ms, 9 ms may be taken


def test_chunks_beside_others_are_taken_to_cost_more_until_one_was_seen() -> None:
    pace = Pace()
    pace.observe(0.01, 0, alone=False)
    pace.observe(1.0, 1000, alone=True)
    assert pace.most_context == 4  # of 9 at the price of the whole prompt
    pace.observe(0.011, 1, alone=False)
    assert pace.most_context == 9


def test_a_step_with_a_prompt_that_was_faster_counts_as_free() -> None:
    """Its prompt cannot have taken less than no time."""
    pace = Pace()
    pace.observe(0.01, 0, alone=False)
    pace.observe(0.004, 10, alone=False)
    assert pace.most_context is None
    pace.observe(0.014, 10, alone=False)
    assert pace.most_context == pytest.approx(45, abs=1)  # 2 ms for 10 tokens in the median of both, 9 ms may be taken


def test_what_was_sixteen_steps_ago_is_forgotten() -> None:
    pace = Pace()
    for _ in range(40):
        pace.observe(0.01, 0, alone=False)
        pace.observe(0.02, 10, alone=False)
    for _ in range(16):
        pace.observe(0.03, 0, alone=False)
    assert pace.most_context == pytest.approx(27, abs=1)  # 1 ms a token, 27 ms may be taken
    for _ in range(16):
        pace.observe(0.06, 10, alone=False)
    assert pace.most_context == pytest.approx(9, abs=1)  # now 30 ms
