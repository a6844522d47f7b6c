// Paged attention: K/V are read where they lie, by an online softmax over 32 keys at a time.
//
// Station: called by kernels.cpp for one layer, and by layers.h; the oracle is `kernels.reference`.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int TILE = 2 * LANES;   // keys at once
constexpr int MOST_QUERIES = 48;  // query vectors of one KV head at once: tokens times the heads that share it
constexpr int GROUP = 6;          // query vectors in registers

// Where a row's K/V lie, and what of them its tokens see.
struct Rows {
    const int32_t *query_indptr, *seq_lens, *block_indptr, *block_ids;
    int64_t block_size, window;

    // The first position that the token at `at` sees. A window below 0 is the size of chunks, negated.
    int64_t first_seen(int64_t at) const {
        if (window < 0) return at - at % -window;
        return window ? std::max<int64_t>(0, at - window + 1) : 0;
    }
};

// Goes over the keys of a row in its table's order.
struct Walk {
    const int32_t* table;
    int64_t block_size, block, offset;

    Walk(const Rows& rows, int64_t row, int64_t first)
        : table(rows.block_ids + rows.block_indptr[row]),
          block_size(rows.block_size),
          block(first / block_size),
          offset(first % block_size) {}

    // Slots of the next keys, TILE of them. Past the end the last one stands in: it is masked, and what lies in unused
    // slots may be no number.
    void next(int filled, int64_t* slots) {
        for (int t = 0; t < filled; t++) {
            slots[t] = int64_t(table[block]) * block_size + offset;
            if (++offset == block_size) block++, offset = 0;
        }
        for (int t = filled; t < TILE; t++) slots[t] = slots[filled - 1];
    }
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

// What one thread needs to attend with: `vectors` query vectors of one KV head.
struct Workspace {
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
inline void soften(int count, int64_t at, int64_t share, const Rows& rows, int64_t tile, float scaling, float* scores, float* greatest,
                   float* total, float* scales) {
    for (int n = 0; n < count; n++) {
        const int64_t place = at + n / share;
        // Keys of this tile that the token sees: from `low` to below `high`.
        const int high = int(std::min<int64_t>(TILE, place + 1 - tile));
        const int low = rows.window ? int(std::max<int64_t>(0, rows.first_seen(place) - tile)) : 0;
        Floats left = load(scores + n * TILE) * scaling, right = load(scores + n * TILE + LANES) * scaling;
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

// Tokens [first, last) of a row, and KV heads from `head` on.
struct Part {
    int64_t row, first, last, head, heads;
};

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

// One tile of K and V in float: keys to (dim, TILE), values to (TILE, dim).
template <typename T>
inline void read_tile(const T* keys, const T* values, int64_t width, const int64_t* slots, int dim, Workspace& own) {
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

// One KV head of a part: its queries against all keys they see, by an online softmax.
template <typename T>
__attribute__((noinline)) void attend_head(const Attention<T>& of, const Part& part, int64_t head, Workspace& own) {
    const Rows& rows = of.rows;
    const int64_t start = rows.query_indptr[part.row], length = rows.query_indptr[part.row + 1] - start;
    const int64_t before = rows.seq_lens[part.row] - length;  // position of the row's first token
    const int64_t share = of.share, width = of.kv_heads * of.dim, ld_out = share * width;
    const int count = int((part.last - part.first) * share), dim = of.dim;
    const T* query = of.query + (start + part.first) * of.ld_q + head * share * dim;
    for (int n = 0; n < count; n++) {
        const T* from = query + n / share * of.ld_q + n % share * dim;
        for (int d = 0; d < dim; d += LANES) {
            store(&own.queries[n * dim + d], load(from + d) * of.scaling);
            store(&own.sums[n * dim + d], splat(0.0f));
        }
        own.most[n] = -INFINITY;
        own.total[n] = 0.0f;
    }
    const int64_t at = before + part.first, seen = before + part.last;
    const int64_t oldest = rows.first_seen(at);
    Walk walk(rows, part.row, oldest);
    for (int64_t tile = oldest; tile < seen; tile += TILE) {
        int64_t slots[TILE];
        walk.next(int(std::min<int64_t>(TILE, seen - tile)), slots);
        read_tile(of.keys + head * dim, of.values + head * dim, width, slots, dim, own);
        for (int n = 0; n < count; n += GROUP)
            dispatch_score<GROUP>(std::min(GROUP, count - n), &own.queries[n * dim], own.keys.data(), dim, &own.scores[n * TILE]);
        soften(count, at, share, rows, tile, 1.0f, own.scores.data(), own.most.data(), own.total.data(), own.scales.data());
        for (int n = 0; n < count; n += GROUP)
            dispatch_accumulate<GROUP>(std::min(GROUP, count - n), &own.scores[n * TILE], own.values.data(), dim, &own.scales[n],
                                       &own.sums[n * dim]);
    }
    for (int n = 0; n < count; n++) {
        T* to = of.out + (start + part.first + n / share) * ld_out + (head * share + n % share) * dim;
        for (int d = 0; d < dim; d += LANES) store(to + d, load(&own.sums[n * dim + d]) / own.total[n]);
    }
}

template <typename T>
inline void attend_part(const Attention<T>& of, const Part& part, Workspace& own) {
    for (int64_t head = part.head; head < part.head + part.heads; head++) attend_head(of, part, head, own);
}

#ifdef KVPLANE_LINEAR
// The same for bfloat16 with products of pairs: of neighbours in a key, of neighbouring keys' values. Weights are rounded
// to bfloat16 before they meet values; sums are in float.

// Two bfloat16 of a pair as one word.
inline __m512bh pair_of(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return (__m512bh)_mm512_set1_epi32(word);
}

// scores[n][TILE] = q[n] . k; keys are pairs, transposed: (dim / 2, TILE) words.
template <int N>
inline void score_pairs(const bfloat16* query, const int64_t* places, const float* keys, int dim, float* scores) {
    __m512 acc[N][2];
    for (int n = 0; n < N; n++) acc[n][0] = acc[n][1] = _mm512_setzero_ps();
    for (int pair = 0; pair < dim / 2; pair++) {
        const __m512bh left = (__m512bh)_mm512_loadu_ps(keys + pair * TILE);
        const __m512bh right = (__m512bh)_mm512_loadu_ps(keys + pair * TILE + LANES);
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

// sums[n] = sums[n] * scales[n] + weights[n] . values; values are pairs of keys: (TILE / 2, dim) words.
template <int N>
inline void accumulate_pairs(const float* weights, const float* values, int dim, const float* scales, float* sums) {
    bfloat16 rounded[N][TILE];
    for (int n = 0; n < N; n++) {
        store(rounded[n], load(weights + n * TILE));
        store(rounded[n] + LANES, load(weights + n * TILE + LANES));
    }
    for (int d = 0; d < dim; d += 2 * LANES) {
        __m512 acc[N][2];
        for (int n = 0; n < N; n++) {
            const __m512 scale = _mm512_set1_ps(scales[n]);
            acc[n][0] = _mm512_mul_ps(_mm512_loadu_ps(sums + n * dim + d), scale);
            acc[n][1] = _mm512_mul_ps(_mm512_loadu_ps(sums + n * dim + d + LANES), scale);
        }
        for (int t = 0; t < TILE / 2; t++) {
            const __m512bh left = (__m512bh)_mm512_loadu_ps(values + t * dim + d);
            const __m512bh right = (__m512bh)_mm512_loadu_ps(values + t * dim + d + LANES);
            for (int n = 0; n < N; n++) {
                const __m512bh both = pair_of(rounded[n] + 2 * t);
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
void dispatch_score_pairs(int count, const bfloat16* q, const int64_t* places, const float* k, int dim, float* s) {
    if (count == N)
        score_pairs<N>(q, places, k, dim, s);
    else if constexpr (N > 1)
        dispatch_score_pairs<N - 1>(count, q, places, k, dim, s);
}

template <int N>
void dispatch_accumulate_pairs(int count, const float* w, const float* v, int dim, const float* scales, float* sums) {
    if (count == N)
        accumulate_pairs<N>(w, v, dim, scales, sums);
    else if constexpr (N > 1)
        dispatch_accumulate_pairs<N - 1>(count, w, v, dim, scales, sums);
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

// One tile of K and V as pairs.
inline void read_tile_pairs(const bfloat16* keys, const bfloat16* values, int64_t width, const int64_t* slots, int dim, Workspace& own) {
    const __m512i low = _mm512_load_si512(INTERLEAVED.low), high = _mm512_load_si512(INTERLEAVED.high);
    for (int t = 0; t < TILE; t += LANES) {
        for (int d = 0; d < dim; d += 2 * LANES) {
            Floats lines[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) lines[i] = (Floats)_mm512_loadu_ps((const float*)(keys + slots[t + i] * width + d));
            transpose(lines, &own.keys[d / 2 * TILE + t]);
        }
    }
    for (int t = 0; t < TILE; t += 2) {
        const bfloat16 *one = values + slots[t] * width, *other = values + slots[t + 1] * width;
        for (int d = 0; d < dim; d += 2 * LANES) {
            const __m512i first = _mm512_loadu_si512(one + d), second = _mm512_loadu_si512(other + d);
            float* to = &own.values[t / 2 * dim + d];
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
            _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(first, high, second));
        }
    }
}

__attribute__((noinline)) void attend_part_pairs(const Attention<bfloat16>& of, const Part& part, Workspace& own) {
    const Rows& rows = of.rows;
    const int64_t start = rows.query_indptr[part.row], length = rows.query_indptr[part.row + 1] - start;
    const int64_t before = rows.seq_lens[part.row] - length;
    const int64_t share = of.share, width = of.kv_heads * of.dim, ld_out = share * width;
    const int count = int((part.last - part.first) * share), dim = of.dim;
    const bfloat16* query = of.query + (start + part.first) * of.ld_q + part.head * share * dim;
    std::fill_n(own.sums.begin(), part.heads * count * dim, 0.0f);
    std::fill_n(own.most.begin(), part.heads * count, -INFINITY);
    std::fill_n(own.total.begin(), part.heads * count, 0.0f);
    const int64_t at = before + part.first, seen = before + part.last;
    const int64_t oldest = rows.first_seen(at);
    Walk walk(rows, part.row, oldest);
    int64_t two[2][TILE];
    walk.next(int(std::min<int64_t>(TILE, seen - oldest)), two[0]);
    int turn = 0;
    for (int64_t tile = oldest; tile < seen; tile += TILE, turn ^= 1) {
        const int64_t* slots = two[turn];
        if (tile + TILE < seen) {
            int64_t* ahead = two[turn ^ 1];
            walk.next(int(std::min<int64_t>(TILE, seen - tile - TILE)), ahead);
            // What a table names next no hardware knows.
            for (int t = 0; t < TILE; t++) {
                const int64_t place = ahead[t] * width + part.head * dim;
                for (int64_t d = 0; d < part.heads * dim; d += 2 * LANES) {
                    _mm_prefetch((const char*)(of.keys + place + d), _MM_HINT_T1);
                    _mm_prefetch((const char*)(of.values + place + d), _MM_HINT_T1);
                }
            }
        }
        for (int64_t head = 0; head < part.heads; head++) {
            const int64_t offset = (part.head + head) * dim;
            const int all = int(head) * count;
            read_tile_pairs(of.keys + offset, of.values + offset, width, slots, dim, own);
            for (int n = 0; n < count; n += GROUP) {
                int64_t places[GROUP];
                const int some = std::min(GROUP, count - n);
                for (int i = 0; i < some; i++) places[i] = (n + i) / share * of.ld_q + (n + i) % share * dim;
                dispatch_score_pairs<GROUP>(some, query + head * share * dim, places, own.keys.data(), dim, &own.scores[n * TILE]);
            }
            soften(count, at, share, rows, tile, of.scaling, own.scores.data(), &own.most[all], &own.total[all], own.scales.data());
            for (int n = 0; n < count; n += GROUP)
                dispatch_accumulate_pairs<GROUP>(std::min(GROUP, count - n), &own.scores[n * TILE], own.values.data(), dim,
                                                 &own.scales[n], &own.sums[(all + n) * dim]);
        }
    }
    for (int64_t head = 0; head < part.heads; head++) {
        for (int n = 0; n < count; n++) {
            bfloat16* to = of.out + (start + part.first + n / share) * ld_out + ((part.head + head) * share + n % share) * dim;
            const int64_t vector = head * count + n;
            for (int d = 0; d < dim; d += LANES) store(to + d, load(&own.sums[vector * dim + d]) / own.total[vector]);
        }
    }
}
#endif

inline void attend_part_of(const Attention<float>& of, const Part& part, Workspace& own) { attend_part(of, part, own); }

inline void attend_part_of(const Attention<bfloat16>& of, const Part& part, Workspace& own) {
#ifdef KVPLANE_LINEAR
    if (of.dim % (2 * LANES) == 0) return attend_part_pairs(of, part, own);
#endif
    attend_part(of, part, own);
}

// Rows cut into parts of at most MOST_QUERIES query vectors, or of one token and KV head if that has more. The last parts
// of a row, which take longest, come first. `threads` want about as many parts: heads stay together, for a token's lie
// side by side, unless that leaves some without.
inline std::vector<Part> parts_of(const Rows& rows, int64_t num_rows, int64_t kv_heads, int64_t share, int64_t threads) {
    std::vector<Part> parts;
    const int64_t chunk = std::max<int64_t>(1, MOST_QUERIES / share);
    for (int64_t row = num_rows - 1; row >= 0; row--) {
        const int64_t length = rows.query_indptr[row + 1] - rows.query_indptr[row];
        for (int64_t first = length ? (length - 1) / chunk * chunk : -1; first >= 0; first -= chunk) {
            const int64_t last = std::min(length, first + chunk);
            const int64_t fit = num_rows < 2 * threads ? 1 : std::max<int64_t>(1, MOST_QUERIES / ((last - first) * share));
            for (int64_t head = 0; head < kv_heads; head += fit) parts.push_back({row, first, last, head, std::min(fit, kv_heads - head)});
        }
    }
    return parts;
}

inline size_t most_vectors(int64_t share) { return size_t(std::max<int64_t>(MOST_QUERIES, share)); }

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
    const std::vector<Part> parts = parts_of(of.rows, num_rows, of.kv_heads, of.share, omp_get_max_threads());
#pragma omp parallel
    {
        thread_local Workspace own;
        own.reserve(of.dim, most_vectors(of.share));
#pragma omp for schedule(dynamic, 1)
        for (size_t item = 0; item < parts.size(); item++) attend_part_of(of, parts[item], own);
    }
}

}  // namespace
