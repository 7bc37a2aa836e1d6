// The decode step on a CPU: a whole decoder layer for a batch of single tokens, and the head. Plain C with GCC's vector extension.
//
// A row's bits depend on no other row, on no number of rows and of threads: every dot product runs down its K in LANES lanes with one
// accumulator each and adds the lanes in a fixed tree; every row and every key/value head of a row is one thread's work.
// Weights and pages are float32 or bfloat16 (`bf16` != 0), pages also FP8 (`fp8` != 0, kv.h); all arithmetic is float32, but for products with
// quantised matrices (quantised.h, product_fp8.h).
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif
#include "attention.h"
#include "product_fp8.h"

// ---- rows -------------------------------------------------------------------------------------------------------------------------

INLINE void rms_norm(const void *x, int64_t at, const void *gain, float *out, int64_t n, float eps, int x16, int bf16) {
    vec squares = {0};
    for (int64_t k = 0; k < n; k += LANES) {
        vec v = load_some(x, at + k, n - k < LANES ? n - k : LANES, x16);
        squares = plus_product(squares, v, v);
    }
    float scale = 1.0f / sqrtf(lanes_sum(squares) / (float)n + eps);
    for (int64_t k = 0; k < n; k++) out[k] = load1(x, at + k, x16) * scale * load1(gain, k, bf16);
}

INLINE float silu(float x) {
    float e = exp_negative(-fabsf(x));
    return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// In place: an optional norm, then channel d turned with channel d + D/2. `sin` has the sign of the second term.
INLINE void norm_and_turn(float *x, const void *gain, const float *cos, const float *sin, int64_t D, float eps, int bf16, float *scratch) {
    if (gain) {
        rms_norm(x, 0, gain, scratch, D, eps, 0, bf16);
    } else {
        memcpy(scratch, x, D * sizeof *x);
    }
    for (int64_t d = 0; d < D / 2; d++) x[d] = scratch[d] * cos[d] + scratch[d + D / 2] * sin[d];
    for (int64_t d = D / 2; d < D; d++) x[d] = scratch[d] * cos[d] + scratch[d - D / 2] * sin[d];
}

// ---- entry points -----------------------------------------------------------------------------------------------------------------

// x[T, K] @ w[N, K]^T, quantised or not. `cells`: room for T * blocks_of(K) cells if w is quantised.
INLINE void multiply(const float *x, int64_t T, int64_t K, const struct matrix *w, int64_t N, struct target t, struct cell *cells, int bf16) {
    if (w->kind == PLAIN) matmul(x, T, K, w->codes, N, t, bf16);
    else quantised_matmul(x, T, K, w, N, t, cells, 0, bf16);
}

// The fields of `LayerArgs` in cpu.py, in its order. x, out [B, M]; cos, sin [B, D] float32; matrices [out, in]; absent ones are null.
// scratch: B * (2 M + X + H D + 3 F) + threads * (G * width * page_size + (G + 1) * D) floats; X = (H + 2K) D, G = H / K. cells: as many as the
// widest quantised matrix needs, on a border of 64 bytes.
struct layer_args {
    const void *x, *input_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm, *gate_up_bias, *down_bias;
    const float *cos, *sin;
    const int32_t *tables, *seq_lens, *slots;
    char *pages;
    float *scratch;
    struct cell *cells;
    void *out;
    struct matrix qkv, o, gate_up, down;
    int64_t B, M, H, K, D, F, width, num_pages, page_size, threads, bf16, fp8, window;
    float eps, scale, softcap;
};

INLINE void layer(const struct layer_args *a, int bf16, int type) {
    const int64_t B = a->B, M = a->M, D = a->D, F = a->F, G = a->H / a->K, X = (a->H + 2 * a->K) * D, HD = a->H * D;
    const int64_t a_thread = G * a->width * a->page_size + (G + 1) * D;
    const struct pages pages = {a->pages, a->tables, a->seq_lens, a->width, a->page_size, a->K, D};
    const struct limits limits = {a->scale, a->softcap, a->window};
    float *hidden = a->scratch, *heads = hidden + B * M, *mixed = heads + B * X, *wide = mixed + B * HD, *gated = wide + B * 2 * F;
    float *middle = gated + B * F, *own = middle + B * M;
#pragma omp parallel num_threads(a->threads)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) rms_norm(a->x, b * M, a->input_norm, hidden + b * M, M, a->eps, bf16, bf16);
        multiply(hidden, B, M, &a->qkv, X, (struct target){a->qkv_bias, 0, heads, 0, 0}, a->cells, bf16);
#pragma omp for schedule(static)  // all keys and values are written before any row attends, as the ops do it
        for (int64_t task = 0; task < B * a->K; task++) {
            int64_t b = task / a->K, head = task % a->K, page = a->slots[b] / a->page_size, slot = a->slots[b] % a->page_size;
            float *k = heads + b * X + HD + head * D, *v = k + a->K * D, *scratch = own + THREAD * a_thread;
            norm_and_turn(k, a->k_norm, a->cos + b * D, a->sin + b * D, D, a->eps, bf16, scratch);
            write_head(k, pages, block_of(pages, page, KEYS, head, type), slot, bf16, type);
            write_head(v, pages, block_of(pages, page, VALUES, head, type), slot, bf16, type);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < B * a->K; task++) {
            int64_t b = task / a->K, head = task % a->K;
            float *q = heads + b * X + head * G * D, *scratch = own + THREAD * a_thread;
            for (int64_t g = 0; g < G; g++) norm_and_turn(q + g * D, a->q_norm, a->cos + b * D, a->sin + b * D, D, a->eps, bf16, scratch);
            attend(q, G, pages, b, head, limits, scratch + G * D, scratch, type);
            memcpy(mixed + b * HD + head * G * D, q, G * D * sizeof *q);
        }
        multiply(mixed, B, HD, &a->o, M, (struct target){a->o_bias, a->x, middle, bf16, 0}, a->cells, bf16);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) rms_norm(middle, b * M, a->post_norm, hidden + b * M, M, a->eps, 0, bf16);
        multiply(hidden, B, M, &a->gate_up, 2 * F, (struct target){a->gate_up_bias, 0, wide, 0, 0}, a->cells, bf16);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++)
            for (int64_t f = 0; f < F; f++) gated[b * F + f] = silu(wide[b * 2 * F + f]) * wide[b * 2 * F + F + f];
        multiply(gated, B, F, &a->down, M, (struct target){a->down_bias, middle, a->out, 0, bf16}, a->cells, bf16);
    }
}

