// What a machine can do at best: bytes read from memory, and products in registers, a second.
//
// limits READ_BYTES THREADS prints JSON: {"bandwidth": bytes/s, "bfloat16": multiply-adds/s, "int8": multiply-adds/s}.
// Products of bfloat16 are those of the fastest instruction, which may be float32's; those of int8 may be the ones of
// integers of 16 bits, and are 0 without either.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static volatile long kept;  // what is computed must not be left out

template <class Work>
static double best(int times, Work work) {
    double least = 1e9;
    for (int i = 0; i < times; ++i) {
        const double start = seconds();
#pragma omp parallel
        work();
        const double took = seconds() - start;
        least = took < least ? took : least;
    }
    return least;
}

// A register of the processor, and how many sums hide the latency of a product and leave registers for what they add up.
#if defined(__AVX512F__)
constexpr size_t BYTES = 64;
constexpr int SUMS = 16;
#elif defined(__AVX__)
constexpr size_t BYTES = 32;
constexpr int SUMS = 12;
#else
constexpr size_t BYTES = 16;
constexpr int SUMS = 12;
#endif
typedef uint64_t Read __attribute__((vector_size(BYTES)));
typedef float Floats __attribute__((vector_size(BYTES)));

static double bandwidth(size_t bytes) {
    const size_t count = bytes / BYTES / 8 * 8;
    auto* data = (Read*)std::aligned_alloc(1 << 21, (count * BYTES + (1 << 21) - 1) >> 21 << 21);
    std::memset((void*)data, 1, count * BYTES);
    const double took = best(5, [=] {
        Read sums[8] = {};
#pragma omp for schedule(static)
        for (size_t i = 0; i < count; i += 8)
            for (size_t k = 0; k < 8; ++k) sums[k] ^= data[i + k];
        for (int k = 1; k < 8; ++k) sums[0] ^= sums[k];
        kept = long(sums[0][0] ^ sums[0][1]);
    });
    std::free(data);
    return double(count * BYTES) / took;
}

constexpr long ROUNDS = 1 << 20;

static void float32_products() {
    Floats sums[SUMS] = {}, a = Floats() + 1.0f;
    for (int k = 0; k < SUMS; ++k) sums[k] += float(k);
    for (long i = 0; i < ROUNDS; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < SUMS; ++k) sums[k] += a * a;
#if defined(__x86_64__)
        __asm__ volatile("" : "+v"(a));
#else
        __asm__ volatile("" : "+w"(a));
#endif
    }
    for (int k = 1; k < SUMS; ++k) sums[0] += sums[k];
    kept = long(sums[0][0]);
}

#if defined(__AVX512BF16__)
static void bfloat16_products() {
    __m512 sums[SUMS];
    for (int k = 0; k < SUMS; ++k) sums[k] = _mm512_set1_ps(float(k));  // different, or they are computed as one
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (long i = 0; i < ROUNDS; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < SUMS; ++k) sums[k] = _mm512_dpbf16_ps(sums[k], a, a);
        __asm__ volatile("" : "+v"(a));
    }
    for (int k = 1; k < SUMS; ++k) sums[0] = _mm512_add_ps(sums[0], sums[k]);
    kept = long(_mm512_reduce_add_ps(sums[0]));
}
#endif

#if defined(__AVX512VNNI__)
constexpr int SUMS_OF_BYTES = 12;

