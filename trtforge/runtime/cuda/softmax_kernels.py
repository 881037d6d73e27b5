"""What the Triton kernels of attention share: online softmax, and the reduction over the parts of a context.

Online softmax: Milakov and Gimelshein 2018. Splitting a long context and combining the parts: Flash-Decoding (Dao et
al. 2023).
"""

import triton
import triton.language as tl

from trtforge.runtime.cuda.number_kernels import INTERPRETED, numbers_of_e4m3

_FEW_ROWS = tl.constexpr(16)


@triton.jit
def exact_product(left, right):
    """left x right, accumulated in float32; float32 inputs are not rounded to TF32."""
    if INTERPRETED:  # see `number_kernels.product`
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right, input_precision="ieee")


@triton.jit
def cached_numbers(codes, E4M3: tl.constexpr, TYPE: tl.constexpr):
    """Cached values converted to the compute type, before multiplication by the cache's scale."""
    if E4M3:
        return numbers_of_e4m3(codes).to(TYPE)
    elif codes.dtype == tl.int8:
        return codes.to(tl.float32).to(TYPE)
    else:
        return codes


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the token at `position` attends to."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def part_of(first, last, split, TOKENS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The split's [begin, end) of the positions that queries at `first` to `last` attend to, and the number of nonempty
    splits."""
    begin = first_seen(first, WINDOW, CHUNK)
    part = tl.cdiv(last + 1 - begin, TOKENS * SPLITS) * TOKENS
    own = begin + split * part
    return own, tl.minimum(last + 1, own + part), tl.cdiv(last + 1 - begin, part)


@triton.jit
def _keep(sums, largest, totals, at, own, known, dims, most, total, found, SIZE: tl.constexpr):
    """Store a split's results, for the program that combines the splits."""
    tl.store(largest + at, most, mask=own)
    tl.store(totals + at, total, mask=own)
    tl.store(sums + at[:, None] * SIZE + dims[None, :], found, mask=known)
    tl.debug_barrier()


@triton.jit
def _of_split(sums, largest, first_part, other, count, own, known, dims, most, SIZE: tl.constexpr):
    """What a split contributes to the sums over all splits, whose largest score is `most`."""
    at = first_part + other
    wrote = at < first_part + count
    highest = tl.load(largest + at, mask=own & wrote, other=float("-inf"), cache_modifier=".cg")
    sums_at = sums + at[:, None] * SIZE + dims[None, :]
    found = tl.load(sums_at, mask=known & wrote[:, None], other=0.0, cache_modifier=".cg")
    return tl.exp(highest - most)[:, None] * found


@triton.jit
def _combined(sums, largest, totals, first_part, count, own, known, dims, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The largest score, the total and the sums over `count` splits, most of them written by other programs."""
    splits = tl.arange(0, SPLITS)[None, :]
    parts, kept = first_part[:, None] + splits, own[:, None] & (splits < count)
    each = tl.load(largest + parts, mask=kept, other=float("-inf"), cache_modifier=".cg")
    most = tl.where(own, tl.max(each, 1), 0.0)
    of_each = tl.load(totals + parts, mask=kept, other=0.0, cache_modifier=".cg")
    total = tl.sum(of_each * tl.exp(each - most[:, None]), 1)
    found = tl.zeros([known.shape[0], known.shape[1]], tl.float32)
    if known.shape[0] <= _FEW_ROWS:
        for other in tl.static_range(SPLITS):
            found += _of_split(sums, largest, first_part, other, count, own, known, dims, most, SIZE)
    else:  # not unrolled, which takes fewer registers
        for other in range(SPLITS):
            found += _of_split(sums, largest, first_part, other, count, own, known, dims, most, SIZE)
    return most, total, found


@triton.jit
def of_all_parts(
    sums,
    largest,
    totals,
    counter,
    first_part,
    split,
    count,
    own,
    known,
    dims,
    most,
    total,
    found,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Whether this program is the last of `count` parts to arrive; if so, also the combined results of all parts."""
    last = True
    if SPLITS > 1 and count > 1:
        _keep(sums, largest, totals, first_part + split, own, known, dims, most, total, found, SIZE)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(counter, 0)
            most, total, found = _combined(sums, largest, totals, first_part, count, own, known, dims, SIZE, SPLITS)
    return last, most, total, found


@triton.jit
def with_sinks(most, total, found, sinks):
    """The sums and the total after adding the sink: an extra logit, whose value vector is zero."""
    higher = tl.maximum(most, sinks)
    return found * tl.exp(most - higher)[:, None], total * tl.exp(most - higher) + tl.exp(sinks - higher)


@triton.jit
def changed(scores, heads, own, positions, seen, slopes, cap, CAPPED: tl.constexpr, BIASED: tl.constexpr):
    """Apply the soft cap, ALiBi bias and mask to scores (rows, positions); positions not `seen` get -inf."""
    if CAPPED:
        scores = cap - 2 * cap / (tl.exp(2 * scores / cap) + 1)  # cap x tanh(scores / cap)
    if BIASED:
        scores += tl.load(slopes + heads, mask=own, other=0.0)[:, None] * positions[None, :].to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def with_scores(scores, values, most, total, found, NONE_SEEN: tl.constexpr = False):
    """Online softmax update: the largest score, the total and the sums after adding more positions.

    NONE_SEEN: some rows may not have attended to any position yet.
    """
    higher = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if NONE_SEEN else higher
    weights, kept = tl.exp(scores - base[:, None]), tl.exp(most - base)
    total = total * kept + tl.sum(weights, 1)
    return higher, total, found * kept[:, None] + exact_product(weights.to(values.dtype), values)
