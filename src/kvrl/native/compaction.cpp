// Compaction on a CPU: kept entries to the front of their slot, and R-KV's search for repeated keys.
//
// A task is one slot of one KV head: what it computes depends on its own inputs alone, in a fixed order.
#include <cstdint>
#include <cstring>
#include <vector>

#include "gemm.h"

// entries: `slots` blocks of [capacity, width] bytes at base + offset[slot]; kept int64 [slots, budget], ascending.
// Entry kept[i] goes to place i. As kept[i] >= i, nothing is overwritten before it was read.
extern "C" void kvrl_keep(char* base, const int64_t* offset, const int64_t* kept, int64_t slots, int64_t budget,
                          int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t slot = 0; slot < slots; slot++) {
        char* entries = base + offset[slot];
        const int64_t* from = kept + slot * budget;
        int64_t i = 0;
        while (i < budget && from[i] == i) i++;  // what is old and stays is where it was
        for (; i < budget; i++) std::memcpy(entries + i * width, entries + from[i] * width, width);
    }
}

namespace {

// The largest j below `end` with dots[j] > threshold that may go and is not `self`, or -1; dots is at column `first`.
inline int64_t newest(const float* dots, const uint8_t* may_go, int64_t first, int64_t end, int64_t self,
                      float threshold) {
    for (int64_t at = (end - first - 1) / LANES * LANES; at >= 0; at -= LANES) {
        Ints above = load(dots + at) > threshold;
        uint32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits |= uint32_t(above[i] & 1) << i;
        while (bits) {
            int i = 31 - __builtin_clz(bits);
            int64_t j = first + at + i;
            if (j < end && j != self && may_go[j]) return j;
            bits &= ~(1u << i);
        }
    }
    return -1;
}

}  // namespace

// For each row i of unit [slots, n, dim]: the newest j != i with unit_i . unit_j > threshold, both candidates. What such
// a pair scores is added to repeated[j], rows in order.
extern "C" void kvrl_newest_similar(const float* unit, const uint8_t* candidate, float threshold, float* repeated,
                                    int64_t slots, int64_t n, int64_t dim, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    {
        int64_t panels = (n + COLUMNS - 1) / COLUMNS;
        std::vector<float> packed(panels * COLUMNS * dim);
        float dots[ROWS * COLUMNS];
#pragma omp for schedule(dynamic, 1)
        for (int64_t slot = 0; slot < slots; slot++) {
            const float* keys = unit + slot * n * dim;
            const uint8_t* may_go = candidate + slot * n;
            float* out = repeated + slot * n;
            std::memset(out, 0, n * sizeof(float));
            int64_t ready = panels;  // packed from here on: often the newest are enough
            for (int64_t first = 0; first < n; first += ROWS) {
                int rows = int(n - first < ROWS ? n - first : ROWS), open = 0;
                int64_t found[ROWS];
                float value[ROWS];
                for (int r = 0; r < rows; r++) {
                    found[r] = may_go[first + r] ? -1 : n;  // n: nothing to look for
                    open += may_go[first + r];
                }
                for (int64_t panel = panels - 1; panel >= 0 && open; panel--) {  // from the newest
                    int64_t start = panel * COLUMNS, end = start + COLUMNS < n ? start + COLUMNS : n;
                    for (; ready > panel; ready--)
                        for (int64_t c = start; c < end; c++)
                            for (int64_t d = 0; d < dim; d++)
                                packed[start * dim + d * COLUMNS + c - start] = keys[c * dim + d];
                    tiles(rows, keys + first * dim, packed.data() + start * dim, dim, dots);
                    for (int r = 0; r < rows; r++) {
                        if (found[r] >= 0) continue;
                        found[r] = newest(dots + r * COLUMNS, may_go, start, end, first + r, threshold);
                        if (found[r] < 0) continue;
                        value[r] = dots[r * COLUMNS + found[r] - start];
                        open--;
                    }
                }
                for (int r = 0; r < rows; r++)
                    if (found[r] >= 0 && found[r] < n) out[found[r]] += value[r];
            }
        }
    }
}
