// Log-probs of tokens and entropies of the distributions, from logits, and the logits' gradient.
#include <cmath>

#include "vectors.h"

namespace {

// Sixteen logits of a row at the row's temperature; beyond the last, and for the beacon, what has no probability.
inline Vec scaled(const float* logits, int64_t at, int64_t n, int64_t banned, float inverse) {
    constexpr float NEVER = -1e30f;  // not -inf: 0 times it is 0
    Vec v = splat(NEVER);
    if (at + LANES <= n)
        v = load(logits + at);
    else
        std::memcpy(&v, logits + at, (n - at) * sizeof(float));
    v = v * inverse;
    if (banned >= at && banned < at + LANES) v[banned - at] = NEVER;
    return v;
}

inline float largest(Vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

}  // namespace

// For each row of logits [m, n]: the log-prob of its token, the entropy in nats and the logarithm of the sum of
// exponentials, of logits times inverse (1 / temperature). banned: the column without probability, or -1.
extern "C" void kvrl_score(const float* logits, const int64_t* tokens, const float* inverse, float* logps,
                           float* entropies, float* totals, int64_t m, int64_t n, int64_t banned, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t row = 0; row < m; row++) {
        const float* own = logits + row * n;
        Vec top = splat(-INFINITY);
        for (int64_t at = 0; at < n; at += LANES) {
            Vec v = scaled(own, at, n, banned, inverse[row]);
            top = v > top || v != v ? v : top;  // what is not a number stays
        }
        Vec most = splat(largest(top)), mass = {}, spread = {};
        for (int64_t at = 0; at < n; at += LANES) {
            Vec below = scaled(own, at, n, banned, inverse[row]) - most;
            Vec e = exponential(below);
            mass += e;
            spread += e * below;
        }
        float all = sum(mass), log = std::log(all);
        totals[row] = most[0] + log;
        entropies[row] = log - sum(spread) / all;
        logps[row] = own[tokens[row]] * inverse[row] - totals[row];
    }
}

// out bfloat16 [m, n]: the gradient of the logits, where grad [m] is that of the log-probs.
extern "C" void kvrl_score_backward(const float* logits, const int64_t* tokens, const float* inverse,
                                    const float* totals, const float* grad, uint16_t* out, int64_t m, int64_t n,
                                    int64_t banned, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t row = 0; row < m; row++) {
        const float* own = logits + row * n;
        uint16_t* to = out + row * n;
        float weight = grad[row] * inverse[row];
        for (int64_t at = 0; at < n; at += LANES) {
            Vec p = exponential(scaled(own, at, n, banned, inverse[row]) - totals[row]);
            if (tokens[row] >= at && tokens[row] < at + LANES) p[tokens[row] - at] -= 1;
            p = p * -weight;
            uint16_t rounded[LANES];
            store(rounded, p);
            std::memcpy(to + at, rounded, (n - at < LANES ? n - at : LANES) * sizeof(uint16_t));
        }
    }
}

// total [n] += part [n]
extern "C" void kvrl_score_add(const uint16_t* part, float* total, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
    for (int64_t at = 0; at < n / LANES; at++)
        store(total + at * LANES, load(total + at * LANES) + load(part + at * LANES));
    for (int64_t at = n / LANES * LANES; at < n; at++) {
        uint16_t lanes[LANES] = {part[at]};
        total[at] += load(lanes)[0];
    }
}
