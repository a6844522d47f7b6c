// Attention in float: for K and V in float, and in bfloat16 where there are no products of pairs.
//
// Station: called by attention.h for a part of a plan. The oracle is `kernels.reference`.

#pragma once

#include <vector>

#include "attention_plan.h"

namespace {

constexpr int GROUP = 6;  // query vectors in registers

// Where Q, K, V and the result lie, and what is asked of them.
template <typename T>
struct Attention {
    const T* query;
    int64_t ld_q;
    const T *keys, *values;
    const Rows& rows;
    int64_t kv_heads, share;
    int dim;
    float scaling;
    T* out;
};

// scores[n][TILE] = q[n] . k over the head's dimension; keys is transposed, (dim, TILE).
template <int N>
inline void score(const float* queries, const float* keys, int dim, float* scores) {
    Floats acc[N][2] = {};
    for (int d = 0; d < dim; d++) {
        const Floats left = load(keys + d * TILE), right = load(keys + d * TILE + LANES);
        for (int n = 0; n < N; n++) {
            acc[n][0] += left * queries[n * dim + d];
            acc[n][1] += right * queries[n * dim + d];
        }
    }
    for (int n = 0; n < N; n++) {
        store(scores + n * TILE, acc[n][0]);
        store(scores + n * TILE + LANES, acc[n][1]);
    }
}

// sums[n] = sums[n] * scales[n] + weights[n] . values, 32 columns of a head at a time; values is (TILE, dim).
template <int N>
inline void accumulate(const float* weights, const float* values, int dim, const float* scales, float* sums) {
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        Floats acc[N][2];
        for (int n = 0; n < N; n++) {
            acc[n][0] = load(sums + n * dim + d) * scales[n];
            acc[n][1] = load(sums + n * dim + d + LANES) * scales[n];
        }
        for (int t = 0; t < TILE; t++) {
            const Floats left = load(values + t * dim + d), right = load(values + t * dim + d + LANES);
            for (int n = 0; n < N; n++) {
                acc[n][0] += left * weights[n * TILE + t];
                acc[n][1] += right * weights[n * TILE + t];
            }
        }
        for (int n = 0; n < N; n++) {
            store(sums + n * dim + d, acc[n][0]);
            store(sums + n * dim + d + LANES, acc[n][1]);
        }
    }
    for (; d < dim; d += LANES) {
        for (int n = 0; n < N; n++) {
            Floats acc = load(sums + n * dim + d) * scales[n];
            for (int t = 0; t < TILE; t++) acc += load(values + t * dim + d) * weights[n * TILE + t];
            store(sums + n * dim + d, acc);
        }
    }
}

template <int N>
void dispatch_score(int count, const float* q, const float* k, int dim, float* s) {
    if (count == N)
        score<N>(q, k, dim, s);
    else if constexpr (N > 1)
        dispatch_score<N - 1>(count, q, k, dim, s);
}

template <int N>
void dispatch_accumulate(int count, const float* w, const float* v, int dim, const float* scales, float* sums) {
    if (count == N)
        accumulate<N>(w, v, dim, scales, sums);
    else if constexpr (N > 1)
        dispatch_accumulate<N - 1>(count, w, v, dim, scales, sums);
}

// One round of a transposition: of rows that differ in this bit of their number, quarters change places.
template <int BIT>
inline void exchange(Floats* rows) {
    const Ints low = ((EACH & BIT) != 0) & (LANES - BIT), high = ((EACH & BIT) == 0) & BIT;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & BIT) continue;
        const Floats first = rows[i], second = rows[i | BIT];
        rows[i] = shuffle(first, second, EACH + low);
        rows[i | BIT] = shuffle(first, second, EACH + high + (((EACH & BIT) != 0) & LANES));
    }
}

// 16 x 16 values, transposed: in from 16 rows, out to 16 rows TILE apart.
inline void transpose(Floats* rows, float* out) {
    exchange<8>(rows);
    exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(out + i * TILE, rows[i]);
}

// What one thread needs: for `vectors` query vectors of one KV head.
struct FloatWorkspace {
    std::vector<float> queries, sums, scores, keys, values, most, total, scales;

    void reserve(int dim, size_t vectors) {
        queries.resize(vectors * dim);
        sums.resize(vectors * dim);
        scores.resize(vectors * TILE);
        keys.resize(size_t(TILE) * dim);
        values.resize(size_t(TILE) * dim);
        most.resize(vectors);
        total.resize(vectors);
        scales.resize(vectors);
    }
};

