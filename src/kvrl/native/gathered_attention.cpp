// Attention of blocks of queries, each over entries of its own, read where they lie; forward and backward.
//
// Products are of bfloat16 numbers with float32 sums; logits, probabilities' sums and the gradients of keys and values
// are float32. The query heads of a group are rows of one product. Every sum runs in one order, whatever the threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gemm.h"

namespace {

struct Call {
    const uint16_t *q, *k, *v;       // [N, H, M, D]; [R, D] both
    const int32_t* index;            // [N, H, n], rows of k and v
    const int64_t* counts;           // [N]: a block's entries are the last so many of its n
    const uint8_t* visible;          // forward: [1 or N, 1 or H, M, n]; backward: the same transposed, [.., n, M]
    uint16_t* out;                   // [N, H, M, D]: the result; read by the backward pass
    float* lse;                      // [N, H, M]: the logarithm of the sum of exponentials; likewise
    const uint16_t* grad;            // backward: [N, H, M, D]
    uint16_t* grad_q;                // [N, H, M, D]
    float *grad_k, *grad_v;          // [N, H, n, D], one for each gathered entry
    int64_t blocks, heads, rows, n, dim, visible_block, visible_head, threads;
    float scaling;
};

// Of a block and head: where its rows are, and where its entries begin among n.
struct Place {
    int64_t at, skipped, count;
    Place(const Call& call, int64_t block, int64_t head)
        : at(block * call.heads + head), skipped(call.n - call.counts[block]), count(call.counts[block]) {}
};

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline int64_t up(int64_t n) { return (n + COLUMNS - 1) / COLUMNS * COLUMNS; }

// Sixteen flags from `at`, of which those at `end` and beyond are unset.
inline Ints flags(const uint8_t* from, int64_t at, int64_t end) {
    Bytes b = {};
    if (at < end) std::memcpy(&b, from + at, std::min<int64_t>(LANES, end - at));
    return __builtin_convertvector(b, Ints) != 0;
}

inline float largest(Vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, v[i]);
    return most;
}

// Rows [n, k] as the columns of panels [up(n) / COLUMNS, k / 2, COLUMNS, 2]: for products with their transpose.
inline void pack_rows(const uint16_t* rows, uint16_t* panels, int64_t n, int64_t k) {
    for (int64_t c = 0; c < up(n); c++) {
        uint16_t* out = panels + c / COLUMNS * COLUMNS * k + c % COLUMNS * 2;
        for (int64_t i = 0; i < k / 2; i++) {
            uint32_t pair = 0;
            if (c < n) std::memcpy(&pair, rows + c * k + 2 * i, sizeof pair);
            std::memcpy(out + i * COLUMNS * 2, &pair, sizeof pair);
        }
    }
}

// Rows [n, k] as panels [k / COLUMNS, up(n) / 2, COLUMNS, 2]: for products with themselves. Rows beyond n are zero.
inline void pack_columns(const uint16_t* rows, uint16_t* panels, int64_t n, int64_t k) {
    static const uint16_t zero[COLUMNS] = {};
    for (int64_t first = 0; first < k; first += COLUMNS)
        for (int64_t i = 0; i < up(n); i += 2, panels += 2 * COLUMNS) {
            const uint16_t* a = i < n ? rows + i * k + first : zero;
            const uint16_t* b = i + 1 < n ? rows + (i + 1) * k + first : zero;
            for (int c = 0; c < COLUMNS; c++) {
                panels[2 * c] = a[c];
                panels[2 * c + 1] = b[c];
            }
        }
}

inline void gather(const uint16_t* from, const int32_t* index, uint16_t* rows, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; i++) std::memcpy(rows + i * k, from + index[i] * k, k * sizeof(uint16_t));
}

// out [count, columns, as the rows are apart] = x [count, k] times panels [columns / COLUMNS, k / 2, COLUMNS, 2].
template <class Store>
inline void multiply_rows(int count, const uint16_t* x, const uint16_t* panels, int64_t k, int64_t columns, Store put) {
    float sums[ROWS * COLUMNS];
    for (int64_t first = 0; first < columns; first += COLUMNS) {
        tiles(count, x, panels + first * k, k, sums);
        for (int r = 0; r < count; r++)
            for (int c = 0; c < COLUMNS; c += LANES) put(r, first + c, load(sums + r * COLUMNS + c));
    }
}

