// Recorded kernel calls, which are replayed without Python.

#pragma once

#include "linears.h"

#include <utility>

struct Adapters;
struct HeadProducts;
struct Norm;
struct Mixture;
struct Routing;

namespace attention {
struct Paged;
}

EXPORT void rms_norm(int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, float);
EXPORT void add(int64_t, const void*, const void*, void*, int64_t, float);
EXPORT void add_rms_norm(int64_t, const void*, const void*, const void*, void*, void*, int64_t, int64_t, float, float);
EXPORT void rotate(int64_t, void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
EXPORT void rotation(int64_t, const int64_t*, const float*, void*, void*, int64_t, int64_t, float, int64_t);
EXPORT void lookup(int64_t, const void*, const int64_t*, void*, int64_t, int64_t, int64_t, int64_t, float);
EXPORT void gate(int64_t, int64_t, int64_t, const void*, void*, int64_t, int64_t);
EXPORT void write_slots(const char*, int64_t, const int64_t*, int64_t, int64_t, char*);
EXPORT void quantize_slots(int64_t, int64_t, const void*, int64_t, const int64_t*, int64_t, int64_t, void*, float);
EXPORT void paged_attention(int64_t, int64_t, const attention::Paged*);
EXPORT void add_adapters(int64_t, const Adapters*);
EXPORT void linear_float32(const FloatLinear*);
EXPORT void linear_expanded(int64_t, const ExpandedLinear*);
EXPORT void linear_screened(int64_t, const ScreenedLinear*);
EXPORT void norm(int64_t, int64_t, int64_t, const Norm*);
EXPORT void activate(int64_t, int64_t, const void*, void*, int64_t);
EXPORT void sum_ranks(int64_t, void*, int64_t, const void*, void*, int64_t, int64_t);
EXPORT void widen(const void*, void*, int64_t);
EXPORT void gate_pairs(int64_t, const void*, void*, int64_t, int64_t, float, float);
EXPORT void scale_rows_by_gate(int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t);
EXPORT void route(const Routing*);
EXPORT void mix_experts(int64_t, const Mixture*);
EXPORT void project_heads(int64_t, const HeadProducts*);
EXPORT void copy_heads(const char*, char*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
#if defined(__AVX512BW__)
EXPORT void linear_bfloat16(const Linear*);
EXPORT void linear_int4(const Linear*);
#if defined(__AVX512VNNI__)
EXPORT void linear_int8(int64_t, const IntegerLinear*);
#endif
#endif

// The kernels in the order of `structures.RECORDED`.
enum Kernel : int64_t {
    RMS_NORM,
    ADD,
    ADD_RMS_NORM,
    ROTATE,
    GATE,
    WRITE_SLOTS,
    QUANTIZE_SLOTS,
    PAGED_ATTENTION,
    ADD_ADAPTERS,
    LINEAR_BFLOAT16,
    LINEAR_INT4,
    LINEAR_INT8,
    LINEAR_FLOAT32,
    NORM,
    ACTIVATE,
    SUM_RANKS,
    WIDEN,
    GATE_PAIRS,
    SCALE_ROWS_BY_GATE,
    ROUTE,
    MIX_EXPERTS,
    ROTATION,
    LOOKUP,
    LINEAR_EXPANDED,
    PROJECT_HEADS,
    COPY_HEADS,
    LINEAR_SCREENED,
};

// The arguments are stored as their bytes, padded to 8.
struct Call {
    int64_t kernel;
    int64_t arguments[10];
};

template <typename T>
static inline T value_of(const int64_t& argument) {
    T value;
    std::memcpy(&value, &argument, sizeof value);
    return value;
}

template <typename... T, size_t... I>
static inline void run(void (*kernel)(T...), const int64_t* arguments, std::index_sequence<I...>) {
    kernel(value_of<T>(arguments[I])...);
}

// Calls the kernel with these arguments.
template <typename... T>
static inline void run(void (*kernel)(T...), const int64_t* arguments) {
    static_assert(sizeof...(T) <= sizeof(Call::arguments) / sizeof(int64_t), "a call holds all arguments");
    run(kernel, arguments, std::index_sequence_for<T...>());
}

// The place where a recorded call stores its number of rows, or of elements, `each` per row. `of_wanted`: the call computes
// only the rows that give logits.
struct RowCount {
    int64_t* place;
    int64_t each, of_wanted;
};

// Sets the number of rows that recorded calls compute when they are replayed. `counts` has one entry per call.
EXPORT void set_rows(const RowCount* counts, int64_t count, int64_t rows, int64_t wanted);

// Replays recorded calls, in order.
EXPORT void replay(const Call* calls, int64_t count);
