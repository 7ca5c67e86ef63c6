// Weights in the order in which gemm.h reads them, for all kernels that multiply.
#include "gemm.h"

extern "C" int kvrl_multiplies(int bfloat16) { return !bfloat16 || BFLOAT16; }

extern "C" int kvrl_lanes() { return LANES; }

// weight [n, k] to panels; rows[c], if given, is the row that stands in column c. k is even for bfloat16.
extern "C" void kvrl_pack(const void* weight, void* packed, int64_t n, int64_t k, const int64_t* rows, int64_t threads,
                          int bfloat16) {
    if (bfloat16)
        pack((const uint16_t*)weight, (uint16_t*)packed, n, k, rows, threads);
    else
        pack((const float*)weight, (float*)packed, n, k, rows, threads);
}
