"""Triton kernels of products of few rows with weights, which are read once, and of INT4 weights' expansion.

INT4 weights lie in tiles, one after the other as a program reads them: (out / TILE, in / group, TILE, group / 2) bytes,
of which byte j has input j of the group in its low and input j + group / 2 in its high half, both offset by 8.
`Products` launches the kernels.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.runtime.cuda.step_kernels import wait_for_previous

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_AHEAD = tl.constexpr(4)  # groups of inputs
_OFFSET = tl.constexpr(136.0)  # 8 of the codes, and 128, above which bfloat16 counts ones
_HALVES_OF_BYTES = """{
    .reg .b32 halves;
    shr.u32 halves, $2, %d;
    and.b32 halves, halves, 0x0F0F0F0F;
    prmt.b32 $0, halves, 0x43434343, 0x4140;
    prmt.b32 $1, halves, 0x43434343, 0x4342;
}"""
"""Of four bytes: each half becomes the lower byte of a bfloat16 whose upper one is that of 128."""
_LOW_HALVES, _HIGH_HALVES = tl.constexpr(_HALVES_OF_BYTES % 0), tl.constexpr(_HALVES_OF_BYTES % 4)


@triton.jit
def multiply_one(
    x,
    weight,
    bias,
    y,
    inputs,
    outputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part of the outputs): y (outputs,) of x (inputs,) and weight (outputs, inputs).

    Weights are read one step ahead, the first ones before what x is computed from has ended.
    """
    if EARLY:
        gdc_launch_dependents()
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = own < outputs
    rows = weight + own.to(tl.int64)[:, None] * inputs
    at = tl.arange(0, INPUTS)
    ahead = tl.load(rows + at[None, :], mask=known[:, None] & (at < inputs)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        weights, at = ahead, start + tl.arange(0, INPUTS)
        values = tl.load(x + at, mask=at < inputs, other=0.0)
        at += INPUTS
        ahead = tl.load(rows + at[None, :], mask=known[:, None] & (at < inputs)[None, :], other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    found = tl.sum(sums, 1)
    if BIASED:
        found += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)
    tl.store(y + own, found.to(y.dtype.element_ty), mask=known)


@triton.jit
def _codes(halves, HIGH: tl.constexpr):
    """_OFFSET + the code in the low or HIGH half of each byte, in bfloat16, whose last bits count ones there."""
    if _INTERPRETED:
        return ((halves.to(tl.int32) >> (4 if HIGH else 0)) & 15).to(tl.float32) + 128.0
    else:
        return tl.inline_asm_elementwise(
            _HIGH_HALVES if HIGH else _LOW_HALVES,
            "=r,=r,r",
            [halves],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _fetch(pointers):
    """Bring what lies there to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _product(left, right, sums):
    """sums + left x right; Triton's interpreter multiplies the bits of bfloat16."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(left, right, sums)


@triton.jit
def multiply_int4(
    x,
    weight,
    scales,
    prescale,
    bias,
    y,
    sums,
    arrived,
    rows,
    x_row,
    inputs,
    outputs,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE: tl.constexpr,
    PRESCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part of the outputs, of the rows, of the inputs): y (rows, outputs) of bfloat16 x (rows, inputs).

    scales (inputs / group, outputs). Of several SPLITS of the inputs, each writes its sums (SPLITS, rows, outputs) in
    float32, and the one that arrives last adds them up; it leaves `arrived` (outputs' parts x rows' parts) zero again.
    ONE: there is one row, which is read once and not for every column of a product, and, if PRESCALED, multiplied by
    prescale (inputs,). The first codes are fetched before what x is computed from has ended.
    """
    part, many, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own, row = part * OUTPUTS + tl.arange(0, OUTPUTS), many * ROWS + tl.arange(0, ROWS)
    groups, half = inputs // (2 * HALF), tl.arange(0, HALF)
    each = (groups + SPLITS - 1) // SPLITS
    begin = split * each
    end = tl.minimum(groups, begin + each)
    known, inside = own < outputs, (row < rows)[None, :]
    read = tl.minimum(own, outputs - 1)  # a program of two tiles may have one
    codes_at = weight + (read // TILE).to(tl.int64)[:, None] * groups * (TILE * HALF) + (read % TILE)[:, None] * HALF
    if EARLY:
        gdc_launch_dependents()
        for group in tl.static_range(_AHEAD):
            _fetch(codes_at + tl.minimum(begin + group, groups - 1) * (TILE * HALF))
        gdc_wait()
    codes_at += half[None, :]
    found = tl.zeros([OUTPUTS, ROWS], tl.float32)
    none = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for group in range(begin, end):
        halves = tl.load(codes_at + group * (TILE * HALF), mask=known[:, None], other=0)
        at = group * 2 * HALF + half
        if ONE:
            first, second = tl.load(x + at), tl.load(x + at + HALF)
            if PRESCALED:
                first = (first.to(tl.float32) * tl.load(prescale + at).to(tl.float32)).to(first.dtype)
                second = (second.to(tl.float32) * tl.load(prescale + at + HALF).to(tl.float32)).to(second.dtype)
            low = tl.broadcast_to(first[:, None], [HALF, ROWS])
            high = tl.broadcast_to(second[:, None], [HALF, ROWS])
        else:
            x_at = x + row[None, :] * x_row + at[:, None]
            low = tl.load(x_at, mask=inside, other=0.0)
            high = tl.load(x_at + HALF, mask=inside, other=0.0)
        products = _product(_codes(halves, HIGH=False) - _OFFSET, low, none)
        products = _product(_codes(halves, HIGH=True) - _OFFSET, high, products)
        found += products * tl.load(scales + group * outputs + own, mask=known, other=0.0).to(tl.float32)[:, None]
    stored, place = known[:, None] & inside, row[None, :] * outputs + own[:, None]
    last = True
    if SPLITS > 1:
        tl.store(sums + split * rows * outputs + place, found, mask=stored)
        tl.debug_barrier()
        counter = arrived + part * tl.num_programs(1) + many
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counter, 0)
            found = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                found += tl.load(sums + other * rows * outputs + place, mask=stored, other=0.0, cache_modifier=".cg")
    if last:
        if BIASED:
            found += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=stored)


@triton.jit
def expand_int4(weight, scales, values, inputs, outputs, TILE: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr):
    """Program (tile, group): the values (outputs, inputs) of the weights in bfloat16."""
    wait_for_previous(EARLY)
    tile, group = tl.program_id(0), tl.program_id(1)
    own, half = tile * TILE + tl.arange(0, TILE), tl.arange(0, HALF)
    codes_at = weight + (tile.to(tl.int64) * (inputs // (2 * HALF)) + group) * (TILE * HALF)
    halves = tl.load(codes_at + tl.arange(0, TILE)[:, None] * HALF + half[None, :])
    scale = tl.load(scales + group * outputs + own).to(tl.float32)[:, None]
    at = values + own.to(tl.int64)[:, None] * inputs + group * 2 * HALF + half[None, :]
    tl.store(at, ((_codes(halves, HIGH=False).to(tl.float32) - _OFFSET) * scale).to(tl.bfloat16))
    tl.store(at + HALF, ((_codes(halves, HIGH=True).to(tl.float32) - _OFFSET) * scale).to(tl.bfloat16))
