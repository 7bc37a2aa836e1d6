// Attention of one token's query heads to the pages of its row. Part of kernels.c.
//
// Numbers of a key or a value are read once for up to four query heads. Every score is a dot product as in matmul.h, and every channel of the
// result adds the values in the order of their tokens, so the bits depend on no other row.
#pragma once
#include <math.h>
#include "exponential.h"
#include "kv.h"
#define PAGES_AHEAD 2  // how many pages a block is asked for in advance
#define ASKED 8192     // the most bytes of it

// tanh(x) after Cephes' tanhf: a polynomial near 0, where the quotient would lose its digits.
INLINE float soft(float x) {
    float z = x * x, e = exp_negative(-2.0f * fabsf(x));
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return fabsf(x) < 0.625f ? p * z * x + x : copysignf((1.0f - e) / (1.0f + e), x);
}

// How a query attends: scores are scaled, capped where `softcap` is not 0; it sees the last `window` keys, or all where that is 0.
struct limits {
    float scale, softcap;
    int64_t window;
};

// Calls DO for as many of n query heads at once as the registers hold: four (of 32 registers), two, one. `g` is the first of them.
#define QUERIES(n, DO)                  \
    {                                   \
        int64_t g = 0;                  \
        for (; LANES == 16 && g + 4 <= n; g += 4) DO(4) \
        for (; g + 2 <= n; g += 2) DO(2) \
        for (; g < n; g++) DO(1)         \
    }

// to[g * apart + s] = q[g] . keys[s] for `queries` query heads and four keys.
INLINE void four_scores(const float *q, int64_t D, const char *keys, float *to, int64_t apart, int queries, int type) {
    vec sums[4][4] = {{{0}}};
    for (int64_t d = 0; d < D; d += LANES) {
        const int64_t count = D - d < LANES ? D - d : LANES;
        vec key[4];
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) key[s] = load_numbers(keys, s * D + d, count, type);
#pragma GCC unroll 4
        for (int g = 0; g < queries; g++) {
            const vec x = load_some(q, g * D + d, count, 0);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) sums[g][s] = plus_product(sums[g][s], x, key[s]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < queries; g++) put(to + g * apart, four_sums(sums[g][0], sums[g][1], sums[g][2], sums[g][3]));
}

// The same for one key.
INLINE void one_score(const float *q, int64_t D, const char *keys, int64_t s, float *to, int64_t apart, int queries, int type) {
    vec sums[4] = {{0}};
    for (int64_t d = 0; d < D; d += LANES) {
        const int64_t count = D - d < LANES ? D - d : LANES;
        const vec key = load_numbers(keys, s * D + d, count, type);
#pragma GCC unroll 4
        for (int g = 0; g < queries; g++) sums[g] = plus_product(sums[g], load_some(q, g * D + d, count, 0), key);
    }
#pragma GCC unroll 4
    for (int g = 0; g < queries; g++) to[g * apart] = lanes_sum(sums[g]);
}

// The products of n query heads with keys lo ... hi of a block: to[g * apart + s].
INLINE void score_keys(const float *q, int64_t n, int64_t D, const char *keys, int64_t lo, int64_t hi, float *to, int64_t apart, int type) {
#define SCORES(R)                                                                                                       \
    {                                                                                                                  \
        int64_t s = lo;                                                                                                 \
        for (; s + 4 <= hi; s += 4) four_scores(q + g * D, D, keys + s * D * size, to + g * apart + s, apart, R, type); \
        for (; s < hi; s++) one_score(q + g * D, D, keys, s, to + g * apart + s, apart, R, type);                       \
    }
    const int64_t size = type == KV_FP8 ? 1 : type == KV_BFLOAT16 ? 2 : 4;
    QUERIES(n, SCORES)
#undef SCORES
}

// mixed[g] += the values lo ... hi of a block by their weights, for `queries` query heads and `parts` vectors of channels from d on.
INLINE void mix_part(float *mixed, int64_t D, int64_t d, int64_t count, const char *values, int64_t lo, int64_t hi, const float *weights,
                     int64_t apart, int queries, int parts, int type) {
    vec sums[4][4];
#pragma GCC unroll 4
    for (int g = 0; g < queries; g++)
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) sums[g][i] = load_some(mixed, g * D + d + i * LANES, count, 0);
    for (int64_t s = lo; s < hi; s++) {
        vec value[4];
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) value[i] = load_numbers(values, s * D + d + i * LANES, count, type);
#pragma GCC unroll 4
        for (int g = 0; g < queries; g++)
#pragma GCC unroll 4
            for (int i = 0; i < parts; i++) sums[g][i] = plus_product(sums[g][i], weights[g * apart + s] - (vec){0}, value[i]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < queries; g++)
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) memcpy(mixed + g * D + d + i * LANES, &sums[g][i], count * sizeof *mixed);
}

