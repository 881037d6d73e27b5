"""The Triton kernel that rounds activations to the values of a format. `Rounding` launches it.

The values are stored in the compute type, which represents those of E4M3, INT8 and NVFP4 exactly.
"""

import triton
import triton.language as tl

from trtforge.core.number_limits import E2M1_MAX, FP8_MAX, NVFP4_BLOCK
from trtforge.runtime.cuda.step_kernels import nearest_e4m3, nearest_int8, power_of_two, wait_for_previous

_E2M1_MAX, _E4M3_MAX, _BLOCK = tl.constexpr(E2M1_MAX), tl.constexpr(FP8_MAX), tl.constexpr(NVFP4_BLOCK)


@triton.jit
def _nearest_nvfp4(values, COLUMNS: tl.constexpr):
    """float32 (COLUMNS,) rounded to E2M1 values times the E4M3 scale of their block; see
    `nvfp4_linear.round_to_nvfp4`."""
    blocks = tl.reshape(values, [COLUMNS // _BLOCK, _BLOCK])
    scales = nearest_e4m3(tl.div_rn(tl.max(tl.abs(blocks), 1), _E2M1_MAX))[:, None]
    scaled = tl.div_rn(blocks, tl.where(scales > 0.0, scales, 1.0))
    scaled = tl.minimum(tl.maximum(scaled, -_E2M1_MAX), _E2M1_MAX)
    magic = tl.maximum(power_of_two(scaled), 1.0) * 6291456.0  # 1.5 x 2^22: leaves two significant bits
    return tl.reshape(((scaled + magic) - magic) * scales, [COLUMNS])


@triton.jit
def round_rows(
    x,
    prescale,
    scale,
    y,
    tokens,
    x_row,
    size,
    least,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    PRESCALED: tl.constexpr,
    BY_ROW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, part): y (rows, size) = x * prescale / scale[0], rounded to the values of KIND.

    KIND: 0 E4M3, 1 INT8, 2 NVFP4. PRESCALED: with prescale (size,). BY_ROW: a row is one part, and its scale is the
    row's amax / 448, but at least `least`; it is stored in tokens (rows,).
    """
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if PRESCALED:
        values *= tl.load(prescale + at, mask=inside, other=0.0).to(tl.float32)
    if BY_ROW:
        divisor = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 0), _E4M3_MAX), least)
        tl.store(tokens + row, divisor)
    else:
        divisor = tl.load(scale)
    values = tl.div_rn(values, divisor)
    if KIND == 0:
        found = nearest_e4m3(values)
    elif KIND == 1:
        found = nearest_int8(values)
    else:
        found = _nearest_nvfp4(values, COLUMNS)
    tl.store(y + row * size + at, found.to(y.dtype.element_ty), mask=inside)
