// Measures which way to multiply is faster on this processor.

#include "products.h"

#if defined(HAS_PRODUCTS)

#include <chrono>

#if defined(__AVX512BF16__)

// The fastest of several times, in seconds, of products of ROWS rows of zeros.
template <class Way>
static double seconds() {
    constexpr int64_t INPUTS = 512;
    alignas(64) static const typename Way::Input x[ROWS * INPUTS] = {};
    alignas(64) static const bfloat16 w[INPUTS * TILE] = {};
    alignas(64) float sums[ROWS * TILE];
    double best = 1.0;
    for (int run = 0; run < 8; ++run) {
        const auto start = std::chrono::steady_clock::now();
        sums_of<Way, ROWS>(x, INPUTS, w, INPUTS, Ahead(w, 0, 0, 0, 1), sums);
        asm volatile("" : : "r"(sums) : "memory");
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

#endif

// Measured once, because the rate of VDPBF16PS differs a lot between processors with and without AMX.
bool multiply_adds_are_faster() {
#if defined(TRTFORGE_DOTS)  // for tests
    return false;
#elif defined(TRTFORGE_MULTIPLY_ADDS) || !defined(__AVX512BF16__)
    return true;
#else
    static const bool faster = seconds<MultiplyAdds>() < seconds<Dots>();
    return faster;
#endif
}

#endif
