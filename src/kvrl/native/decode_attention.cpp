// Decode attention on a CPU: one query token a row over the first `count` entries of its slot, K and V read once.
// Products and sums are float32 whatever the type of K and V.
//
// A task is one (row, KV head): its query group attends to the same entries. What a task computes depends on its own
// inputs alone, in a fixed order, so that a row's bits do not depend on the other rows or on the number of threads.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

// Mirrored field by field in native/decode_attention.py. Strides count elements; the last dimension is contiguous.
struct Call {
    const void *q, *new_k, *new_v;  // [rows, query_heads, dim], [rows, kv_heads, dim]
    void *k, *v;                    // [rows, kv_heads, capacity, dim]
    void* out;                      // [rows, query_heads, dim], contiguous
    const int64_t *at, *count;      // [rows]: entry that takes new_k and new_v, entries attended to
    const int32_t* position;        // [rows, kv_heads, capacity] or null: an entry is seen if position > oldest
    const int64_t* oldest;          // [rows]
    const float* sinks;             // [query_heads] or null
    int64_t rows, query_heads, kv_heads, capacity, dim;
    int64_t q_row, q_head, new_k_row, new_k_head, new_v_row, new_v_head;
    int64_t row_stride, head_stride, position_row, position_head;
    int64_t threads;
    float scaling, softcap;  // softcap 0: none
};

namespace {

// The larger number, x where it is none.
inline float larger(float x, float most) { return x > most || x != x ? x : most; }
inline Vec larger(Vec x, Vec most) { return (x > most) | (x != x) ? x : most; }

// The products of G queries with one key, each as a vector of partial sums.
template <int G, class T>
inline void products(const T* q, int64_t q_stride, const T* key, int dim, Vec* acc) {
    for (int g = 0; g < G; g++) acc[g] = Vec{};
    for (int d = 0; d < dim; d += LANES) {
        Vec x = load(key + d);
        for (int g = 0; g < G; g++) acc[g] += x * load(q + g * q_stride + d);
    }
}

#ifdef __AVX512BF16__
template <int G>
inline void products(const uint16_t* q, int64_t q_stride, const uint16_t* key, int dim, Vec* acc) {
    __m512 sum[G];
    for (int g = 0; g < G; g++) sum[g] = _mm512_setzero_ps();
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        __m512bh x = (__m512bh)_mm512_loadu_si512(key + d);
        for (int g = 0; g < G; g++)
            sum[g] = _mm512_dpbf16_ps(sum[g], x, (__m512bh)_mm512_loadu_si512(q + g * q_stride + d));
    }
    for (int g = 0; g < G; g++) acc[g] = (Vec)sum[g];
    if (d < dim) {
        Vec x = load(key + d);
        for (int g = 0; g < G; g++) acc[g] += x * load(q + g * q_stride + d);
    }
}
#endif

// Products of G queries and keys [n][dim]: out[g * stride + j], up to the next multiple of LANES.
template <int G, class T>
void score(const T* q, int64_t q_stride, const T* keys, int64_t n, int dim, float* out, int64_t stride) {
    for (int64_t start = 0; start < n; start += LANES) {
        Vec part[G][LANES];
        int width = n - start < LANES ? int(n - start) : LANES;
        for (int j = 0; j < width; j++) {
            Vec acc[G];
            products<G>(q, q_stride, keys + (start + j) * dim, dim, acc);
            for (int g = 0; g < G; g++) part[g][j] = acc[g];
        }
        for (int j = width; j < LANES; j++)
            for (int g = 0; g < G; g++) part[g][j] = Vec{};
        for (int g = 0; g < G; g++) store(out + g * stride + start, sums(part[g]));
    }
}

// Weighted values: out[g][d] = sum over j of weight[g * stride + j] * values[j][d], DV vectors of dimensions at a time.
template <int G, int DV, class T>
void mix(const float* weight, int64_t stride, const T* values, int64_t n, int dim, float* out) {
    for (int d = 0; d < dim; d += DV * LANES) {
        Vec acc[G][DV] = {};
        for (int64_t j = 0; j < n; j++) {
            Vec x[DV];
            for (int v = 0; v < DV; v++) x[v] = load(values + j * dim + d + v * LANES);
            for (int g = 0; g < G; g++)
                for (int v = 0; v < DV; v++) acc[g][v] += x[v] * weight[g * stride + j];
        }
        for (int g = 0; g < G; g++)
            for (int v = 0; v < DV; v++) store(out + g * dim + d + v * LANES, acc[g][v]);
    }
}

