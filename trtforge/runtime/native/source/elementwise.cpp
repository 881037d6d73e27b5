// RMS norm, rotary embedding, embedding lookup, and activations with or without a gate. Each makes one pass over its rows.

#include "team.h"
#include "vectors.h"

template <typename T>
static void rms_norm_row(const T* x, const T* weight, T* y, int64_t size, float epsilon) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += to_float(x[i]) * to_float(x[i]);
    const float factor = 1.0f / std::sqrt(sum / float(size) + epsilon);
    for (int64_t i = 0; i < size; ++i) put(y + i, to_float(x[i]) * factor * to_float(weight[i]));
}

template <typename T>
static void rms_norm_rows(const T* x, const T* weight, T* y, int64_t outer, int64_t stride, int64_t into,
                          int64_t inner, int64_t size, float epsilon) {
    team::for_each(outer, outer * inner * size >= PARALLEL_FROM, [=](int64_t row) {
        for (int64_t part = 0; part < inner; ++part)
            rms_norm_row(x + row * stride + part * size, weight, y + row * into + part * size, size, epsilon);
    });
}

// y = x / rms(x) * weight over the last dimension. x and y: (outer, inner, size), whose first dimension has stride `stride`
// in x and `into` in y; they may be the same.
EXPORT void rms_norm(int64_t type, const void* x, const void* weight, void* y, int64_t outer, int64_t stride,
                     int64_t into, int64_t inner, int64_t size, float epsilon) {
    if (type == FLOAT32)
        rms_norm_rows((const float*)x, (const float*)weight, (float*)y, outer, stride, into, inner, size, epsilon);
    else
        rms_norm_rows((const bfloat16*)x, (const bfloat16*)weight, (bfloat16*)y, outer, stride, into, inner, size,
                      epsilon);
}

template <typename T>
static void add_scaled(const T* x, const T* change, T* sum, int64_t count, float scale) {
    constexpr int64_t block = 4096;
    team::for_each((count + block - 1) / block, count >= PARALLEL_FROM, [=](int64_t part) {
        const int64_t end = std::min(count, (part + 1) * block);
        for (int64_t i = part * block; i < end; ++i) put(sum + i, to_float(x[i]) + to_float(change[i]) * scale);
    });
}

// sum = x + scale * change, for `count` elements.
EXPORT void add(int64_t type, const void* x, const void* change, void* sum, int64_t count, float scale) {
    if (type == FLOAT32)
        add_scaled((const float*)x, (const float*)change, (float*)sum, count, scale);
    else
        add_scaled((const bfloat16*)x, (const bfloat16*)change, (bfloat16*)sum, count, scale);
}

template <typename T>
static void add_rms_norm_rows(const T* x, const T* change, const T* weight, T* sum, T* y, int64_t rows, int64_t size,
                              float scale, float epsilon) {
    team::for_each(rows, rows * size >= PARALLEL_FROM, [=](int64_t row) {
        const int64_t at = row * size;
        for (int64_t i = at; i < at + size; ++i) put(sum + i, to_float(x[i]) + to_float(change[i]) * scale);
        rms_norm_row(sum + at, weight, y + at, size, epsilon);
    });
}

// sum = x + scale * change, and y = RMS norm of the sum. All are (rows, size), contiguous.
EXPORT void add_rms_norm(int64_t type, const void* x, const void* change, const void* weight, void* sum, void* y,
                         int64_t rows, int64_t size, float scale, float epsilon) {
    if (type == FLOAT32)
        add_rms_norm_rows((const float*)x, (const float*)change, (const float*)weight, (float*)sum, (float*)y, rows,
                          size, scale, epsilon);
    else
        add_rms_norm_rows((const bfloat16*)x, (const bfloat16*)change, (const bfloat16*)weight, (bfloat16*)sum,
                          (bfloat16*)y, rows, size, scale, epsilon);
}

template <typename T>
static void rotate_head(T* head, const T* cos, const T* sin, int64_t dim, bool interleaved) {
    const int64_t half = dim / 2;
    for (int64_t pair = 0; pair < half; ++pair) {
        const int64_t i = interleaved ? 2 * pair : pair, j = interleaved ? i + 1 : i + half;
        const float first = to_float(head[i]), second = to_float(head[j]);
        put(head + i, first * to_float(cos[i]) + second * to_float(sin[i]));
        put(head + j, second * to_float(cos[j]) + first * to_float(sin[j]));
    }
}

template <typename T>
static void rotate_rows(T* x, const T* cos, const T* sin, int64_t tokens, int64_t stride, int64_t heads, int64_t size,
                        int64_t dim, bool interleaved) {
    team::for_each(tokens, tokens * heads * dim >= PARALLEL_FROM, [=](int64_t token) {
        for (int64_t head = 0; head < heads; ++head)
            rotate_head(x + token * stride + head * size, cos + token * dim, sin + token * dim, dim, interleaved);
    });
}

