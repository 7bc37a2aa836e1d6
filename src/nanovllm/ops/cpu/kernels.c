// The decode step on a CPU: the layers of a decoder for a batch of single tokens, and the head. Plain C with GCC's vector extension.
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

// The fields of `Step`, and the numbers that `_run` writes for views and layers, in cpu.py, in their order. x, out [B, M]; logits [B, V];
// cos, sin [B, D] float32; matrices [out, in]; absent ones are null. scratch: B * (2 M + X + H D + 3 F) + threads * (G * width * page_size +
// (G + 1) * D) floats; X = (H + 2K) D, G = H / K, F and width the largest; B * M without layers. cells: as many as the widest quantised matrix
// needs, on a border of 64 bytes.
struct step {
    const void *x;
    const int32_t *seq_lens;
    float *scratch;
    struct cell *cells;
    void *out;
    const void *final_norm;
    void *logits;
    struct matrix head;
    int64_t B, M, H, K, D, V, page_size, threads, bf16, fp8;
    float eps, scale, softcap;
};

// What the layers with one window share.
struct view {
    const float *cos, *sin;
    const int32_t *tables, *slots;
    int64_t width, num_pages, window;
};

struct layer {
    const void *input_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm, *gate_up_bias, *down_bias;
    char *pages;
    struct matrix qkv, o, gate_up, down;
    int64_t F, view;
};

// One layer: `out` of its input `x`, which may be the same memory. Called by all threads of a parallel region.
INLINE void layer(const struct step *s, const struct view *v, const struct layer *a, const void *x, int bf16, int type) {
    const int64_t B = s->B, M = s->M, D = s->D, F = a->F, G = s->H / s->K, X = (s->H + 2 * s->K) * D, HD = s->H * D;
    const int64_t a_thread = G * v->width * s->page_size + (G + 1) * D;
    const struct pages pages = {a->pages, v->tables, s->seq_lens, v->width, s->page_size, s->K, D};
    const struct limits limits = {s->scale, s->softcap, v->window};
    float *hidden = s->scratch, *heads = hidden + B * M, *mixed = heads + B * X, *wide = mixed + B * HD, *gated = wide + B * 2 * F;
    float *middle = gated + B * F, *own = middle + B * M;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < B; b++) rms_norm(x, b * M, a->input_norm, hidden + b * M, M, s->eps, bf16, bf16);
    multiply(hidden, B, M, &a->qkv, X, (struct target){a->qkv_bias, 0, heads, 0, 0}, s->cells, bf16);
#pragma omp for schedule(static)  // all keys and values are written before any row attends, as the ops do it
    for (int64_t task = 0; task < B * s->K; task++) {
        int64_t b = task / s->K, head = task % s->K, page = v->slots[b] / s->page_size, slot = v->slots[b] % s->page_size;
        float *k = heads + b * X + HD + head * D, *value = k + s->K * D, *scratch = own + THREAD * a_thread;
        norm_and_turn(k, a->k_norm, v->cos + b * D, v->sin + b * D, D, s->eps, bf16, scratch);
        write_head(k, pages, block_of(pages, page, KEYS, head, type), slot, bf16, type);
        write_head(value, pages, block_of(pages, page, VALUES, head, type), slot, bf16, type);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < B * s->K; task++) {
        int64_t b = task / s->K, head = task % s->K;
        float *q = heads + b * X + head * G * D, *scratch = own + THREAD * a_thread;
        for (int64_t g = 0; g < G; g++) norm_and_turn(q + g * D, a->q_norm, v->cos + b * D, v->sin + b * D, D, s->eps, bf16, scratch);
        attend(q, G, pages, b, head, limits, scratch + G * D, scratch, type);
        memcpy(mixed + b * HD + head * G * D, q, G * D * sizeof *q);
    }
    multiply(mixed, B, HD, &a->o, M, (struct target){a->o_bias, x, middle, bf16, 0}, s->cells, bf16);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < B; b++) rms_norm(middle, b * M, a->post_norm, hidden + b * M, M, s->eps, 0, bf16);
    multiply(hidden, B, M, &a->gate_up, 2 * F, (struct target){a->gate_up_bias, 0, wide, 0, 0}, s->cells, bf16);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < B; b++)
        for (int64_t f = 0; f < F; f++) gated[b * F + f] = silu(wide[b * 2 * F + f]) * wide[b * 2 * F + F + f];
    multiply(gated, B, F, &a->down, M, (struct target){a->down_bias, middle, s->out, 0, bf16}, s->cells, bf16);
}

INLINE void run(const struct step *s, const struct view *views, const struct layer *layers, int64_t count, int bf16, int type) {
    const int64_t B = s->B, M = s->M;
#pragma omp parallel num_threads(s->threads)
    {
        const void *x = s->x;
        for (const struct layer *a = layers; a < layers + count; a++, x = s->out) layer(s, &views[a->view], a, x, bf16, type);
        if (s->V) {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < B; b++) rms_norm(x, b * M, s->final_norm, s->scratch + b * M, M, s->eps, bf16, bf16);
            multiply(s->scratch, B, M, &s->head, s->V, (struct target){0, 0, s->logits, 0, bf16}, s->cells, bf16);
        }
    }
}

// Writes k and v of B tokens into the pages of `count` layers, which read one another's outputs, and computes `out` of the last; with V != 0 also
// the final norm and the logits of that, or of x without layers. 0; or 1 + the view of which a slot or a page table is wrong, and nothing is
// written.
int nanovllm_step(const struct step *s, const struct view *views, int64_t num_views, const struct layer *layers, int64_t count) {
    for (int64_t i = 0; i < num_views; i++)
        for (int64_t b = 0; b < s->B; b++) {
            const struct view *v = &views[i];
            int64_t pages = (s->seq_lens[b] + s->page_size - 1) / s->page_size;
            if (s->seq_lens[b] < 1 || pages > v->width || v->slots[b] < 0 || v->slots[b] >= v->num_pages * s->page_size) return 1 + (int)i;
            for (int64_t p = 0; p < pages; p++)
                if (v->tables[b * v->width + p] < 0 || v->tables[b * v->width + p] >= v->num_pages) return 1 + (int)i;
        }
    if (s->fp8 && s->bf16) run(s, views, layers, count, 1, KV_FP8);
    else if (s->fp8) run(s, views, layers, count, 0, KV_FP8);
    else if (s->bf16) run(s, views, layers, count, 1, KV_BFLOAT16);
    else run(s, views, layers, count, 0, KV_FLOAT32);
    return 0;
}

// out[T, N] = x[T, K] @ w[N, K]^T + bias for a quantised matrix; x, bias and out are bfloat16 or float32.
void nanovllm_quantised_linear(const void *x, const struct matrix *w, const void *bias, void *out, struct cell *cells, int64_t T, int64_t K,
                               int64_t N, int64_t bf16, int64_t threads) {
    (void)threads;
#pragma omp parallel num_threads(threads)
    quantised_matmul(x, T, K, w, N, (struct target){bias, 0, out, 0, (int)bf16}, cells, (int)bf16, (int)bf16);
}

// So that the caller can see that both sides mean the same by the structs.
int64_t nanovllm_structs_size(void) { return sizeof(struct step) + sizeof(struct view) + sizeof(struct layer); }
int64_t nanovllm_cell_size(void) { return sizeof(struct cell); }
