// Implements team.h, with own worker threads or with those of OpenMP.

#include "team.h"

#include <omp.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace team {

using Clock = std::chrono::steady_clock;

static int64_t nanoseconds_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// The adaptive time that waits spin before they sleep, in nanoseconds. A wait is short if spinning to its end costs no more
// than a wake-up. Long waits come from parts of a task that take different times (rarely by more than a millisecond), or from
// threads that lost their processor to another program; these two count as much as about 7 and 35 short waits.
class Spinning {
  public:
    int64_t limit() const { return limit_.load(std::memory_order_relaxed); }

    void waited(int64_t nanoseconds) {
        const int64_t now = limit();
        const int64_t next = nanoseconds <= SHORT ? now + now / 50 + 1 : nanoseconds <= LONG ? now - now / 8 : now / 2;
        limit_.store(std::clamp(next, LEAST, SHORT), std::memory_order_relaxed);
    }

  private:
    static constexpr int64_t LEAST = 2000, SHORT = 100000, LONG = 1000000;
    std::atomic<int64_t> limit_{20000};
};

class Team {
  public:
    explicit Team(int64_t size) : size(size), counters_(size_t(LOOPS * size)) {
        for (int64_t thread = 1; thread < size; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    }

    ~Team() {
        task_ = nullptr;
        start();
        for (std::thread& worker : workers_) worker.join();
    }

    void run(Task task, void* context) {
        for (Counter& counter : counters_) counter.taken.store(0, std::memory_order_relaxed);
        task_ = task;
        context_ = context;
        running_ = size - 1;
        start();
        compute(0);
        wait([this] { return running_ == 0; }, true);
    }

    void barrier() {
        const int64_t before = passed_;
        if (++arrived_ == size) {
            arrived_ = 0;
            ++passed_;
            wake();
        } else {
            wait([this, before] { return passed_ != before; }, true);
        }
    }

    const int64_t size;

  private:
    void start() {
        ++started_;
        wake();
    }

    void compute(int64_t thread) {
        Member member{this, counters_.data(), thread, size};
        task_(context_, member);
    }

    void work(int64_t thread) {
        for (int64_t seen = 1;; ++seen) {
            wait([this, seen] { return started_ == seen; }, false);
            if (!task_) return;
            compute(thread);
            if (--running_ == 0) wake();
        }
    }

    // Spins, then sleeps, until done(). `computing`: waits for threads that compute, and not for the next task, which may come
    // much later.
    template <class Done>
    void wait(Done done, bool computing) {
        if (done()) return;
        const Clock::time_point start = Clock::now();
        const int64_t limit = spinning_.limit();
        int64_t waited = 0;
        while (waited < limit) {
            for (int i = 0; i < 16; ++i) {
                if (done()) return spinning_.waited(waited);
                pause();
            }
            waited = nanoseconds_since(start);
        }
        {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleeping_;
            changed_.wait(lock, done);
            --sleeping_;
        }
        if (computing) spinning_.waited(nanoseconds_since(start));
    }

    // Wakes sleeping threads after a change that they may wait for. Either the sleeper sees the change, or this function sees
    // the sleeper, because all of these variables are sequentially consistent.
    void wake() {
        if (sleeping_ == 0) return;
        { const std::lock_guard<std::mutex> lock(mutex_); }
        changed_.notify_all();
    }

    Task task_ = nullptr;
    void* context_ = nullptr;
    std::vector<Counter> counters_;
    alignas(64) std::atomic<int64_t> started_{0};
    alignas(64) std::atomic<int64_t> running_{0};
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> passed_{0};
    alignas(64) std::atomic<int64_t> sleeping_{0};
    Spinning spinning_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> workers_;
};

static std::atomic<bool> own_threads{true};

// Sets whether teams use their own threads or OpenMP's. If OpenMP's threads spin for long after each torch operation, own
// threads would compete with them for processors.
EXPORT void use_own_threads(int64_t own) { own_threads = own != 0; }

void Member::barrier() {
    if (team)
        team->barrier();
    else {
#pragma omp barrier
    }
}

int64_t size() { return omp_get_max_threads(); }

static thread_local std::unique_ptr<Team> own_team;

// A forked child has none of the threads of its parent's team, so it can neither use nor end it.
static void forget_team() { (void)own_team.release(); }
[[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, forget_team);

static void run_on_openmp(Task task, void* context, int64_t threads) {
    std::vector<Counter> counters(size_t(LOOPS * threads));
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        Member member{nullptr, counters.data(), omp_get_thread_num(), omp_get_num_threads()};
        task(context, member);
    }
}

void run_task(Task task, void* context) {
    const int64_t threads = size();
    if (threads == 1 || !own_threads) return run_on_openmp(task, context, threads);
    if (!own_team || own_team->size != threads) {
        own_team.reset();
        own_team = std::make_unique<Team>(threads);
    }
    own_team->run(task, context);
}

// Ends the caller's team and OpenMP's threads; the next kernel starts a new team.
EXPORT void release_threads() {
    own_team.reset();
    omp_pause_resource_all(omp_pause_soft);
}

}  // namespace team
