// Rounding of weights with error compensation: rounding a block of columns, refining the levels, and finding the best step of a
// group (trtforge/calibrate/compensation.py, grids.py). Each output is computed separately, so that results do not depend on
// the number of threads.

#include <vector>

#include "team.h"
#include "vectors.h"

// The levels of weights, numbered like `rounding.GRIDS`: integers from -8 to 7, or E2M1 values.
enum Grid : int64_t { INT4 = 0, E2M1 = 1 };

constexpr int64_t VECTORS = 4, TILE = VECTORS * WIDTH;  // outputs of a tile
constexpr int64_t LONGEST = 128;                        // maximum columns of a block
constexpr int64_t SPAN = 4;                             // columns whose sums are in registers

struct Rounding {
    const float* columns;   // (block, outputs); the last one is rounded first
    const void* product;    // (block, outputs): compensation of the errors of columns after the block, subtracted; or null
    const float* shares;    // (block, block): factors of the later columns' errors, which a column subtracts
    const float* quanta;    // (block, outputs): the value of level 1
    const int8_t* ends;     // (block, outputs): the level of a fixed weight, 0 for others; or null
    int8_t* levels;         // (block, outputs), E2M1 in halves
    void* errors;           // (block, outputs): rounded values minus the columns
    void* residuals;        // (block, outputs): rounded values minus the columns' targets
    int64_t block, outputs;
};

struct Refinement {
    int8_t* levels;         // (outputs, inputs), E2M1 in halves
    const void* gradients;  // (outputs, inputs): half the derivative of the output error by each weight
    const void* gram;       // (inputs, inputs)
    const float* diagonal;  // (inputs,): of gram
    const float* scales;    // (inputs,)
    const int64_t* groups;  // (inputs,): each input's group
    const float* steps;     // (outputs, count)
    const int8_t* ends;     // (outputs, inputs), as above
    int64_t outputs, inputs, count, sweeps;
};

struct Steps {
    const float* columns;     // (group, outputs)
    const float* weights;     // (group,)
    const float* candidates;  // (count, outputs)
    float* best;              // (outputs,)
    int64_t group, outputs, count;
};

static inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }

static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// The nearest level, ties to even: adding and subtracting a large number leaves only the bits of a level.
template <Grid grid>
static inline Vector nearest(Vector x) {
    if (grid == INT4) {
        x = smaller(larger(x, Vector() - 8.0f), Vector() + 7.0f);
        return (x + 0x1.8p23f) - 0x1.8p23f;
    }
    x = smaller(larger(x, Vector() - 6.0f), Vector() + 6.0f);
    const Vector power = larger((Vector)((Words)x & 0x7f800000), Vector() + 1.0f) * 0x1.8p22f;
    return smaller(larger((x + power) - power, Vector() - 6.0f), Vector() + 6.0f);
}

// A tile of `count` elements at `from`, padded with `other` in `copy`. A whole tile is used in place.
static inline const float* tile_of(const float* from, int64_t count, float* copy, float other) {
    if (count == TILE) return from;
    std::fill(copy, copy + TILE, other);
    std::copy(from, from + count, copy);
    return copy;
}

template <typename T>
static inline void put_tile(T* into, const float* values, int64_t count) {
    if (count == TILE)
        for (int64_t v = 0; v < VECTORS; ++v) put(into + v * WIDTH, load(values + v * WIDTH));
    else
        for (int64_t i = 0; i < count; ++i) put(into + i, values[i]);
}

