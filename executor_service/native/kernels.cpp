// Kernels for decoding on a CPU, behind a C interface: no torch header, so that they compile in seconds.
//
// Station: compiled and loaded by `library.py`, called through `ops.py`, which checks shapes and types; here nothing is
// checked. The oracle of each is what it stands for in torch. T is float or bfloat16; sums are in float, and products of
// bfloat16 may be of rounded values. A matrix is row-major with `ld` elements from row to row. Threads are OpenMP's; from
// GCC it is the same pool as torch's.

#include "attention.h"
#include "layer_ops.h"
#include "layers.h"
#include "linear.h"

extern "C" {

// Outputs of a packed block of weights; 0 where this machine has no instruction for products of bfloat16.
int64_t kvplane_linear_columns() {
#ifdef KVPLANE_LINEAR
    return COLUMNS;
#else
    return 0;
#endif
}

// Tiles of one head's K and V that parts of a step's plan look at, those that rows of a part share once. Nothing is read.
int64_t kvplane_planned_tiles(const int32_t* query_indptr, const int32_t* seq_lens, const int32_t* block_indptr, const int32_t* block_ids,
                              int64_t block_size, int64_t window, int64_t num_rows, int64_t kv_heads, int64_t share, int64_t threads) {
    const Rows rows = {query_indptr, seq_lens, block_indptr, block_ids, block_size, window};
    const Plan plan = plan_of(rows, num_rows, kv_heads, share, threads);
    int64_t tiles = 0;
    for (const Part& part : plan.parts) {
        std::vector<Job> jobs;
        add_jobs(rows, plan, part, part.from, part.to, 0, jobs);
        tiles += int64_t(jobs.size()) * part.heads;
    }
    return tiles;
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
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < linear_blocks(outputs); block++) linear_block(x, packed, bias, rows, false, outputs, inputs, y, block);
}

// The layers of a decoder, one after the other. `states` (tokens, width) become what the last one returns. Tokens' cosines
// and sines are (tokens, dim); pages are in the layers' order; `workspace` has kvplane_layers_workspace elements. With
// `wanted`, rising, only these tokens of the last layer's result are.
void kvplane_layers(const Sizes* sizes, const Layer* layers, int64_t num_layers, const Page* pages, const Group* groups,
                    int64_t num_groups, const bfloat16* cos, const bfloat16* sin, int64_t tokens, const int64_t* wanted,
                    int64_t num_wanted, bfloat16* states, bfloat16* workspace, int64_t threads) {
    run_layers(*sizes, layers, num_layers, pages, groups, num_groups, cos, sin, tokens, {wanted, num_wanted}, states, workspace,
               int(threads));
}

int64_t kvplane_layers_workspace(const Sizes* sizes, int64_t tokens) { return tokens * sizes->workspace(); }
#endif

#define KVPLANE_FOR(T, NAME)                                                                                                       \
    void kvplane_rms_norm_##NAME(T* states, const T* added, const T* weight, float eps, int64_t rows, int64_t width, T* out) {      \
        rms_norm(states, added, weight, eps, rows, width, out);                                                                    \
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
        const Rows where = {query_indptr, seq_lens, block_indptr, block_ids, block_size, window};                                  \
        attend<T>({query, ld_q, keys, values, where, kv_heads, share, int(dim), scaling, out}, rows);                              \
    }

KVPLANE_FOR(float, float32)
KVPLANE_FOR(bfloat16, bfloat16)
}
