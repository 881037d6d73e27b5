"""The arithmetic of the benchmarks, which `make bench` runs."""

import pytest

from tests.benchmarks.calibration import extrapolate


def test_more_batches_take_longer_and_the_rest_does_not() -> None:
    passes = [[1.0, 1.0, 1.0, 5.0], [3.0, 2.0, 2.0, 2.0]]
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 4) == pytest.approx(4.0 + 4 * 1.0 + 4 * 2.0)
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 32) == pytest.approx(4.0 + 32 * 1.0 + 32 * 2.0)
