"""Integers that are sent to a device together arrive as they were."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.cuda.kernels import DEVICE
from trtforge.runtime.cuda.pinned import sent_together

SHAPES = st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(0, 5)))


@given(st.lists(SHAPES, min_size=1, max_size=5))
def test_arrays_sent_together_begin_at_multiples_of_16_bytes(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(np.prod(shape)).reshape(shape) + 100 * index for index, shape in enumerate(shapes)]
    found = sent_together(arrays, DEVICE)
    for made, given_array in zip(found, arrays, strict=True):
        assert made.tolist() == given_array.tolist()
        assert tuple(made.shape) == given_array.shape
        assert (made.data_ptr() - found[0].data_ptr()) % 16 == 0
