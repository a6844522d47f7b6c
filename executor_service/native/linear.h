// Products of bfloat16 with weights that were packed, where the machine has instructions for them.
//
// Station: called by kernels.cpp for one product, and by layers.h.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

#ifdef KVPLANE_LINEAR
constexpr int COLUMNS = 2 * LANES;  // outputs of a packed block
constexpr int MOST_ROWS = 12;       // 24 accumulators of the 32 registers
constexpr int FEW_ROWS = 4;         // so many leave registers free: several sums of one output hide the latency of adding to one

// Rows of x times one block of packed weights: (inputs / 2, COLUMNS, 2), so that each step multiplies pairs of inputs. With
// FETCH the block after it comes nearer meanwhile. Rows of MANY are added up as if they were more than FEW_ROWS.
template <int ROWS, bool FETCH, bool MANY>
void linear_tile(const bfloat16* x, int64_t ld_x, const bfloat16* block, const bfloat16* bias, int64_t inputs, bfloat16* y,
                 int64_t ld_y, int columns) {
    constexpr int SUMS = MANY || ROWS > FEW_ROWS ? 1 : ROWS <= 2 ? 4 : 2;
    __m512 acc[SUMS][ROWS][2];
    for (int s = 0; s < SUMS; s++)
        for (int r = 0; r < ROWS; r++) acc[s][r][0] = acc[s][r][1] = _mm512_setzero_ps();
    const int64_t pairs = inputs / 2;
    const auto step = [&](int s, int64_t pair) __attribute__((always_inline)) {
        const bfloat16* weights = block + pair * COLUMNS * 2;
        if constexpr (FETCH) {
            _mm_prefetch((const char*)(weights + COLUMNS * inputs), _MM_HINT_T1);
            _mm_prefetch((const char*)(weights + COLUMNS * inputs + 2 * LANES), _MM_HINT_T1);
        }
        const __m512bh left = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(weights + 2 * LANES);
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

template <int ROWS, bool FETCH, bool MANY>
void dispatch_tile(int rows, const bfloat16* x, int64_t ld_x, const bfloat16* block, const bfloat16* bias, int64_t inputs,
                   bfloat16* y, int64_t ld_y, int columns) {
    if (rows == ROWS)
        linear_tile<ROWS, FETCH, MANY>(x, ld_x, block, bias, inputs, y, ld_y, columns);
    else if constexpr (ROWS > 1)
        dispatch_tile<ROWS - 1, FETCH, MANY>(rows, x, ld_x, block, bias, inputs, y, ld_y, columns);
}

inline int64_t linear_blocks(int64_t outputs) { return (outputs + COLUMNS - 1) / COLUMNS; }

inline int64_t linear_tiles(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

// Rows of a tile. The first one waits for weights from memory, which is idle while the second has them near.
inline void linear_rows(int64_t tile, int rows, bool many, const bfloat16* x, int64_t ld_x, const bfloat16* block, const bfloat16* bias,
                        int64_t inputs, bfloat16* y, int64_t ld_y, int columns) {
    const auto compute = many && rows <= FEW_ROWS ? dispatch_tile<FEW_ROWS, false, true>
                         : tile == 1              ? dispatch_tile<MOST_ROWS, true, false>
                                                  : dispatch_tile<MOST_ROWS, false, false>;
    compute(rows, x, ld_x, block, bias, inputs, y, ld_y, columns);
}

// COLUMNS outputs of all rows; `many` where these are some of more than FEW_ROWS, and shall get what they get among those.
inline void linear_block(const bfloat16* x, const bfloat16* packed, const bfloat16* bias, int64_t rows, bool many, int64_t outputs,
                         int64_t inputs, bfloat16* y, int64_t block) {
    const int64_t column = block * COLUMNS, tiles = linear_tiles(rows);
    const int columns = int(std::min<int64_t>(COLUMNS, outputs - column));
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        linear_rows(tile, int(end - row), many, x + row * inputs, inputs, packed + column * inputs, bias ? bias + column : nullptr, inputs,
                    y + row * outputs + column, outputs, columns);
    }
}
#endif

}  // namespace
