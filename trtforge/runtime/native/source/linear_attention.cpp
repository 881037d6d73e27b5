// What linear attention computes before the delta rule, from its projections, and after it: the gated norm.

#include "team.h"
#include "vectors.h"

constexpr float ADDED = 1e-6f;             // added to the squared norms of queries and keys
constexpr float LINEAR_SOFTPLUS = 20.0f;  // above this, log(1 + exp(x)) = x

// Splits `convolved` (tokens, 2 key_heads key_size + value_heads value_size) into queries and keys (tokens, value_heads,
// key_size) and values (tokens, value_heads, value_size). Queries and keys are normalised to length 1, and queries divided by
// the square root of key_size; consecutive value heads share a key head. rates = sigmoid(rate) and decays = -decay
// softplus(step + bias), both (tokens, value_heads), from `projected` (tokens, key_heads, 2, value heads of a key head):
// rates, then steps. decay, bias: (value_heads,).
struct DeltaInputs {
    const void *convolved, *projected;
    const float *decay, *bias;
    float *queries, *keys, *values, *rates, *decays;
    int64_t tokens, key_heads, value_heads, key_size, value_size;
};

// x rounded to the pointer's type.
template <typename T>
static float rounded(float x, const T*) {
    T number;
    put(&number, x);
    return to_float(number);
}

static Vector rounded(Vector x, const float*) { return x; }

static Vector rounded(Vector x, const bfloat16*) {
    bfloat16 numbers[WIDTH];
    put(numbers, x);
    return load(numbers);
}

// Writes `scale` times the normalised vector, `copies` times.
template <typename T>
static void normalise(const T* from, int64_t size, float scale, int64_t copies, float* into) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += to_float(from[i]) * to_float(from[i]);
    const float factor = scale / std::sqrt(squares + ADDED);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) into[i] = to_float(from[i]) * factor;
    for (int64_t copy = 1; copy < copies; ++copy) std::copy_n(into, size, into + copy * size);
}

template <typename T>
static void prepare_token(const DeltaInputs& d, int64_t token) {
    const int64_t shared = d.value_heads / d.key_heads, keys = d.key_heads * d.key_size;
    const int64_t values = d.value_heads * d.value_size, first = token * d.value_heads;
    const T* from = (const T*)d.convolved + token * (2 * keys + values);
    const T* projected = (const T*)d.projected + 2 * first;
    const float scale = 1.0f / std::sqrt(float(d.key_size));
    for (int64_t head = 0; head < d.key_heads; ++head) {
        const int64_t place = (first + head * shared) * d.key_size;
        normalise(from + head * d.key_size, d.key_size, scale, shared, d.queries + place);
        normalise(from + keys + head * d.key_size, d.key_size, 1.0f, shared, d.keys + place);
        for (int64_t i = 0; i < shared; ++i) {
            const int64_t own = head * shared + i;
            const float rate = to_float(projected[2 * head * shared + i]);
            const float step = to_float(projected[(2 * head + 1) * shared + i]) + d.bias[own];
            d.rates[first + own] = rounded(1.0f / (1.0f + std::exp(-rate)), from);
            d.decays[first + own] = -d.decay[own] * (step > LINEAR_SOFTPLUS ? step : std::log1p(std::exp(step)));
        }
    }
#pragma omp simd
    for (int64_t i = 0; i < values; ++i) d.values[first * d.value_size + i] = to_float(from[2 * keys + i]);
}

template <typename T>
static void prepare_tokens(const DeltaInputs& d) {
    const int64_t numbers = d.tokens * (2 * d.key_heads * d.key_size + d.value_heads * d.value_size);
    team::for_each(d.tokens, numbers >= PARALLEL_FROM, [&](int64_t token) { prepare_token<T>(d, token); });
}

EXPORT void delta_inputs(int64_t type, const DeltaInputs* d) {
    if (type == FLOAT32)
        prepare_tokens<float>(*d);
    else
        prepare_tokens<bfloat16>(*d);
}

// y = weight (x / rms(x)) silu(gates), for rows of `size` elements. The norm and its product with the weight are rounded to
// the storage type. weight: (size,).
struct GatedNorm {
    const void *x, *gates, *weight;
    void* y;
    int64_t rows, size;
    float epsilon;
};

template <typename T>
static void norm_gated_row(const T* x, const T* gates, const T* weight, T* y, int64_t size, float epsilon) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += to_float(x[i]) * to_float(x[i]);
    const float factor = 1.0f / std::sqrt(squares / float(size) + epsilon);
    const auto gated = [&](auto number, auto share, auto gate) {
        return rounded(share * rounded(number * factor, x), x) * silu(gate);
    };
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) put(y + i, gated(load(x + i), load(weight + i), load(gates + i)));
    for (; i < size; ++i) put(y + i, gated(to_float(x[i]), to_float(weight[i]), to_float(gates[i])));
}

template <typename T>
static void norm_gated_rows(const GatedNorm& n) {
    team::for_each(n.rows, n.rows * n.size >= PARALLEL_FROM, [&](int64_t row) {
        const int64_t first = row * n.size;
        norm_gated_row((const T*)n.x + first, (const T*)n.gates + first, (const T*)n.weight, (T*)n.y + first, n.size,
                       n.epsilon);
    });
}

EXPORT void norm_gated(int64_t type, const GatedNorm* n) {
    if (type == FLOAT32)
        norm_gated_rows<float>(*n);
    else
        norm_gated_rows<bfloat16>(*n);
}
