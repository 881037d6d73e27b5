// Mixture of experts: routing of tokens to experts, and the experts' layers on their tokens.
//
// An expert's layers are calls that were recorded for `capacity` rows; they are replayed with the expert's number of rows.

#include "calls.h"
#include "team.h"
#include "vectors.h"

#include <algorithm>
#include <limits>
#include <vector>

// How the router's logits become weights, see `MoeSpec`.
enum Scoring : int64_t { SOFTMAX = 0, SIGMOID = 1, SIGMOID_OF_CHOSEN = 2 };

// Selects experts (rows, top_k) for each row from logits (rows, num_experts), the best first, with their weights. `bias`:
// (num_experts,), or null, is added to the scores for the selection only. Experts are divided into `groups` consecutive
// groups, of which only the `top_groups` best are candidates.
struct Routing {
    const float* logits;
    const float* bias;
    float* weights;
    int64_t* experts;
    int64_t rows, num_experts, top_k, groups, top_groups, scoring, renormalize;
    float scaling;
};

static void softmax(const float* logits, int64_t count, float* scores) {
    const float largest = *std::max_element(logits, logits + count);
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += scores[i] = exponential(logits[i] - largest);
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// The score of what may still be taken, at least; less marks what is taken or excluded.
constexpr float LEAST_RANK = std::numeric_limits<float>::lowest();

// The indices of the `best` largest of `count` values, the largest first; ties go to the lower index. Overwrites `values`.
static void take_best(float* values, int64_t count, int64_t best, int64_t* indices) {
    for (int64_t k = 0; k < best; ++k) {
        indices[k] = std::max_element(values, values + count) - values;
        values[indices[k]] = -std::numeric_limits<float>::infinity();
    }
}

// A group's score is that of its best expert or, with SIGMOID, the sum of its two best.
static float score_of_group(const float* ranked, int64_t size, int64_t scoring) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t i = 0; i < size; ++i) {
        second = std::max(second, std::min(first, ranked[i]));
        first = std::max(first, ranked[i]);
    }
    return scoring == SIGMOID ? first + second : first;
}

// Scratch memory of one thread.
struct RouteMemory {
    std::vector<float> scores, ranked, by_group;
    std::vector<int64_t> best;

    explicit RouteMemory(const Routing& r)
        : scores(size_t(r.num_experts)), ranked(size_t(r.num_experts)), by_group(size_t(r.groups)),
          best(size_t(r.groups)) {}
};

// Excludes experts outside the best groups.
static void keep_best_groups(const Routing& r, RouteMemory& memory) {
    const int64_t size = r.num_experts / r.groups;
    for (int64_t group = 0; group < r.groups; ++group)
        memory.by_group[group] = std::max(score_of_group(&memory.ranked[group * size], size, r.scoring), LEAST_RANK);
    take_best(memory.by_group.data(), r.groups, r.groups, memory.best.data());
    for (int64_t k = r.top_groups; k < r.groups; ++k)
        std::fill_n(&memory.ranked[memory.best[k] * size], size, -std::numeric_limits<float>::infinity());
}

static void route_row(const Routing& r, int64_t row, RouteMemory& memory) {
    const float* logits = r.logits + row * r.num_experts;
    std::vector<float>&scores = memory.scores, &ranked = memory.ranked;
    if (r.scoring == SOFTMAX)
        softmax(logits, r.num_experts, scores.data());
    else
        for (int64_t i = 0; i < r.num_experts; ++i) scores[i] = 1.0f / (1.0f + exponential(-logits[i]));
    for (int64_t i = 0; i < r.num_experts; ++i) {
        const float rank = r.scoring == SIGMOID_OF_CHOSEN ? logits[i] : scores[i] + (r.bias ? r.bias[i] : 0.0f);
        ranked[i] = rank >= LEAST_RANK ? rank : LEAST_RANK;  // NaN and -inf too, so that no expert is taken twice
    }
    if (r.groups > r.top_groups) keep_best_groups(r, memory);
    int64_t* experts = r.experts + row * r.top_k;
    float *weights = r.weights + row * r.top_k, total = 0.0f;
    take_best(ranked.data(), r.num_experts, r.top_k, experts);
    for (int64_t k = 0; k < r.top_k; ++k) total += weights[k] = scores[experts[k]];
    const float factor = r.renormalize ? r.scaling / (total + (r.scoring == SIGMOID ? 1e-20f : 0.0f)) : r.scaling;
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] *= factor;
}

