// What a layer computes between products and attention; each for one row, and for many by OpenMP.
//
// Station: called by kernels.cpp, and row by row by layers.h; the oracle is `layer_ops.TorchOps`.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

// y = weight * x / sqrt(mean(x^2) + eps), x = states + added first where there is one; x is written back to states.
template <typename T>
inline void rms_norm_row(T* x, const T* more, const T* weight, float eps, int64_t width, T* y) {
    const int64_t whole = width / LANES * LANES;
    const int rest = int(width - whole);
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
    for (int64_t i = 0; i < whole; i += LANES) store(y + i, round_to<T>(load(x + i) * factor) * load(weight + i));
    if (rest) store_part(y + whole, round_to<T>(load_part(x + whole, rest) * factor) * load_part(weight + whole, rest), rest);
}

template <typename T>
void rms_norm(T* states, const T* added, const T* weight, float eps, int64_t rows, int64_t width, T* out) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++)
        rms_norm_row(states + row * width, added ? added + row * width : nullptr, weight, eps, width, out + row * width);
}

// ---- rotary --------------------------------------------------------------------------------------------------------

// Heads that lie side by side, in place: (a, b) to (a cos - b sin, b cos + a sin), a and b a head's two halves.
template <typename T>
inline void rotary_row(T* heads_of, const T* c, const T* s, int64_t heads, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t head = 0; head < heads; head++) {
        T *a = heads_of + head * dim, *b = a + half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int count = int(std::min<int64_t>(LANES, half - i));
            if (count == LANES) {
                const Floats first = load(a + i), second = load(b + i);
                store(a + i, first * load(c + i) - second * load(s + i));
                store(b + i, second * load(c + half + i) + first * load(s + half + i));
                continue;
            }
            const Floats first = load_part(a + i, count), second = load_part(b + i, count);
            store_part(a + i, first * load_part(c + i, count) - second * load_part(s + i, count), count);
            store_part(b + i, second * load_part(c + half + i, count) + first * load_part(s + half + i, count), count);
        }
    }
}

template <typename T>
void rotary(T* states, int64_t ld, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > 16384)
    for (int64_t row = 0; row < rows; row++) rotary_row(states + row * ld, cos + row * dim, sin + row * dim, heads, dim);
}

// ---- silu_and_mul --------------------------------------------------------------------------------------------------

// y = g / (1 + e^-g) * u.
template <typename T>
inline void silu_and_mul_part(const T* gates, const T* ups, int64_t width, T* y) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int count = int(std::min<int64_t>(LANES, width - i));
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

// Gates and ups are the two halves of each row.
template <typename T>
void silu_and_mul(const T* both, int64_t rows, int64_t width, T* out) {
    const int64_t chunk = 1024, chunks = (width + chunk - 1) / chunk;
#pragma omp parallel for collapse(2) schedule(static) if (rows * width > 4096)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t part = 0; part < chunks; part++) {
            const int64_t start = part * chunk;
            const T* gates = both + row * 2 * width + start;
            silu_and_mul_part(gates, gates + width, std::min(chunk, width - start), out + row * width + start);
        }
    }
}

}  // namespace
