// Runs recorded kernel calls again, in order: a step's thousands of arguments are converted once.

#include "common.h"

#include <utility>

struct Adapters;
struct FloatLinear;
struct IntegerLinear;
struct Linear;
struct Norm;
struct Paged;

extern "C" {
void rms_norm(int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, float);
void add(int64_t, const void*, const void*, void*, int64_t, float);
void add_rms_norm(int64_t, const void*, const void*, const void*, void*, void*, int64_t, int64_t, float, float);
void rotate(int64_t, void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void gate(int64_t, int64_t, int64_t, const void*, void*, int64_t, int64_t);
void write_slots(const char*, int64_t, const int64_t*, int64_t, int64_t, char*);
void quantize_slots(int64_t, int64_t, const void*, int64_t, const int64_t*, int64_t, int64_t, void*, float);
void paged_attention(int64_t, int64_t, const Paged*);
void add_adapters(int64_t, const Adapters*);
void linear_float32(const FloatLinear*);
void norm(int64_t, int64_t, int64_t, const Norm*);
void activate(int64_t, int64_t, const void*, void*, int64_t);
void sum_ranks(int64_t, void*, int64_t, const void*, void*, int64_t, int64_t);
#if defined(__AVX512BW__)
void linear_bfloat16(const Linear*);
void linear_int4(const Linear*);
#if defined(__AVX512VNNI__)
void linear_int8(int64_t, const IntegerLinear*);
#endif
#endif
}

// `kernel`: as `structures.RECORDED` numbers them. An argument is its bytes.
struct Call {
    int64_t kernel;
    int64_t arguments[10];
};

template <typename T>
static T value_of(const int64_t& argument) {
    T value;
    std::memcpy(&value, &argument, sizeof value);
    return value;
}

template <typename... T, size_t... I>
static void run(void (*kernel)(T...), const int64_t* arguments, std::index_sequence<I...>) {
    kernel(value_of<T>(arguments[I])...);
}

template <typename... T>
static void run(void (*kernel)(T...), const int64_t* arguments) {
    static_assert(sizeof...(T) <= sizeof(Call::arguments) / sizeof(int64_t), "a call holds all arguments");
    run(kernel, arguments, std::index_sequence_for<T...>());
}

EXPORT void replay(const Call* calls, int64_t count) {
    for (const Call* call = calls; call < calls + count; ++call) {
        const int64_t* given = call->arguments;
        switch (call->kernel) {
            case 0: run(rms_norm, given); break;
            case 1: run(add, given); break;
            case 2: run(add_rms_norm, given); break;
            case 3: run(rotate, given); break;
            case 4: run(gate, given); break;
            case 5: run(write_slots, given); break;
            case 6: run(quantize_slots, given); break;
            case 7: run(paged_attention, given); break;
            case 8: run(add_adapters, given); break;
            case 12: run(linear_float32, given); break;
            case 13: run(norm, given); break;
            case 14: run(activate, given); break;
            case 15: run(sum_ranks, given); break;
#if defined(__AVX512BW__)
            case 9: run(linear_bfloat16, given); break;
            case 10: run(linear_int4, given); break;
#if defined(__AVX512VNNI__)
            case 11: run(linear_int8, given); break;
#endif
#endif
        }
    }
}
