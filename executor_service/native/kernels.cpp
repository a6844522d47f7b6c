// Kernels for decoding on a CPU, behind a C interface: no torch header, so that they compile in seconds.
//
// Station: compiled and loaded by `library.py`, called through `ops.py`, which checks shapes and types; here nothing is
// checked. The oracle of each is what it stands for in torch. T is float or bfloat16, arithmetic is in float; a matrix
// is row-major with `ld` elements from row to row. Threads are OpenMP's, the same pool as torch's.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define KVPLANE_LINEAR 1
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
    Floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline Floats load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// To the nearest, ties to even; NaN stays NaN.
inline void store(bfloat16* to, Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = (Words)(values == values);
    const Halves halves = __builtin_convertvector((rounded & kept) | (0x7fc0 & ~kept), Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// The last elements of a row that is no multiple of LANES.
template <typename T>
inline Floats load_part(const T* from, int count) {
    T whole[LANES] = {};
    std::memcpy(whole, from, count * sizeof(T));
    return load(whole);
}

template <typename T>
inline void store_part(T* to, Floats values, int count) {
    T whole[LANES];
    store(whole, values);
    std::memcpy(to, whole, count * sizeof(T));
}

template <typename T>
inline Floats round_to(Floats values) {
    T kept[LANES];
    store(kept, values);
    return load(kept);
}

// Lane i of the result is lane from[i] of the first, or from[i] - LANES of the second.
inline Floats shuffle(Floats first, Floats second, Ints from) {
#if defined(__clang__)
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = from[i] < LANES ? first[from[i]] : second[from[i] - LANES];
    return out;
#else
    return __builtin_shuffle(first, second, from);
#endif
}

const Ints EACH = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline float sum(Floats values) {
    for (int step = LANES / 2; step; step /= 2) values += shuffle(values, values, EACH ^ step);
    return values[0];
}

inline Floats select(Ints which, Floats yes, Floats no) { return (Floats)(((Ints)yes & which) | ((Ints)no & ~which)); }

inline float largest(Floats values) {
    for (int step = LANES / 2; step; step /= 2) {
        const Floats others = shuffle(values, values, EACH ^ step);
        values = select(values > others, values, others);
    }
    return values[0];
}

// e^x within 2 units in the last place, 0 below -87; x <= 88; NaN stays NaN. After Cephes' expf: x = n ln 2 + r, and a
// polynomial in r.
inline Floats exponential(Floats asked) {
    const Ints tiny = asked < splat(-87.0f);
    const Floats x = select(tiny, splat(0.0f), asked);
    const Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are n
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints power = ((Ints)shifted - 0x4b400000) << 23;
    return select(tiny, splat(0.0f), select(asked == asked, (Floats)((Ints)p + power), asked));
}

// ---- rms_norm ------------------------------------------------------------------------------------------------------

// y = weight * x / sqrt(mean(x^2) + eps), x = states + added first where there is one; x is written back to states.
template <typename T>
void rms_norm(T* states, const T* added, const T* weight, float eps, float offset, int64_t rows, int64_t width, T* out) {
    const int64_t whole = width / LANES * LANES;
    const int rest = int(width - whole);
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        T* x = states + row * width;
        const T* more = added ? added + row * width : nullptr;
        T* y = out + row * width;
        Floats squares = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats value = load(x + i);
            if (more) {
                value = round_to<T>(value + load(more + i));
                store(x + i, value);
            }
            squares += value * value;
        }
        if (rest) {
            Floats value = load_part(x + whole, rest);
            if (more) {
                value = round_to<T>(value + load_part(more + whole, rest));
                store_part(x + whole, value, rest);
            }
            squares += value * value;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
        for (int64_t i = 0; i < whole; i += LANES)
            store(y + i, round_to<T>(load(x + i) * factor) * (load(weight + i) + offset));
        if (rest)
            store_part(y + whole, round_to<T>(load_part(x + whole, rest) * factor) * (load_part(weight + whole, rest) + offset), rest);
    }
}

// ---- rotary --------------------------------------------------------------------------------------------------------

// The first `heads` heads of each row in place: (a, b) to (a cos - b sin, b cos + a sin), a and b a head's two halves.
template <typename T>
void rotary(T* states, int64_t ld, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + row * dim, *s = sin + row * dim;
        for (int64_t head = 0; head < heads; head++) {
            T *a = states + row * ld + head * dim, *b = a + half;
            for (int64_t i = 0; i < half; i += LANES) {
                const int count = int(std::min<int64_t>(LANES, half - i));
                const Floats first = load_part(a + i, count), second = load_part(b + i, count);
                store_part(a + i, first * load_part(c + i, count) - second * load_part(s + i, count), count);
                store_part(b + i, second * load_part(c + half + i, count) + first * load_part(s + half + i, count), count);
            }
        }
    }
}

