// Arguments of the kernels of linear layers. For weight layouts see matmul.cpp, integer.cpp and float32.cpp.

#pragma once

#include "common.h"

// y (rows, outputs) = x (rows, inputs) W^T + bias, with bfloat16 or 4-bit weights. `scales`: (outputs / 32, inputs / group,
// 32). `prequant`: factors of the inputs, or null; `scaled`: memory for the scaled inputs, unused with AMX.
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

// y (rows, outputs) = (round(x prequant / activation_scale) W^T) scales + bias. `codes`: memory for rows x inputs bytes,
// unused with AMX.
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

// Weight formats of expanded.cpp, in the order of `structures.FORMATS`.
enum Format : int64_t { OF_BFLOAT16, OF_FLOAT16, OF_INT8, OF_E4M3, OF_INT4, OF_E2M1 };

// How expanded.cpp rounds inputs, in the order of `structures.INPUTS`. AS_THEY_ARE: not at all. E4M3, INT8: after division by
// `activation_scale`. E4M3_BY_ROW: after division by a scale of each row, at least `activation_scale`, which multiplies the
// row's sums. NVFP4: after division by `activation_scale`, to E2M1 times an E4M3 scale for each 16 inputs. INT8_BY_GROUP: with
// a scale for each group of a row, only for INT4 weights.
enum Inputs : int64_t { AS_THEY_ARE, E4M3, INT8, E4M3_BY_ROW, NVFP4, INT8_BY_GROUP };

// y (rows, outputs) = factor round(x prequant) W^T + bias. `scales`: (outputs / 32, inputs / group, 32), or null; E2M1 has
// groups of 16. `prequant`: (inputs,), or null. x and y are float32 or bfloat16; `inputs` is a multiple of 16.
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

// y (rows, outputs) = x (rows, inputs) W^T + bias with 16-bit weights, of which only the largest elements of each row must be
// exact: `most` of them, 0 for all. If a row's factor is not 0, only the largest element x factor + noise must be exact (the
// row's key and the token determine the noise); if its distance is not 0, those up to this distance below the largest.
// `first`: the token of the first output. `codes`, `scales` and `errors`, from `screen`, show which tiles may contain these
// elements. `pause`: see `linear_screened`; `by_products`: whether `linear_bfloat16` computes exact outputs, else
// `linear_expanded` with `format`. `farthest`: all outputs are computed exactly if a likely one is farther from 0.
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
