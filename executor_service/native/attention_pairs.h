// Attention in bfloat16 with products of pairs: of neighbours in a key, of neighbouring keys' values. Weights are rounded to
// bfloat16 before they meet values; sums are in float.
//
// Station: called by attention.h for a part of a plan, where the machine has instructions for such products and a head is
// whole pairs of vectors. The oracle is `kernels.reference`.

#pragma once

#include <algorithm>
#include <vector>

#include "attention_floats.h"

namespace {

#ifdef KVPLANE_LINEAR
// Two bfloat16 of a pair as one word.
inline __m512bh pair_of(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return (__m512bh)_mm512_set1_epi32(word);
}

// 32 values, in a register: GCC 12 would read them again for each product.
inline __m512bh pairs_at(const bfloat16* from) {
    __m512i pairs = _mm512_loadu_si512(from);
    asm("" : "+v"(pairs));
    return (__m512bh)pairs;
}

// scores[n][TILE] = q[n] . k; keys are pairs, transposed: (dim / 2, TILE, 2).
template <int N>
inline void score_pairs(const bfloat16* query, const int64_t* places, const bfloat16* keys, int dim, float* scores) {
    __m512 acc[N][2];
    for (int n = 0; n < N; n++) acc[n][0] = acc[n][1] = _mm512_setzero_ps();
    for (int pair = 0; pair < dim / 2; pair++) {
        const __m512bh left = pairs_at(keys + pair * 2 * TILE), right = pairs_at(keys + pair * 2 * TILE + 2 * LANES);
        for (int n = 0; n < N; n++) {
            const __m512bh both = pair_of(query + places[n] + 2 * pair);
            acc[n][0] = _mm512_dpbf16_ps(acc[n][0], both, left);
            acc[n][1] = _mm512_dpbf16_ps(acc[n][1], both, right);
        }
    }
    for (int n = 0; n < N; n++) {
        _mm512_storeu_ps(scores + n * TILE, acc[n][0]);
        _mm512_storeu_ps(scores + n * TILE + LANES, acc[n][1]);
    }
}

// sums[n] = sums[n] * scales[n] + weights[n] . values; values are pairs of keys: (TILE / 2, dim, 2).
template <int N>
inline void accumulate_pairs(const bfloat16* weights, const bfloat16* values, int dim, const float* scales, float* sums) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        __m512 acc[N][2];
        for (int n = 0; n < N; n++) {
            const __m512 scale = _mm512_set1_ps(scales[n]);
            acc[n][0] = _mm512_mul_ps(_mm512_loadu_ps(sums + n * dim + d), scale);
            acc[n][1] = _mm512_mul_ps(_mm512_loadu_ps(sums + n * dim + d + LANES), scale);
        }
        for (int t = 0; t < TILE; t += 2) {
            const bfloat16* from = values + t * dim + 2 * d;
            const __m512bh left = pairs_at(from), right = pairs_at(from + 2 * LANES);
            for (int n = 0; n < N; n++) {
                const __m512bh both = pair_of(weights + n * TILE + t);
                acc[n][0] = _mm512_dpbf16_ps(acc[n][0], both, left);
                acc[n][1] = _mm512_dpbf16_ps(acc[n][1], both, right);
            }
        }
        for (int n = 0; n < N; n++) {
            _mm512_storeu_ps(sums + n * dim + d, acc[n][0]);
            _mm512_storeu_ps(sums + n * dim + d + LANES, acc[n][1]);
        }
    }
}

template <int N>
void dispatch_score_pairs(int count, const bfloat16* q, const int64_t* places, const bfloat16* k, int dim, float* s) {
    if (count == N)
        score_pairs<N>(q, places, k, dim, s);
    else if constexpr (N > 1)
        dispatch_score_pairs<N - 1>(count, q, places, k, dim, s);
}

template <int N>
void dispatch_accumulate_pairs(int count, const bfloat16* w, const bfloat16* v, int dim, const float* scales, float* sums) {
    if (count == N)
        accumulate_pairs<N>(w, v, dim, scales, sums);
    else if constexpr (N > 1)
        dispatch_accumulate_pairs<N - 1>(count, w, v, dim, scales, sums);
}