// ---- silu_and_mul --------------------------------------------------------------------------------------------------

// y = g / (1 + e^-g) * u, g and u the two halves of each row.
template <typename T>
void silu_and_mul(const T* both, int64_t rows, int64_t width, T* out) {
    const int64_t chunk = 1024, chunks = (width + chunk - 1) / chunk;
#pragma omp parallel for collapse(2) schedule(static) if (rows * width > 4096)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t part = 0; part < chunks; part++) {
            const T *gates = both + row * 2 * width, *ups = gates + width;
            T* y = out + row * width;
            const int64_t end = std::min(width, (part + 1) * chunk);
            for (int64_t i = part * chunk; i < end; i += LANES) {
                const int count = int(std::min<int64_t>(LANES, end - i));
                const Floats gate = count == LANES ? load(gates + i) : load_part(gates + i, count);
                const Floats up = count == LANES ? load(ups + i) : load_part(ups + i, count);
                // Kept within what `exponential` takes: what lies below is 0 in either type.
                const Floats least = select(gate < splat(-87.0f), splat(-87.0f), gate);
                const Floats held = round_to<T>(gate / (exponential(-least) + 1.0f));
                if (count == LANES)
                    store(y + i, held * up);
                else
                    store_part(y + i, held * up, count);
            }
        }
    }
}

// ---- attend --------------------------------------------------------------------------------------------------------

constexpr int TILE = 2 * LANES;   // keys at once
constexpr int MOST_QUERIES = 48;  // query vectors of one KV head at once: tokens times the heads that share it
constexpr int GROUP = 6;          // query vectors in registers

// Where a row's K/V lie, and what of them its tokens see.
struct Rows {
    const int32_t *query_indptr, *seq_lens, *block_indptr, *block_ids;
    int64_t block_size, window;
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

// One KV head of tokens [first, last) of a row: its queries against all keys they see, by an online softmax.
template <typename T>
__attribute__((noinline)) void attend_part(const T* query, int64_t ld_q, const T* keys, const T* values, const Rows& rows, int64_t row, int64_t first,
                 int64_t last, int64_t head, int64_t kv_heads, int64_t share, int dim, float scaling, T* out, Workspace& own) {
    const int64_t start = rows.query_indptr[row], length = rows.query_indptr[row + 1] - start;
    const int64_t before = rows.seq_lens[row] - length;  // position of the row's first token
    const int32_t* table = rows.block_ids + rows.block_indptr[row];
    const int count = int((last - first) * share);
    const int64_t heads = kv_heads * share, width = kv_heads * dim;
    for (int n = 0; n < count; n++) {
        const T* from = query + (start + first + n / share) * ld_q + (head * share + n % share) * dim;
        for (int d = 0; d < dim; d += LANES) {
            store(&own.queries[n * dim + d], load(from + d) * scaling);
            store(&own.sums[n * dim + d], splat(0.0f));
        }
        own.most[n] = -INFINITY;
        own.total[n] = 0.0f;
    }
    const int64_t seen = before + last;
    const int64_t oldest = rows.window ? std::max<int64_t>(0, before + first - rows.window + 1) : 0;
    int64_t block = oldest / rows.block_size, offset = oldest % rows.block_size;
    for (int64_t tile = oldest; tile < seen; tile += TILE) {
        const int filled = int(std::min<int64_t>(TILE, seen - tile));
        int64_t slots[TILE];
        for (int t = 0; t < filled; t++) {
            slots[t] = int64_t(table[block]) * rows.block_size + offset;
            if (++offset == rows.block_size) block++, offset = 0;
        }
        // Past the end the last key stands in: it is masked, and what lies in unused slots may be no number.
        for (int t = filled; t < TILE; t++) slots[t] = slots[filled - 1];
        for (int t = 0; t < TILE; t += LANES) {
            for (int d = 0; d < dim; d += LANES) {
                Floats lines[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    const int64_t at = slots[t + i] * width + head * dim + d;
                    lines[i] = load(keys + at);
                    store(&own.values[(t + i) * dim + d], load(values + at));
                }
                transpose(lines, &own.keys[d * TILE + t]);
            }
        }
        for (int n = 0; n < count; n += GROUP)
            dispatch_score<GROUP>(std::min(GROUP, count - n), &own.queries[n * dim], own.keys.data(), dim, &own.scores[n * TILE]);
        for (int n = 0; n < count; n++) {
            const int64_t at = before + first + n / share;
            // Keys of this tile that the token sees: from `low` to below `high`.
            const int high = int(std::min<int64_t>(TILE, at + 1 - tile));
            const int low = rows.window ? int(std::max<int64_t>(0, at - rows.window + 1 - tile)) : 0;
            Floats left = load(&own.scores[n * TILE]), right = load(&own.scores[n * TILE + LANES]);
            if (high < TILE || low > 0) {
                const Floats none = splat(-INFINITY);
                left = select((EACH < high) & (EACH >= low), left, none);
                right = select((EACH + LANES < high) & (EACH + LANES >= low), right, none);
            }
            if (high <= low) {  // the token sees nothing here
                store(&own.scores[n * TILE], splat(0.0f));
                store(&own.scores[n * TILE + LANES], splat(0.0f));
                own.scales[n] = 1.0f;
                continue;
            }
            const float most = std::max(own.most[n], largest(select(left > right, left, right)));
            left = exponential(left - most);
            right = exponential(right - most);
            own.scales[n] = std::exp(own.most[n] - most);
            own.total[n] = own.total[n] * own.scales[n] + sum(left + right);
            own.most[n] = most;
            store(&own.scores[n * TILE], left);
            store(&own.scores[n * TILE + LANES], right);
        }
        for (int n = 0; n < count; n += GROUP)
            dispatch_accumulate<GROUP>(std::min(GROUP, count - n), &own.scores[n * TILE], own.values.data(), dim, &own.scales[n],
                                       &own.sums[n * dim]);
    }
    for (int n = 0; n < count; n++) {
        T* to = out + (start + first + n / share) * heads * dim + (head * share + n % share) * dim;
        for (int d = 0; d < dim; d += LANES) store(to + d, load(&own.sums[n * dim + d]) / own.total[n]);
    }
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
void attend(const T* query, int64_t ld_q, const T* keys, const T* values, const Rows& rows, int64_t num_rows, int64_t kv_heads,
            int64_t share, int64_t dim, float scaling, T* out) {
    struct Part {
        int64_t row, first, last;
    };
    std::vector<Part> parts;
    const int64_t chunk = std::max<int64_t>(1, MOST_QUERIES / share);
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t length = rows.query_indptr[row + 1] - rows.query_indptr[row];
        for (int64_t first = 0; first < length; first += chunk) parts.push_back({row, first, std::min(length, first + chunk)});
    }
    const int64_t work = int64_t(parts.size()) * kv_heads;
#pragma omp parallel
    {
        thread_local Workspace own;
        own.reserve(int(dim), size_t(chunk * share));
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < work; item++) {
            // The longest parts of a row are its last ones: they go first.
            const Part& part = parts[parts.size() - 1 - item / kv_heads];
            attend_part(query, ld_q, keys, values, rows, part.row, part.first, part.last, item % kv_heads, kv_heads, share, int(dim),
                        scaling, out, own);
        }
    }
}

