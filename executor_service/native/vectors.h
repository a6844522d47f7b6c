// Vectors of 16 numbers, and the types that they are loaded from: what all kernels are written in.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
// This machine multiplies pairs of bfloat16.
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

inline Floats widened(Halves halves) { return (Floats)(__builtin_convertvector(halves, Words) << 16); }

inline Floats load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return widened(halves);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// To the nearest bfloat16, ties to even; NaN stays NaN. The instruction takes what is below the least normal number, 1.2e-38,
// for 0.
inline Halves rounded(Floats values) {
#ifdef KVPLANE_LINEAR
    return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
    const Words bits = (Words)values;
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = (Words)(values == values);
    return __builtin_convertvector((nearest & kept) | (0x7fc0 & ~kept), Halves);
#endif
}

inline void store(bfloat16* to, Floats values) {
    const Halves halves = rounded(values);
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

// As T has it, in float.
template <typename T>
inline Floats round_to(Floats values) {
    if constexpr (sizeof(T) == sizeof(float)) return values;
    return widened(rounded(values));
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

}  // namespace
