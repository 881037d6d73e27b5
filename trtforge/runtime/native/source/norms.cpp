// LayerNorm, and RMS norm whose weights differ in type from the activations; plain RMS norm is in elementwise.cpp.

#include "team.h"

// y = (x - mean) / deviation * weight + bias, or x / rms(x) * weight + bias, over the last dimension. x and y: (outer, inner,
// size), whose first dimension has stride `stride` in x and `into` in y; they may be the same. weight and bias, which may be
// null: (inner, size) with row stride `pitch`, 0 if all rows share one.
struct Norm {
    const void* x;
    const void* weight;
    const void* bias;
    void* y;
    int64_t outer, stride, into, inner, size, pitch;
    float epsilon;
};

// The mean is subtracted before squares are summed, to stay accurate for small deviations from a large mean.
template <bool CENTRED, typename T, typename W>
static void norm_row(const T* x, const W* weight, const W* bias, T* y, int64_t size, float epsilon) {
    float mean = 0.0f, squares = 0.0f;
    if (CENTRED) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < size; ++i) mean += to_float(x[i]);
        mean /= float(size);
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float factor = 1.0f / std::sqrt(squares / float(size) + epsilon);
    if (bias)
        for (int64_t i = 0; i < size; ++i)
            put(y + i, (to_float(x[i]) - mean) * factor * to_float(weight[i]) + to_float(bias[i]));
    else
        for (int64_t i = 0; i < size; ++i) put(y + i, (to_float(x[i]) - mean) * factor * to_float(weight[i]));
}

template <bool CENTRED, typename T, typename W>
static void norm_rows(const Norm& n) {
    const W *weight = (const W*)n.weight, *bias = (const W*)n.bias;
    team::for_each(n.outer, n.outer * n.inner * n.size >= PARALLEL_FROM, [&](int64_t row) {
        for (int64_t part = 0; part < n.inner; ++part)
            norm_row<CENTRED>((const T*)n.x + row * n.stride + part * n.size, weight + part * n.pitch,
                              bias ? bias + part * n.pitch : nullptr, (T*)n.y + row * n.into + part * n.size, n.size,
                              n.epsilon);
    });
}

template <typename T, typename W>
static void norm_any(int64_t centred, const Norm& n) {
    if (centred)
        norm_rows<true, T, W>(n);
    else
        norm_rows<false, T, W>(n);
}

// `type`: of x and y; `weights`: of weight and bias, the same type or float32. `centred`: LayerNorm.
EXPORT void norm(int64_t type, int64_t weights, int64_t centred, const Norm* n) {
    if (type == FLOAT32)
        norm_any<float, float>(centred, *n);
    else if (weights == FLOAT32)
        norm_any<bfloat16, float>(centred, *n);
    else
        norm_any<bfloat16, bfloat16>(centred, *n);
}