// What one thread attends with. Query vector n of a part's head number h has its own at h * queries + n.
struct PairWorkspace {
    std::vector<bfloat16> keys, values, weights;
    std::vector<float> scores, scales, most, total, sums;
    std::vector<int64_t> at, places, outs;
    std::vector<Job> jobs;

    // For `queries` query vectors of each of some heads.
    void reserve(size_t dim, size_t queries, size_t heads) {
        keys.resize(TILE * dim);
        values.resize(TILE * dim);
        weights.resize(TILE * queries);
        scores.resize(TILE * queries);
        scales.resize(queries);
        most.assign(queries * heads, -INFINITY);
        total.assign(LANES * queries * heads, 0.0f);
        sums.assign(dim * queries * heads, 0.0f);
        at.resize(queries);
        places.resize(queries);
        outs.resize(queries);
        jobs.clear();
    }
};

// 2^x within 3e-7 of it, 0 below -150; NaN stays NaN. A polynomial for the part behind the point, after Taylor.
inline __m512 power_of_two(__m512 asked) {
    const __m512 x = _mm512_max_ps(_mm512_set1_ps(-200.0f), asked);  // of NaN and a number the second
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.54035304e-4f);
    for (float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(term));
    return _mm512_scalef_ps(p, whole);
}

// One round of `largest_of_each`: of vectors that differ in this bit of their number, and lanes likewise, the greater.
template <int BIT>
inline void fold(Floats* rows) {
    const Ints low = ((EACH & BIT) != 0) & (LANES - BIT), high = ((EACH & BIT) == 0) & BIT;
#pragma GCC unroll 8
    for (int i = 0; i < BIT; i++) {
        const Floats one = shuffle(rows[i], rows[i + BIT], EACH + low);
        const Floats other = shuffle(rows[i], rows[i + BIT], EACH + high + (((EACH & BIT) != 0) & LANES));
        rows[i] = (Floats)_mm512_max_ps((__m512)one, (__m512)other);
    }
}

// Lane i of the result is the greatest of rows[i].
inline Floats largest_of_each(Floats* rows) {
    fold<8>(rows);
    fold<4>(rows);
    fold<2>(rows);
    fold<1>(rows);
    return rows[0];
}

// A tile of scores to weights relative to the greatest score so far, and `scales`, what that does to earlier sums. The
// total stays in LANES parts. Query vector n is of the token at position at[n]; the tile's first key is at `tile`. Scores
// are multiplied by `scaling`: log2(e) with it makes powers of two of what are powers of e.
inline void soften_pairs(int count, const int64_t* at, const Rows& rows, int64_t tile, float scaling, float* scores, bfloat16* weights,
                         float* most, float* total, float* scales) {
    for (int n = 0; n < count; n += LANES) {
        const int some = std::min(LANES, count - n);
        Floats each[LANES];
        for (int i = 0; i < some; i++) {
            float* from = scores + (n + i) * TILE;
            Floats left = load(from) * scaling, right = load(from + LANES) * scaling;
            // Keys of this tile that the token sees: from `low` to below `high`.
            const int64_t place = at[n + i];
            const int high = int(std::min<int64_t>(TILE, place + 1 - tile));
            const int low = rows.window ? int(std::min<int64_t>(TILE, std::max<int64_t>(0, rows.first_seen(place) - tile))) : 0;
            if (high < TILE || low > 0) {
                const Floats none = splat(-INFINITY);
                left = select((EACH < high) & (EACH >= low), left, none);
                right = select((EACH + LANES < high) & (EACH + LANES >= low), right, none);
            }
            store(from, left);
            store(from + LANES, right);
            each[i] = (Floats)_mm512_max_ps((__m512)left, (__m512)right);
        }
        for (int i = some; i < LANES; i++) each[i] = splat(-INFINITY);
        const __mmask16 asked = __mmask16((1u << some) - 1);
        const __m512 before = _mm512_maskz_loadu_ps(asked, most + n), now = _mm512_max_ps(before, (__m512)largest_of_each(each));
        // Where a token has seen nothing yet, or keys that are infinite, these weigh nothing.
        const __mmask16 nothing = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        float base[LANES];
        _mm512_storeu_ps(base, _mm512_mask_mov_ps(now, nothing, _mm512_setzero_ps()));
        _mm512_mask_storeu_ps(most + n, asked, now);
        _mm512_mask_storeu_ps(scales + n, asked, power_of_two(_mm512_sub_ps(before, _mm512_loadu_ps(base))));
        for (int i = 0; i < some; i++) {
            const float* from = scores + (n + i) * TILE;
            const __m512 left = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(from), _mm512_set1_ps(base[i])));
            const __m512 right = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(from + LANES), _mm512_set1_ps(base[i])));
            float* sums = total + (n + i) * LANES;
            _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(scales[n + i]), _mm512_add_ps(left, right)));
            const __m512bh both = _mm512_cvtne2ps_pbh(right, left);
            std::memcpy(weights + (n + i) * TILE, &both, sizeof both);
        }
    }
}

