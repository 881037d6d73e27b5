// Replays recorded kernel calls in order. A step's thousands of arguments are converted only once, when recorded.

#include "calls.h"

EXPORT void set_rows(const RowCount* counts, int64_t count, int64_t rows, int64_t wanted) {
    for (const RowCount* at = counts; at < counts + count; ++at)
        *at->place = at->each * (at->of_wanted ? wanted : rows);
}

EXPORT void replay(const Call* calls, int64_t count) {
    for (const Call* call = calls; call < calls + count; ++call) {
        const int64_t* given = call->arguments;
        switch (call->kernel) {
            case RMS_NORM: run(rms_norm, given); break;
            case ADD: run(add, given); break;
            case ADD_RMS_NORM: run(add_rms_norm, given); break;
            case ROTATE: run(rotate, given); break;
            case GATE: run(gate, given); break;
            case WRITE_SLOTS: run(write_slots, given); break;
            case QUANTIZE_SLOTS: run(quantize_slots, given); break;
            case PAGED_ATTENTION: run(paged_attention, given); break;
            case ADD_ADAPTERS: run(add_adapters, given); break;
            case LINEAR_FLOAT32: run(linear_float32, given); break;
            case LINEAR_EXPANDED: run(linear_expanded, given); break;
            case NORM: run(norm, given); break;
            case ACTIVATE: run(activate, given); break;
            case SUM_RANKS: run(sum_ranks, given); break;
            case WIDEN: run(widen, given); break;
            case GATE_PAIRS: run(gate_pairs, given); break;
            case SCALE_ROWS_BY_GATE: run(scale_rows_by_gate, given); break;
            case ROUTE: run(route, given); break;
            case MIX_EXPERTS: run(mix_experts, given); break;
            case ROTATION: run(rotation, given); break;
            case LOOKUP: run(lookup, given); break;
            case PROJECT_HEADS: run(project_heads, given); break;
            case COPY_HEADS: run(copy_heads, given); break;
            case LINEAR_SCREENED: run(linear_screened, given); break;
#if defined(__AVX512BW__)
            case LINEAR_BFLOAT16: run(linear_bfloat16, given); break;
            case LINEAR_INT4: run(linear_int4, given); break;
#if defined(__AVX512VNNI__)
            case LINEAR_INT8: run(linear_int8, given); break;
#endif
#endif
        }
    }
}