struct Forward {
    std::vector<uint16_t> entries, keys, values, probs;
    std::vector<float> logits;

    explicit Forward(const Call& call)
        : entries(call.n * call.dim), keys(up(call.n) * call.dim), values(keys.size()), probs(ROWS * up(call.n)),
          logits(ROWS * up(call.n)) {}

    void run(const Call& call, int64_t block, int64_t head) {
        const Place place(call, block, head);
        const int64_t at = place.at, n = place.count, wide = up(n), dim = call.dim;
        const int32_t* index = call.index + at * call.n + place.skipped;
        const uint8_t* visible = call.visible + block * call.visible_block + head * call.visible_head + place.skipped;
        gather(call.k, index, entries.data(), n, dim);
        pack_rows(entries.data(), keys.data(), n, dim);
        gather(call.v, index, entries.data(), n, dim);
        pack_columns(entries.data(), values.data(), n, dim);
        for (int64_t row = 0; row < call.rows; row += ROWS) {
            const int count = int(std::min<int64_t>(ROWS, call.rows - row));
            multiply_rows(count, call.q + (at * call.rows + row) * dim, keys.data(), dim, wide,
                          [&](int r, int64_t c, Vec x) { store(logits.data() + r * wide + c, x * call.scaling); });
            float scale[ROWS];
            for (int r = 0; r < count; r++)
                scale[r] = 1 / softmax(logits.data() + r * wide, visible + (row + r) * call.n, probs.data() + r * wide, n,
                                       call.lse + at * call.rows + row + r);
            uint16_t* out = call.out + (at * call.rows + row) * dim;
            multiply_rows(count, probs.data(), values.data(), wide, dim,
                          [&](int r, int64_t c, Vec x) { store(out + r * dim + c, x * scale[r]); });
        }
    }

    // Exponentials of the visible logits, less the largest, as bfloat16; returns their sum and gives its logarithm.
    // Where nothing is visible they are 0, and the sum counts as 1.
    static float softmax(float* logits, const uint8_t* visible, uint16_t* probs, int64_t n, float* lse) {
        Vec top = splat(-INFINITY), sum_of = {};
        for (int64_t j = 0; j < up(n); j += LANES) {
            Vec x = flags(visible, j, n) ? load(logits + j) : splat(-INFINITY);
            store(logits + j, x);
            top = x > top ? x : top;
        }
        const float most = std::max(largest(top), std::numeric_limits<float>::lowest());
        for (int64_t j = 0; j < up(n); j += LANES) {
            Vec e = exponential(load(logits + j) - most);
            sum_of += e;
            store(probs + j, e);
        }
        const float total = sum(sum_of);
        *lse = most + std::log(total);
        return total == 0 ? 1 : total;
    }
};

// By blocks of keys, so that probabilities come transposed: rows are keys, columns are queries.
struct Backward {
    std::vector<uint16_t> keys, values, key_columns, q_rows, q_columns, grad_rows, grad_columns, probs, slopes, by_query;
    std::vector<float> lse, delta, logits, products;

    explicit Backward(const Call& call)
        : keys(call.n * call.dim), values(keys.size()), key_columns(up(call.n) * call.dim),
          q_rows(up(call.rows) * call.dim), q_columns(q_rows.size()), grad_rows(q_rows.size()),
          grad_columns(q_rows.size()), probs(ROWS * up(call.rows)), slopes(probs.size()),
          by_query(call.rows * up(call.n)), lse(up(call.rows)), delta(lse.size()), logits(probs.size()),
          products(probs.size()) {}

