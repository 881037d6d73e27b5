// Teams of worker threads that compute a kernel together. Each thread that calls kernels has its own team.
//
// A step calls hundreds of kernels, so threads wait for each other very often. Waking a sleeping thread takes longer than many
// kernels; spinning takes processor time from other programs, and from the thread being waited for. So the time that a team
// spins before it sleeps adapts to the length of its previous waits. (OpenMP's threads spin for a fixed time.)

#pragma once

#include "common.h"

#include <atomic>

namespace team {

// Hints to the processor that this is a spin loop.
static inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

constexpr int LOOPS = 2;  // maximum calls of `each` and `each_in_order` in one task

struct alignas(64) Counter {
    std::atomic<int64_t> taken{0};
};

class Team;

// One thread of a team while a task runs.
struct Member {
    Team* team;
    Counter* counters;  // (LOOPS, size)
    int64_t thread, size;

    // Calls f(i) for each i below `count`, once in the whole team. Each thread has a part of consecutive items; when that is
    // done, it takes remaining items of other parts. May return before other threads have finished.
    template <class F>
    void each(int64_t count, F f) {
        Counter* taken = next_loop();
        for (int64_t turn = 0; turn < size; ++turn) {
            const int64_t part = (thread + turn) % size, first = first_of(part, count);
            const int64_t own = first_of(part + 1, count) - first;
            for (int64_t i; (i = taken[part].taken.fetch_add(1, std::memory_order_relaxed)) < own;) f(first + i);
        }
    }

    // The first item of a thread's part in `each`.
    int64_t first_of(int64_t part, int64_t count) const { return part * count / size; }

    // The part that contains item i.
    int64_t part_of(int64_t i, int64_t count) const { return ((i + 1) * size - 1) / count; }

    // Like `each`, but all threads together take items in order.
    template <class F>
    void each_in_order(int64_t count, F f) {
        Counter* taken = next_loop();
        for (int64_t i; (i = taken->taken.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    }

    // Barrier: waits until all threads of the team have reached it.
    void barrier();

  private:
    Counter* next_loop() {
        Counter* now = counters;
        counters += size;
        return now;
    }
};

using Task = void (*)(void* context, Member& member);

// Runs the task on all threads of the caller's team, as many as OpenMP (and therefore torch) would use.
void run_task(Task task, void* context);

// Number of threads in the caller's team.
int64_t size();

// Runs task(member) on all threads of the team, or only on the calling thread if `worth_while` is false.
template <class F>
void run(bool worth_while, F task) {
    if (worth_while) return run_task([](void* context, Member& member) { (*static_cast<F*>(context))(member); }, &task);
    Counter counters[LOOPS];
    Member alone{nullptr, counters, 0, 1};
    task(alone);
}

// Calls f(i) for each i below `count`, on the threads that `run` would use.
template <class F>
void for_each(int64_t count, bool worth_while, F f) {
    if (!worth_while) {
        for (int64_t i = 0; i < count; ++i) f(i);
        return;
    }
    run(true, [&](Member& member) { member.each(count, f); });
}

}  // namespace team
