"""A format for each group of layers within a budget of bits, against trying all choices."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.recipe import QuantFormat
from trtforge.pipeline.allocation import Option, allocate, counted

FORMATS: tuple[QuantFormat, ...] = ("int4_awq", "fp8", "none")


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Option]], float]:
    groups = []
    for _ in range(draw(st.integers(1, 6))):
        weights = draw(st.integers(1, 50))
        losses = [draw(st.floats(0, 100)), draw(st.floats(0, 100)), 0.0]
        bits = (4.25, 8.0, 16.0)
        groups.append([Option(f, b * weights, x) for f, b, x in zip(FORMATS, bits, losses, strict=True)])
    least = sum(group[0].bits for group in groups)
    return groups, least * draw(st.floats(1.0, 4.0))


@given(problems())
def test_no_choice_is_better_than_the_bound_and_the_budget_holds(problem: tuple[list[list[Option]], float]) -> None:
    groups, budget = problem
    found = allocate(groups, budget)
    assert found is not None
    affordable = [choice for choice in product(*groups) if sum(option.bits for option in choice) <= budget]
    best = min(sum(option.loss for option in choice) for choice in affordable)
    assert found.bits <= budget + 1e-9
    assert found.bound <= best + 1e-6
    assert best <= found.loss + 1e-6
    picked = [next(o for o in group if o.format == quant) for group, quant in zip(groups, found.formats, strict=True)]
    assert found.loss == pytest.approx(sum(option.loss for option in picked))
    # One more change that fits must not help: the greedy choice is at least a local optimum.
    for group, own in zip(groups, picked, strict=True):
        for option in group:
            assert option.loss >= own.loss or found.bits - own.bits + option.bits > budget


def test_the_most_useful_bits_are_spent_first() -> None:
    def group(loss: float) -> list[Option]:
        return [Option("int4_awq", 400, loss), Option("fp8", 800, loss / 10), Option("none", 1600, 0.0)]

    found = allocate([group(1.0), group(9.0), group(2.0)], 1600)
    assert found is not None
    assert found.formats == ("int4_awq", "fp8", "int4_awq")
    assert (found.loss, found.bits) == (pytest.approx(3.9), 1600)
    assert found.bound == pytest.approx(3.9)


def test_a_budget_below_the_smallest_formats_has_no_choice() -> None:
    assert allocate([[Option("int4_awq", 400, 1.0)], [Option("none", 1600, 0.0)]], 1999) is None


def test_a_format_that_is_larger_and_no_better_is_never_taken() -> None:
    found = allocate([[Option("int4_awq", 400, 1.0), Option("fp8", 800, 1.5), Option("none", 1600, 0.0)]], 900)
    assert found is not None
    assert (found.formats, found.bound) == (("int4_awq",), pytest.approx(1 - 500 / 1200))


def test_weights_are_counted_by_format() -> None:
    assert counted(("fp8", "none", "fp8"), (10, 5, 1)) == {"fp8": 11, "none": 5}
