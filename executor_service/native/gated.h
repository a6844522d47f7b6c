// The first half of an MLP in one go: silu(x G^T) * (x U^T), of weights of which gates and ups are packed as one matrix.
//
// Station: called by layers.h, where the gates are whole blocks. Values are rounded where product and `silu_and_mul` by
// themselves round them: the result is the same to the last bit.

#pragma once

#include "layer_ops.h"
#include "linear.h"

namespace {

#ifdef KVPLANE_LINEAR
inline bool can_gate(int64_t inner) { return inner % COLUMNS == 0; }

// COLUMNS of the `inner` results of all rows; `many` as in `linear_block`.
inline void gated_block(const bfloat16* x, const bfloat16* packed, const bfloat16* bias, int64_t rows, bool many, int64_t inner,
                        int64_t inputs, bfloat16* y, int64_t block) {
    const int64_t column = block * COLUMNS, tiles = linear_tiles(rows);
    const bfloat16 *gate_weights = packed + column * inputs, *up_weights = gate_weights + inner * inputs;
    const bfloat16 *gate_bias = bias ? bias + column : nullptr, *up_bias = bias ? gate_bias + inner : nullptr;
    bfloat16 gates[MOST_ROWS * COLUMNS], ups[MOST_ROWS * COLUMNS];
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        const bfloat16* from = x + row * inputs;
        linear_rows(tile, int(end - row), many, from, inputs, gate_weights, gate_bias, inputs, gates, COLUMNS, COLUMNS);
        linear_rows(tile, int(end - row), many, from, inputs, up_weights, up_bias, inputs, ups, COLUMNS, COLUMNS);
        for (int64_t r = 0; r < end - row; r++)
            silu_and_mul_part(gates + r * COLUMNS, ups + r * COLUMNS, COLUMNS, y + (row + r) * inner + column);
    }
}
#endif

}  // namespace
