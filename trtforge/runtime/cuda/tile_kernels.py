"""Triton kernels that multiply by 4-bit weights in tiles, INT4 and NVFP4, and that dequantise these weights.

Tiles are stored in the order in which a program reads them: (out / TILE, in / group, TILE, group / 2) bytes. Byte j has
input j of the group in its low half, and input j + group / 2 in its high half. INT4 codes are offset by 8. NVFP4 scales
of 16 inputs have the same order: (out / TILE, in / group, TILE, group / 16) E4M3 values in uint8. `Products` launches
the kernels.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.runtime.cuda.number_kernels import INTERPRETED, fetch, numbers_of_e4m3, product, sum_of_splits
from trtforge.runtime.cuda.step_kernels import wait_for_previous

_AHEAD = tl.constexpr(4)  # groups of inputs to prefetch
_BLOCK = tl.constexpr(NVFP4_BLOCK)
_E2M1_FACTOR = tl.constexpr(16384.0)  # 2^14: float16 and E2M1 have the exponent biases 15 and 1
_OFFSET = tl.constexpr(136.0)  # 8, the codes' offset, + 128, from which on bfloat16 has a precision of 1
_HALVES_OF_BYTES = """{
    .reg .b32 halves;
    shr.u32 halves, $2, %d;
    and.b32 halves, halves, 0x0F0F0F0F;
    prmt.b32 $0, halves, 0x43434343, 0x4140;
    prmt.b32 $1, halves, 0x43434343, 0x4342;
}"""
"""Half of each of four bytes becomes the low byte of a bfloat16, whose high byte is that of 128."""
_LOW_HALVES, _HIGH_HALVES = tl.constexpr(_HALVES_OF_BYTES % 0), tl.constexpr(_HALVES_OF_BYTES % 4)


@triton.jit
def _codes(halves, HIGH: tl.constexpr):
    """128 + the 4-bit number in the low or HIGH half of each byte, in bfloat16: the signed code + _OFFSET."""
    if INTERPRETED:
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
def _values(halves, blocks, HALF: tl.constexpr, HIGH: tl.constexpr):
    """Values (outputs, HALF) of E2M1 codes, through float16, times the block scales (outputs, HALF / 16).

    They have at most six significant bits, so they are exact in bfloat16.
    """
    wide = (halves.to(tl.uint8) >> (4 if HIGH else 0)).to(tl.uint16)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    factors = numbers_of_e4m3(blocks) * _E2M1_FACTOR
    shape: tl.constexpr = [blocks.shape[0], HALF // _BLOCK, _BLOCK]
    of_each = tl.reshape(tl.broadcast_to(factors[:, :, None], shape), [blocks.shape[0], HALF])
    return (half.to(tl.float32) * of_each).to(tl.bfloat16)


@triton.jit
def _of_one_row(x, prescale, at, PRESCALED: tl.constexpr):
    """Inputs `at` of the only row, multiplied by `prescale` if PRESCALED."""
    values = tl.load(x + at)
    if PRESCALED:
        values = (values.to(tl.float32) * tl.load(prescale + at).to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def multiply_tiles(
    x,
    weight,
    scales,
    prescale,
    factor,
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
    NVFP4: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part of the outputs, of the rows, of the inputs): y (rows, outputs) = bfloat16 x (rows, inputs) W^T.

    INT4: scales (inputs / group, outputs). NVFP4: block scales in tiles, and sums are multiplied by factor (1,). With
    several SPLITS of the inputs, each program writes its sums (SPLITS, rows, outputs) in float32; the last one to
    arrive adds them up and resets `arrived` (outputs' parts x rows' parts) to zero.
    ONE: there is only one row. It is read once and broadcast to all ROWS and, if PRESCALED, multiplied by prescale
    (inputs,). Otherwise the first codes are prefetched before the kernel that computes x has ended.
    """
    part, many, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own, row = part * OUTPUTS + tl.arange(0, OUTPUTS), many * ROWS + tl.arange(0, ROWS)
    groups, half = inputs // (2 * HALF), tl.arange(0, HALF)
    each = (groups + SPLITS - 1) // SPLITS
    begin = split * each
    end = tl.minimum(groups, begin + each)
    known, inside = own < outputs, (row < rows)[None, :]
    read = tl.minimum(own, outputs - 1)  # the last program of two tiles may have only one
    line = (read // TILE).to(tl.int64)[:, None] * groups * TILE + (read % TILE)[:, None]  # in the first group
    codes_at = weight + line * HALF
    if EARLY:
        gdc_launch_dependents()
        if not ONE:
            for group in tl.static_range(_AHEAD):
                fetch(codes_at + tl.minimum(begin + group, groups - 1) * (TILE * HALF))
        gdc_wait()
    codes_at += half[None, :]
    blocks = tl.arange(0, HALF // _BLOCK)
    found = tl.zeros([OUTPUTS, ROWS], tl.float32)
    none = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for group in range(begin, end):
        halves = tl.load(codes_at + group * (TILE * HALF), mask=known[:, None], other=0)
        at = group * 2 * HALF + half
        if ONE:
            low = tl.broadcast_to(_of_one_row(x, prescale, at, PRESCALED)[:, None], [HALF, ROWS])
            high = tl.broadcast_to(_of_one_row(x, prescale, at + HALF, PRESCALED)[:, None], [HALF, ROWS])
        else:
            x_at = x + row[None, :] * x_row + at[:, None]
            low = tl.load(x_at, mask=inside, other=0.0)
            high = tl.load(x_at + HALF, mask=inside, other=0.0)
        if NVFP4:
            blocks_at = scales + (line + group * TILE) * (2 * HALF // _BLOCK) + blocks[None, :]
            of_low, of_high = tl.load(blocks_at), tl.load(blocks_at + HALF // _BLOCK)
            found = product(_values(halves, of_low, HALF, HIGH=False), low, found)
            found = product(_values(halves, of_high, HALF, HIGH=True), high, found)
        else:
            products = product(_codes(halves, HIGH=False) - _OFFSET, low, none)
            products = product(_codes(halves, HIGH=True) - _OFFSET, high, products)
            found += products * tl.load(scales + group * outputs + own, mask=known, other=0.0).to(tl.float32)[:, None]
    stored, place = known[:, None] & inside, row[None, :] * outputs + own[:, None]
    last = True
    if SPLITS > 1:
        counter = arrived + part * tl.num_programs(1) + many
        found, last = sum_of_splits(found, sums, counter, split, place, stored, rows * outputs, SPLITS)
    if last:
        if NVFP4:
            found *= tl.load(factor)
        if BIASED:
            found += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=stored)


@triton.jit
def expand_tiles(
    weight,
    scales,
    values,
    inputs,
    scales_group,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    NVFP4: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile, group): the values (outputs, inputs) of the weights in bfloat16.

    INT4: scales (groups, outputs), with stride `scales_group` between groups.
    """
    wait_for_previous(EARLY)
    tile, group = tl.program_id(0), tl.program_id(1)
    own, half = tl.arange(0, TILE), tl.arange(0, HALF)
    line = (tile.to(tl.int64) * (inputs // (2 * HALF)) + group) * TILE + own[:, None]
    halves = tl.load(weight + line * HALF + half[None, :])
    output = tile * TILE + own
    at = values + output.to(tl.int64)[:, None] * inputs + group * 2 * HALF + half[None, :]
    if NVFP4:
        blocks_at = scales + line * (2 * HALF // _BLOCK) + tl.arange(0, HALF // _BLOCK)[None, :]
        low = _values(halves, tl.load(blocks_at), HALF, HIGH=False)
        high = _values(halves, tl.load(blocks_at + HALF // _BLOCK), HALF, HIGH=True)
    else:
        scale = tl.load(scales + group * scales_group + output).to(tl.float32)[:, None]
        low = ((_codes(halves, HIGH=False).to(tl.float32) - _OFFSET) * scale).to(tl.bfloat16)
        high = ((_codes(halves, HIGH=True).to(tl.float32) - _OFFSET) * scale).to(tl.bfloat16)
    tl.store(at, low)
    tl.store(at + HALF, high)
