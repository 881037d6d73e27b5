"""The arithmetic of the benchmarks, which `make bench` runs."""

import pytest

from tests.benchmarks.calibration import extrapolate
from tests.benchmarks.serving import CLIENT, Measured, Run


def test_more_batches_take_longer_and_the_rest_does_not() -> None:
    passes = [[1.0, 1.0, 1.0, 5.0], [3.0, 2.0, 2.0, 2.0]]
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 4) == pytest.approx(4.0 + 4 * 1.0 + 4 * 2.0)
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 32) == pytest.approx(4.0 + 32 * 1.0 + 32 * 2.0)


def test_serving_is_compared_by_medians_and_the_client_is_counted_apart() -> None:
    served = tuple(
        Run(1000, seconds, first, {"stub": 3.0, CLIENT: 1.0}) for seconds, first in ((1, 0.2), (2, 0.1), (9, 9))
    )
    engine = tuple(Run(1000, seconds, 0.05, {"engine": 2.0}) for seconds in (1, 1, 5))
    measured = Measured(served, engine)
    assert measured.ratio == pytest.approx(0.5)
    assert measured.first_later == pytest.approx(0.15)
    assert served[0].cpu_seconds == pytest.approx(3.0)
    assert served[0].client_share == pytest.approx(0.25)
    assert engine[0].client_share == 0.0
    assert Run(1000, 2.0, 0.1, {"engine": 2.0}, busy=3.0).others == pytest.approx(0.5)
