// Vectors of floats as wide as the machine's registers (GCC keeps wider ones in memory), and sums of them.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int VECTORS = REGISTERS == 32 ? 4 : 2;  // of a row, summed at once for several rows without spilling
typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const uint16_t* p) {  // bfloat16: the upper half of a float
#ifdef __AVX512F__  // GCC widens and narrows vectors of so many numbers in four parts
    Words w = (Words)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    Halves h;
    std::memcpy(&h, p, sizeof h);
    Words w = __builtin_convertvector(h, Words) << 16;
#endif
    Vec v;
    std::memcpy(&v, &w, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(uint16_t* p, Vec v) {  // round to nearest even, as torch does; NaN stays NaN
    Words w;
    std::memcpy(&w, &v, sizeof w);
    Words nan = (Words)(v != v);
    w = (w + 0x7FFF + ((w >> 16) & 1)) >> 16;
    w = (nan & 0x7FC0) | (~nan & w);
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)w));
#else
    Halves h = __builtin_convertvector(w, Halves);
    std::memcpy(p, &h, sizeof h);
#endif
}

// One level of a transposed sum: folds blocks of 2 * W lanes of a and b to W lanes each.
template <int W>
inline Vec fold(Vec a, Vec b) {
    Ints low, high;
    for (int i = 0; i < LANES; i++) {
        int source = (i / W * 2 * W) + i % W;  // lane of a ++ b, both LANES wide
        low[i] = source;
        high[i] = source + W;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// The sums of LANES vectors as one vector, from 2 * W vectors that hold W summands of each.
template <int W = LANES / 2>
inline Vec sums(const Vec* v) {
    Vec half[W];
    for (int i = 0; i < W; i++) half[i] = fold<W>(v[2 * i], v[2 * i + 1]);
    if constexpr (W > 1)
        return sums<W / 2>(half);
    else
        return half[0];
}

// exp of x <= 0 to about 1e-7, relative; 0 below -87. By 2^n * exp(r), |r| <= ln 2 / 2 (Cephes' polynomial).
inline Vec exponential(Vec x) {
    Ints keep = x > -87.0f;
    Vec n = x * 1.44269504f;
    Ints whole = __builtin_convertvector(n - 0.5f, Ints);  // towards zero, so to the nearest for x <= 0
    n = __builtin_convertvector(whole, Vec);
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Ints power = (whole + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    Vec out = y * scale;
    Ints bits;
    std::memcpy(&bits, &out, sizeof bits);
    bits &= keep | (Ints)(x != x);
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

}  // namespace
