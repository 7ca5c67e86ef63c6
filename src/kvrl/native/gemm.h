// Products with packed weights: y [m, n] = x [m, k] times the transpose of w [n, k], summed in float32.
//
// The sums of a row run over k in one order whatever the other rows are, so that its bits do not depend on them.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

namespace {

constexpr int COLUMNS = 64;  // of a panel
constexpr int ROWS = 6;      // of a tile: times VECTORS sums, the weights and a broadcast fill the registers
constexpr int BLOCK = 24;    // rows of a task

// The kinds of numbers: float, and bfloat16 (as uint16_t), whose products come in pairs.
template <class T>
constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;

// w [n, k] to panels [ceil(n / COLUMNS), k / PAIR, COLUMNS, PAIR]; columns beyond n are zero. k is a multiple of PAIR.
// rows[c] is the row of w that stands in column c, or null for c itself.
template <class T>
void pack(const T* w, T* packed, int64_t n, int64_t k, const int64_t* rows, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t first = 0; first < n; first += COLUMNS) {
        T* out = packed + first * k;
        int64_t columns = n - first < COLUMNS ? n - first : COLUMNS;
        std::memset(out, 0, COLUMNS * k * sizeof(T));
        for (int64_t c = 0; c < columns; c++) {
            const T* row = w + (rows ? rows[first + c] : first + c) * k;
            for (int64_t i = 0; i < k / PAIR<T>; i++)
                std::memcpy(out + (i * COLUMNS + c) * PAIR<T>, row + i * PAIR<T>, sizeof(T) * PAIR<T>);
        }
    }
}

// out [R, COLUMNS] = x [R, k] times one panel. Sums of 32 products are summed: a long chain would lose digits.
template <int R>
inline void tile(const float* x, const float* panel, int64_t k, float* out) {
    for (int first = 0; first < COLUMNS; first += VECTORS * LANES) {
        Vec total[R][VECTORS] = {};
        for (int64_t start = 0; start < k; start += 32) {
            Vec acc[R][VECTORS] = {};
            for (int64_t i = start; i < (start + 32 < k ? start + 32 : k); i++) {
                Vec weight[VECTORS];
                for (int c = 0; c < VECTORS; c++) weight[c] = load(panel + i * COLUMNS + first + c * LANES);
                for (int r = 0; r < R; r++) {
                    Vec one = splat(x[r * k + i]);
                    for (int c = 0; c < VECTORS; c++) acc[r][c] += one * weight[c];
                }
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < VECTORS; c++) total[r][c] += acc[r][c];
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < VECTORS; c++) store(out + r * COLUMNS + first + c * LANES, total[r][c]);
    }
}

#ifdef __AVX512BF16__
template <int R>
inline void tile(const uint16_t* x, const uint16_t* panel, int64_t k, float* out) {
    __m512 acc[R][4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) acc[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k / 2; i++) {
        __m512bh weight[4];
        for (int c = 0; c < 4; c++) weight[c] = (__m512bh)_mm512_loadu_si512(panel + i * 2 * COLUMNS + c * 32);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * k + 2 * i, sizeof pair);
            __m512bh one = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 4; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], one, weight[c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) _mm512_storeu_ps(out + r * COLUMNS + c * LANES, acc[r][c]);
}
constexpr bool BFLOAT16 = true;
#else
template <int R>
inline void tile(const uint16_t*, const uint16_t*, int64_t, float*) {}
constexpr bool BFLOAT16 = false;
#endif

// out [count, COLUMNS] = x [count, k] times one panel; count is 1 to ROWS.
template <class T>
inline void tiles(int count, const T* x, const T* panel, int64_t k, float* out) {
    switch (count) {
        case 1: return tile<1>(x, panel, k, out);
        case 2: return tile<2>(x, panel, k, out);
        case 3: return tile<3>(x, panel, k, out);
        case 4: return tile<4>(x, panel, k, out);
        case 5: return tile<5>(x, panel, k, out);
        default: return tile<ROWS>(x, panel, k, out);
    }
}

// Inside a parallel region, which shares the work: done(row, column, sums of LANES columns from there) for all of y.
template <class T, class Done>
void multiply(const T* x, const T* packed, int64_t m, int64_t n, int64_t k, Done done) {
    int64_t panels = (n + COLUMNS - 1) / COLUMNS, blocks = (m + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * blocks; task++) {  // a thread's tasks share a panel, which its cache holds
        int64_t first = task / blocks * COLUMNS, row = task % blocks * BLOCK;
        int64_t end = row + BLOCK < m ? row + BLOCK : m;
        const T* panel = packed + first * k;
        float sums[ROWS * COLUMNS];
        while (row < end) {
            int count = int(end - row < ROWS ? end - row : ROWS);
            tiles(count, x + row * k, panel, k, sums);
            for (int r = 0; r < count; r++)
                for (int c = 0; c < COLUMNS && first + c < n; c += LANES)
                    done(row + r, first + c, load(sums + r * COLUMNS + c));
            row += count;
        }
    }
}

}  // namespace