// Rotates the first `dim` of `size` elements of every head in place. x: (tokens, heads, size), with token stride `stride`;
// cos and sin: (tokens, dim); the sine for a pair's first element is negated.
EXPORT void rotate(int64_t type, void* x, const void* cos, const void* sin, int64_t tokens, int64_t stride,
                   int64_t heads, int64_t size, int64_t dim, int64_t interleaved) {
    if (type == FLOAT32)
        rotate_rows((float*)x, (const float*)cos, (const float*)sin, tokens, stride, heads, size, dim, interleaved);
    else
        rotate_rows((bfloat16*)x, (const bfloat16*)cos, (const bfloat16*)sin, tokens, stride, heads, size, dim,
                    interleaved);
}

template <typename T>
static void rotation_rows(const int64_t* positions, const float* frequencies, T* cos, T* sin, int64_t tokens,
                          int64_t half, float factor, bool interleaved) {
    team::for_each(tokens, tokens * half >= PARALLEL_FROM / 8, [=](int64_t token) {
        T *own_cos = cos + token * 2 * half, *own_sin = sin + token * 2 * half;
        for (int64_t pair = 0; pair < half; ++pair) {
            const int64_t i = interleaved ? 2 * pair : pair, j = interleaved ? i + 1 : i + half;
            const float angle = float(positions[token]) * frequencies[pair];
            const float c = std::cos(angle) * factor, s = std::sin(angle) * factor;
            put(own_cos + i, c);
            put(own_cos + j, c);
            put(own_sin + i, -s);
            put(own_sin + j, s);
        }
    });
}

// cos and sin (tokens, 2 x half) for `rotate`: of the angles positions times frequencies (half,), multiplied by `factor`.
EXPORT void rotation(int64_t type, const int64_t* positions, const float* frequencies, void* cos, void* sin,
                     int64_t tokens, int64_t half, float factor, int64_t interleaved) {
    if (type == FLOAT32)
        rotation_rows(positions, frequencies, (float*)cos, (float*)sin, tokens, half, factor, interleaved);
    else
        rotation_rows(positions, frequencies, (bfloat16*)cos, (bfloat16*)sin, tokens, half, factor, interleaved);
}

template <typename T>
static void lookup_rows(const T* table, const int64_t* rows, T* out, int64_t count, int64_t size, int64_t first,
                        int64_t known, float scale) {
    team::for_each(count, count * size >= PARALLEL_FROM, [=](int64_t i) {
        const int64_t row = rows[i] - first;
        T* into = out + i * size;
        if (row < 0 || row >= known) {
            std::memset(into, 0, size_t(size) * sizeof(T));
            return;
        }
        for (int64_t at = 0; at < size; ++at) put(into + at, to_float(table[row * size + at]) * scale);
    });
}

// out (count, size) = `scale` times rows of a table (known, size), whose first row has number `first`; other rows give zeros.
EXPORT void lookup(int64_t type, const void* table, const int64_t* rows, void* out, int64_t count, int64_t size,
                   int64_t first, int64_t known, float scale) {
    if (type == FLOAT32)
        lookup_rows((const float*)table, rows, (float*)out, count, size, first, known, scale);
    else
        lookup_rows((const bfloat16*)table, rows, (bfloat16*)out, count, size, first, known, scale);
}

struct Silu {
    template <typename V>
    static V of(V x) {
        return silu(x);
    }
};

// Tanh approximation of GELU: 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)).
struct GeluTanh {
    template <typename V>
    static V of(V x) {
        const V u = 0.7978845608f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exponential(-2.0f * u));
    }
};

// 0.5 x (1 + erf(x / sqrt(2))) = max(x, 0) - a T(a), where a = |x| and T(a) = 0.5 erfc(a / sqrt(2)). As in erfcc (Press et
// al., Numerical Recipes, 6.2), a polynomial approximates the logarithm of T, here without a division: log2(T) is nearly a
// parabola, so a minimax polynomial of degree 7, fitted up to a = 10, has an error below 2e-7 in a T(a). T(10) < 1e-23.
struct Gelu {
    template <typename V>
    static V of(V x) {
        const V a = smaller(10.0f, absolute(x));
        V q = a * -1.28508918e-6f + 5.04843192e-5f;
        q = q * a - 8.48785818e-4f;
        q = q * a + 8.23710766e-3f;
        q = q * a - 5.35362475e-2f;
        q = q * a - 4.58760411e-1f;
        q = q * a - 1.15117514f;
        q = q * a - 1.0f;
        return larger(0.0f, x) - a * exponential_of_two(q);
    }
};

struct Relu {
    template <typename V>
    static V of(V x) {
        return x < 0.0f ? V() : x;
    }
};

struct SquaredRelu {
    template <typename V>
    static V of(V x) {
        return x < 0.0f ? V() : x * x;
    }
};

template <typename Activation, typename T>
static void activate_all(const T* x, T* y, int64_t count) {
    constexpr int64_t block = 4096;
    team::for_each((count + block - 1) / block, count >= PARALLEL_FROM, [=](int64_t part) {
        const int64_t end = std::min(count, (part + 1) * block);
        int64_t i = part * block;
        for (; i + WIDTH <= end; i += WIDTH) put(y + i, Activation::of(load(x + i)));
        for (; i < end; ++i) put(y + i, Activation::of(to_float(x[i])));
    });
}

