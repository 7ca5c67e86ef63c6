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

// Vectors of `dim` numbers for each batch row, head and token, in any order of the three.
struct Strided {
    uint16_t* data;
    int64_t row, head, token;
    uint16_t* at(int64_t b, int64_t h, int64_t t) const { return data + b * row + h * head + t * token; }
};

struct Call {
    Strided q, k, v;         // queries of every token; keys and values
    Strided out;             // the result; read by the backward pass
    Strided grad, grad_q;    // backward: of the result, and of the queries
    const int32_t* index;    // [B, C, H, n]: tokens
    const int64_t* counts;   // [B, C]: a block's entries are the last so many of its n
    const uint8_t* visible;  // forward: [1 or B, 1 or C, 1 or H, M, n]; backward: the same transposed, [.., n, M]
    float* lse;              // [B, C, H, M]: the logarithm of the sum of exponentials; read by the backward pass
    float *grad_k, *grad_v;  // [blocks, H, n, D], one for each entry gathered by this call
    // Blocks `first` to `first + blocks` of B * C. Block c has the queries from start + c * size on, of M = group * size
    // rows; those before the first token or from `length` on do not exist.
    int64_t first, blocks, per_row, heads, group, size, start, length, n, dim;
    int64_t visible_row, visible_block, visible_head, threads;
    float scaling;
};

// One block under one KV head.
struct Place {
    int64_t b, c, head, at, skipped, count;
    Place(const Call& call, int64_t block, int64_t head)
        : b(block / call.per_row), c(block % call.per_row), head(head), at(block * call.heads + head),
          skipped(call.n - call.counts[block]), count(call.counts[block]) {}

    const int32_t* index(const Call& call) const { return call.index + at * call.n + skipped; }
    const uint8_t* visible(const Call& call) const {
        return call.visible + b * call.visible_row + c * call.visible_block + head * call.visible_head;
    }
    // The numbers of x that row r of the block's product stands for: query r % size of head r / size. Or null.
    uint16_t* query(const Call& call, const Strided& x, int64_t r) const {
        const int64_t token = call.start + c * call.size + r % call.size;
        return token < 0 || token >= call.length ? nullptr : x.at(b, head * call.group + r / call.size, token);
    }
    // All rows of the product, zeros where there is none: [M, dim].
    void queries(const Call& call, const Strided& x, uint16_t* rows) const {
        for (int64_t r = 0; r < call.group * call.size; r++, rows += call.dim) {
            if (const uint16_t* from = query(call, x, r)) std::memcpy(rows, from, call.dim * sizeof(uint16_t));
            else std::memset(rows, 0, call.dim * sizeof(uint16_t));
        }
    }
    // The gathered rows of keys or values: [count, dim].
    void entries(const Call& call, const Strided& x, uint16_t* rows) const {
        const int32_t* at = index(call);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(rows + i * call.dim, x.at(b, head, at[i]), call.dim * sizeof(uint16_t));
    }
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

// Where multiply_rows puts rows of the product from `row` on: in x, where there is such a query.
struct Into {
    uint16_t* to[ROWS];
    Into(const Call& call, const Place& place, const Strided& x, int64_t row, int count) {
        for (int r = 0; r < count; r++) to[r] = place.query(call, x, row + r);
    }
    void operator()(int r, int64_t c, Vec x) const {
        if (to[r]) store(to[r] + c, x);
    }
};

struct Forward {
    std::vector<uint16_t> queries, entries, keys, values, probs;
    std::vector<float> logits;

    explicit Forward(const Call& call)
        : queries(call.group * call.size * call.dim), entries(call.n * call.dim), keys(up(call.n) * call.dim),
          values(keys.size()), probs(ROWS * up(call.n)), logits(ROWS * up(call.n)) {}

