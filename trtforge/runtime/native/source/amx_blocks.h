// AMX products of any number of rows, in blocks that fit in the caches.
//
// A block of activations stays in the L2 cache while all weights are read. It is packed so that the rows of a tile register
// are contiguous: (rows / 16 rounded up, inputs / DEPTH, 16, DEPTH); a block of less than 16 rows: (inputs / DEPTH, rows,
// DEPTH). Few bfloat16 rows are multiplied unpacked. As many inputs of a weight tile as fit in the L1 cache are multiplied
// by all rows before the next inputs.

#pragma once

#include "float32.h"
#include "products.h"
#include "team.h"

#if defined(HAS_AMX)

namespace amx {

constexpr int64_t MOST_BYTES = 3 << 19;  // of a block of activations; the 2 MiB cache also holds weights and sums
constexpr int64_t MOST_ROWS = 512;       // in a block
constexpr int64_t WEIGHTS = 1 << 14;     // bytes of a weight tile in the L1 cache, which has 48 KiB

// Inputs of a weight tile that are multiplied by all rows at a time.
template <typename X>
constexpr int64_t INPUTS = WEIGHTS / TILE / int64_t(sizeof(X));

// A block of rows from `first` on, in groups of HEIGHT rows. `pitch`: stride between the rows of a group; `step`: stride
// between DEPTH inputs and the next.
template <typename X>
struct Block {
    const X* from;
    int64_t first, rows, inputs, pitch, step;

    int64_t groups() const { return (rows + HEIGHT - 1) / HEIGHT; }
    // The rows of a group from `input` on, which is a multiple of DEPTH.
    const X* at(int64_t group, int64_t input) const { return from + group * HEIGHT * inputs + input / DEPTH<X> * step; }
};

// The packed position of a row's inputs: each DEPTH inputs are contiguous, the next ones `step` elements later.
template <typename X>
struct Row {
    X* into;
    int64_t step;

    Row(X* packed, const Block<X>& block, int64_t index)
        : into(packed + index / HEIGHT * HEIGHT * block.inputs + index % HEIGHT * DEPTH<X>), step(block.step) {}
    X* at(int64_t input) const { return into + input / DEPTH<X> * step; }
};

// sums (32, TILE) += the rows of groups `group` and, if it exists, `group` + 1, times inputs [input, input + count), whose
// weight tile is `w`; = if `fresh`.
template <typename X, typename W, typename S, class Beside>
static inline void multiply(const Block<X>& x, int64_t group, int64_t input, const W* w, int64_t count, bool fresh, S* sums,
                            const Beside& beside) {
    if (group + 1 < x.groups())
        products<true>(x.at(group, input), x.at(group + 1, input), x.pitch, x.step, w, count, fresh, sums,
                       sums + HEIGHT * TILE, beside);
    else
        products<false>(x.at(group, input), (const X*)nullptr, x.pitch, x.step, w, count, fresh, sums, (S*)nullptr,
                        beside);
}

// Calls f(first group, first row, rows) for every two groups.
template <typename X, class F>
static inline void each_pair(const Block<X>& x, F f) {
    for (int64_t row = 0; row < x.rows; row += 2 * HEIGHT) f(row / HEIGHT, row, std::min(2 * HEIGHT, x.rows - row));
}

// The share of the next weights that two groups prefetch while they are multiplied by `w`.
template <typename X, typename W>
static inline Fetch fetch_next(const Block<X>& x, int64_t group, const W* w) {
    const int64_t width = (STEP / ((x.groups() + 1) / 2) + 63) / 64 * 64;
    return {(const char*)w + WEIGHTS + group / 2 * width, width};
}

// For each block of rows, calls pack(row, position, first input, inputs) for all rows, in parts of at most `section`
// inputs, and then multiply(block, tile) for every weight tile.
template <typename X, class Pack, class Multiply>
static void for_each_tile(int64_t rows, int64_t inputs, int64_t outputs, int64_t section, Pack pack, Multiply multiply) {
    const int64_t fit = MOST_BYTES / (inputs * int64_t(sizeof(X))) / TILE * TILE;
    const int64_t most = std::clamp(fit, TILE, MOST_ROWS), sections = (inputs + section - 1) / section;
    X* packed = memory_for<X>(std::min(most, (rows + HEIGHT - 1) / HEIGHT * HEIGHT) * inputs);
    for (int64_t first = 0, left = (rows + most - 1) / most, count; left > 0; --left, first += count) {
        count = left == 1 ? rows - first : std::min(most, (share(rows - first, left) + TILE - 1) / TILE * TILE);
        const Block<X> block{packed, first, count, inputs, DEPTH<X>, height(count) * DEPTH<X>};
        team::run(true, [&](team::Member& member) {
            member.each(count * sections, [&](int64_t at) {
                const int64_t row = at / sections, input = at % sections * section;
                pack(first + row, Row<X>(packed, block, row), input, std::min(section, inputs - input));
            });
            member.barrier();
            const Session session(count, true);
            member.each(outputs / TILE, [&](int64_t tile) { multiply(block, tile); });
        });
    }
}

// Like `for_each_tile`, for up to HEIGHT rows (rows, inputs), which are not packed.
template <typename X, class Multiply>
static void for_each_tile_unpacked(const X* x, int64_t rows, int64_t inputs, int64_t outputs, Multiply multiply) {
    if (rows == 0) return;
    const Block<X> block{x, 0, rows, inputs, inputs, DEPTH<X>};
    team::run(true, [&](team::Member& member) {
        const Session session(rows, true);
        member.each(outputs / TILE, [&](int64_t tile) { multiply(block, tile); });
    });
}

// Multiplies the rows of a block by a weight tile, with accumulators of type S. y.put(row, rows, sums) writes the outputs.
template <typename S, typename X, typename W, class Output>
static void multiply_tile(const Block<X>& x, const W* w, const Output& y) {
    alignas(64) S sums[MOST_ROWS * TILE];
    for (int64_t input = 0, count; input < x.inputs; input += count, w += count * TILE) {
        count = std::min(INPUTS<X>, x.inputs - input);
        const bool last = input + count == x.inputs;
        each_pair(x, [&](int64_t group, int64_t row, int64_t rows) {
            multiply(x, group, input, w, count, input == 0, sums + row * TILE, fetch_next(x, group, w));
            if (last) y.put(x.first + row, rows, sums + row * TILE);
        });
    }
}

// Work to interleave with a product: each step expands the weights of DEPTH inputs, from `input` on and up to `end`.
template <class Expand>
struct ExpandBeside {
    const Expand& expand;
    int64_t input, end;
    bfloat16* into;

