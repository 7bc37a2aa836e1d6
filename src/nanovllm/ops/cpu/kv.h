// Pages of keys and values, in the model's dtype or in FP8: where a head's tokens lie, how they are read and written. Part of kernels.c.
//
// A block is what one head of one page holds of keys or of values: [S, D] numbers. In FP8 these are codes of one byte, and S float32 scales
// follow them (ops/kv_cache/fp8.py). A number is its code times the scale of its token.
#pragma once
#include "fp8.h"
#define LARGEST 448.0f         // the largest code
#define LEAST_SCALE 0x1p-126f  // a normal number, so that no division of zeros gives NaN

enum kv_types { KV_FLOAT32, KV_BFLOAT16, KV_FP8 };
enum kv_kinds { KEYS, VALUES };

struct pages {
    char *base;  // of one layer, [N, 2, K] blocks
    const int32_t *tables, *seq_lens;
    int64_t width, page_size, num_kv_heads, head_dim;
};

INLINE char *block_of(struct pages p, int64_t page, int kind, int64_t head, int type) {
    const int64_t token = type == KV_FP8 ? p.head_dim + 4 : p.head_dim * (type == KV_BFLOAT16 ? 2 : 4);
    return p.base + ((page * 2 + kind) * p.num_kv_heads + head) * p.page_size * token;
}

INLINE const char *scales_of(struct pages p, const char *block) { return block + p.page_size * p.head_dim; }

// ---- reading ----------------------------------------------------------------------------------------------------------------------

// `count` of a vector's numbers of a block from number i on, then zeros; in FP8 without their scales.
INLINE vec load_numbers(const char *block, int64_t i, int64_t count, int type) {
    if (type != KV_FP8) return load_some(block, i, count, type == KV_BFLOAT16);
    return load_codes(block, i, count);
}

// ---- writing ----------------------------------------------------------------------------------------------------------------------

// NaN becomes 0, and infinities become the largest numbers.
INLINE vec bounded(vec v) {
    ints whole = as_ints(v), size = whole & 0x7fffffff;
    return as_floats((whole & ~(size > 0x7f800000)) + (size == 0x7f800000));  // a comparison that holds is -1
}

// The nearest codes of |v| <= 448, ties to even. Below 2^-6 codes are 2^-9 apart, as floats from 2^14 on are.
INLINE bytes codes_of(vec v) {
    ints whole = as_ints(v), size = whole & 0x7fffffff, few = size < 0x3c800000;
    ints low = as_ints(as_floats(size) + 0x1p14f) - 0x46800000;
    ints high = (size + (size >> 20 & 1) + 0x7ffff - (120 << 23)) >> 20;
    return __builtin_convertvector((low & few) | (high & ~few) | (whole >> 24 & 0x80), bytes);
}

// The codes and the scale of a head x[D], with the bits of `quantised` in ops/kv_cache/fp8.py.
INLINE void put_codes(const float *x, int64_t D, char *codes, char *scale) {
    ints top = {0};
    for (int64_t d = 0; d < D; d += LANES) {
        ints size = as_ints(bounded(load_some(x, d, D - d < LANES ? D - d : LANES, 0))) & 0x7fffffff, more = size > top;
        top = (size & more) | (top & ~more);
    }
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    float chosen;
    memcpy(&chosen, &largest, sizeof chosen);
    chosen *= (float)(1 / 448.0);
    chosen = chosen < LEAST_SCALE ? LEAST_SCALE : chosen;
    for (int64_t d = 0; d < D; d += LANES) {
        const int64_t count = D - d < LANES ? D - d : LANES;
        vec v = bounded(load_some(x, d, count, 0)) / chosen;
        ints whole = as_ints(v), over = (whole & 0x7fffffff) > 0x43e00000;  // 448
        whole = (whole & ~over) | (((whole & (int32_t)0x80000000) | 0x43e00000) & over);
        bytes rounded = codes_of(as_floats(whole));
        memcpy(codes + d, &rounded, count);
    }
    memcpy(scale, &chosen, sizeof chosen);
}

// A head x[D] of the token in a slot of a block, rounded to the model's dtype first. Replaces x.
INLINE void write_head(float *x, struct pages p, char *block, int64_t slot, int bf16, int type) {
    const int64_t D = p.head_dim;
    if (type != KV_FP8) {
        for (int64_t d = 0; d < D; d++) store1(block, slot * D + d, x[d], bf16);
        return;
    }
    for (int64_t d = 0; bf16 && d < D; d++) {
        uint16_t half;
        store1(&half, 0, x[d], 1);
        x[d] = load1(&half, 0, 1);
    }
    put_codes(x, D, block + slot * D, block + p.page_size * D + slot * 4);
}