// Written out, because compilers move some of the sums to memory or to other registers.
static void int8_products() {
    __m512i sums[SUMS_OF_BYTES] = {}, a = _mm512_set1_epi8(1);
    for (long i = 0; i < ROUNDS / 16; ++i)
        __asm__ volatile(
            ".rept 16\n"
            "vpdpbusd %12, %12, %0\n vpdpbusd %12, %12, %1\n vpdpbusd %12, %12, %2\n vpdpbusd %12, %12, %3\n"
            "vpdpbusd %12, %12, %4\n vpdpbusd %12, %12, %5\n vpdpbusd %12, %12, %6\n vpdpbusd %12, %12, %7\n"
            "vpdpbusd %12, %12, %8\n vpdpbusd %12, %12, %9\n vpdpbusd %12, %12, %10\n vpdpbusd %12, %12, %11\n"
            ".endr"
            : "+v"(sums[0]), "+v"(sums[1]), "+v"(sums[2]), "+v"(sums[3]), "+v"(sums[4]), "+v"(sums[5]), "+v"(sums[6]),
              "+v"(sums[7]), "+v"(sums[8]), "+v"(sums[9]), "+v"(sums[10]), "+v"(sums[11])
            : "v"(a));
    for (int k = 1; k < SUMS_OF_BYTES; ++k) sums[0] = _mm512_add_epi32(sums[0], sums[k]);
    kept = _mm512_reduce_add_epi32(sums[0]);
}
#endif

#if defined(__AVX2__)
constexpr int SUMS_OF_PAIRS = 4;

// Written out, because compilers move some of the sums to memory.
static void int16_products() {
    __m256i sums[SUMS_OF_PAIRS] = {}, a = _mm256_set1_epi16(1), products;
    for (long i = 0; i < ROUNDS / 4; ++i)
        __asm__ volatile(
            ".rept 4\n"
            "vpmaddwd %5, %5, %4\n vpaddd %4, %0, %0\n"
            "vpmaddwd %5, %5, %4\n vpaddd %4, %1, %1\n"
            "vpmaddwd %5, %5, %4\n vpaddd %4, %2, %2\n"
            "vpmaddwd %5, %5, %4\n vpaddd %4, %3, %3\n"
            ".endr"
            : "+x"(sums[0]), "+x"(sums[1]), "+x"(sums[2]), "+x"(sums[3]), "=&x"(products)
            : "x"(a));
    for (int k = 1; k < SUMS_OF_PAIRS; ++k) sums[0] = _mm256_add_epi32(sums[0], sums[k]);
    kept = _mm256_extract_epi32(sums[0], 0);
}
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
template <bool BYTES>
static void tile_products() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(6);
    _tile_zero(7);
    for (long i = 0; i < ROUNDS / 16; ++i) {
        if (BYTES) {
            _tile_dpbusd(0, 6, 7);
            _tile_dpbusd(1, 6, 7);
            _tile_dpbusd(2, 6, 7);
            _tile_dpbusd(3, 6, 7);
        } else {
            _tile_dpbf16ps(0, 6, 7);
            _tile_dpbf16ps(1, 6, 7);
            _tile_dpbf16ps(2, 6, 7);
            _tile_dpbf16ps(3, 6, 7);
        }
    }
    _tile_release();
}

static bool has_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

int main(int, char** words) {
    omp_set_num_threads(std::atoi(words[2]));
    const double threads = omp_get_max_threads();
    double bfloat16 = threads * ROUNDS * SUMS * (BYTES / sizeof(float)) / best(5, float32_products), int8 = 0;
#if defined(__AVX512BF16__)
    bfloat16 = std::max(bfloat16, threads * ROUNDS * SUMS * 32 / best(5, bfloat16_products));
#endif
#if defined(__AVX2__)
    int8 = threads * ROUNDS * SUMS_OF_PAIRS * 16 / best(5, int16_products);
#endif
#if defined(__AVX512VNNI__)
    int8 = threads * ROUNDS * SUMS_OF_BYTES * 64 / best(5, int8_products);
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (has_tiles()) {
        const double tiles = threads * (ROUNDS / 16) * 4 * 16 * 16;
        bfloat16 = std::max(bfloat16, tiles * 32 / best(5, tile_products<false>));
        int8 = tiles * 64 / best(5, tile_products<true>);
    }
#endif
    std::printf("{\"bandwidth\": %.4g, \"bfloat16\": %.4g, \"int8\": %.4g}\n", bandwidth(std::atoll(words[1])), bfloat16,
                int8);
}
