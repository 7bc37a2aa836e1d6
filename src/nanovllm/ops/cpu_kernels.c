// The decode step on a CPU: a whole decoder layer for a batch of single tokens, and the head. Plain C with GCC's vector extension.
//
// A row's bits depend on no other row, on no number of rows and of threads: every dot product runs down its K in 16 lanes with one
// accumulator each and adds the lanes in a fixed tree; every row and every key/value head of a row is one thread's work.
// Weights and pages are float32 or bfloat16 (`bf16` != 0); all arithmetic is float32.
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define LANES 16
#define STRIP 32  // weight rows that stay in cache while all rows of x pass
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(64)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

INLINE vec load(const void *p, long i, int bf16) {
    vec v;
    if (bf16) {
        halves h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        bits wide = __builtin_convertvector(h, bits) << 16;
        memcpy(&v, &wide, sizeof v);
    } else {
        memcpy(&v, (const float *)p + i, sizeof v);
    }
    return v;
}

INLINE float load1(const void *p, long i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t wide = (uint32_t)((const uint16_t *)p)[i] << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE void store1(void *p, long i, float value, int bf16) {
    if (!bf16) {
        ((float *)p)[i] = value;
        return;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    ((uint16_t *)p)[i] = value != value ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// Shuffles and no copies through memory: a variable whose address is taken would be kept in memory all along.
INLINE vec quarter(vec v) {
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    return v + SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}

INLINE vec interleave(vec a, vec b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}

// The sums of the lanes of four vectors, in the first four lanes.
INLINE vec four_sums(vec a, vec b, vec c, vec d) {
    vec ab = interleave(quarter(a), quarter(b)), cd = interleave(quarter(c), quarter(d));
    return SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

INLINE float lanes_sum(vec v) {
    v = quarter(v);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

static __attribute__((noinline)) vec load_few(const void *p, long i, long count, int bf16) {
    float values[LANES] = {0};
    for (long lane = 0; lane < count; lane++) values[lane] = load1(p, i + lane, bf16);
    return load(values, 0, 0);
}

// The first `count` of 16 values, zeros behind them.
INLINE vec load_some(const void *p, long i, long count, int bf16) {
    return count == LANES ? load(p, i, bf16) : load_few(p, i, count, bf16);
}

INLINE float dot(const float *x, const void *w, long at, long n, int bf16) {
    vec sum = {0};
    long k = 0;
    for (; k + LANES <= n; k += LANES) sum += load(x, k, 0) * load(w, at + k, bf16);
    if (k < n) sum += load_some(x, k, n - k, 0) * load_some(w, at + k, n - k, bf16);
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
INLINE void finish(float block[4][STRIP], struct target t, long row, int rows, long lo, long n, long N, int bf16) {
    for (int r = 0; r < rows; r++) {
        long at = (row + r) * N + lo;
        float *sums = block[r];
        if (t.bias) for (long c = 0; c < n; c++) sums[c] += load1(t.bias, lo + c, bf16);
        if (t.residual && t.residual16) for (long c = 0; c < n; c++) sums[c] += load1(t.residual, at + c, 1);
        if (t.residual && !t.residual16) for (long c = 0; c < n; c++) sums[c] += load1(t.residual, at + c, 0);
        if (t.out16) for (long c = 0; c < n; c++) store1(t.out, at + c, sums[c], 1);
        else memcpy((float *)t.out + at, sums, n * sizeof *sums);
    }
}

// Tiles: block[r * STRIP + c] = x[r] . w[c] for as many rows r and columns c as the name says. The accumulators have names, because GCC keeps an
// array of them in memory.
#define FOUR(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define EIGHT(DO, r) FOUR(DO, r) DO(r, 4) DO(r, 5) DO(r, 6) DO(r, 7)
#define ZERO(r, c) vec sum_##r##c = {0};
#define WEIGHT(r, c) const vec w_##c = load_some(w, c * K + k, count, bf16);
#define MULTIPLY(r, c) sum_##r##c += x_##r * w_##c;
#define VALUE(r) const vec x_##r = load_some(x, r * K + k, count, 0);
#define STORE(r, c, c1, c2, c3) put(block + r * STRIP + c, four_sums(sum_##r##c, sum_##r##c1, sum_##r##c2, sum_##r##c3));
#define TILE(NAME, BEFORE, STEP, AFTER)                                                         \
    INLINE void NAME(const float *x, long K, const char *w, float *block, int bf16) {            \
        BEFORE                                                                                  \
        long k = 0, count = LANES;                                                              \
        for (; k + LANES <= K; k += LANES) { STEP }                                             \
        if (k < K) { count = K - k; STEP }                                                      \
        AFTER                                                                                   \
    }

INLINE void put(float *to, vec sums) { memcpy(to, &sums, 4 * sizeof *to); }

TILE(tile_4x4, FOUR(ZERO, 0) FOUR(ZERO, 1) FOUR(ZERO, 2) FOUR(ZERO, 3),
     FOUR(WEIGHT, 0) VALUE(0) FOUR(MULTIPLY, 0) VALUE(1) FOUR(MULTIPLY, 1) VALUE(2) FOUR(MULTIPLY, 2) VALUE(3) FOUR(MULTIPLY, 3),
     STORE(0, 0, 1, 2, 3) STORE(1, 0, 1, 2, 3) STORE(2, 0, 1, 2, 3) STORE(3, 0, 1, 2, 3))
TILE(tile_2x8, EIGHT(ZERO, 0) EIGHT(ZERO, 1),
     EIGHT(WEIGHT, 0) VALUE(0) EIGHT(MULTIPLY, 0) VALUE(1) EIGHT(MULTIPLY, 1),
     STORE(0, 0, 1, 2, 3) STORE(0, 4, 5, 6, 7) STORE(1, 0, 1, 2, 3) STORE(1, 4, 5, 6, 7))
TILE(tile_1x8, EIGHT(ZERO, 0), EIGHT(WEIGHT, 0) VALUE(0) EIGHT(MULTIPLY, 0), STORE(0, 0, 1, 2, 3) STORE(0, 4, 5, 6, 7))

// The strip's columns for as many rows as are left and fit.
#define ROWS(COUNT, COLS)                                                                                                    \
    for (; T - row >= COUNT; row += COUNT) {                                                                                 \
        const float *rows = x + row * K;                                                                                     \
        long c = 0;                                                                                                          \
        for (; c + COLS <= n; c += COLS)                                                                                     \
            tile_##COUNT##x##COLS(rows, K, at + c * stride, block[0] + c, bf16);                                             \
        for (; c < n; c++)                                                                                                   \
            for (int r = 0; r < COUNT; r++) block[r][c] = dot(rows + r * K, at + c * stride, 0, K, bf16);                     \
        finish(block, t, row, COUNT, lo, n, N, bf16);                                                                        \
    }

// out[T, N] = x[T, K] @ w[N, K]^T. Called by all threads of a parallel region.
INLINE void matmul_of(const float *x, long T, long K, const void *w, long N, struct target t, int bf16) {
    const long stride = K * (bf16 ? 2 : 4);
#pragma omp for schedule(static)
    for (long strip = 0; strip < (N + STRIP - 1) / STRIP; strip++) {
        float block[4][STRIP];
        const long lo = strip * STRIP, n = N - lo < STRIP ? N - lo : STRIP;
        const char *at = (const char *)w + lo * stride;
        long row = 0;
        ROWS(4, 4)
        ROWS(2, 8)
        ROWS(1, 8)
    }
}

static void matmul_float32(const float *x, long T, long K, const void *w, long N, struct target t) { matmul_of(x, T, K, w, N, t, 0); }
static void matmul_bfloat16(const float *x, long T, long K, const void *w, long N, struct target t) { matmul_of(x, T, K, w, N, t, 1); }

static void matmul(const float *x, long T, long K, const void *w, long N, struct target t, int bf16) {
    (bf16 ? matmul_bfloat16 : matmul_float32)(x, T, K, w, N, t);
}

// ---- rows -------------------------------------------------------------------------------------------------------------------------

INLINE void rms_norm(const void *x, long at, const void *gain, float *out, long n, float eps, int x16, int bf16) {
    vec squares = {0};
    for (long k = 0; k < n; k += LANES) {
        vec v = load_some(x, at + k, n - k < LANES ? n - k : LANES, x16);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(lanes_sum(squares) / (float)n + eps);
    for (long k = 0; k < n; k++) out[k] = load1(x, at + k, x16) * scale * load1(gain, k, bf16);
}

// exp(x) for x <= 0 after Cephes' expf: 2^n times a polynomial, within 2 units in the last place; below -87 it is 0.
INLINE float exp_negative(float x) {
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t wide = ((int32_t)(n < -126.0f ? -126.0f : n) + 127) << 23;
    float power;
    memcpy(&power, &wide, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

INLINE float silu(float x) {
    float e = exp_negative(-fabsf(x));
    return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// In place: an optional norm, then channel d turned with channel d + D/2. `sin` has the sign of the second term.
INLINE void norm_and_turn(float *x, const void *gain, const float *cos, const float *sin, long D, float eps, int bf16, float *scratch) {
    if (gain) {
        rms_norm(x, 0, gain, scratch, D, eps, 0, bf16);
    } else {
        memcpy(scratch, x, D * sizeof *x);
    }
    for (long d = 0; d < D / 2; d++) x[d] = scratch[d] * cos[d] + scratch[d + D / 2] * sin[d];
    for (long d = D / 2; d < D; d++) x[d] = scratch[d] * cos[d] + scratch[d - D / 2] * sin[d];
}

// ---- attention --------------------------------------------------------------------------------------------------------------------

struct pages {
    char *base;  // of one layer, [N, 2, K, S, D]
    const int32_t *tables, *seq_lens;
    long width, page_size, num_kv_heads, head_dim;
};

INLINE long place(struct pages p, long page, long kind, long head) {
    return ((page * 2 + kind) * p.num_kv_heads + head) * p.page_size * p.head_dim;
}

// G query heads `q` over one key/value head of row b; the result replaces `q`. `scores` holds G * seq_len floats.
INLINE void attend(float *q, long G, struct pages p, long b, long head, float scale, float *scores, float *mixed, int bf16) {
    long length = p.seq_lens[b], D = p.head_dim, S = p.page_size;
    const int32_t *table = p.tables + b * p.width;
    for (long start = 0; start < length; start += S) {
        long at = place(p, table[start / S], 0, head), count = length - start < S ? length - start : S;
        for (long s = 0; s < count; s++)
            for (long g = 0; g < G; g++) scores[g * length + start + s] = dot(q + g * D, p.base, at + s * D, D, bf16) * scale;
    }
    for (long g = 0; g < G; g++) {
        float *row = scores + g * length, top = row[0], total = 0;
        for (long i = 1; i < length; i++) top = row[i] > top ? row[i] : top;
        for (long i = 0; i < length; i++) row[i] = exp_negative(row[i] - top);
        for (long i = 0; i < length; i++) total += row[i];
        for (long i = 0; i < length; i++) row[i] /= total;
    }
    memset(mixed, 0, G * D * sizeof *mixed);
    for (long start = 0; start < length; start += S) {
        long at = place(p, table[start / S], 1, head), count = length - start < S ? length - start : S;
        for (long g = 0; g < G; g++)
            for (long s = 0; s < count; s++) {
                float weight = scores[g * length + start + s];
                for (long d = 0; d < D; d++) mixed[g * D + d] += weight * load1(p.base, at + s * D + d, bf16);
            }
    }
    memcpy(q, mixed, G * D * sizeof *q);
}

// ---- entry points -----------------------------------------------------------------------------------------------------------------

// The fields of `LayerArgs` in cpu.py, in its order. x, out [B, M]; cos, sin [B, D] float32; matrices [out, in]; absent ones are null.
// scratch: B * (2 M + X + H D + 3 F) + threads * (G * width * page_size + (G + 1) * D) floats; X = (H + 2K) D, G = H / K.
struct layer_args {
    const void *x, *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *cos, *sin;
    const int32_t *tables, *seq_lens, *slots;
    char *pages;
    float *scratch;
    void *out;
    long B, M, H, K, D, F, width, num_pages, page_size, threads, bf16;
    float eps, scale;
};

INLINE void layer(const struct layer_args *a, int bf16) {
    const long B = a->B, M = a->M, D = a->D, F = a->F, G = a->H / a->K, X = (a->H + 2 * a->K) * D, HD = a->H * D;
    const struct pages pages = {a->pages, a->tables, a->seq_lens, a->width, a->page_size, a->K, D};
    float *hidden = a->scratch, *heads = hidden + B * M, *mixed = heads + B * X, *wide = mixed + B * HD, *gated = wide + B * 2 * F;
    float *middle = gated + B * F, *own = middle + B * M;
#pragma omp parallel num_threads(a->threads)
    {
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++) rms_norm(a->x, b * M, a->input_norm, hidden + b * M, M, a->eps, bf16, bf16);
        matmul(hidden, B, M, a->qkv, X, (struct target){a->qkv_bias, 0, heads, 0, 0}, bf16);
#pragma omp for schedule(static)
        for (long task = 0; task < B * a->K; task++) {
            long b = task / a->K, head = task % a->K, page = a->slots[b] / a->page_size, slot = a->slots[b] % a->page_size;
            float *scratch = own + THREAD * (G * a->width * a->page_size + (G + 1) * D);
            float *q = heads + b * X + head * G * D, *k = heads + b * X + HD + head * D, *v = k + a->K * D;
            const float *cos = a->cos + b * D, *sin = a->sin + b * D;
            norm_and_turn(k, a->k_norm, cos, sin, D, a->eps, bf16, scratch);
            for (long d = 0; d < D; d++) {
                store1(a->pages, place(pages, page, 0, head) + slot * D + d, k[d], bf16);
                store1(a->pages, place(pages, page, 1, head) + slot * D + d, v[d], bf16);
            }
            for (long g = 0; g < G; g++) norm_and_turn(q + g * D, a->q_norm, cos, sin, D, a->eps, bf16, scratch);
            attend(q, G, pages, b, head, a->scale, scratch + G * D, scratch, bf16);
            memcpy(mixed + b * HD + head * G * D, q, G * D * sizeof *q);
        }
        matmul(mixed, B, HD, a->o, M, (struct target){a->o_bias, a->x, middle, bf16, 0}, bf16);
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++) rms_norm(middle, b * M, a->post_norm, hidden + b * M, M, a->eps, 0, bf16);
        matmul(hidden, B, M, a->gate_up, 2 * F, (struct target){a->gate_up_bias, 0, wide, 0, 0}, bf16);
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++)
            for (long f = 0; f < F; f++) gated[b * F + f] = silu(wide[b * 2 * F + f]) * wide[b * 2 * F + F + f];
        matmul(gated, B, F, a->down, M, (struct target){a->down_bias, middle, a->out, 0, bf16}, bf16);
    }
}

// Writes k and v of B tokens into one layer's pages and computes `out`. -1, and nothing is written, where a slot or a page table is wrong.
int nanovllm_layer(const struct layer_args *a) {
    for (long b = 0; b < a->B; b++) {
        long count = (a->seq_lens[b] + a->page_size - 1) / a->page_size;
        if (a->seq_lens[b] < 1 || count > a->width || a->slots[b] < 0 || a->slots[b] >= a->num_pages * a->page_size) return -1;
        for (long p = 0; p < count; p++)
            if (a->tables[b * a->width + p] < 0 || a->tables[b * a->width + p] >= a->num_pages) return -1;
    }
    if (a->bf16) layer(a, 1); else layer(a, 0);
    return 0;
}

INLINE void head(const void *x, const void *gain, const void *w, void *out, float *scratch, long R, long M, long V, float eps, int bf16,
                 long threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < R; r++) rms_norm(x, r * M, gain, scratch + r * M, M, eps, bf16, bf16);
        matmul(scratch, R, M, w, V, (struct target){0, 0, out, 0, bf16}, bf16);
    }
}

// out[R, V] = rms_norm(x)[R, M] @ w[V, M]^T; scratch: R * M floats.
void nanovllm_head(const void *x, const void *gain, const void *w, void *out, float *scratch, long R, long M, long V, float eps, int bf16,
                   long threads) {
    if (bf16) head(x, gain, w, out, scratch, R, M, V, eps, 1, threads); else head(x, gain, w, out, scratch, R, M, V, eps, 0, threads);
}