template <Grid grid, typename T>
static void round_column(const Rounding& given, int64_t column, int64_t first, int64_t count, const Vector* sums,
                         float* errors) {
    float copies[2][TILE], levels[TILE], residuals[TILE];
    const int64_t at = (given.block - 1 - column) * given.outputs + first;
    const float* original = tile_of(given.columns + at, count, copies[0], 0.0f);
    const float* quanta = tile_of(given.quanta + at, count, copies[1], 1.0f);
    const T* product = given.product ? (const T*)given.product + at : nullptr;
    T rest[TILE] = {};
    if (product && count < TILE) {
        std::copy(product, product + count, rest);
        product = rest;
    }
    for (int64_t v = 0; v < VECTORS; ++v) {
        Vector target = load(original + v * WIDTH) - sums[v];
        if (product) target -= load(product + v * WIDTH);
        put(levels + v * WIDTH, nearest<grid>(target / load(quanta + v * WIDTH)));
        put(residuals + v * WIDTH, target);
    }
    if (given.ends)
        for (int64_t i = 0; i < count; ++i)
            if (given.ends[at + i]) levels[i] = given.ends[at + i];
    for (int64_t v = 0; v < VECTORS; ++v) {
        const int64_t i = v * WIDTH;
        const Vector value = load(levels + i) * load(quanta + i);
        put(errors + i, value - load(original + i));
        put(residuals + i, value - load(residuals + i));
    }
    int8_t stored[TILE];
    for (int64_t i = 0; i < TILE; ++i) stored[i] = int8_t(levels[i] * (grid == E2M1 ? 2.0f : 1.0f));
    std::copy(stored, stored + count, given.levels + at);
    put_tile((T*)given.errors + at, errors, count);
    put_tile((T*)given.residuals + at, residuals, count);
}

// Rounds `N` columns from `begin` on, counted from the block's last column. First it sums the errors of the columns before
// `begin` for all of them, then it rounds them one by one.
template <Grid grid, typename T, int64_t N>
static void round_span(const Rounding& given, int64_t begin, int64_t first, int64_t count, float (*errors)[TILE]) {
    Vector sums[N][VECTORS] = {};
    const float* shares = given.shares + begin * given.block;
    for (int64_t earlier = 0; earlier < begin; ++earlier)
        for (int64_t v = 0; v < VECTORS; ++v) {
            const Vector error = load(errors[earlier] + v * WIDTH);
            for (int64_t n = 0; n < N; ++n) sums[n][v] += shares[n * given.block + earlier] * error;
        }
    for (int64_t n = 0; n < N; ++n) {
        for (int64_t earlier = 0; earlier < n; ++earlier)
            for (int64_t v = 0; v < VECTORS; ++v)
                sums[n][v] += shares[n * given.block + begin + earlier] * load(errors[begin + earlier] + v * WIDTH);
        round_column<grid, T>(given, begin + n, first, count, sums[n], errors[begin + n]);
    }
}

template <Grid grid, typename T>
static void round_tiles(const Rounding& given) {
    team::for_each((given.outputs + TILE - 1) / TILE, given.outputs > TILE, [&](int64_t tile) {
        alignas(64) float errors[LONGEST][TILE];
        const int64_t first = tile * TILE, count = std::min(TILE, given.outputs - first);
        int64_t column = 0;
        for (; column + SPAN <= given.block; column += SPAN)
            round_span<grid, T, SPAN>(given, column, first, count, errors);
        for (; column < given.block; ++column) round_span<grid, T, 1>(given, column, first, count, errors);
    });
}

// Rounds each column of a block, at most LONGEST, to its target: the column minus `product` minus its shares of the errors of
// the block's later columns. `type`: of the product, the errors and the residuals.
EXPORT void round_block(int64_t grid, int64_t type, const Rounding* given) {
    if (grid == INT4)
        type == FLOAT32 ? round_tiles<INT4, float>(*given) : round_tiles<INT4, bfloat16>(*given);
    else
        type == FLOAT32 ? round_tiles<E2M1, float>(*given) : round_tiles<E2M1, bfloat16>(*given);
}