// Writes k and v of B tokens into one layer's pages and computes `out`. -1, and nothing is written, where a slot or a page table is wrong.
int nanovllm_layer(const struct layer_args *a) {
    for (int64_t b = 0; b < a->B; b++) {
        int64_t count = (a->seq_lens[b] + a->page_size - 1) / a->page_size;
        if (a->seq_lens[b] < 1 || count > a->width || a->slots[b] < 0 || a->slots[b] >= a->num_pages * a->page_size) return -1;
        for (int64_t p = 0; p < count; p++)
            if (a->tables[b * a->width + p] < 0 || a->tables[b * a->width + p] >= a->num_pages) return -1;
    }
    if (a->fp8 && a->bf16) layer(a, 1, KV_FP8);
    else if (a->fp8) layer(a, 0, KV_FP8);
    else if (a->bf16) layer(a, 1, KV_BFLOAT16);
    else layer(a, 0, KV_FLOAT32);
    return 0;
}

INLINE void head(const void *x, const void *gain, const struct matrix *w, void *out, float *scratch, struct cell *cells, int64_t R, int64_t M,
                 int64_t V, float eps, int bf16, int64_t threads) {
    (void)threads;  // without OpenMP
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) rms_norm(x, r * M, gain, scratch + r * M, M, eps, bf16, bf16);
        multiply(scratch, R, M, w, V, (struct target){0, 0, out, 0, bf16}, cells, bf16);
    }
}

// out[R, V] = rms_norm(x)[R, M] @ w[V, M]^T; scratch: R * M floats.
void nanovllm_head(const void *x, const void *gain, const struct matrix *w, void *out, float *scratch, struct cell *cells, int64_t R, int64_t M,
                   int64_t V, int64_t bf16, int64_t threads, float eps) {
    if (bf16) head(x, gain, w, out, scratch, cells, R, M, V, eps, 1, threads);
    else head(x, gain, w, out, scratch, cells, R, M, V, eps, 0, threads);
}

// out[T, N] = x[T, K] @ w[N, K]^T + bias for a quantised matrix; x, bias and out are bfloat16 or float32.
void nanovllm_quantised_linear(const void *x, const struct matrix *w, const void *bias, void *out, struct cell *cells, int64_t T, int64_t K,
                               int64_t N, int64_t bf16, int64_t threads) {
    (void)threads;
#pragma omp parallel num_threads(threads)
    quantised_matmul(x, T, K, w, N, (struct target){bias, 0, out, 0, (int)bf16}, cells, (int)bf16, (int)bf16);
}

// So that the caller can see that both sides mean the same by the structs.
int64_t nanovllm_layer_args_size(void) { return sizeof(struct layer_args); }
int64_t nanovllm_cell_size(void) { return sizeof(struct cell); }
