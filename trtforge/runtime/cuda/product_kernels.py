"""Triton kernels that multiply few rows by weights, reading the weights once, and that dequantise 8-bit weights.

`Products` launches them. Weight codes are INT8, or E4M3 in uint8; CONVERTS: the GPU has instructions to convert E4M3.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from trtforge.runtime.cuda.number_kernels import fetch, numbers_of, product, sum_of_splits
from trtforge.runtime.cuda.step_kernels import wait_for_previous


@triton.jit
def multiply_one(
    x,
    weight,
    scales,
    factor,
    bias,
    y,
    inputs,
    outputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    AHEAD: tl.constexpr,
    CONVERTS: tl.constexpr,
    SCALED: tl.constexpr,
    FACTORED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part of the outputs): y (outputs,) = weight (outputs, inputs) x (inputs,); both may be codes.

    SCALED: sums are multiplied by scales (outputs,); FACTORED: and by factor (1,). AHEAD: weights are loaded one step
    ahead, the first ones before the kernel that computes x has ended. Without it, a program needs fewer registers, so
    more programs can wait for memory at the same time.
    """
    if EARLY:
        gdc_launch_dependents()
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = own < outputs
    rows = weight + own.to(tl.int64)[:, None] * inputs
    at = tl.arange(0, INPUTS)
    if AHEAD:
        ahead = tl.load(rows + at[None, :], mask=known[:, None] & (at < inputs)[None, :], other=0)
        if EARLY:
            gdc_wait()
        sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            weights, at = ahead, start + tl.arange(0, INPUTS)
            values = tl.load(x + at, mask=at < inputs, other=0.0)
            at += INPUTS
            ahead = tl.load(rows + at[None, :], mask=known[:, None] & (at < inputs)[None, :], other=0)
            sums += numbers_of(weights, CONVERTS) * values.to(tl.float32)[None, :]
        found = tl.sum(sums, 1)
    else:
        if EARLY:
            gdc_wait()
        found = tl.zeros([OUTPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            weights = tl.load(rows + at[None, :], mask=known[:, None] & (at < inputs)[None, :], other=0)
            values = tl.load(x + at, mask=at < inputs, other=0.0)
            found += tl.sum(numbers_of(weights, CONVERTS) * values.to(tl.float32)[None, :], 1)
    if SCALED:
        found *= tl.load(scales + own, mask=known, other=0.0)
    if FACTORED:
        found *= tl.load(factor)
    if BIASED:
        found += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)
    tl.store(y + own, found.to(y.dtype.element_ty), mask=known)


@triton.jit
def multiply_codes(
    x,
    weight,
    scales,
    factors,
    bias,
    y,
    sums,
    arrived,
    rows,
    x_row,
    inputs,
    outputs,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    CONVERTS: tl.constexpr,
    FACTORED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part of the outputs, of the rows, of the inputs): y (rows, outputs) = bfloat16 x (rows, inputs) W^T.

    weight: codes (outputs, inputs); sums are multiplied by scales (outputs,) and, if FACTORED, by factors (rows,). The
    program that arrives last adds up the parts of the inputs, and resets `arrived` (outputs' parts x rows' parts) to
    zero. The first codes are prefetched before the kernel that computes x has ended.
    """
    part, many, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own, row, at = part * OUTPUTS + tl.arange(0, OUTPUTS), many * ROWS + tl.arange(0, ROWS), tl.arange(0, INPUTS)
    known, inside = own < outputs, row < rows
    each = (inputs + INPUTS * SPLITS - 1) // (INPUTS * SPLITS) * INPUTS
    begin = split * each
    end = tl.minimum(inputs, begin + each)
    weight_at = weight + tl.minimum(own, outputs - 1).to(tl.int64)[:, None] * inputs
    if EARLY:
        gdc_launch_dependents()
        fetch(weight_at + tl.minimum(begin, inputs - 1))
        gdc_wait()
    found = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(begin, end, INPUTS):
        column = start + at
        codes = tl.load(weight_at + column[None, :], mask=(column < end)[None, :], other=0)
        x_at = x + row[None, :] * x_row + column[:, None]
        values = tl.load(x_at, mask=inside[None, :] & (column < end)[:, None], other=0.0)
        found = product(numbers_of(codes, CONVERTS).to(tl.bfloat16), values, found)
    stored, place = known[:, None] & inside[None, :], row[None, :] * outputs + own[:, None]
    last = True
    if SPLITS > 1:
        counter = arrived + part * tl.num_programs(1) + many
        found, last = sum_of_splits(found, sums, counter, split, place, stored, rows * outputs, SPLITS)
    if last:
        found *= tl.load(scales + own, mask=known, other=0.0)[:, None]
        if FACTORED:
            found *= tl.load(factors + row, mask=inside, other=0.0)[None, :]
        if BIASED:
            found += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=stored)


@triton.jit
def expand_codes(
    weight,
    scales,
    values,
    inputs,
    COLUMNS: tl.constexpr,
    CONVERTS: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (output, part): bfloat16 values (outputs, inputs) of the codes, if SCALED times scales (outputs,)."""
    wait_for_previous(EARLY)
    output, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < inputs
    found = numbers_of(tl.load(weight + output * inputs + at, mask=inside, other=0), CONVERTS)
    if SCALED:
        found *= tl.load(scales + output)
    tl.store(values + output * inputs + at, found.to(tl.bfloat16), mask=inside)


@triton.jit
def scale_sums(
    sums,
    scales,
    factors,
    bias,
    y,
    outputs,
    COLUMNS: tl.constexpr,
    FACTORED: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, part): y (rows, outputs) = sums * scales (outputs,) * factors (rows,) (if FACTORED) + bias."""
    wait_for_previous(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < outputs
    found = tl.load(sums + row * outputs + at, mask=inside, other=0).to(tl.float32)
    found *= tl.load(scales + at, mask=inside, other=0.0)
    if FACTORED:
        found *= tl.load(factors + row)
    if BIASED:
        found += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + at, found.to(y.dtype.element_ty), mask=inside)
