// What a Llama-shaped layer does around its attention while one token a row is decoded, on a CPU.
//
// Sums are float32; results are rounded to the model's type where the modules round theirs. A row's bits depend on its
// own numbers alone, in a fixed order.
#include <cmath>
#include <cstddef>

#include "gemm.h"

// Mirrored field by field in native/layer.py. All tensors are contiguous; weights are packed (gemm.h).
struct Before {  // norm, projections, positions
    const void *hidden, *norm, *weight, *bias, *q_norm, *k_norm;  // [rows, width], [width], [q k v, width], [q k v], [dim]
    const void *cos, *sin;                                        // [rows, dim]
    void *normed, *q, *k, *v;                                     // [rows, width], [rows, heads, dim]
    int64_t rows, width, query_heads, kv_heads, dim, threads;
    float eps, head_eps;
};

struct After {  // output projection, norm, feed-forward; hidden is changed in place
    void* hidden;
    const void *attended, *out_weight, *norm, *gate_up, *down;  // [rows, inner]; gate and up in turns of LANES columns
    void *normed, *active;                                      // [rows, width], [rows, feed]
    int64_t rows, width, inner, feed, threads;
    float eps;
};

namespace {

inline float number(float x) { return x; }
inline float number(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

template <class T>
inline Vec rounded(Vec x) {
    T as[LANES];
    store(as, x);
    return load(as);
}

template <class T>
inline float rounded(float x) {
    if (sizeof(T) == 4) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return x;
    return number(uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16));
}

template <class T>
inline void put(T* p, float x) {
    x = rounded<T>(x);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (sizeof(T) == 4)
        std::memcpy(p, &x, sizeof x);
    else
        *p = T(x != x ? 0x7FC0 : bits >> 16);
}

// RMSNorm of n numbers, a multiple of LANES: weight times the normalised numbers, which are rounded before.
template <class T>
inline void norm(const T* x, const T* weight, float eps, int64_t n, T* out) {
    Vec squares = {};
    for (int64_t i = 0; i < n; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    for (int64_t i = 0; i < n; i += LANES) store(out + i, load(weight + i) * rounded<T>(load(x + i) * scale));
}

// Rotate one head's numbers by its position: halves are pairs.
template <class T>
inline void rotate(T* x, const T* cos, const T* sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = number(x[i]), b = number(x[i + half]);
        put(x + i, rounded<T>(a * number(cos[i])) + rounded<T>(-b * number(sin[i])));
        put(x + i + half, rounded<T>(b * number(cos[i + half])) + rounded<T>(a * number(sin[i + half])));
    }
}

inline Vec silu(Vec x) {
    Vec e = exponential(x < 0 ? x : -x);
    return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
}

template <class T>
void before(const Before& c) {
    const T *norms[] = {(const T*)c.q_norm, (const T*)c.k_norm}, *bias = (const T*)c.bias;
    T* parts[] = {(T*)c.q, (T*)c.k, (T*)c.v};
    int64_t q_width = c.query_heads * c.dim, kv_width = c.kv_heads * c.dim;
#pragma omp parallel num_threads(int(c.threads))
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < c.rows; r++)
            norm((const T*)c.hidden + r * c.width, (const T*)c.norm, c.eps, c.width, (T*)c.normed + r * c.width);
        auto done = [&](int64_t row, int64_t column, Vec sums) {
            if (bias) sums += load(bias + column);
            int part = column < q_width ? 0 : column < q_width + kv_width ? 1 : 2;
            int64_t width = part ? kv_width : q_width, start = part ? q_width + (part - 1) * kv_width : 0;
            store(parts[part] + row * width + column - start, sums);
        };
        multiply((const T*)c.normed, (const T*)c.weight, c.rows, q_width + 2 * kv_width, c.width, done);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < c.rows; r++)
            for (int part = 0; part < 2; part++) {
                int64_t heads = part ? c.kv_heads : c.query_heads;
                for (int64_t h = 0; h < heads; h++) {
                    T* x = parts[part] + (r * heads + h) * c.dim;
                    if (norms[part]) norm(x, norms[part], c.head_eps, c.dim, x);
                    rotate(x, (const T*)c.cos + r * c.dim, (const T*)c.sin + r * c.dim, c.dim);
                }
            }
    }
}

template <class T>
void after(const After& c) {
    T *hidden = (T*)c.hidden, *normed = (T*)c.normed, *active = (T*)c.active;
    auto add = [&](int64_t row, int64_t column, Vec sums) {
        T* at = hidden + row * c.width + column;
        store(at, load(at) + rounded<T>(sums));
    };
    // Gate and up stand in turns of LANES columns; the gate comes first and waits in the slot of the result.
    auto feed = [&](int64_t row, int64_t column, Vec sums) {
        T* at = active + row * c.feed + column / (2 * LANES) * LANES;
        if (column % (2 * LANES) == 0)
            store(at, sums);
        else
            store(at, rounded<T>(silu(load(at))) * rounded<T>(sums));
    };
#pragma omp parallel num_threads(int(c.threads))
    {
        multiply((const T*)c.attended, (const T*)c.out_weight, c.rows, c.width, c.inner, add);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < c.rows; r++)
            norm(hidden + r * c.width, (const T*)c.norm, c.eps, c.width, normed + r * c.width);
        multiply(normed, (const T*)c.gate_up, c.rows, 2 * c.feed, c.width, feed);
        multiply(active, (const T*)c.down, c.rows, c.width, c.feed, add);
    }
}

}  // namespace

extern "C" void kvrl_layer_before(const Before* call, int bfloat16) {
    bfloat16 ? before<uint16_t>(*call) : before<float>(*call);
}

extern "C" void kvrl_layer_after(const After* call, int bfloat16) {
    bfloat16 ? after<uint16_t>(*call) : after<float>(*call);
}
