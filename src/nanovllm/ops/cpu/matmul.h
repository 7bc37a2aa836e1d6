// Matrix products for few rows of x: every row's dot products have one order of additions. Part of kernels.c.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8  // GCC keeps vectors that are wider than a register in memory
#endif
#define STRIP 32  // weight rows that stay in cache while all rows of x pass
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

// Unsigned integers of 16 bits as integers of 32 bits, by one instruction where GCC's own conversion takes many.
INLINE bits wider(halves h) {
#if LANES == 16
    __m256i narrow;
    memcpy(&narrow, &h, sizeof narrow);
    return (bits)_mm512_cvtepu16_epi32(narrow);
#elif defined(__AVX2__)
    __m128i narrow;
    memcpy(&narrow, &h, sizeof narrow);
    return (bits)_mm256_cvtepu16_epi32(narrow);
#else
    return __builtin_convertvector(h, bits);
#endif
}

// sum + a * b, rounded once where the processor can. Compilers contract such expressions in some places and not in others, which would make the
// bits of a dot product depend on the function that computes it; so they are told not to (build.py).
INLINE vec plus_product(vec sum, vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    float32x4_t s[2], x[2], y[2];
    memcpy(s, &sum, sizeof s), memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
    s[0] = vfmaq_f32(s[0], x[0], y[0]), s[1] = vfmaq_f32(s[1], x[1], y[1]);
    memcpy(&sum, s, sizeof s);
    return sum;
#else
    return sum + a * b;
#endif
}

INLINE vec load(const void *p, int64_t i, int bf16) {
    vec v;
    if (bf16) {
        halves h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        bits wide = wider(h) << 16;
        memcpy(&v, &wide, sizeof v);
    } else {
        memcpy(&v, (const float *)p + i, sizeof v);
    }
    return v;
}

