"""What Triton kernels of products share: numbers of codes, sums of products, and the sum of split inputs.

NaN codes excepted, which trtforge's quantisation does not write, numbers of codes are exact on every GPU.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def numbers_of_e4m3(bits):
    """float32 numbers of E4M3 in uint8: by the bits of float16, whose exponents are 8 lower."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def numbers_of(codes, CONVERTS: tl.constexpr):
    """float32 numbers of INT8, of E4M3 in uint8, or of floating-point numbers. CONVERTS: the GPU converts E4M3."""
    if codes.dtype == tl.uint8:
        if CONVERTS:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return numbers_of_e4m3(codes)
    else:
        return codes.to(tl.float32)


@triton.jit
def fetch(pointers):
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
def product(left, right, sums):
    """sums + left x right in float32; Triton's interpreter (3.9) multiplies the bits of bfloat16."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(left, right, sums)


@triton.jit
def sum_of_splits(found, sums, counter, split, place, stored, count, SPLITS: tl.constexpr):
    """The sum of all splits and whether this program arrived last: only then it is complete.

    Each writes what it `found` to its part of `sums`, of `count` numbers; the last one leaves `counter` zero again.
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