    void step(int64_t index) const {
        const int64_t done = index * DEPTH<bfloat16>;
        if (input + done < end) expand(input + done, into + done * TILE);
    }
};

// Like `multiply_tile`, for weights in another format: expand(input, into) dequantises DEPTH inputs to a bfloat16 tile. The
// next inputs are expanded while the first rows are multiplied. `scales`: (inputs / group, TILE), one per group of inputs,
// or null.
template <class Expand, class Output>
static void multiply_expanded(const Block<bfloat16>& x, int64_t group, const float* scales, const Expand& expand,
                              const Output& y) {
    // Inputs that are expanded at once. Two tiles of FEW inputs fit in the L1 cache with rows and sums; the sums of many rows
    // do not fit anyway.
    constexpr int64_t FEW = 128, MANY = 256;
    const int64_t most = x.rows > 256 ? MANY : FEW;
    alignas(64) bfloat16 weights[2][MANY * TILE];
    alignas(64) float totals[MOST_ROWS * TILE], of_group[MOST_ROWS * TILE];
    if (!scales) group = x.inputs;
    const bool within = most % group == 0;  // no group spans several steps, so group sums are not kept
    const auto end_of = [&](int64_t input) { return std::min(input + most, x.inputs); };
    const ExpandBeside<Expand> first{expand, 0, end_of(0), weights[0]};
    for (int64_t step = 0; step < first.end / DEPTH<bfloat16>; ++step) first.step(step);
    for (int64_t input = 0; input < x.inputs; input += most) {
        const int64_t end = end_of(input);
        const bfloat16* w = weights[input / most % 2];
        bfloat16* next = weights[(input / most + 1) % 2];
        each_pair(x, [&](int64_t pair, int64_t row, int64_t rows) {
            float* total = totals + row * TILE;
            float* sums = scales ? of_group + (within ? 0 : row * TILE) : total;
            for (int64_t at = input, stop; at < end; at = stop) {
                stop = std::min(end, at / group * group + group);
                const bfloat16* part = w + (at - input) * TILE;
                const bool fresh = at % group == 0;
                if (pair == 0)
                    multiply(x, pair, at, part, stop - at, fresh, sums,
                             ExpandBeside<Expand>{expand, at + most, end_of(end), next + (at - input) * TILE});
                else
                    multiply(x, pair, at, part, stop - at, fresh, sums, Nothing());
                if (scales && stop % group == 0)
                    float32::add_scaled(sums, scales + at / group * TILE, rows, at < group, total);
            }
            if (end == x.inputs) y.put(x.first + row, rows, total);
        });
    }
}

}  // namespace amx

#endif
