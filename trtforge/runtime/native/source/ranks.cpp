// All-reduce (sum) over the tensor-parallel ranks of one machine, through shared memory.
//
// Each rank copies a part of its values to its own buffer, increments its part count, waits until the other ranks have counted
// this part, and adds up all buffers in rank order, so that all ranks get identical sums. Each rank alternates between two
// buffers: when it writes a part, all others have counted the previous part, so they have finished reading the one before.

#include "team.h"
#include "vectors.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

constexpr int64_t PART = 1 << 17;  // bytes
constexpr int64_t SLICE = 4096;    // elements that a thread adds up at once
constexpr int SPINS = 1000;

struct alignas(64) Flag {
    std::atomic<uint32_t> set;
};

// Number of parts that a rank has written, modulo 2^32, and number of ranks that sleep until there are more.
struct alignas(64) Counted {
    std::atomic<uint32_t> parts, sleepers;
};

// Size of the memory that the ranks of one pipeline stage share: a `Counted` of each rank, then two buffers of each rank.
EXPORT int64_t shared_bytes(int64_t ranks) { return ranks * (int64_t(sizeof(Counted)) + 2 * PART); }

static void futex(const std::atomic<uint32_t>& word, int operation, uint32_t value) {
    static const timespec longest = {0, 50'000'000};  // maximum sleep before `Flag` is checked
    syscall(SYS_futex, &word, operation, value, &longest, nullptr, 0);
}

static void announce(Counted& own, uint32_t parts) {
    own.parts.store(parts);
    if (own.sleepers.load()) futex(own.parts, FUTEX_WAKE, INT32_MAX);
}

// Waits until a rank has counted `parts` parts: spins for about 50 microseconds, the time that a wake-up takes, then sleeps.
// Returns false if a rank ended.
static bool wait_for(Counted& rank, uint32_t parts, const Flag& ended) {
    const auto reached = [&](uint32_t now) { return int32_t(now - parts) >= 0; };
    for (int turn = 0; turn < SPINS; ++turn) {
        if (reached(rank.parts.load(std::memory_order_acquire))) return true;
        team::pause();
    }
    ++rank.sleepers;
    uint32_t now;
    while (!reached(now = rank.parts.load()) && !ended.set.load()) futex(rank.parts, FUTEX_WAIT, now);
    --rank.sleepers;
    return reached(now);
}

static inline float read(const float* from, float) { return *from; }
static inline float read(const bfloat16* from, float) { return to_float(*from); }
template <typename T>
static inline Vector read(const T* from, Vector) { return load(from); }

// The buffers of all ranks for one part.
template <typename T>
struct Places {
    void* shared;
    int64_t ranks;
    uint32_t part;

    T* of(int64_t rank) const {
        return (T*)((char*)shared + ranks * int64_t(sizeof(Counted)) + (2 * rank + int64_t(part % 2)) * PART);
    }
    template <typename V>
    V sum(int64_t i) const {
        V total = V();
        for (int64_t rank = 0; rank < ranks; ++rank) total += read(of(rank) + i, V());
        return total;
    }
};

template <typename T>
static void sum(T* values, int64_t count, const Flag* ended, void* shared, int64_t ranks, int64_t rank) {
    Counted* counted = (Counted*)shared;
    constexpr int64_t most = PART / int64_t(sizeof(T));
    for (; count > 0; values += most, count -= most) {
        const Places<T> places{shared, ranks, counted[rank].parts.load(std::memory_order_relaxed)};
        const int64_t size = std::min(count, most), slices = (size + SLICE - 1) / SLICE;
        const bool parallel = size >= PARALLEL_FROM;
        T* own = places.of(rank);
        team::for_each(slices, parallel, [&](int64_t slice) {
            const int64_t first = slice * SLICE, length = std::min(SLICE, size - first);
            std::memcpy(own + first, values + first, size_t(length) * sizeof(T));
        });
        announce(counted[rank], places.part + 1);
        for (int64_t other = 0; other < ranks; ++other)
            if (!wait_for(counted[other], places.part + 1, *ended)) return;
        team::for_each(slices, parallel, [&](int64_t slice) {
            const int64_t last = std::min(size, (slice + 1) * SLICE);
            int64_t i = slice * SLICE;
            for (; i + WIDTH <= last; i += WIDTH) put(values + i, places.template sum<Vector>(i));
            for (; i < last; ++i) put(values + i, places.template sum<float>(i));
        });
    }
}

// Replaces values (count) by their sum over the ranks. `ended`: a flag, set when a rank has ended; then the sums are invalid.
// `shared`: `shared_bytes(ranks)` bytes, initially zero. All ranks must make the same calls, with the same `count`.
EXPORT void sum_ranks(int64_t type, void* values, int64_t count, const void* ended, void* shared, int64_t ranks,
                      int64_t rank) {
    if (type == BFLOAT16)
        sum((bfloat16*)values, count, (const Flag*)ended, shared, ranks, rank);
    else
        sum((float*)values, count, (const Flag*)ended, shared, ranks, rank);
}
