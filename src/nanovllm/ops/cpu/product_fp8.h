// Matrix products with weights in FP8, for any number of rows. Part of kernels.c.
//
// Codes become float32 in a cache's worth of memory, a block of four rows at a time, and all rows of x meet them there. The lanes of a vector run
// along the columns of a span, whose sums are added, scaled, and added to those of the spans before: the order of a dot product is the same for
// every number of rows and of threads.
#pragma once
#include "quantised.h"
#define AT_ONCE (LANES == 16 ? 4 : 3)  // of x, as many as the registers hold with four rows of weights

typedef float four __attribute__((vector_size(16)));

INLINE void put_all(float *to, vec v) { memcpy(to, &v, sizeof v); }

// Block `b` of four rows of codes as float32; rows from `n` on repeat the last one, and zeros stand behind the last column.
INLINE void numbers_of_block(const char *codes, int64_t stride, int64_t n, int64_t b, float to[4][BLOCK]) {
    const int64_t from = b * BLOCK, left = stride - from;
    for (int i = 0; i < 4; i++) {
        const char *const row = codes + (i < n ? i : n - 1) * stride + from;
        for (int64_t k = 0; k < BLOCK; k += 64) __builtin_prefetch(row + 4 * stride + k, 0, 2);  // of the next four rows
        if (left >= BLOCK) {
#pragma GCC unroll 16
            for (int64_t k = 0; k < BLOCK; k += LANES) put_all(to[i] + k, load_codes(row, k, LANES));
        } else {
            for (int64_t k = 0; k < BLOCK; k += LANES) put_all(to[i] + k, load_codes(row, k, left - k > LANES ? LANES : left > k ? left - k : 0));
        }
    }
}

// What a group of columns has for four rows, of which `n` exist.
struct group_fp8 {
    four scales;
    float zeros[4];
};

INLINE struct group_fp8 group_of_rows(const struct matrix *m, int64_t lo, int64_t n, int64_t groups, int64_t g) {
    struct group_fp8 group;
    for (int64_t i = 0; i < 4; i++) {
        const int64_t row = lo + (i < n ? i : n - 1), at = (m->rows == 1 ? row : row / m->rows) * groups + g;
        group.scales[i] = number(m->scales, at, m->scale_type);
        group.zeros[i] = m->zeros ? m->zeros[at] : 0;
    }
    return group;
}

// Adds the products of `count` rows of x with four rows of weights, over the columns of a span, to their sums.
INLINE void add_floats(const struct cell *cells, float weights[4][BLOCK], float (*sums)[STRIP], four scales, int64_t first, int64_t span, int count) {
    vec acc[4][4] = {{{0}}};
    for (int64_t k = first; k < first + span; k += LANES) {
        vec x[4];
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) x[r] = load(cells[r].values, k, 0);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const vec w = load(weights[c], k, 0);
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) acc[r][c] = plus_product(acc[r][c], x[r], w);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) {
        const vec all = four_sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        four sum, more;
        memcpy(&more, &all, sizeof more);
        memcpy(&sum, sums[r], sizeof sum);
        sum += more * scales;
        memcpy(sums[r], &sum, sizeof sum);
    }
}

// out[T, N] = x[T, K] @ matrix[N, K]^T for inputs that `make_cells` made. Called by all threads of a parallel region.
static void product_fp8(const struct cell *cells, int64_t T, int64_t K, const struct matrix *m, int64_t N, struct target t, int bf16) {
    const int64_t blocks = blocks_of(K), span = span_of(m, K), groups = m->group >= K ? 1 : (K + m->group - 1) / m->group;
#pragma omp for schedule(static)
    for (int64_t strip = 0; strip < (N + STRIP - 1) / STRIP; strip++)
        for (int64_t row = 0; row < T; row += PANEL) {
            float whole[PANEL][STRIP], weights[4][BLOCK] __attribute__((aligned(64)));
            const int64_t lo = strip * STRIP, n = N - lo < STRIP ? N - lo : STRIP, rows = T - row < PANEL ? T - row : PANEL;
            memset(whole, 0, rows * sizeof *whole);
            for (int64_t part = 0; part < n; part += 4) {
                float(*const sums)[STRIP] = (float(*)[STRIP]) & whole[0][part];
                struct group_fp8 group;
                int64_t loaded = -1;
                for (int64_t b = 0; b < blocks; b++) {
                    const struct cell *const at = cells + b * T + row;
                    numbers_of_block((const char *)m->codes + (lo + part) * K, K, n - part, b, weights);
                    for (int64_t first = 0; first < BLOCK && b * BLOCK + first < K; first += span) {
                        const int64_t g = groups == 1 ? 0 : (b * BLOCK + first) / m->group;
                        if (g != loaded) group = group_of_rows(m, lo + part, n - part, groups, loaded = g);
                        if (m->zeros)
                            for (int i = 0; i < 4; i++)
                                for (int64_t k = first; k < first + span; k++) weights[i][k] -= group.zeros[i];
                        int64_t r = 0;
                        for (; rows - r >= AT_ONCE; r += AT_ONCE) add_floats(at + r, weights, sums + r, group.scales, first, span, AT_ONCE);
                        for (; rows - r >= 2; r += 2) add_floats(at + r, weights, sums + r, group.scales, first, span, 2);
                        for (; r < rows; r++) add_floats(at + r, weights, sums + r, group.scales, first, span, 1);
                    }
                }
            }
            finish(whole, t, row, (int)rows, lo, n, N, bf16);
        }
}

static void quantised_matmul(const void *x, int64_t T, int64_t K, const struct matrix *m, int64_t N, struct target t, struct cell *cells, int x16,
                             int bf16) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < T; row++) make_cells(x, row, T, K, m, cells, x16, bf16 ? 1 : 2);
    if (m->kind == FP8) product_fp8(cells, T, K, m, N, t, bf16);
    else if (m->kind == INT8) (bf16 ? product_int8 : product_int8_exact)(cells, T, K, m, N, t, bf16);
    else (bf16 ? product_int4 : product_int4_exact)(cells, T, K, m, N, t, bf16);
}