// One tile of scores to weights relative to the greatest score so far, and `scales`, what that does to earlier sums.
// Query vector n is of the token at position `at` + n / share; the tile's first key is at `tile`.
inline void soften(int count, int64_t at, int64_t share, const Rows& rows, int64_t tile, float* scores, float* greatest, float* total,
                   float* scales) {
    for (int n = 0; n < count; n++) {
        const int64_t place = at + n / share;
        // Keys of this tile that the token sees: from `low` to below `high`.
        const int high = int(std::min<int64_t>(TILE, place + 1 - tile));
        const int low = rows.window ? int(std::max<int64_t>(0, rows.first_seen(place) - tile)) : 0;
        Floats left = load(scores + n * TILE), right = load(scores + n * TILE + LANES);
        if (high < TILE || low > 0) {
            const Floats none = splat(-INFINITY);
            left = select((EACH < high) & (EACH >= low), left, none);
            right = select((EACH + LANES < high) & (EACH + LANES >= low), right, none);
        }
        if (high <= low) {  // the token sees nothing here
            store(scores + n * TILE, splat(0.0f));
            store(scores + n * TILE + LANES, splat(0.0f));
            scales[n] = 1.0f;
            continue;
        }
        const float most = std::max(greatest[n], largest(select(left > right, left, right)));
        if (most == -INFINITY && sum((Floats)(((left == left) & (right == right)) & (Ints)splat(1.0f))) == LANES) {
            // Infinite keys, and nothing else so far: they weigh nothing, here as in the whole.
            store(scores + n * TILE, splat(0.0f));
            store(scores + n * TILE + LANES, splat(0.0f));
            scales[n] = 1.0f;
            continue;
        }
        left = exponential(left - most);
        right = exponential(right - most);
        scales[n] = greatest[n] == most ? 1.0f : std::exp(greatest[n] - most);
        total[n] = total[n] * scales[n] + sum(left + right);
        greatest[n] = most;
        store(scores + n * TILE, left);
        store(scores + n * TILE + LANES, right);
    }
}

// One tile of K and V in float: keys to (dim, TILE), values to (TILE, dim).
template <typename T>
inline void read_tile(const T* keys, const T* values, int64_t width, const int64_t* slots, int dim, FloatWorkspace& own) {
    for (int t = 0; t < TILE; t += LANES) {
        for (int d = 0; d < dim; d += LANES) {
            Floats lines[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const int64_t at = slots[t + i] * width + d;
                lines[i] = load(keys + at);
                store(&own.values[(t + i) * dim + d], load(values + at));
            }
            transpose(lines, &own.keys[d * TILE + t]);
        }
    }
}

// Tokens [first, last) of a row and one KV head: its queries against all keys they see, by an online softmax.
template <typename T>
__attribute__((noinline)) void attend_head(const Attention<T>& of, int64_t row, int64_t first, int64_t last, int64_t head,
                                           FloatWorkspace& own) {
    const Rows& rows = of.rows;
    const int64_t share = of.share, width = of.kv_heads * of.dim, ld_out = share * width;
    const int64_t token = rows.query_indptr[row] + first;
    const int count = int((last - first) * share), dim = of.dim;
    const T* query = of.query + token * of.ld_q + head * share * dim;
    for (int n = 0; n < count; n++) {
        const T* from = query + n / share * of.ld_q + n % share * dim;
        for (int d = 0; d < dim; d += LANES) {
            store(&own.queries[n * dim + d], load(from + d) * of.scaling);
            store(&own.sums[n * dim + d], splat(0.0f));
        }
        own.most[n] = -INFINITY;
        own.total[n] = 0.0f;
    }
    const int64_t at = rows.start(row) + first, seen = rows.start(row) + last;
    for (int64_t tile = rows.first_seen(at); tile < seen; tile += TILE) {
        int64_t slots[TILE];
        rows.slots(row, tile, std::min<int64_t>(TILE, seen - tile), slots);
        read_tile(of.keys + head * dim, of.values + head * dim, width, slots, dim, own);
        for (int n = 0; n < count; n += GROUP)
            dispatch_score<GROUP>(std::min(GROUP, count - n), &own.queries[n * dim], own.keys.data(), dim, &own.scores[n * TILE]);
        soften(count, at, share, rows, tile, own.scores.data(), own.most.data(), own.total.data(), own.scales.data());
        for (int n = 0; n < count; n += GROUP)
            dispatch_accumulate<GROUP>(std::min(GROUP, count - n), &own.scores[n * TILE], own.values.data(), dim, &own.scales[n],
                                       &own.sums[n * dim]);
    }
    for (int n = 0; n < count; n++) {
        T* to = of.out + (token + n / share) * ld_out + (head * share + n % share) * dim;
        for (int d = 0; d < dim; d += LANES) store(to + d, load(&own.sums[n * dim + d]) / own.total[n]);
    }
}

template <typename T>
inline void attend_part(const Attention<T>& of, const Plan& plan, const Part& part, FloatWorkspace& own) {
    own.reserve(of.dim, size_t((part.last - part.first) * of.share));
    for (int64_t at = part.from; at < part.to; at++)
        for (int64_t head = part.head; head < part.head + part.heads; head++)
            attend_head(of, plan.order[at], part.first, part.last, head, own);
}

}  // namespace