EXPORT void route(const Routing* given) {
    const Routing& r = *given;
    team::run(r.rows * r.num_experts >= PARALLEL_FROM, [&](team::Member& member) {
        RouteMemory memory(r);
        member.each(r.rows, [&](int64_t row) { route_row(r, row, memory); });
    });
}

// The `count` recorded calls of one expert, and their result `computed` (capacity, size).
struct Expert {
    const Call* calls;
    const RowCount* row_counts;
    int64_t count;
    const void* computed;
};

// out (rows, size) = the weighted sum of the outputs of each row's experts (rows, top_k), or += with `accumulate`; x and out
// must not overlap. This rank has `local` experts from `first` on, whose calls read `gathered` (capacity, size).
// `on_inputs`: the weights multiply the experts' inputs instead of their outputs.
struct Mixture {
    const void* x;
    const float* weights;
    const int64_t* chosen;
    const Expert* experts;
    void* gathered;
    void* out;
    int64_t rows, size, top_k, first, local, capacity, on_inputs, accumulate;
};

// The places in (rows, top_k) that chose an expert of this rank, grouped by expert. Writes `starts` (local + 1): where each
// expert's places begin.
static std::vector<int64_t> places_by_expert(const Mixture& m, std::vector<int64_t>& starts) {
    const auto local = [&](int64_t place) { return m.chosen[place] - m.first; };
    const auto is_here = [&](int64_t place) { return local(place) >= 0 && local(place) < m.local; };
    for (int64_t place = 0; place < m.rows * m.top_k; ++place)
        if (is_here(place)) ++starts[local(place) + 1];
    for (int64_t expert = 0; expert < m.local; ++expert) starts[expert + 1] += starts[expert];
    std::vector<int64_t> places(size_t(starts[m.local])), next = starts;
    for (int64_t place = 0; place < m.rows * m.top_k; ++place)
        if (is_here(place)) places[next[local(place)]++] = place;
    return places;
}

template <typename T>
static void gather_row(const Mixture& m, int64_t place, T* into) {
    const T* x = (const T*)m.x + place / m.top_k * m.size;
    if (!m.on_inputs) {
        std::memcpy(into, x, size_t(m.size) * sizeof(T));
        return;
    }
    for (int64_t i = 0; i < m.size; ++i) put(into + i, to_float(x[i]) * m.weights[place]);
}

template <typename T>
static void add_row(const Mixture& m, int64_t place, const T* computed) {
    const float weight = m.on_inputs ? 1.0f : m.weights[place];
    T* out = (T*)m.out + place / m.top_k * m.size;
    for (int64_t i = 0; i < m.size; ++i) put(out + i, to_float(out[i]) + to_float(computed[i]) * weight);
}

template <typename T>
static void mix(const Mixture& m) {
    if (m.rows == 0) return;
    std::vector<int64_t> starts(size_t(m.local + 1));
    const std::vector<int64_t> places = places_by_expert(m, starts);
    if (!m.accumulate) std::memset(m.out, 0, size_t(m.rows * m.size) * sizeof(T));
    T* gathered = (T*)m.gathered;
    for (int64_t index = 0; index < m.local; ++index) {
        const Expert& expert = m.experts[index];
        const T* computed = (const T*)expert.computed;
        for (int64_t at = starts[index], rows; at < starts[index + 1]; at += rows) {
            rows = std::min(m.capacity, starts[index + 1] - at);
            const bool shared = rows * m.size >= PARALLEL_FROM;
            team::for_each(rows, shared, [&](int64_t i) { gather_row(m, places[at + i], gathered + i * m.size); });
            set_rows(expert.row_counts, expert.count, rows, rows);
            replay(expert.calls, expert.count);
            // An expert occurs at most once per row, so no two threads add to the same row.
            team::for_each(rows, shared, [&](int64_t i) { add_row(m, places[at + i], computed + i * m.size); });
        }
    }
}

EXPORT void mix_experts(int64_t type, const Mixture* m) {
    if (type == FLOAT32)
        mix<float>(*m);
    else
        mix<bfloat16>(*m);
}
