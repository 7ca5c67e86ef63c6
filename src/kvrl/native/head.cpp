// The language-model head on a CPU: products of bfloat16 numbers, which are exact in float32, summed in float32.
#include "gemm.h"

// out float32 [m, n] = hidden bfloat16 [m, k], contiguous, times the packed weight; k is even.
extern "C" void kvrl_head(const uint16_t* hidden, const uint16_t* packed, float* out, int64_t m, int64_t n, int64_t k,
                          int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    multiply(hidden, packed, m, n, k, [&](int64_t row, int64_t column, Vec sums) {
        int64_t count = n - column < LANES ? n - column : LANES;
        std::memcpy(out + row * n + column, &sums, count * sizeof(float));
    });
}