// Four registers whose 128-bit lanes hold four words each, transposed in each lane.
inline void transpose_lanes(__m512i* four) {
    const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpackhi_epi32(four[0], four[1]);
    const __m512i c = _mm512_unpacklo_epi32(four[2], four[3]), d = _mm512_unpackhi_epi32(four[2], four[3]);
    four[0] = _mm512_unpacklo_epi64(a, c);
    four[1] = _mm512_unpackhi_epi64(a, c);
    four[2] = _mm512_unpacklo_epi64(b, d);
    four[3] = _mm512_unpackhi_epi64(b, d);
}

// 8 values each of keys 4 apart, one in each lane.
inline __m512i lanes_of(const bfloat16* keys, int64_t width, const int64_t* slots) {
    const auto lane = [&](int i) { return _mm_loadu_si128((const __m128i*)(keys + slots[4 * i] * width)); };
    __m512i all = _mm512_castsi128_si512(lane(0));
    all = _mm512_inserti32x4(all, lane(1), 1);
    all = _mm512_inserti32x4(all, lane(2), 2);
    return _mm512_inserti32x4(all, lane(3), 3);
}

// Which of the values of two vectors, one after the other, are the pairs of their first and of their last halves.
struct Interleaved {
    alignas(64) uint16_t low[2 * LANES], high[2 * LANES];

    constexpr Interleaved() : low(), high() {
        for (int i = 0; i < 2 * LANES; i++) {
            low[i] = uint16_t(i / 2 + i % 2 * 2 * LANES);
            high[i] = uint16_t(low[i] + LANES);
        }
    }
};
constexpr Interleaved INTERLEAVED;

// One tile of K and V as pairs. Of the tile after it, at the slots `ahead`, a line is fetched for each that is read: what a
// table names next no hardware knows, and many at once would wait for each other.
inline void read_tile_pairs(const bfloat16* keys, const bfloat16* values, int64_t width, const int64_t* slots, const int64_t* ahead,
                            int dim, PairWorkspace& own) {
    for (int t = 0; t < TILE; t += LANES) {
        for (int d = 0; d < dim; d += 2 * LANES) {
            for (int i = 0; i < LANES; i++) _mm_prefetch((const char*)(keys + ahead[t + i] * width + d), _MM_HINT_T1);
            for (int chunk = 0; chunk < 2 * LANES; chunk += 8) {
                __m512i four[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) four[i] = lanes_of(keys + d + chunk, width, slots + t + i);
                transpose_lanes(four);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) _mm512_storeu_si512(&own.keys[((d + chunk) / 2 + i) * 2 * TILE + 2 * t], four[i]);
            }
        }
    }
    const __m512i low = _mm512_load_si512(INTERLEAVED.low), high = _mm512_load_si512(INTERLEAVED.high);
    for (int t = 0; t < TILE; t += 2) {
        const bfloat16 *one = values + slots[t] * width, *other = values + slots[t + 1] * width;
        for (int d = 0; d < dim; d += 2 * LANES) {
            _mm_prefetch((const char*)(values + ahead[t] * width + d), _MM_HINT_T1);
            _mm_prefetch((const char*)(values + ahead[t + 1] * width + d), _MM_HINT_T1);
            const __m512i first = _mm512_loadu_si512(one + d), second = _mm512_loadu_si512(other + d);
            bfloat16* to = &own.values[t * dim + 2 * d];
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
            _mm512_storeu_si512(to + 2 * LANES, _mm512_permutex2var_epi16(first, high, second));
        }
    }
}

