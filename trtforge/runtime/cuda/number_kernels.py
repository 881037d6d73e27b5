"""What the Triton kernels of matrix products share: dequantising codes, products, and the reduction over splits.

The values of codes are exact on every GPU, except those of NaN codes, which trtforge writes only for NaN values.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def numbers_of_e4m3(bits):
    """float32 values of E4M3 codes in uint8, through float16: its exponent bias is 8 higher, hence the factor 2^8."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def numbers_of(codes, CONVERTS: tl.constexpr):
    """float32 values of INT8 codes, E4M3 codes in uint8, or floating-point values. CONVERTS: the GPU converts E4M3."""
    if codes.dtype == tl.uint8:
        if CONVERTS:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return numbers_of_e4m3(codes)
    else:
        return codes.to(tl.float32)


@triton.jit
def fetch(pointers):
    """Prefetch what `pointers` point to into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def product(left, right, sums):
    """sums + left x right in float32. Triton's interpreter (3.9) would multiply the bit patterns of bfloat16."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(left, right, sums)


@triton.jit
def sum_of_splits(found, sums, counter, split, place, stored, count, SPLITS: tl.constexpr):
    """The sum over all splits, and whether this program arrived last: only then the sum is complete.

    Each program writes `found` to its part of `sums`, `count` elements; the last one resets `counter` to zero.
    """
    tl.store(sums + split * count + place, found, mask=stored)
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counter, 0)
        found = tl.zeros_like(found)
        for other in tl.static_range(SPLITS):
            found += tl.load(sums + other * count + place, mask=stored, other=0.0, cache_modifier=".cg")
    return found, last
