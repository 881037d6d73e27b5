// The short depthwise convolution of linear attention over the tokens of a sequence, with its activation.

#include "team.h"
#include "vectors.h"

// y (rows, tokens, channels) = silu(sum over i of window[row, token + i, channel] taps[i, channel]), for a window (rows,
// tokens + size - 1, channels) and taps (size, channels). Sums are rounded to type T before the activation.
template <typename T>
static void convolve_rows(const T* window, const float* taps, T* y, int64_t rows, int64_t tokens, int64_t channels,
                          int64_t size) {
    team::for_each(rows * tokens, rows * tokens * channels >= PARALLEL_FROM, [=](int64_t i) {
        const T* from = window + (i / tokens * (tokens + size - 1) + i % tokens) * channels;
        T* into = y + i * channels;
        int64_t c = 0;
        for (; c + WIDTH <= channels; c += WIDTH) {
            Vector sum = load(from + c) * load(taps + c);
            for (int64_t tap = 1; tap < size; ++tap) sum += load(from + tap * channels + c) * load(taps + tap * channels + c);
            put(into + c, sum);
            put(into + c, silu(load(into + c)));
        }
        for (; c < channels; ++c) {
            float sum = 0.0f;
            for (int64_t tap = 0; tap < size; ++tap) sum += to_float(from[tap * channels + c]) * taps[tap * channels + c];
            put(into + c, sum);
            const float rounded = to_float(into[c]);
            put(into + c, rounded / (1.0f + std::exp(-rounded)));
        }
    });
}

EXPORT void convolve(int64_t type, const void* window, const float* taps, void* y, int64_t rows, int64_t tokens,
                     int64_t channels, int64_t size) {
    if (type == FLOAT32)
        convolve_rows((const float*)window, taps, (float*)y, rows, tokens, channels, size);
    else
        convolve_rows((const bfloat16*)window, taps, (bfloat16*)y, rows, tokens, channels, size);
}
