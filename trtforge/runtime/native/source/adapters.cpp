// LoRA (Hu et al. 2021) for single-token rows, each of which has its own adapter or none.

#include "team.h"
#include "vectors.h"

#include <vector>

// y (rows, outputs) += (x (rows, inputs) A^T) B, with the matrices of each row's adapter. slots: its number, -1 for none.
// a: (adapters, rank, inputs), `pitch` elements from adapter to adapter; b: (adapters, rank, outputs). `stride`: from
// row to row of y.
struct Adapters {
    const void* x;
    const void* a;
    const void* b;
    void* y;
    const int64_t* slots;
    int64_t rows, inputs, outputs, rank, pitch, stride;
};

template <typename T>
static float dot(const T* x, const T* w, int64_t count) {
    Vector sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * WIDTH <= count; i += 4 * WIDTH)
        for (int part = 0; part < 4; ++part) sums[part] += load(x + i + part * WIDTH) * load(w + i + part * WIDTH);
    for (; i + WIDTH <= count; i += WIDTH) sums[0] += load(x + i) * load(w + i);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < count; ++i) total += to_float(x[i]) * to_float(w[i]);
    return total;
}

template <int W, typename T>
static void add_outputs(const T* b, const std::vector<float>& inner, int64_t outputs, T* y) {
    Vector sums[W];
    for (int w = 0; w < W; ++w) sums[w] = load(y + w * WIDTH);
    for (size_t r = 0; r < inner.size(); ++r)
        for (int w = 0; w < W; ++w) sums[w] += inner[r] * load(b + int64_t(r) * outputs + w * WIDTH);
    for (int w = 0; w < W; ++w) put(y + w * WIDTH, sums[w]);
}

template <typename T>
static void add_row(const Adapters& l, int64_t row, std::vector<float>& inner) {
    const int64_t slot = l.slots[row];
    if (slot < 0) return;
    const T* x = (const T*)l.x + row * l.inputs;
    const T* a = (const T*)l.a + slot * l.pitch;
    const T* b = (const T*)l.b + slot * l.rank * l.outputs;
    T* y = (T*)l.y + row * l.stride;
    for (int64_t r = 0; r < l.rank; ++r) inner[size_t(r)] = dot(x, a + r * l.inputs, l.inputs);
    int64_t o = 0;
    for (; o + 4 * WIDTH <= l.outputs; o += 4 * WIDTH) add_outputs<4>(b + o, inner, l.outputs, y + o);
    for (; o + WIDTH <= l.outputs; o += WIDTH) add_outputs<1>(b + o, inner, l.outputs, y + o);
    for (; o < l.outputs; ++o) {
        float total = to_float(y[o]);
        for (int64_t r = 0; r < l.rank; ++r) total += inner[size_t(r)] * to_float(b[r * l.outputs + o]);
        put(y + o, total);
    }
}

template <typename T>
static void add_rows(const Adapters& l) {
    team::run(l.rows > 1, [&](team::Member& member) {
        std::vector<float> inner(static_cast<size_t>(l.rank));
        member.each(l.rows, [&](int64_t row) { add_row<T>(l, row, inner); });
    });
}

EXPORT void add_adapters(int64_t type, const Adapters* l) {
    if (type == FLOAT32)
        add_rows<float>(*l);
    else
        add_rows<bfloat16>(*l);
}