// ---- linear --------------------------------------------------------------------------------------------------------

#ifdef KVPLANE_LINEAR
constexpr int COLUMNS = 2 * LANES;  // outputs of a packed block
constexpr int MOST_ROWS = 12;       // 24 accumulators of the 32 registers

// Rows of x times one block of packed weights: (inputs / 2, COLUMNS, 2), so that each step multiplies pairs of inputs.
template <int ROWS>
void linear_tile(const bfloat16* x, int64_t ld_x, const bfloat16* block, const bfloat16* bias, int64_t inputs, bfloat16* y,
                 int64_t ld_y, int columns) {
    // Few rows leave registers free: several sums of one output hide the latency of adding to one.
    constexpr int SUMS = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
    __m512 acc[SUMS][ROWS][2];
    for (int s = 0; s < SUMS; s++)
        for (int r = 0; r < ROWS; r++) acc[s][r][0] = acc[s][r][1] = _mm512_setzero_ps();
    const int64_t pairs = inputs / 2;
    const auto step = [&](int s, int64_t pair) __attribute__((always_inline)) {
        const bfloat16* weights = block + pair * COLUMNS * 2;
        const __m512bh left = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(weights + 2 * LANES);
        if (ROWS <= 4) {
            _mm_prefetch((const char*)weights + 2048, _MM_HINT_T0);
            _mm_prefetch((const char*)weights + 2112, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t two;
            std::memcpy(&two, x + r * ld_x + 2 * pair, sizeof two);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
            acc[s][r][0] = _mm512_dpbf16_ps(acc[s][r][0], both, left);
            acc[s][r][1] = _mm512_dpbf16_ps(acc[s][r][1], both, right);
        }
    };
    int64_t pair = 0;
    for (; pair + SUMS <= pairs; pair += SUMS) {
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; s++) step(s, pair + s);
    }
    for (; pair < pairs; pair++) step(0, pair);
    const __mmask16 first = columns >= LANES ? 0xffff : (1u << columns) - 1;
    const __mmask16 second = columns >= 2 * LANES ? 0xffff : columns > LANES ? (1u << (columns - LANES)) - 1 : 0;
    Floats add[2] = {};
    if (bias) {
        add[0] = load_part(bias, std::min(columns, LANES));
        if (columns > LANES) add[1] = load_part(bias + LANES, columns - LANES);
    }
    for (int r = 0; r < ROWS; r++) {
        for (int half = 0; half < 2; half++) {
            for (int s = 1; s < SUMS; s++) acc[0][r][half] = _mm512_add_ps(acc[0][r][half], acc[s][r][half]);
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(acc[0][r][half], (__m512)add[half]));
            _mm256_mask_storeu_epi16(y + r * ld_y + half * LANES, half ? second : first, rounded);
        }
    }
}

