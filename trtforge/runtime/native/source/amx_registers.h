// Tile registers of a processor with AMX-BF16 and AMX-INT8, by the compiler's intrinsics, whose register numbers must be
// literals.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tile {

// Whether Linux grants this process the tile registers, which it must request (Documentation/arch/x86/xstate.rst).
static bool granted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return yes;
}

// The intrinsics do not tell the compiler which memory they read, so this keeps it from moving earlier stores behind them.
static inline void stores_are_done() { __asm__ volatile("" ::: "memory"); }

static inline void configure(const void* config) {
    __asm__ volatile("" ::"r"(config) : "memory");
    _tile_loadconfig(config);
}

static inline void release() { _tile_release(); }

}  // namespace tile

#define TILE_ZERO(number) _tile_zero(number)
#define TILE_LOAD(number, from, stride) _tile_loadd(number, from, stride)
#define TILE_STORE(number, into, stride) _tile_stored(number, into, stride)
#define TILE_MULTIPLY(X, c, a, b)            \
    do { /* c += a b */                       \
        if constexpr (std::is_same_v<X, int8_t>) \
            _tile_dpbsud(c, a, b);            \
        else if constexpr (sizeof(X) == 1)    \
            _tile_dpbusd(c, a, b);            \
        else                                  \
            _tile_dpbf16ps(c, a, b);          \
    } while (false)