    void run(const Call& call, int64_t block, int64_t head) {
        const Place place(call, block, head);
        const int64_t n = place.count, wide = up(n), dim = call.dim, rows = call.group * call.size;
        const uint8_t* visible = place.visible(call) + place.skipped;
        place.queries(call, call.q, queries.data());
        place.entries(call, call.k, entries.data());
        pack_rows(entries.data(), keys.data(), n, dim);
        place.entries(call, call.v, entries.data());
        pack_columns(entries.data(), values.data(), n, dim);
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int count = int(std::min<int64_t>(ROWS, rows - row));
            multiply_rows(count, queries.data() + row * dim, keys.data(), dim, wide,
                          [&](int r, int64_t c, Vec x) { store(logits.data() + r * wide + c, x * call.scaling); });
            float scale[ROWS];
            for (int r = 0; r < count; r++)
                scale[r] = 1 / softmax(logits.data() + r * wide, visible + (row + r) * call.n, probs.data() + r * wide, n,
                                       call.lse + place.at * rows + row + r);
            const Into out(call, place, call.out, row, count);
            multiply_rows(count, probs.data(), values.data(), wide, dim,
                          [&](int r, int64_t c, Vec x) { out(r, c, x * scale[r]); });
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
    std::vector<uint16_t> keys, values, key_columns, rows_of, q_rows, q_columns, grad_rows, grad_columns, probs, slopes,
        by_query;
    std::vector<float> lse, delta, logits, products;

    explicit Backward(const Call& call) : Backward(call, up(call.group * call.size)) {}
    Backward(const Call& call, int64_t wide)
        : keys(call.n * call.dim), values(keys.size()), key_columns(up(call.n) * call.dim), rows_of(wide * call.dim),
          q_rows(wide * call.dim), q_columns(q_rows.size()), grad_rows(q_rows.size()), grad_columns(q_rows.size()),
          probs(ROWS * wide), slopes(probs.size()), by_query(call.group * call.size * up(call.n)), lse(wide), delta(wide),
          logits(probs.size()), products(probs.size()) {}

    void run(const Call& call, int64_t block, int64_t head) {
        const Place place(call, block, head);
        const int64_t n = place.count, rows = call.group * call.size, wide = up(rows), dim = call.dim;
        const uint8_t* visible = place.visible(call) + place.skipped * rows;
        place.entries(call, call.k, keys.data());
        place.entries(call, call.v, values.data());
        pack_columns(keys.data(), key_columns.data(), n, dim);
        place.queries(call, call.q, rows_of.data());
        pack_rows(rows_of.data(), q_rows.data(), rows, dim);
        pack_columns(rows_of.data(), q_columns.data(), rows, dim);
        place.queries(call, call.grad, rows_of.data());
        pack_rows(rows_of.data(), grad_rows.data(), rows, dim);
        pack_columns(rows_of.data(), grad_columns.data(), rows, dim);
        for (int64_t row = 0; row < rows; row++)  // what an earlier task left there might be no number
            std::fill(by_query.begin() + row * up(n) + n, by_query.begin() + (row + 1) * up(n), 0);
        for (int64_t r = 0; r < wide; r++) {
            const uint16_t* out = r < rows ? place.query(call, call.out, r) : nullptr;
            lse[r] = r < rows ? call.lse[place.at * rows + r] : INFINITY;  // beyond the last nothing has probability
            Vec dot = {};
            for (int64_t d = 0; out && d < dim; d += LANES) dot += load(rows_of.data() + r * dim + d) * load(out + d);
            delta[r] = sum(dot);
        }
        const int64_t first = ((block - call.first) * call.heads + head) * call.n + place.skipped;
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
            multiply_rows(count, by_query.data() + row * up(n), key_columns.data(), up(n), dim,
                          Into(call, place, call.grad_q, row, count));
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
        for (int64_t i = 0; i < call.blocks * call.heads; i++)
            task.run(call, call.first + i / call.heads, i % call.heads);
    }
}

}  // namespace

extern "C" void kvrl_gathered_forward(const Call* call) { each_task<Forward>(*call); }

extern "C" void kvrl_gathered_backward(const Call* call) { each_task<Backward>(*call); }

// total [B, T, H, D] += parts [blocks, H, n, D], the gradients of the entries of one call's blocks.
extern "C" void kvrl_gathered_add(const Call* call, const float* parts, float* total, int64_t tokens) {
    const int64_t dim = call->dim;
#pragma omp parallel for collapse(2) num_threads(int(call->threads)) schedule(static)
    for (int64_t head = 0; head < call->heads; head++)
        for (int64_t d = 0; d < dim; d += LANES)
            for (int64_t block = 0; block < call->blocks; block++) {
                const Place place(*call, call->first + block, head);
                const int32_t* index = place.index(*call);
                const float* from = parts + ((block * call->heads + head) * call->n + place.skipped) * dim + d;
                for (int64_t i = 0; i < place.count; i++) {
                    float* to = total + ((place.b * tokens + index[i]) * call->heads + head) * dim + d;
                    store(to, load(to) + load(from + i * dim));
                }
            }
}