template <typename Activation, typename T>
static void gate_rows(const T* x, T* y, int64_t rows, int64_t size, int64_t activated) {
    team::for_each(rows, rows * size >= PARALLEL_FROM, [=](int64_t row) {
        const T* act = x + row * 2 * size + (activated ? size : 0);
        const T* plain = x + row * 2 * size + (activated ? 0 : size);
        T* out = y + row * size;
        int64_t i = 0;
        for (; i + WIDTH <= size; i += WIDTH) put(out + i, Activation::of(load(act + i)) * load(plain + i));
        for (; i < size; ++i) put(out + i, Activation::of(to_float(act[i])) * to_float(plain[i]));
    });
}

// Calls compute(A()) with the activation A whose number in `bindings.ACTIVATIONS` is `activation`.
template <typename Compute>
static void with_activation(int64_t activation, Compute compute) {
    switch (activation) {
        case 0: return compute(Silu());
        case 1: return compute(GeluTanh());
        case 2: return compute(Gelu());
        case 3: return compute(Relu());
        case 4: return compute(SquaredRelu());
    }
}

// y = activation(one half of x) * other half. x: (rows, 2 x size); `activated`: index of the activated half.
EXPORT void gate(int64_t type, int64_t activation, int64_t activated, const void* x, void* y, int64_t rows,
                 int64_t size) {
    with_activation(activation, [&](auto kind) {
        if (type == FLOAT32)
            gate_rows<decltype(kind)>((const float*)x, (float*)y, rows, size, activated);
        else
            gate_rows<decltype(kind)>((const bfloat16*)x, (bfloat16*)y, rows, size, activated);
    });
}

// y = activation(x), for `count` elements.
EXPORT void activate(int64_t type, int64_t activation, const void* x, void* y, int64_t count) {
    with_activation(activation, [&](auto kind) {
        if (type == FLOAT32)
            activate_all<decltype(kind)>((const float*)x, (float*)y, count);
        else
            activate_all<decltype(kind)>((const bfloat16*)x, (bfloat16*)y, count);
    });
}

template <typename T>
static void gate_pair_rows(const T* x, T* y, int64_t rows, int64_t size, float limit, float alpha) {
    team::for_each(rows, rows * size >= PARALLEL_FROM, [=](int64_t row) {
        const T* pairs = x + row * 2 * size;
        for (int64_t i = 0; i < size; ++i) {
            const float gate = smaller(limit, to_float(pairs[2 * i]));
            const float up = larger(-limit, smaller(limit, to_float(pairs[2 * i + 1])));
            put(y + row * size + i, (up + 1.0f) * gate / (1.0f + exponential(-alpha * gate)));
        }
    });
}

// y = (up + 1) gate sigmoid(alpha gate), for x (rows, 2 x size) with gate and up interleaved. First gate is clamped to at most
// `limit`, and up to [-limit, limit].
EXPORT void gate_pairs(int64_t type, const void* x, void* y, int64_t rows, int64_t size, float limit, float alpha) {
    if (type == FLOAT32)
        gate_pair_rows((const float*)x, (float*)y, rows, size, limit, alpha);
    else
        gate_pair_rows((const bfloat16*)x, (bfloat16*)y, rows, size, limit, alpha);
}

template <typename T>
static void scale_rows(const T* x, const T* weight, T* y, int64_t rows, int64_t inputs, int64_t size) {
    team::for_each(rows, rows * (inputs + size) >= PARALLEL_FROM, [=](int64_t row) {
        float gate = 0.0f;
#pragma omp simd reduction(+ : gate)
        for (int64_t i = 0; i < inputs; ++i) gate += to_float(x[row * inputs + i]) * to_float(weight[i]);
        const float factor = 1.0f / (1.0f + exponential(-gate));
        for (int64_t i = row * size; i < (row + 1) * size; ++i) put(y + i, to_float(y[i]) * factor);
    });
}

// y (rows, size) *= sigmoid(x (rows, inputs) times weight (inputs,)).
EXPORT void scale_rows_by_gate(int64_t type, const void* x, const void* weight, void* y, int64_t rows, int64_t inputs,
                               int64_t size) {
    if (type == FLOAT32)
        scale_rows((const float*)x, (const float*)weight, (float*)y, rows, inputs, size);
    else
        scale_rows((const bfloat16*)x, (const bfloat16*)weight, (bfloat16*)y, rows, inputs, size);
}

// y = x in float32, for `count` bfloat16 elements.
EXPORT void widen(const void* x, void* y, int64_t count) {
    constexpr int64_t block = 4096;
    team::for_each((count + block - 1) / block, count >= PARALLEL_FROM, [=](int64_t part) {
        const int64_t end = std::min(count, (part + 1) * block);
        for (int64_t i = part * block; i < end; ++i) ((float*)y)[i] = to_float(((const bfloat16*)x)[i]);
    });
}