template <int ROWS>
void dispatch_tile(int rows, const bfloat16* x, int64_t ld_x, const bfloat16* block, const bfloat16* bias, int64_t inputs,
                   bfloat16* y, int64_t ld_y, int columns) {
    if (rows == ROWS)
        linear_tile<ROWS>(x, ld_x, block, bias, inputs, y, ld_y, columns);
    else if constexpr (ROWS > 1)
        dispatch_tile<ROWS - 1>(rows, x, ld_x, block, bias, inputs, y, ld_y, columns);
}
#endif

}  // namespace

extern "C" {

// Outputs of a packed block of weights; 0 where this machine has no instruction for products of bfloat16.
int64_t kvplane_linear_columns() {
#ifdef KVPLANE_LINEAR
    return COLUMNS;
#else
    return 0;
#endif
}

#ifdef KVPLANE_LINEAR
// (outputs, inputs) to blocks of (inputs / 2, COLUMNS, 2); outputs from `offset` on of those that are packed together.
void kvplane_pack(const bfloat16* weight, int64_t outputs, int64_t inputs, int64_t offset, bfloat16* packed) {
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; output++) {
        const int64_t place = offset + output;
        bfloat16* to = packed + place / COLUMNS * COLUMNS * inputs + place % COLUMNS * 2;
        for (int64_t pair = 0; pair < inputs / 2; pair++) std::memcpy(to + pair * COLUMNS * 2, weight + output * inputs + 2 * pair, 4);
    }
}

// y = x W^T + b.
void kvplane_linear(const bfloat16* x, const bfloat16* packed, const bfloat16* bias, int64_t rows, int64_t outputs, int64_t inputs,
                    bfloat16* y) {
    const int64_t blocks = (outputs + COLUMNS - 1) / COLUMNS, tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t column = block * COLUMNS;
        const int columns = int(std::min<int64_t>(COLUMNS, outputs - column));
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
            dispatch_tile<MOST_ROWS>(int(end - row), x + row * inputs, inputs, packed + column * inputs, bias ? bias + column : nullptr,
                                     inputs, y + row * outputs + column, outputs, columns);
        }
    }
}
#endif

#define KVPLANE_FOR(T, NAME)                                                                                                       \
    void kvplane_rms_norm_##NAME(T* states, const T* added, const T* weight, float eps, float offset, int64_t rows, int64_t width, \
                                 T* out) {                                                                                         \
        rms_norm(states, added, weight, eps, offset, rows, width, out);                                                            \
    }                                                                                                                              \
    void kvplane_rotary_##NAME(T* states, int64_t ld, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim) {      \
        rotary(states, ld, cos, sin, rows, heads, dim);                                                                            \
    }                                                                                                                              \
    void kvplane_silu_and_mul_##NAME(const T* both, int64_t rows, int64_t width, T* out) { silu_and_mul(both, rows, width, out); } \
    void kvplane_write_kv_##NAME(const T* key, const T* value, int64_t ld_k, int64_t ld_v, const int64_t* slots, int64_t tokens,   \
                                 int64_t width, T* keys, T* values) {                                                              \
        write_kv(key, value, ld_k, ld_v, slots, tokens, width, keys, values);                                                      \
    }                                                                                                                              \
    void kvplane_attend_##NAME(const T* query, int64_t ld_q, const T* keys, const T* values, const int32_t* query_indptr,          \
                               const int32_t* seq_lens, const int32_t* block_indptr, const int32_t* block_ids, int64_t block_size, \
                               int64_t window, int64_t rows, int64_t kv_heads, int64_t share, int64_t dim, float scaling,          \
                               T* out) {                                                                                           \
        attend(query, ld_q, keys, values, {query_indptr, seq_lens, block_indptr, block_ids, block_size, window}, rows, kv_heads,   \
               share, dim, scaling, out);                                                                                          \
    }

KVPLANE_FOR(float, float32)
KVPLANE_FOR(bfloat16, bfloat16)
}