    void run(const Call& call, int64_t block, int64_t head) {
        const Place place(call, block, head);
        const int64_t at = place.at, n = place.count, rows = call.rows, wide = up(rows), dim = call.dim;
        const int64_t first = at * call.n + place.skipped;
        const int32_t* index = call.index + first;
        const uint8_t* visible =
            call.visible + block * call.visible_block + head * call.visible_head + place.skipped * rows;
        const uint16_t *q = call.q + at * rows * dim, *grad = call.grad + at * rows * dim;
        gather(call.k, index, keys.data(), n, dim);
        gather(call.v, index, values.data(), n, dim);
        pack_columns(keys.data(), key_columns.data(), n, dim);
        pack_rows(q, q_rows.data(), rows, dim);
        pack_columns(q, q_columns.data(), rows, dim);
        pack_rows(grad, grad_rows.data(), rows, dim);
        pack_columns(grad, grad_columns.data(), rows, dim);
        for (int64_t row = 0; row < rows; row++)  // what an earlier task left there might be no number
            std::fill(by_query.begin() + row * up(n) + n, by_query.begin() + (row + 1) * up(n), 0);
        for (int64_t r = 0; r < wide; r++) {
            lse[r] = r < rows ? call.lse[at * rows + r] : INFINITY;  // beyond the last query nothing has probability
            Vec dot = {};
            for (int64_t d = 0; r < rows && d < dim; d += LANES)
                dot += load(grad + r * dim + d) * load(call.out + (at * rows + r) * dim + d);
            delta[r] = sum(dot);
        }
        for (int64_t key = 0; key < n; key += ROWS) {
            const int count = int(std::min<int64_t>(ROWS, n - key));
            multiply_rows(count, keys.data() + key * dim, q_rows.data(), dim, wide,
                          [&](int r, int64_t c, Vec x) { store(logits.data() + r * wide + c, x); });
            multiply_rows(count, values.data() + key * dim, grad_rows.data(), dim, wide,
                          [&](int r, int64_t c, Vec x) { store(products.data() + r * wide + c, x); });
            for (int r = 0; r < count; r++) differentiate(call, visible + (key + r) * rows, r, rows);
            for (int64_t row = 0; row < rows; row++)
                for (int r = 0; r < count; r++) by_query[row * up(n) + key + r] = slopes[r * wide + row];
            float *grad_k = call.grad_k + (first + key) * dim, *grad_v = call.grad_v + (first + key) * dim;
            multiply_rows(count, probs.data(), grad_columns.data(), wide, dim,
                          [&](int r, int64_t c, Vec x) { store(grad_v + r * dim + c, x); });
            multiply_rows(count, slopes.data(), q_columns.data(), wide, dim,
                          [&](int r, int64_t c, Vec x) { store(grad_k + r * dim + c, x); });
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int count = int(std::min<int64_t>(ROWS, rows - row));
            uint16_t* out = call.grad_q + (at * rows + row) * dim;
            multiply_rows(count, by_query.data() + row * up(n), key_columns.data(), up(n), dim,
                          [&](int r, int64_t c, Vec x) { store(out + r * dim + c, x); });
        }
    }

    // One key: its probability under every query, and the gradient of its logits, scaled.
    void differentiate(const Call& call, const uint8_t* visible, int r, int64_t rows) {
        const int64_t wide = up(rows);
        for (int64_t c = 0; c < wide; c += LANES) {
            // A key that is not visible may have a logit above the sum: 0, not the exponential of a positive number
            Vec below = flags(visible, c, rows) ? load(&logits[r * wide + c]) * call.scaling - load(&lse[c])
                                                : splat(-INFINITY);
            Vec p = exponential(below);
            store(&probs[r * wide + c], p);
            store(&slopes[r * wide + c], p * (load(&products[r * wide + c]) - load(&delta[c])) * call.scaling);
        }
    }
};

template <class Task>
void each_task(const Call& call) {
#pragma omp parallel num_threads(int(call.threads))
    {
        Task task(call);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < call.blocks * call.heads; i++) task.run(call, i / call.heads, i % call.heads);
    }
}

}  // namespace

extern "C" void kvrl_gathered_forward(const Call* call) { each_task<Forward>(*call); }

extern "C" void kvrl_gathered_backward(const Call* call) { each_task<Backward>(*call); }

// total [R, D] += parts [N, H, n, D] at index [N, H, n], the last counts [N] of n; different heads have different rows.
extern "C" void kvrl_gathered_add(const float* parts, const int32_t* index, const int64_t* counts, float* total,
                                  int64_t blocks, int64_t heads, int64_t n, int64_t dim, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(int(threads)) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t d = 0; d < dim; d += LANES)
            for (int64_t block = 0; block < blocks; block++)
                for (int64_t end = (block * heads + head + 1) * n, i = end - counts[block]; i < end; i++) {
                    float* to = total + index[i] * dim + d;
                    store(to, load(to) + load(parts + i * dim + d));
                }
}