template <int G, class T>
void attend(const T* q, int64_t q_stride, const T* keys, const T* values, int64_t n, int dim, float scaling,
            float softcap, const float* sinks, const int32_t* position, int64_t oldest, float* weight, int64_t stride,
            float* out) {
    score<G>(q, q_stride, keys, n, dim, weight, stride);
    float total[G];
    for (int g = 0; g < G; g++) {
        float* w = weight + g * stride;
        int64_t padded = (n + LANES - 1) / LANES * LANES;
        for (int64_t j = 0; j < padded; j += LANES) store(w + j, load(w + j) * scaling);
        if (softcap > 0)
            for (int64_t j = 0; j < n; j++) w[j] = std::tanh(w[j] / softcap) * softcap;
        if (position)
            for (int64_t j = 0; j < n; j++)
                if (position[j] <= oldest) w[j] = -INFINITY;
        for (int64_t j = n; j < padded; j++) w[j] = -INFINITY;
        Vec tops = splat(-INFINITY);
        for (int64_t j = 0; j < padded; j += LANES) tops = larger(load(w + j), tops);
        float most = sinks ? sinks[g] : -INFINITY;
        for (int i = 0; i < LANES; i++) most = larger(tops[i], most);
        Vec sum_of = {};
        for (int64_t j = 0; j < padded; j += LANES) {
            Vec e = exponential(load(w + j) - most);
            store(w + j, e);
            sum_of += e;
        }
        total[g] = sum(sum_of) + (sinks ? std::exp(sinks[g] - most) : 0.0f);
    }
    if (dim % (VECTORS * LANES) == 0)
        mix<G, VECTORS>(weight, stride, values, n, dim, out);
    else
        mix<G, 1>(weight, stride, values, n, dim, out);
    for (int g = 0; g < G; g++)
        for (int d = 0; d < dim; d += LANES) store(out + g * dim + d, load(out + g * dim + d) / total[g]);
}

template <class T>
void decode(const Call& c) {
    int group = int(c.query_heads / c.kv_heads);
    int dim = int(c.dim);
#pragma omp parallel num_threads(int(c.threads))
    {
        thread_local std::vector<float> scratch;
        int64_t stride = (c.capacity + LANES - 1) / LANES * LANES;
        scratch.resize(size_t(group) * (dim + stride));
        float* out = scratch.data();
        float* weight = out + group * dim;
#pragma omp for schedule(dynamic, 2)
        for (int64_t task = 0; task < c.rows * c.kv_heads; task++) {
            int64_t row = task / c.kv_heads, head = task % c.kv_heads;
            T* keys = (T*)c.k + row * c.row_stride + head * c.head_stride;
            T* values = (T*)c.v + row * c.row_stride + head * c.head_stride;
            int64_t n = c.count[row], at = c.at[row];
            std::memcpy(keys + at * dim, (const T*)c.new_k + row * c.new_k_row + head * c.new_k_head, dim * sizeof(T));
            std::memcpy(values + at * dim, (const T*)c.new_v + row * c.new_v_row + head * c.new_v_head, dim * sizeof(T));
            const int32_t* position = c.position ? c.position + row * c.position_row + head * c.position_head : nullptr;
            int64_t oldest = c.position ? c.oldest[row] : 0;
            const T* q = (const T*)c.q + row * c.q_row + head * group * c.q_head;
            const float* sinks = c.sinks ? c.sinks + head * group : nullptr;
            auto some = [&](auto size, int g) {
                attend<decltype(size)::value>(q + g * c.q_head, c.q_head, keys, values, n, dim, c.scaling, c.softcap,
                                              sinks ? sinks + g : nullptr, position, oldest, weight + g * stride,
                                              stride, out + g * dim);
            };
            int g = 0;
            for (; g + 4 <= group; g += 4) some(std::integral_constant<int, 4>{}, g);
            if (group - g == 3) some(std::integral_constant<int, 3>{}, g);
            if (group - g == 2) some(std::integral_constant<int, 2>{}, g);
            if (group - g == 1) some(std::integral_constant<int, 1>{}, g);
            for (int i = 0; i < group; i++) {
                T* target = (T*)c.out + (row * c.query_heads + head * group + i) * dim;
                for (int d = 0; d < dim; d += LANES) store(target + d, load(out + i * dim + d));
            }
        }
    }
}

}  // namespace

extern "C" void kvrl_decode_attention(const Call* call, int bfloat16) {
    if (bfloat16)
        decode<uint16_t>(*call);
    else
        decode<float>(*call);
}
