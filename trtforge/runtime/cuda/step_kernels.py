"""Triton kernels between matrix products and attention: norms, activations, rotary embedding, and KV cache writes.

`FusedKernels` launches them. All of them compute in float32, and round the results that they store.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.core.number_limits import FP8_MAX, INT8_MAX
from trtforge.runtime.cuda.number_kernels import INTERPRETED

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding it to a float32 below 2^22 and subtracting it again rounds to an integer, ties to even."""
_E4M3_MAX, _INT8_MAX = tl.constexpr(FP8_MAX), tl.constexpr(INT8_MAX)


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Let the next kernel start and, if kernels start EARLY, wait for the previous one to end; see `Launcher`.

    Every program that reads or writes data of other kernels must wait. At least one program of every kernel must wait,
    so that after a wait all earlier kernels have ended.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _saturated_e4m3(values):
    largest = tl.minimum(values, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(largest, -_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def power_of_two(values):
    """The largest power of two that is at most |values|, for float32 values."""
    return (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def nearest_e4m3(values):
    """float32 values, saturated and rounded to values of E4M3: see `float8.round_to_e4m3`."""
    values = _saturated_e4m3(values)
    magic = tl.maximum(power_of_two(values), 0.015625) * 1572864.0
    return (values + magic) - magic


@triton.jit
def nearest_int8(values):
    """float32 values, saturated and rounded to values of INT8, ties to even."""
    values = tl.minimum(tl.maximum(values, -_INT8_MAX - 1), _INT8_MAX)
    return (values + _ROUNDING) - _ROUNDING


@triton.jit
def to_e4m3(values, scale):
    """values / scale in float32, saturated and rounded to E4M3: to four significant bits, ties to even."""
    scaled = tl.div_rn(values.to(tl.float32), scale)
    if INTERPRETED:  # Triton's interpreter (3.9) truncates
        return nearest_e4m3(scaled).to(tl.float8e4nv)
    else:
        return _saturated_e4m3(scaled).to(tl.float8e4nv)


@triton.jit
def as_stored(values, target, code_scale, KIND: tl.constexpr):
    """float32 values converted to the dtype of `target`; for E4M3 codes, first rounded to the compute type KIND."""
    if target.dtype.element_ty == tl.float8e4nv:
        return to_e4m3(values.to(KIND), tl.load(code_scale))
    else:
        return values.to(target.dtype.element_ty)


@triton.jit
def rms_norm(
    x,
    change,
    weight,
    total,
    y,
    code_scale,
    x_row,
    x_head,
    y_row,
    y_head,
    size,
    scale,
    epsilon,
    ADDS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, head): y = x / rms(x) * weight; with ADDS, total = x + scale * change is stored and used for x.

    `code_scale`: see `as_stored`.
    """
    wait_for_previous(EARLY)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, SIZE_PADDED)
    inside = at < size
    place = row * x_row + head * x_head + at
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += scale * tl.load(change + place, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + epsilon)
    found = values * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    found = as_stored(found, y, code_scale, x.dtype.element_ty)
    tl.store(y + row * y_row + head * y_head + at, found, mask=inside)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """The activation with number KIND in `native.bindings.ACTIVATIONS`."""
    if KIND == 0:  # silu
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:  # gelu by tanh
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    elif KIND == 2:  # gelu by the error function
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:  # relu
        return tl.maximum(x, 0.0)
    else:  # squared relu
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def gate(
    halves,
    y,
    code_scale,
    size,
    ACTIVATED: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, part): y (rows, size) = activation(one half) * other half, of (rows, 2 x size).

    `code_scale`: see `as_stored`.
    """
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, start = at < size, halves + row * 2 * size
    activated = tl.load(start + ACTIVATED * size + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + (1 - ACTIVATED) * size + at, mask=inside, other=0.0).to(tl.float32)
    found = as_stored(_activated(activated, KIND) * other, y, code_scale, halves.dtype.element_ty)
    tl.store(y + row * size + at, found, mask=inside)


@triton.jit
def rotate(
    heads,
    cosines,
    sines,
    count,
    heads_row,
    heads_head,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token, part): rotates the first DIM elements of HEADS of the `count` heads in place.

    Cosines and sines: (tokens, DIM); the sine for a pair's first element is negated.
    """
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    own, pairs = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF_PADDED)
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + DIM // 2
    inside = pairs < DIM // 2
    angle = row * DIM
    cos_first = tl.load(cosines + angle + first, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cosines + angle + second, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sines + angle + first, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sines + angle + second, mask=inside, other=0.0).to(tl.float32)
    start = heads + row * heads_row + own[:, None] * heads_head
    known = (own < count)[:, None] & inside[None, :]
    a = tl.load(start + first[None, :], mask=known, other=0.0).to(tl.float32)
    b = tl.load(start + second[None, :], mask=known, other=0.0).to(tl.float32)
    kind: tl.constexpr = heads.dtype.element_ty
    tl.store(start + first[None, :], (a * cos_first[None, :] + b * sin_first[None, :]).to(kind), mask=known)
    tl.store(start + second[None, :], (b * cos_second[None, :] + a * sin_second[None, :]).to(kind), mask=known)


@triton.jit
def _cosine_and_sine(angles):
    """Cosine and sine of any angle; the GPU instructions that `tl.cos` may use are inaccurate for large angles."""
    if INTERPRETED:
        return tl.cos(angles), tl.sin(angles)
    else:
        return libdevice.cos(angles), libdevice.sin(angles)


@triton.jit
def rotation(
    positions,
    frequencies,
    cosines,
    sines,
    factor,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token): the cosines and sines for `rotate`, from the token's position and frequencies (HALF,)."""
    wait_for_previous(EARLY)
    row, pairs = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_PADDED)
    inside = pairs < HALF
    position = tl.load(positions + row).to(tl.float32)
    angles = position * tl.load(frequencies + pairs, mask=inside, other=0.0)
    cos, sin = _cosine_and_sine(angles)
    cos, sin = cos * factor, sin * factor
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + HALF
    kind: tl.constexpr = cosines.dtype.element_ty
    start = row * 2 * HALF
    tl.store(cosines + start + first, cos.to(kind), mask=inside)
    tl.store(cosines + start + second, cos.to(kind), mask=inside)
    tl.store(sines + start + first, (-sin).to(kind), mask=inside)
    tl.store(sines + start + second, sin.to(kind), mask=inside)


@triton.jit
def as_cached(values, scale, INT8: tl.constexpr, E4M3: tl.constexpr):
    """Values in the cache's format: unchanged, or values / scale in INT8 or E4M3."""
    if E4M3:
        return to_e4m3(values, scale).to(tl.uint8, bitcast=True)
    elif INT8:
        return nearest_int8(tl.div_rn(values.to(tl.float32), scale)).to(tl.int8)
    else:
        return values


@triton.jit
def write_slots(
    values,
    slots,
    storage,
    values_row,
    width,
    scale,
    COLUMNS: tl.constexpr,
    INT8: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token, part): storage[slot] = the token's `width` values, or values / scale in a quantised cache."""
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, slot = at < width, tl.load(slots + row)
    found = tl.load(values + row * values_row + at, mask=inside, other=0.0)
    tl.store(storage + slot * width + at, as_cached(found, scale, INT8, E4M3), mask=inside)


@triton.jit
def turned(start, dims, known, turns, cosines, sines, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements `dims` of heads that begin at `start`, in the heads' dtype; those in `turns` rotated, see `rotate`."""
    other = dims ^ 1 if INTERLEAVED else tl.where(dims < DIM // 2, dims + DIM // 2, dims - DIM // 2)
    cos = tl.load(cosines + dims, mask=dims < DIM, other=1.0).to(tl.float32)
    sin = tl.load(sines + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    values = tl.load(start + dims, mask=known, other=0.0).to(tl.float32)
    partners = tl.load(start + other, mask=turns, other=0.0).to(tl.float32)
    return tl.where(turns, values * cos + partners * sin, values).to(start.dtype.element_ty)


@triton.jit
def rotate_and_write(
    heads,
    cosines,
    sines,
    slots,
    storage,
    count,
    queries,
    rotated,
    heads_row,
    heads_head,
    scale,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INT8: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token, part) computes HEADS of the `count` heads: `rotate` for the first `rotated` heads, and
    `write_slots` for all heads after the first `queries`."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    own, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE_PADDED)
    known, start = (own < count)[:, None] & (dims < SIZE)[None, :], heads + row * heads_row + own[:, None] * heads_head
    turns = (own < rotated)[:, None] & (dims < DIM)[None, :]
    found = turned(start, dims[None, :], known, turns, cosines + row * DIM, sines + row * DIM, DIM, INTERLEAVED)
    tl.debug_barrier()  # all elements are read before any is overwritten
    tl.store(start + dims[None, :], found, mask=known & turns)
    place = tl.load(slots + row) * (count - queries) * SIZE + (own - queries)[:, None] * SIZE + dims[None, :]
    tl.store(storage + place, as_cached(found, scale, INT8, E4M3), mask=known & (own >= queries)[:, None])


@triton.jit
def quantize(values, codes, scale, count, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """Program (part): E4M3 codes of values / scale[0]."""
    wait_for_previous(EARLY)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < count
    found = to_e4m3(tl.load(values + at, mask=inside, other=0.0), tl.load(scale))
    tl.store(codes + at, found, mask=inside)


@triton.jit
def add(x, change, total, scale, count, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """Program (part): total = x + scale * change."""
    wait_for_previous(EARLY)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < count
    found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    found += scale * tl.load(change + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


@triton.jit
def scale_columns(x, factors, y, x_row, size, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """Program (row, part): y (rows, size) = x * factors (size,)."""
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    found = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    found *= tl.load(factors + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + at, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def largest_of_parts(
    x, values, places, x_row, columns, PARTS_PADDED: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, part): the largest of COLUMNS elements in a row of `x`, and its column, the first on a tie.

    NaN counts as -inf. `values`, `places` (rows, PARTS_PADDED): receive these for each part.
    """
    wait_for_previous(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.load(x + row * x_row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    found = tl.where(found == found, found, float("-inf"))  # NaN compares false
    value, place = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row * PARTS_PADDED + part, value)
    tl.store(places + row * PARTS_PADDED + part, tl.minimum(part * COLUMNS + place, columns - 1))


@triton.jit
def largest_of_row(values, places, chosen, parts, PARTS_PADDED: tl.constexpr, EARLY: tl.constexpr):
    """Program (row): the column of the row's largest element, from the results of `largest_of_parts`."""
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED)
    found = tl.load(values + row * PARTS_PADDED + at, mask=at < parts, other=float("-inf"))
    _, part = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
    part = tl.minimum(part, parts - 1)
    tl.store(chosen + row, tl.load(places + row * PARTS_PADDED + part).to(tl.int64))
