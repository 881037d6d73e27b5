// Linear layers as their kernels take them. Layouts of the weights: matmul.cpp, integer.cpp and float32.cpp.

#pragma once

#include "common.h"

// y (rows, outputs) = x (rows, inputs) W^T + bias, of weights in bfloat16 or in 4 bits. `scales`: (outputs / 32, inputs /
// group, 32). `prequant`: factors of the inputs, or null; `scaled`: memory for the rows that they multiply, unused with tile registers.
struct Linear {
    const bfloat16* x;
    const void* weight;
    const float* scales;
    const float* bias;
    bfloat16* y;
    const bfloat16* prequant;
    bfloat16* scaled;
    int64_t rows, inputs, outputs, group;
};

// y (rows, outputs) = (round(x prequant / activation_scale) W^T) scales + bias. `codes`: memory for rows x inputs
// bytes, unused with tile registers.
struct IntegerLinear {
    const void* x;
    const int8_t* weight;
    const int32_t* offsets;
    const float* prequant;
    const float* scales;
    const float* bias;
    uint8_t* codes;
    void* y;
    int64_t rows, inputs, outputs;
    float activation_scale;
};

// y (rows, outputs) = x (rows, inputs) W^T + bias, which may be null.
struct FloatLinear {
    const float* x;
    const float* weight;
    const float* bias;
    float* y;
    int64_t rows, inputs, outputs;
};

// How `expanded.cpp` stores weights, as `structures.FORMATS` numbers them.
enum Format : int64_t { OF_BFLOAT16, OF_FLOAT16, OF_INT8, OF_E4M3, OF_INT4, OF_E2M1 };

// How it rounds inputs, as `structures.INPUTS` numbers them: not at all, after a division by `activation_scale`, or after
// one by a scale of each row, at least `activation_scale`, which multiplies the row's sums. NVFP4: after a division by
// `activation_scale` to E2M1 times an E4M3 scale of each 16 inputs. INT8_BY_GROUP: of INT4 weights, by a scale of each group
// of a row.
enum Inputs : int64_t { AS_THEY_ARE, E4M3, INT8, E4M3_BY_ROW, NVFP4, INT8_BY_GROUP };

// y (rows, outputs) = factor round(x prequant) W^T + bias. `scales`: (outputs / 32, inputs / group, 32), or null; E2M1
// has them for groups of 16. `prequant`: (inputs,), or null. x and y are in float32 or bfloat16; inputs are multiples of 16.
struct ExpandedLinear {
    const void* x;
    const void* weight;
    const float* scales;
    const float* bias;
    const float* prequant;
    void* y;
    int64_t rows, inputs, outputs, group, format, kind;
    float factor, activation_scale;
};

// y (rows, outputs) = x (rows, inputs) W^T + bias of weights in 16 bits, of which only the largest numbers of each row
// need be right: `most` of them, 0 for all. Of a row whose factor is not 0 only the largest sum of a number, times the
// factor, and the noise that the row's key gives its token must be; of one whose distance is not 0 those that are at most so
// far below the largest one; `first`: the token of the first output. What `screen`
// made of the weights says which tiles may have them. `pause`: see `linear_screened`; `by_products`: whether
// `linear_bfloat16` takes the weights, else `linear_expanded` with `format`. `farthest`: all numbers are computed where a
// likely one is farther from 0.
struct ScreenedLinear {
    const void* x;
    const void* weight;
    const float* bias;
    const int8_t* codes;
    const float* scales;
    const float* errors;
    void* y;
    const int64_t* most;
    int64_t* pause;
    const uint64_t* keys;
    const float* factors;
    const float* distances;
    int64_t rows, inputs, outputs, format, by_products, first;
    float farthest;
};