__attribute__((noinline)) void attend_part_pairs(const Attention<bfloat16>& of, const Plan& plan, const Part& part, PairWorkspace& own) {
    const Rows& rows = of.rows;
    const int64_t share = of.share, width = of.kv_heads * of.dim;
    const int64_t each = (part.last - part.first) * share;  // query vectors of a row and head
    const int count = int((part.to - part.from) * each), dim = of.dim;
    const float scaling = of.scaling * 1.44269504f;  // log2(e)
    own.reserve(size_t(dim), size_t(count), size_t(part.heads));
    for (int n = 0; n < count; n++) {
        const int64_t row = plan.order[part.from + n / each], token = part.first + n % each / share;
        const int64_t place = rows.query_indptr[row] + token, head = part.head * share + n % share;
        own.at[n] = rows.start(row) + token;
        own.places[n] = place * of.ld_q + head * dim;
        own.outs[n] = place * share * width + head * dim;
    }
    add_jobs(rows, plan, part, part.from, part.to, 0, own.jobs);
    const auto slots_of = [&](const Job& job, int64_t* to) {
        const int64_t row = plan.order[job.from];
        rows.slots(row, job.tile, std::min<int64_t>(TILE, rows.start(row) + part.last - job.tile), to);
    };
    int64_t two[2][TILE];
    slots_of(own.jobs[0], two[0]);
    for (size_t number = 0; number < own.jobs.size(); number++) {
        const Job& job = own.jobs[number];
        const int64_t *slots = two[number % 2], *ahead = slots;
        if (number + 1 < own.jobs.size()) {
            slots_of(own.jobs[number + 1], two[(number + 1) % 2]);
            ahead = two[(number + 1) % 2];
        }
        const int start = int((job.from - part.from) * each), end = int((job.to - part.from) * each);
        for (int64_t head = 0; head < part.heads; head++) {
            const int64_t offset = (part.head + head) * dim, all = head * count;
            read_tile_pairs(of.keys + offset, of.values + offset, width, slots, ahead, dim, own);
            for (int n = start; n < end; n += GROUP)
                dispatch_score_pairs<GROUP>(std::min(GROUP, end - n), of.query + head * share * dim, &own.places[n], own.keys.data(), dim,
                                            &own.scores[n * TILE]);
            soften_pairs(end - start, &own.at[start], rows, job.tile, scaling, &own.scores[start * TILE], &own.weights[start * TILE],
                         &own.most[all + start], &own.total[(all + start) * LANES], &own.scales[start]);
            for (int n = start; n < end; n += GROUP)
                dispatch_accumulate_pairs<GROUP>(std::min(GROUP, end - n), &own.weights[n * TILE], own.values.data(), dim, &own.scales[n],
                                                 &own.sums[(all + n) * dim]);
        }
    }
    for (int64_t head = 0; head < part.heads; head++) {
        for (int n = 0; n < count; n++) {
            const int64_t vector = head * count + n;
            const float total = sum(load(&own.total[vector * LANES]));
            bfloat16* to = of.out + own.outs[n] + head * share * dim;
            for (int d = 0; d < dim; d += LANES) store(to + d, load(&own.sums[vector * dim + d]) / total);
        }
    }
}
#endif

}  // namespace
