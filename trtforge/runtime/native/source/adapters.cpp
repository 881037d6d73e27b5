// LoRA (Hu et al. 2021) for single-token rows; each row has its own adapter or none.

#include "team.h"
#include "vectors.h"

#include <vector>

// A module of a linear layer: columns [first, first + outputs) of y.
struct Adapted {
    int64_t first, outputs;
};

// y (rows, columns of all modules and others) += (x (rows, inputs) A^T) B of each module, with the matrices of each row's
// adapter. slots (rows,): the adapter's number, -1 for none. a: (adapters, modules, rank, inputs); b: (adapters, rank,
// outputs of all modules). Only the first rows of a module's matrices are used, as many as its entry in `ranks` (adapters,
// modules). `stride`: row stride of y.
struct Adapters {
    const void* x;
    const void* a;
    const void* b;
    void* y;
    const int64_t* slots;
    const int64_t* ranks;
    const Adapted* modules;
    int64_t rows, count, inputs, outputs, rank, stride;
};

constexpr int64_t TOGETHER = 4;    // rows of a matrix that are read together while the next ones are prefetched
constexpr int64_t COLUMNS = 2048;  // outputs whose accumulators stay in the L1 cache

// Calls function(first, rows) for `count` rows, TOGETHER at a time and the rest one by one; `rows` is a compile-time
// constant.
template <class Function>
static void for_rows(int64_t count, Function function) {
    int64_t r = 0;
    for (; r + TOGETHER <= count; r += TOGETHER) function(r, std::integral_constant<int, int(TOGETHER)>());
    for (; r < count; ++r) function(r, std::integral_constant<int, 1>());
}

// inner[r] = dot product of x and row r of `a`, for R rows.
template <int R, typename T>
static void dot(const T* x, const T* a, int64_t count, float* inner) {
    Vector sums[R][2] = {};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
        const Vector low = load(x + i), high = load(x + i + WIDTH);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const T* from = a + r * count + i;
            __builtin_prefetch(from + R * count);
            sums[r][0] += low * load(from);
            sums[r][1] += high * load(from + WIDTH);
        }
    }
    for (int r = 0; r < R; ++r) inner[r] = sum(sums[r][0] + sums[r][1]);
    for (; i < count; ++i)
        for (int r = 0; r < R; ++r) inner[r] += to_float(x[i]) * to_float(a[r * count + i]);
}

// sums (count,) += inner (R,) times R rows of `b`.
template <int R, typename T>
static void add_products(const T* b, int64_t pitch, const float* inner, int64_t count, float* sums) {
    int64_t o = 0;
    for (; o + 2 * WIDTH <= count; o += 2 * WIDTH) {
        Vector low = load(sums + o), high = load(sums + o + WIDTH);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const T* from = b + r * pitch + o;
            __builtin_prefetch(from + R * pitch);
            low += inner[r] * load(from);
            high += inner[r] * load(from + WIDTH);
        }
        put(sums + o, low);
        put(sums + o + WIDTH, high);
    }
    for (; o < count; ++o)
        for (int r = 0; r < R; ++r) sums[o] += inner[r] * to_float(b[r * pitch + o]);
}

template <typename From, typename To>
static void convert(const From* from, int64_t count, To* into) {
    int64_t o = 0;
    for (; o + WIDTH <= count; o += WIDTH) put(into + o, load(from + o));
    for (; o < count; ++o) put(into + o, to_float(from[o]));
}

// y (outputs,) += inner (rank,) times a module's B, (rank, outputs) with row stride `pitch`.
template <typename T>
static void add_outputs(const T* b, int64_t pitch, const float* inner, int64_t rank, int64_t outputs, T* y) {
    float sums[COLUMNS];
    for (int64_t first = 0; first < outputs; first += COLUMNS) {
        const int64_t count = std::min(COLUMNS, outputs - first);
        convert(y + first, count, sums);
        for_rows(rank, [&](int64_t r, auto rows) {
            add_products<rows()>(b + r * pitch + first, pitch, inner + r, count, sums);
        });
        convert(sums, count, y + first);
    }
}

template <typename T>
static void add_row(const Adapters& l, int64_t row, float* inner) {
    const int64_t slot = l.slots[row];
    if (slot < 0) return;
    const T* x = (const T*)l.x + row * l.inputs;
    const T* a = (const T*)l.a + slot * l.count * l.rank * l.inputs;
    const T* b = (const T*)l.b + slot * l.rank * l.outputs;
    T* y = (T*)l.y + row * l.stride;
    for (int64_t m = 0; m < l.count; ++m) {
        const int64_t rank = l.ranks[slot * l.count + m];
        for_rows(rank, [&](int64_t r, auto rows) { dot<rows()>(x, a + r * l.inputs, l.inputs, inner + r); });
        if (rank > 0) add_outputs(b, l.outputs, inner, rank, l.modules[m].outputs, y + l.modules[m].first);
        a += l.rank * l.inputs;
        b += l.modules[m].outputs;
    }
}

template <typename T>
static void add_rows(const Adapters& l) {
    team::run(l.rows > 1, [&](team::Member& member) {
        std::vector<float> inner(static_cast<size_t>(l.rank));
        member.each(l.rows, [&](int64_t row) { add_row<T>(l, row, inner.data()); });
    });
}

EXPORT void add_adapters(int64_t type, const Adapters* l) {
    if (type == FLOAT32)
        add_rows<float>(*l);
    else
        add_rows<bfloat16>(*l);
}