// Coordinate descent on one output's levels, from the last to the first: moves each level to its best value with all others
// fixed, for up to `sweeps` sweeps or until none moves. A level moves by -gradient / (diagonal of gram * quantum), rounded.
template <Grid grid, typename T>
static void refine_row(const Refinement& given, int64_t row, float* work) {
    constexpr float unit = grid == E2M1 ? 0.5f : 1.0f;
    const int64_t inputs = given.inputs, padded = (inputs + WIDTH - 1) / WIDTH * WIDTH;
    float *gradient = work, *levels = work + padded, *quanta = levels + padded, *moves = quanta + padded;
    const T* gradients = (const T*)given.gradients + row * inputs;
    int8_t* stored = given.levels + row * inputs;
    for (int64_t i = 0; i < padded; ++i) {
        const bool inside = i < inputs;
        gradient[i] = inside ? to_float(gradients[i]) : 0.0f;
        levels[i] = inside ? stored[i] * unit : 0.0f;
        quanta[i] = inside ? std::max(given.steps[row * given.count + given.groups[i]] * given.scales[i], 0x1p-126f) : 1.0f;
        moves[i] = inside ? 1.0f / (given.diagonal[i] * quanta[i]) : 0.0f;
    }
    bool moved = true;
    for (int64_t sweep = 0; moved && sweep < given.sweeps; ++sweep) {
        moved = false;
        for (int64_t at = padded - WIDTH; at >= 0; at -= WIDTH)
            for (int64_t lane = WIDTH - 1; lane >= 0; --lane) {
                const Vector old = load(levels + at);
                const Vector best = nearest<grid>(old - load(gradient + at) * load(moves + at));
                const Integers different = best != old;
                while (lane >= 0 && !(different[lane] && !(given.ends && given.ends[row * inputs + at + lane]))) --lane;
                if (lane < 0) break;
                const float change = (best[lane] - old[lane]) * quanta[at + lane];
                levels[at + lane] = best[lane];
                const T* products = (const T*)given.gram + (at + lane) * inputs;
                for (int64_t i = 0; i < inputs; ++i) gradient[i] += change * to_float(products[i]);
                moved = true;
            }
    }
    for (int64_t i = 0; i < inputs; ++i) stored[i] = int8_t(levels[i] / unit);
}

template <Grid grid, typename T>
static void refine_rows(const Refinement& given) {
    team::run(given.outputs > 1, [&](team::Member& member) {
        std::vector<float> work(4 * (given.inputs + WIDTH));
        member.each(given.outputs, [&](int64_t row) { refine_row<grid, T>(given, row, work.data()); });
    });
}

// `type`: of the gradients and of the Gram matrix.
EXPORT void refine(int64_t grid, int64_t type, const Refinement* given) {
    if (grid == INT4)
        type == FLOAT32 ? refine_rows<INT4, float>(*given) : refine_rows<INT4, bfloat16>(*given);
    else
        type == FLOAT32 ? refine_rows<E2M1, float>(*given) : refine_rows<E2M1, bfloat16>(*given);
}

template <Grid grid>
static void best_of_tile(const Steps& given, int64_t first, int64_t count) {
    Vector least[VECTORS] = {}, best[VECTORS] = {};
    float copy[TILE], other[TILE];
    for (int64_t candidate = 0; candidate < given.count; ++candidate) {
        const float* steps = tile_of(given.candidates + candidate * given.outputs + first, count, other, 1.0f);
        Vector losses[VECTORS] = {};
        for (int64_t column = 0; column < given.group; ++column) {
            const float* values = tile_of(given.columns + column * given.outputs + first, count, copy, 0.0f);
            for (int64_t v = 0; v < VECTORS; ++v) {
                const Vector value = load(values + v * WIDTH), step = load(steps + v * WIDTH);
                const Vector error = nearest<grid>(value / step) * step - value;
                losses[v] += given.weights[column] * error * error;
            }
        }
        for (int64_t v = 0; v < VECTORS; ++v) {
            const Vector step = load(steps + v * WIDTH);
            best[v] = candidate == 0 || losses[v] < least[v] ? step : best[v];
            least[v] = candidate == 0 ? losses[v] : smaller(losses[v], least[v]);
        }
    }
    float found[TILE];
    for (int64_t v = 0; v < VECTORS; ++v) put(found + v * WIDTH, best[v]);
    std::copy(found, found + count, given.best + first);
}

// For each output, the candidate step with the least weighted squared error of a group's columns; the first one on a tie.
EXPORT void best_steps(int64_t grid, const Steps* given) {
    team::for_each((given->outputs + TILE - 1) / TILE, given->outputs > TILE, [&](int64_t tile) {
        const int64_t first = tile * TILE, count = std::min(TILE, given->outputs - first);
        grid == INT4 ? best_of_tile<INT4>(*given, first, count) : best_of_tile<E2M1>(*given, first, count);
    });
}