INLINE float load1(const void *p, int64_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t wide = (uint32_t)((const uint16_t *)p)[i] << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE void store1(void *p, int64_t i, float value, int bf16) {
    if (!bf16) {
        ((float *)p)[i] = value;
        return;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    ((uint16_t *)p)[i] = value != value ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// Shuffles and no copies through memory: a variable whose address is taken would be kept in memory all along. Folding adds the lanes to four
// sums; EVEN ... HIGH transpose two times two words of each four.
#if LANES == 16
INLINE vec folded(vec v) {
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    return v + SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
#define EVEN 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define ODD 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#else
INLINE vec folded(vec v) { return v + SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3); }
#define EVEN 0, 8, 1, 9, 4, 12, 5, 13
#define ODD 2, 10, 3, 11, 6, 14, 7, 15
#define LOW 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH 2, 3, 10, 11, 6, 7, 14, 15
#endif

INLINE vec interleave(vec a, vec b) { return SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD); }

// The sums of the lanes of four vectors, in the first four lanes.
INLINE vec four_sums(vec a, vec b, vec c, vec d) {
    vec ab = interleave(folded(a), folded(b)), cd = interleave(folded(c), folded(d));
    return SHUFFLE(ab, cd, LOW) + SHUFFLE(ab, cd, HIGH);
}

INLINE float lanes_sum(vec v) {
    v = folded(v);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

static __attribute__((noinline)) vec load_few(const void *p, int64_t i, int64_t count, int bf16) {
    float values[LANES] = {0};
    for (int64_t lane = 0; lane < count; lane++) values[lane] = load1(p, i + lane, bf16);
    return load(values, 0, 0);
}

// The first `count` values of a vector, zeros behind them.
INLINE vec load_some(const void *p, int64_t i, int64_t count, int bf16) {
    return count == LANES ? load(p, i, bf16) : load_few(p, i, count, bf16);
}

INLINE float dot(const float *x, const void *w, int64_t at, int64_t n, int bf16) {
    vec sum = {0};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) sum = plus_product(sum, load(x, k, 0), load(w, at + k, bf16));
    if (k < n) sum = plus_product(sum, load_some(x, k, n - k, 0), load_some(w, at + k, n - k, bf16));
    return lanes_sum(sum);
}

// ---- matrix products --------------------------------------------------------------------------------------------------------------

// What becomes of a product: out = product + bias + residual; `residual16`, `out16`: whether these two are bfloat16.
struct target {
    const void *bias, *residual;
    void *out;
    int residual16, out16;
};

// Columns lo ... lo + n of `rows` rows, from row `row` of the target on: what stands in `block` becomes the result.
INLINE void finish(float block[4][STRIP], struct target t, int64_t row, int rows, int64_t lo, int64_t n, int64_t N, int bf16) {
    for (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * N + lo;
        float *sums = block[r];
        if (t.bias) for (int64_t c = 0; c < n; c++) sums[c] += load1(t.bias, lo + c, bf16);
        if (t.residual && t.residual16) for (int64_t c = 0; c < n; c++) sums[c] += load1(t.residual, at + c, 1);
        if (t.residual && !t.residual16) for (int64_t c = 0; c < n; c++) sums[c] += load1(t.residual, at + c, 0);
        if (t.out16) for (int64_t c = 0; c < n; c++) store1(t.out, at + c, sums[c], 1);
        else memcpy((float *)t.out + at, sums, n * sizeof *sums);
    }
}

// Tiles: block[r * STRIP + c] = x[r] . w[c] for as many rows r and columns c as the name says. The accumulators have names, because GCC keeps an
// array of them in memory.
#define FOUR(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define EIGHT(DO, r) FOUR(DO, r) DO(r, 4) DO(r, 5) DO(r, 6) DO(r, 7)
#define ZERO(r, c) vec sum_##r##c = {0};
#define WEIGHT(r, c) const vec w_##c = load_some(w, c * K + k, count, bf16);
#define MULTIPLY(r, c) sum_##r##c = plus_product(sum_##r##c, x_##r, w_##c);
#define VALUE(r) const vec x_##r = load_some(x, r * K + k, count, 0);
#define STORE(r, c, c1, c2, c3) put(block + r * STRIP + c, four_sums(sum_##r##c, sum_##r##c1, sum_##r##c2, sum_##r##c3));
#define TILE(NAME, BEFORE, STEP, AFTER)                                                         \
    INLINE void NAME(const float *x, int64_t K, const char *w, float *block, int bf16) {            \
        BEFORE                                                                                  \
        int64_t k = 0, count = LANES;                                                              \
        for (; k + LANES <= K; k += LANES) { STEP }                                             \
        if (k < K) { count = K - k; STEP }                                                      \
        AFTER                                                                                   \
    }

INLINE void put(float *to, vec sums) { memcpy(to, &sums, 4 * sizeof *to); }

#if LANES == 16
TILE(tile_4x4, FOUR(ZERO, 0) FOUR(ZERO, 1) FOUR(ZERO, 2) FOUR(ZERO, 3),
     FOUR(WEIGHT, 0) VALUE(0) FOUR(MULTIPLY, 0) VALUE(1) FOUR(MULTIPLY, 1) VALUE(2) FOUR(MULTIPLY, 2) VALUE(3) FOUR(MULTIPLY, 3),
     STORE(0, 0, 1, 2, 3) STORE(1, 0, 1, 2, 3) STORE(2, 0, 1, 2, 3) STORE(3, 0, 1, 2, 3))
TILE(tile_2x8, EIGHT(ZERO, 0) EIGHT(ZERO, 1),
     EIGHT(WEIGHT, 0) VALUE(0) EIGHT(MULTIPLY, 0) VALUE(1) EIGHT(MULTIPLY, 1),
     STORE(0, 0, 1, 2, 3) STORE(0, 4, 5, 6, 7) STORE(1, 0, 1, 2, 3) STORE(1, 4, 5, 6, 7))
#else  // 16 registers in place of 32
#define COLUMN(c) { WEIGHT(0, c) MULTIPLY(0, c) MULTIPLY(1, c) MULTIPLY(2, c) }
TILE(tile_3x4, FOUR(ZERO, 0) FOUR(ZERO, 1) FOUR(ZERO, 2), VALUE(0) VALUE(1) VALUE(2) COLUMN(0) COLUMN(1) COLUMN(2) COLUMN(3),
     STORE(0, 0, 1, 2, 3) STORE(1, 0, 1, 2, 3) STORE(2, 0, 1, 2, 3))
TILE(tile_2x4, FOUR(ZERO, 0) FOUR(ZERO, 1), FOUR(WEIGHT, 0) VALUE(0) FOUR(MULTIPLY, 0) VALUE(1) FOUR(MULTIPLY, 1),
     STORE(0, 0, 1, 2, 3) STORE(1, 0, 1, 2, 3))
#endif
TILE(tile_1x8, EIGHT(ZERO, 0), EIGHT(WEIGHT, 0) VALUE(0) EIGHT(MULTIPLY, 0), STORE(0, 0, 1, 2, 3) STORE(0, 4, 5, 6, 7))

// The strip's columns for as many rows as are left and fit.
#define ROWS(COUNT, COLS)                                                                                                    \
    for (; T - row >= COUNT; row += COUNT) {                                                                                 \
        const float *rows = x + row * K;                                                                                     \
        int64_t c = 0;                                                                                                          \
        for (; c + COLS <= n; c += COLS)                                                                                     \
            tile_##COUNT##x##COLS(rows, K, at + c * stride, block[0] + c, bf16);                                             \
        for (; c < n; c++)                                                                                                   \
            for (int r = 0; r < COUNT; r++) block[r][c] = dot(rows + r * K, at + c * stride, 0, K, bf16);                     \
        finish(block, t, row, COUNT, lo, n, N, bf16);                                                                        \
    }

// out[T, N] = x[T, K] @ w[N, K]^T. Called by all threads of a parallel region.
INLINE void matmul_of(const float *x, int64_t T, int64_t K, const void *w, int64_t N, struct target t, int bf16) {
    const int64_t stride = K * (bf16 ? 2 : 4);
#pragma omp for schedule(static)
    for (int64_t strip = 0; strip < (N + STRIP - 1) / STRIP; strip++) {
        float block[4][STRIP];
        const int64_t lo = strip * STRIP, n = N - lo < STRIP ? N - lo : STRIP;
        const char *at = (const char *)w + lo * stride;
        int64_t row = 0;
#if LANES == 16
        ROWS(4, 4)
        ROWS(2, 8)
#else
        ROWS(3, 4)
        ROWS(2, 4)
#endif
        ROWS(1, 8)
    }
}

static void matmul_float32(const float *x, int64_t T, int64_t K, const void *w, int64_t N, struct target t) { matmul_of(x, T, K, w, N, t, 0); }
static void matmul_bfloat16(const float *x, int64_t T, int64_t K, const void *w, int64_t N, struct target t) { matmul_of(x, T, K, w, N, t, 1); }

static void matmul(const float *x, int64_t T, int64_t K, const void *w, int64_t N, struct target t, int bf16) {
    (bf16 ? matmul_bfloat16 : matmul_float32)(x, T, K, w, N, t);
}
