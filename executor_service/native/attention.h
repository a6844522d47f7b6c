// Paged attention: K/V are read where they lie, by an online softmax over 32 keys at a time.
//
// Station: called by kernels.cpp for one layer, and by layers.h part by part; the oracle is `kernels.reference`.

#pragma once

#include <omp.h>

#include "attention_floats.h"
#include "attention_pairs.h"

namespace {

// What one thread attends with.
struct Workspace {
    FloatWorkspace floats;
#ifdef KVPLANE_LINEAR
    PairWorkspace pairs;
#endif
};

inline void attend_part_of(const Attention<float>& of, const Plan& plan, const Part& part, Workspace& own) {
    attend_part(of, plan, part, own.floats);
}

inline void attend_part_of(const Attention<bfloat16>& of, const Plan& plan, const Part& part, Workspace& own) {
#ifdef KVPLANE_LINEAR
    if (of.dim % (2 * LANES) == 0) return attend_part_pairs(of, plan, part, own.pairs);
#endif
    attend_part(of, plan, part, own.floats);
}

template <typename T>
void write_kv(const T* key, const T* value, int64_t ld_k, int64_t ld_v, const int64_t* slots, int64_t tokens, int64_t width,
              T* keys, T* values) {
#pragma omp parallel for schedule(static) if (tokens * width > 16384)
    for (int64_t token = 0; token < tokens; token++) {
        std::memcpy(keys + slots[token] * width, key + token * ld_k, width * sizeof(T));
        std::memcpy(values + slots[token] * width, value + token * ld_v, width * sizeof(T));
    }
}

template <typename T>
void attend(const Attention<T>& of, int64_t num_rows) {
    const Plan plan = plan_of(of.rows, num_rows, of.kv_heads, of.share, omp_get_max_threads());
#pragma omp parallel
    {
        thread_local Workspace own;
#pragma omp for schedule(dynamic, 1)
        for (size_t item = 0; item < plan.parts.size(); item++) attend_part_of(of, plan, plan.parts[item], own);
    }
}

}  // namespace