INLINE void mix_values(float *mixed, int64_t n, int64_t D, const char *values, int64_t lo, int64_t hi, const float *weights, int64_t apart,
                       int type) {
#define MIX(COUNT, R, PARTS) mix_part(mixed + g * D, D, d, COUNT, values, lo, hi, weights + g * apart, apart, R, PARTS, type)
#define MIXED(R)                                                                       \
    {                                                                                  \
        int64_t d = 0;                                                                 \
        for (; d + 4 * LANES <= D; d += 4 * LANES) MIX(LANES, R, 4);                   \
        for (; d + LANES <= D; d += LANES) MIX(LANES, R, 1);                           \
        if (d < D) MIX(D - d, R, 1);                                                   \
    }
    QUERIES(n, MIXED)
#undef MIXED
#undef MIX
}

INLINE void times_scales(float *row, const char *scales, int64_t lo, int64_t hi) {
    for (int64_t s = lo; s < hi; s++) row[s] *= load1(scales, s, 0);
}

// Asks for a block that is read soon: pages lie anywhere, so the processor cannot guess where the next one is.
INLINE void ask_ahead(struct pages p, const int32_t *table, int64_t page, int64_t pages, int kind, int64_t head, int type) {
    const int64_t size = block_of(p, 0, 0, 1, type) - p.base, most = size < ASKED ? size : ASKED;
    if (page + PAGES_AHEAD >= pages) return;
    const char *next = block_of(p, table[page + PAGES_AHEAD], kind, head, type);
    for (int64_t i = 0; i < most; i += 64) __builtin_prefetch(next + i);
}

// In place: scores become weights that are not yet divided by their sum, which is returned.
INLINE float weights_of(float *row, int64_t n, struct limits limits) {
    for (int64_t i = 0; i < n; i++) row[i] *= limits.scale;
    if (limits.softcap != 0)
        for (int64_t i = 0; i < n; i++) row[i] = limits.softcap * soft(row[i] / limits.softcap);
    float tops[LANES], top = row[0];
    for (int lane = 0; lane < LANES; lane++) tops[lane] = row[0];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) tops[lane] = row[i + lane] > tops[lane] ? row[i + lane] : tops[lane];
    for (; i < n; i++) top = row[i] > top ? row[i] : top;
    for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    for (i = 0; i < n; i++) row[i] = exp_negative(row[i] - top);
    vec total = {0};
    for (i = 0; i < n; i += LANES) total += load_some(row, i, n - i < LANES ? n - i : LANES, 0);
    return lanes_sum(total);
}

// G query heads `q` over one key/value head of row b; the result replaces `q`. `scores` holds G * seq_len floats, `mixed` G * D.
INLINE void attend(float *q, int64_t G, struct pages p, int64_t b, int64_t head, struct limits limits, float *scores, float *mixed, int type) {
    const int64_t length = p.seq_lens[b], D = p.head_dim, S = p.page_size;
    const int64_t first = limits.window && limits.window < length ? length - limits.window : 0;
    const int32_t *table = p.tables + b * p.width;
    const int64_t count = (length + S - 1) / S;
    for (int64_t start = first / S * S; start < length; start += S) {
        const char *keys = block_of(p, table[start / S], KEYS, head, type);
        ask_ahead(p, table, start / S, count, KEYS, head, type);
        const int64_t lo = first > start ? first - start : 0, hi = length - start < S ? length - start : S;
        score_keys(q, G, D, keys, lo, hi, scores + start, length, type);
        for (int64_t g = 0; type == KV_FP8 && g < G; g++) times_scales(scores + g * length + start, scales_of(p, keys), lo, hi);
    }
    memset(mixed, 0, G * D * sizeof *mixed);
    float totals[G];
    for (int64_t g = 0; g < G; g++) totals[g] = weights_of(scores + g * length + first, length - first, limits);
    for (int64_t start = first / S * S; start < length; start += S) {
        const char *values = block_of(p, table[start / S], VALUES, head, type);
        ask_ahead(p, table, start / S, count, VALUES, head, type);
        const int64_t lo = first > start ? first - start : 0, hi = length - start < S ? length - start : S;
        for (int64_t g = 0; type == KV_FP8 && g < G; g++) times_scales(scores + g * length + start, scales_of(p, values), lo, hi);
        mix_values(mixed, G, D, values, lo, hi, scores + start, length, type);
    }
    for (int64_t g = 0; g < G; g++)
        for (int64_t d = 0; d < D; d++) q[g * D + d] = mixed[g * D + d] / totals[g];
}
