"""NaN and infinity are found in the bytes of every type, as torch finds them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.dtypes import DTYPES, dtype_named
from trtforge.formats.finite import first_nonfinite, is_nan

FLOATS = [dtype.name for dtype in DTYPES if "float" in dtype.name]


def test_every_float_is_known() -> None:
    assert FLOATS == [
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    ]  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
@given(data=st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    dtype = dtype_named(name)
    count = data.draw(st.integers(0, 20))
    raw = data.draw(st.binary(min_size=count * dtype.size, max_size=count * dtype.size))
    values = torch.frombuffer(bytearray(raw), dtype=getattr(torch, name)).double() if raw else torch.empty(0)
    wrong = (~values.isfinite()).nonzero().flatten().tolist()

    found = first_nonfinite(memoryview(raw), dtype)

    assert found == (wrong[0] if wrong else None)
    if found is not None:
        assert is_nan(memoryview(raw), dtype, found) == bool(values[found].isnan())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn"])
def test_every_pattern(name: str) -> None:
    dtype = dtype_named(name)
    patterns = torch.arange(256**dtype.size, dtype=torch.int32).to(torch.uint16 if dtype.size == 2 else torch.uint8)
    values = patterns.view(getattr(torch, name)).float()
    for index, finite in enumerate(values.isfinite().tolist()):
        raw = index.to_bytes(dtype.size, "little")
        assert (first_nonfinite(memoryview(raw), dtype) is None) is finite, f"{index:#x}"


@pytest.mark.parametrize("name", ["int64", "int32", "int16", "int8", "uint8", "bool"])
def test_integers_are_finite(name: str) -> None:
    dtype = dtype_named(name)
    assert first_nonfinite(memoryview(b"\xff" * 8 * dtype.size), dtype) is None
