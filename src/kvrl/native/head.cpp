// The language-model head on a CPU: products of bfloat16 numbers, which are exact in float32, summed in float32.
//
// A row's sums run over k in one order whatever the other rows are, so that its bits do not depend on them.
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int COLUMNS = 64;  // of a panel: four registers
constexpr int ROWS = 6;      // 24 sums, 4 weights and a broadcast fill the registers

// out [rows of R, COLUMNS] = hidden [R, k] times one panel [k / 2, COLUMNS, 2]
template <int R>
void tile(const uint16_t* hidden, const uint16_t* panel, int64_t k, float* out, int64_t out_stride, int64_t columns) {
    __m512 acc[R][4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) acc[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k / 2; i++) {
        __m512bh weight[4];
        for (int c = 0; c < 4; c++) weight[c] = (__m512bh)_mm512_loadu_si512(panel + i * 2 * COLUMNS + c * 32);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, hidden + r * k + 2 * i, sizeof pair);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 4; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], x, weight[c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) {
            int64_t left = columns - 16 * c;
            if (left <= 0) break;
            __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
            _mm512_mask_storeu_ps(out + r * out_stride + 16 * c, mask, acc[r][c]);
        }
}

}  // namespace

extern "C" int kvrl_head_exists() { return 1; }

// weight [n, k] to panels [ceil(n / COLUMNS), k / 2, COLUMNS, 2], columns beyond n zero; k is even.
extern "C" void kvrl_head_pack(const uint16_t* weight, uint16_t* packed, int64_t n, int64_t k, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t first = 0; first < n; first += COLUMNS) {
        uint32_t* out = (uint32_t*)(packed + first * k);
        int64_t columns = n - first < COLUMNS ? n - first : COLUMNS;
        std::memset(out, 0, COLUMNS * k * sizeof(uint16_t));
        for (int64_t c = 0; c < columns; c++) {
            const uint16_t* row = weight + (first + c) * k;
            for (int64_t i = 0; i < k / 2; i++) std::memcpy(out + i * COLUMNS + c, row + 2 * i, sizeof(uint32_t));
        }
    }
}

// out float32 [m, n] = hidden bfloat16 [m, k], contiguous, times the packed weight.
extern "C" void kvrl_head(const uint16_t* hidden, const uint16_t* packed, float* out, int64_t m, int64_t n, int64_t k,
                          int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t first = 0; first < n; first += COLUMNS) {
        const uint16_t* panel = packed + first * k;
        int64_t columns = n - first < COLUMNS ? n - first : COLUMNS;
        int64_t row = 0;
        for (; row + ROWS <= m; row += ROWS) tile<ROWS>(hidden + row * k, panel, k, out + row * n + first, n, columns);
        for (; row + 2 <= m; row += 2) tile<2>(hidden + row * k, panel, k, out + row * n + first, n, columns);
        if (row < m) tile<1>(hidden + row * k, panel, k, out + row * n + first, n, columns);
    }
}

#else

extern "C" int kvrl_head_exists() { return 0; }

#endif
