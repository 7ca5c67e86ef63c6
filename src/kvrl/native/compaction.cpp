// Compaction on a CPU: kept entries to the front of their slot, and R-KV's search for repeated keys.
//
// A task is one slot of one KV head: what it computes depends on its own inputs alone, in a fixed order.
#include <cstdint>
#include <cstring>

#include "vectors.h"

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

// For each row i of unit [slots, n, dim]: the newest j != i with unit_i . unit_j > threshold, both candidates. What such
// a pair scores is added to repeated[j], rows in order. dim is a multiple of LANES.
extern "C" void kvrl_newest_similar(const float* unit, const uint8_t* candidate, float threshold, float* repeated,
                                    int64_t slots, int64_t n, int64_t dim, int64_t threads) {
    constexpr int ROWS = 4;
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic, 1)
    for (int64_t slot = 0; slot < slots; slot++) {
        const float* keys = unit + slot * n * dim;
        const uint8_t* may_go = candidate + slot * n;
        float* out = repeated + slot * n;
        std::memset(out, 0, n * sizeof(float));
        for (int64_t first = 0; first < n; first += ROWS) {
            int rows = n - first < ROWS ? int(n - first) : ROWS;
            int64_t found[ROWS];
            float value[ROWS];
            int open = 0;
            for (int r = 0; r < ROWS; r++) {
                found[r] = -1;
                bool real = r < rows && may_go[first + r];
                if (!real) found[r] = n;  // nothing to look for
                open += real;
            }
            for (int64_t end = n; end > 0 && open; end -= LANES) {
                int64_t start = end < LANES ? 0 : end - LANES;
                int width = int(end - start);
                Vec part[ROWS][LANES] = {};
                for (int j = 0; j < width; j++) {
                    const float* key = keys + (start + j) * dim;
                    Vec acc[ROWS] = {};
                    for (int64_t d = 0; d < dim; d += LANES) {
                        Vec x = load(key + d);
                        for (int r = 0; r < rows; r++) acc[r] += x * load(keys + (first + r) * dim + d);
                    }
                    for (int r = 0; r < rows; r++) part[r][j] = acc[r];
                }
                for (int r = 0; r < rows; r++) {
                    if (found[r] >= 0) continue;
                    Vec dots = sums(part[r]);
                    for (int j = width - 1; j >= 0; j--)
                        if (dots[j] > threshold && may_go[start + j] && start + j != first + r) {
                            found[r] = start + j;
                            value[r] = dots[j];
                            open--;
                            break;
                        }
                }
            }
            for (int r = 0; r < rows; r++)
                if (found[r] >= 0 && found[r] < n) out[found[r]] += value[r];
        }
    }
}
