// Sampling on a CPU: the ops of ops/sampling/ row by row, a row being one thread's work. Logits are float32 or bfloat16 (`bf16` != 0).
//
// Built without contraction of products and sums (`build.py` says so to the compiler): random numbers, filters and penalties then have
// the bits of the plain torch form, which rounds after every operation. Logarithms differ in the last bits. So `nanovllm_draw` says where
// that could change a token, and leaves the row to torch.
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif
#include "exponential.h"
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define BLOCK 64  // tokens whose random numbers are made together: four of each of 16 counters

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Rows of logits: V numbers each, `stride` numbers apart.
struct rows {
    const void *x;
    int64_t V, stride;
    int bf16;
};

// One row as float32: its own memory, or `wide`, which is filled.
INLINE const float *row_of(struct rows rows, int64_t b, float *wide) {
    if (!rows.bf16) return (const float *)rows.x + b * rows.stride;
    const uint16_t *x = (const uint16_t *)rows.x + b * rows.stride;
    for (int64_t i = 0; i < rows.V; i++) wide[i] = as_float((uint32_t)x[i] << 16);
    return wide;
}

// The largest of n numbers, by lanes; NaN if one of them is NaN.
static float largest(const float *x, int64_t n) {
    float top[LANES], max = -INFINITY;
    uint32_t nan[LANES] = {0}, any = 0;
    int64_t i = 0;
    for (int lane = 0; lane < LANES; lane++) top[lane] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float v = x[i + lane];
            nan[lane] |= v != v;
            top[lane] = v > top[lane] ? v : top[lane];
        }
    for (int lane = 0; lane < LANES; lane++) any |= nan[lane], max = top[lane] > max ? top[lane] : max;
    for (; i < n; i++) any |= x[i] != x[i], max = x[i] > max ? x[i] : max;
    return any ? NAN : max;
}

INLINE int64_t first_of(const float *x, int64_t n, float value) {
    int64_t i = 0;
    if (value != value) {
        while (i < n - 1 && x[i] == x[i]) i++;
        return i;
    }
    for (; i + LANES <= n; i += LANES) {
        int found = 0;
        for (int lane = 0; lane < LANES; lane++) found |= x[i + lane] == value;
        if (found) break;
    }
    while (i < n - 1 && x[i] != value) i++;
    return i;
}

// ---- random numbers ---------------------------------------------------------------------------------------------------------------

// The four words of each of 16 counters under a key, by Philox-4x32-10, as `uniforms.py` describes it.
INLINE void philox(const int64_t *key, uint32_t stream, uint32_t words[4][LANES]) {
    uint32_t *c0 = words[0], *c1 = words[1], *c2 = words[2], *c3 = words[3];  // `c0` has the counters
    uint32_t k0 = (uint32_t)key[0], k1 = (uint32_t)((uint64_t)key[0] >> 32);
    for (int i = 0; i < LANES; i++) {
        c1[i] = stream;
        c2[i] = (uint32_t)key[1];
        c3[i] = (uint32_t)((uint64_t)key[1] >> 32);
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < LANES; i++) {
            uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)b;
            c3[i] = (uint32_t)a;
        }
}

INLINE float unit_of(uint32_t w) {
    uint32_t fine = w < 1u << 23;
    return (float)(int32_t)((fine ? w : w >> 9) * 2 + 1) * (fine ? 0x1p-33f : 0x1p-24f);
}

// Numbers 64 * block ... of a key.
static void uniforms(const int64_t *key, int64_t block, uint32_t stream, float *u) {
    uint32_t words[4][LANES], in_order[BLOCK];
    for (int i = 0; i < LANES; i++) words[0][i] = (uint32_t)(block * LANES + i);
    philox(key, stream, words);
    for (int i = 0; i < LANES; i++)
        for (int word = 0; word < 4; word++) in_order[4 * i + word] = words[word][i];
    for (int i = 0; i < BLOCK; i++) u[i] = unit_of(in_order[i]);
}

int64_t nanovllm_uniforms(const int64_t *keys, float *out, int64_t B, int64_t num, int64_t stream, int64_t threads) {
    (void)threads;  // without OpenMP
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static)
    for (int64_t b = 0; b < B; b++)
        for (int64_t start = 0; start < num; start += BLOCK) {
            float u[BLOCK];
            uniforms(keys + 2 * b, start / BLOCK, (uint32_t)stream, u);
            memcpy(out + b * num + start, u, (num - start < BLOCK ? num - start : BLOCK) * sizeof *u);
        }
    return 0;
}

// ---- samples ----------------------------------------------------------------------------------------------------------------------

// log(x) of a positive normal number after Cephes' logf, within 2 units in the last place.
INLINE float log_of(float x) {
    int32_t exponent = (int32_t)(as_bits(x) - 0x3f3504f3u) >> 23;
    float f = as_float(as_bits(x) - ((uint32_t)exponent << 23)) - 1.0f, z = f * f, n = (float)exponent;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return f + (p * f * z - n * 2.12194440e-4f - 0.5f * z) + n * 0.693359375f;
}

#define MOST_NOISE 24.0f  // no Gumbel noise is larger: the smallest uniform number is 2^-33

// Gumbel noise of a uniform number, as `gumbel` in draw.py computes it.
INLINE float noise_of(float u) {
    float small = u + u * u * (0.5f + u / 3.0f), large = -log_of(1.0f - u);
    return -log_of(u < 0x1p-9f ? small : large);
}

// The index of `best`, the largest of n sums; -1 if it is not finite, or if rounding could make another sum the largest.
// Two logarithms of the noise are each within 2 units in the last place of the exact ones, here and in torch; so is each later rounding.
static int32_t decided(const float *sums, int64_t n, float best, float temperature) {
    const float limit = best - (6e-5f * temperature + 5e-7f * fabsf(best) + 1e-37f);
    int64_t rivals = 0;
    for (int64_t i = 0; i < n; i++) rivals += sums[i] >= limit;
    return !(fabsf(best) < INFINITY) || rivals != 1 ? -1 : (int32_t)first_of(sums, n, best);
}

// The argmax of x + temperature * noise over n tokens, at most BLOCK; -1 if not decided.
static int32_t sampled_of_few(const float *x, const uint32_t *ids, int64_t n, float temperature, const int64_t *key, uint32_t stream) {
    float sums[BLOCK];
    for (int64_t start = 0; start < n; start += LANES) {
        uint32_t words[4][LANES], own[LANES];
        for (int i = 0; i < LANES; i++) words[0][i] = ids[start + i] / 4;
        philox(key, stream, words);
        for (int i = 0; i < LANES; i++) own[i] = words[ids[start + i] % 4][i];
        for (int i = 0; i < LANES; i++) sums[start + i] = temperature * noise_of(unit_of(own[i]));
    }
    for (int64_t i = 0; i < n; i++) sums[i] = x[ids[i]] + sums[i];
    int32_t at = decided(sums, n, largest(sums, n), temperature);
    return at < 0 ? -1 : (int32_t)ids[at];
}

// The argmax of x + temperature * noise over the tokens whose logit is not below `least`; -1 if not decided. `sums` holds V rounded up to a
// multiple of BLOCK.
static int32_t sampled(const float *x, int64_t V, float temperature, float least, const int64_t *key, uint32_t stream, float *sums) {
    uint32_t ids[BLOCK + 1] = {0};
    int64_t num = 0;
    for (int64_t i = 0; i < V && num <= BLOCK; i++)
        if (!(x[i] < least)) ids[num++] = (uint32_t)i;
    if (num <= BLOCK) return sampled_of_few(x, ids, num, temperature, key, stream);
    const int64_t padded = (V + BLOCK - 1) / BLOCK * BLOCK;
    float best = -INFINITY;
    for (int64_t start = 0; start < padded; start += BLOCK) {
        float *sum = sums + start, u[BLOCK];
        const int64_t n = V - start < BLOCK ? V - start : BLOCK;
        for (int64_t i = n; i < BLOCK; i++) sum[i] = -INFINITY;
        for (int64_t i = 0; i < n; i++) sum[i] = x[start + i] < least ? -INFINITY : x[start + i];
        const float top = largest(sum, BLOCK);
        if (top != top) return -1;
        if (top + MOST_NOISE * temperature < best - 1e-6f * fabsf(best) || top == -INFINITY) {  // none of them can be the argmax
            for (int i = 0; i < BLOCK; i++) sum[i] = -INFINITY;
            continue;
        }
        uniforms(key, start / BLOCK, stream, u);
        for (int i = 0; i < BLOCK; i++) sum[i] = sum[i] + temperature * noise_of(u[i]);
        const float highest = largest(sum, BLOCK);
        best = highest > best ? highest : best;
    }
    return decided(sums, padded, best, temperature);
}

// out[b]: the sampled token of each row, or -1 where torch must decide. Returns the number of such rows. scratch: threads * (2 V + BLOCK) floats.
int64_t nanovllm_draw(const void *logits, const float *temperature, const float *least, const int64_t *keys, int32_t *out, float *scratch, int64_t B,
                      int64_t V, int64_t stride, int64_t stream, int64_t threads, int64_t bf16) {
    const struct rows rows = {logits, V, stride, bf16 != 0};
    int64_t undecided = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static) reduction(+ : undecided)
    for (int64_t b = 0; b < B; b++) {
        float *own = scratch + THREAD * (2 * V + BLOCK);
        const float *x = row_of(rows, b, own), t = temperature[b];
        if (t > 0) {
            out[b] = sampled(x, V, t, least ? least[b] : -INFINITY, keys + 2 * b, (uint32_t)stream, own + V);
        } else {
            out[b] = (int32_t)first_of(x, V, largest(x, V));
        }
        undecided += out[b] < 0;
    }
    return undecided;
}

// out[b]: the token with the largest logit, the lowest id of a tie, the first NaN. scratch: threads * V floats.
int64_t nanovllm_highest(const void *logits, int32_t *out, float *scratch, int64_t B, int64_t V, int64_t stride, int64_t threads, int64_t bf16) {
    const struct rows rows = {logits, V, stride, bf16 != 0};
    (void)threads;
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static)
    for (int64_t b = 0; b < B; b++) {
        const float *x = row_of(rows, b, scratch + THREAD * V);
        out[b] = (int32_t)first_of(x, V, largest(x, V));
    }
    return 0;
}

// ---- filters ----------------------------------------------------------------------------------------------------------------------

#define BUCKETS 2049
#define COLDEST 1e-30f

// A row under a filter: each number has a bucket, by its distance from the largest one; those of a lower bucket are larger.
struct filtered {
    const float *x;
    uint16_t *buckets;
    float *few;  // scratch for the numbers of one bucket
    int64_t V;
    float top, inverse;  // the largest logit; 1 / temperature
};

INLINE float exponent_of(const struct filtered *r, float x) {
    float exponent = (x - r->top) * r->inverse * 1.4426950408889634f;
    return exponent < -64.0f ? -64.0f : exponent;
}

// exp((x - top) / temperature) in fixed point with 40 bits, as in `fixed_weights.py`.
INLINE int64_t weight_of(const struct filtered *r, float x) {
    float exponent = exponent_of(r, x), whole = floorf(exponent + 0.5f), part = exponent - whole;
    float power = 0.0001540353039338f;
    power = power * part + 0.0013333558146428443f;
    power = power * part + 0.009618129107628477f;
    power = power * part + 0.05550410866482158f;
    power = power * part + 0.2402265069591007f;
    power = power * part + 0.6931471805599453f;
    power = power * part + 1.0f;
    int64_t shift = (int64_t)whole + 16;
    return ((int64_t)(power * 0x1p24f) << (shift > 0 ? shift : 0)) >> (shift < 0 ? -shift : 0);
}

// Of the numbers from `floor` up, in descending order, the one with which their weights reach `wanted`; each number weighs 1 if not `by_mass`.
// `held` has the weights by bucket. NaN if all together weigh less.
static float reaching(const struct filtered *r, const int64_t *held, int64_t wanted, float floor, int by_mass) {
    int64_t bucket = 0, n = 0;
    for (; bucket < BUCKETS && held[bucket] < wanted; bucket++) wanted -= held[bucket];
    if (bucket == BUCKETS) return NAN;
    float *few = r->few;
    for (int64_t i = 0; i < r->V; i++)
        if (r->buckets[i] == bucket && r->x[i] >= floor) few[n++] = r->x[i];
    for (;;) {  // part the numbers into larger, equal and smaller ones, and go on in one part
        const float pivot = few[n / 2];
        int64_t equal = 0, at = 0, smaller = n, above = 0;  // starts of the equal ones, of those not yet seen and of the smaller ones
        while (at < smaller) {
            const float v = few[at];
            if (v > pivot) {
                above += by_mass ? weight_of(r, v) : 1;
                few[at++] = few[equal];
                few[equal++] = v;
            } else if (v < pivot) {
                few[at] = few[--smaller];
                few[smaller] = v;
            } else {
                at++;
            }
        }
        const int64_t with_equal = above + (smaller - equal) * (by_mass ? weight_of(r, pivot) : 1);
        if (wanted <= above) {
            n = equal;
        } else if (wanted <= with_equal) {
            return pivot;
        } else {
            wanted -= with_equal, few += smaller, n -= smaller;
        }
    }
}

// The smallest logit that the filters keep. `lowest`: what min-p keeps; `num`: how many numbers top-k and top-p examine.
static float kept_from(struct filtered r, int64_t top_k, float top_p, float lowest, int64_t num) {
    int64_t held[BUCKETS] = {0}, above = 0, total = 0;
    const int by_count = top_k > 0 || num < r.V;
    float kth = -INFINITY;
    for (int64_t i = 0; i < r.V; i++) r.buckets[i] = (uint16_t)(int32_t)(exponent_of(&r, r.x[i]) * -32.0f);
    if (by_count) {
        num = top_k > 0 && top_k < num ? top_k : num;
        for (int64_t i = 0; i < r.V; i++) held[r.buckets[i]]++;
        kth = reaching(&r, held, num, -INFINITY, 0);
    }
    if (!(top_p < 1)) return kth > lowest ? kth : lowest;
    // The nucleus, of the numbers above the k-th and as many equal to it as are left.
    float floor = nextafterf(kth, INFINITY);
    floor = floor > lowest ? floor : lowest;
    memset(held, 0, sizeof held);
    for (int64_t start = 0; start < r.V; start += BLOCK) {
        const int64_t n = r.V - start < BLOCK ? r.V - start : BLOCK;
        int64_t weights[BLOCK];
        if (largest(r.x + start, n) < floor) continue;
        for (int64_t i = 0; i < n; i++) weights[i] = r.x[start + i] >= floor ? weight_of(&r, r.x[start + i]) : 0;
        for (int64_t i = 0; i < n; i++) held[r.buckets[start + i]] += weights[i], total += weights[i], above += r.x[start + i] > kth;
    }
    if (by_count && kth >= lowest) total += (num - above) * weight_of(&r, kth);
    int64_t wanted = (int64_t)((double)top_p * (double)total);
    float last = wanted > 0 ? reaching(&r, held, wanted, floor, 1) : r.top;
    last = last != last ? kth : last;
    return last > lowest ? last : lowest;
}

// out[b]: the smallest logit that is kept, NaN where torch must decide. Returns the number of such rows. `log_min_p`: the logarithm of each
// row's min-p. `num`: how many numbers top-k and top-p examine. scratch: threads * 3 V floats.
int64_t nanovllm_least_kept(const void *logits, const float *temperature, const int32_t *top_k, const float *top_p, const float *min_p,
                            const float *log_min_p, float *out, float *scratch, int64_t B, int64_t V, int64_t stride, int64_t num, int64_t threads,
                            int64_t bf16) {
    const struct rows rows = {logits, V, stride, bf16 != 0};
    int64_t undecided = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static) reduction(+ : undecided)
    for (int64_t b = 0; b < B; b++) {
        float *own = scratch + THREAD * 3 * V, t = temperature[b];
        out[b] = -INFINITY;
        if (!(t > 0)) continue;
        const float *x = row_of(rows, b, own), top = largest(x, V);
        if (!(fabsf(top) < INFINITY)) continue;
        if (!(t < INFINITY)) {
            out[b] = NAN, undecided++;
            continue;
        }
        const float lowest = min_p && min_p[b] > 0 ? top + t * log_min_p[b] : -INFINITY, p = top_p ? top_p[b] : 1.0f;
        const int64_t k = top_k && top_k[b] > 0 ? top_k[b] : 0;
        const struct filtered row = {x, (uint16_t *)(own + V), own + 2 * V, V, top, 1.0f / (t < COLDEST ? COLDEST : t)};
        out[b] = k || p < 1 ? kept_from(row, k, p, lowest, num) : lowest;
    }
    return undecided;
}

// ---- penalties and log-probabilities ----------------------------------------------------------------------------------------------

// out [B, V] float32: logits after biases and penalties, in the order of `adjusted.py`; `bias`, and all of the others, may be null.
int64_t nanovllm_adjusted(const void *logits, const float *bias, const uint8_t *in_prompt, const int32_t *counts, const float *repetition,
                       const float *presence, const float *frequency, float *out, int64_t B, int64_t V, int64_t stride, int64_t threads,
                       int64_t bf16) {
    const struct rows rows = {logits, V, stride, bf16 != 0};
    (void)threads;
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static)
    for (int64_t b = 0; b < B; b++) {
        float *to = out + b * V;
        const float *x = row_of(rows, b, to);
        if (x != to) memcpy(to, x, V * sizeof *to);
        if (bias)
            for (int64_t i = 0; i < V; i++) to[i] = bias[b * V + i] != 0 ? to[i] + bias[b * V + i] : to[i];
        if (!counts) continue;
        const int32_t *drawn = counts + b * V;
        const uint8_t *given = in_prompt + b * V;
        const float r = repetition[b], f = frequency[b], p = presence[b];
        if (r != 1)
            for (int64_t i = 0; i < V; i++) {
                float changed = to[i] > 0 ? to[i] / r : to[i] * r;
                to[i] = (drawn[i] > 0) | (given[i] != 0) ? changed : to[i];
            }
        if (f != 0)
            for (int64_t i = 0; i < V; i++) to[i] = drawn[i] > 0 ? to[i] - f * (float)drawn[i] : to[i];
        if (p != 0)
            for (int64_t i = 0; i < V; i++) to[i] = drawn[i] > 0 ? to[i] - p : to[i];
    }
    return 0;
}

// The logarithm of the sum of exp(x - top), added in 16 lanes per 256 numbers, and the sums of these in double precision.
static float log_sum(const float *x, int64_t V, float top) {
    double total = 0;
    for (int64_t start = 0; start < V; start += 256) {
        const int64_t n = V - start < 256 ? V - start : 256;
        float sums[LANES] = {0}, sum = 0;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += exp_negative(x[start + i + lane] - top);
        for (; i < n; i++) sum += exp_negative(x[start + i] - top);
        for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
        total += sum;
    }
    return (float)log(total);
}

// Log-probabilities of one token per row, and ids and log-probabilities of the `num` most probable tokens, the lowest id first of a tie.
// Returns the number of rows whose largest logit is not finite, which torch must decide; their `logprobs` are NaN. scratch: threads * V floats.
int64_t nanovllm_logprobs(const void *logits, const int32_t *ids, float *logprobs, int32_t *top_ids, float *top_logprobs, float *scratch, int64_t B,
                          int64_t V, int64_t stride, int64_t num, int64_t threads, int64_t bf16) {
    const struct rows rows = {logits, V, stride, bf16 != 0};
    int64_t undecided = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) if (B > 1) schedule(static) reduction(+ : undecided)
    for (int64_t b = 0; b < B; b++) {
        const float *x = row_of(rows, b, scratch + THREAD * V), top = largest(x, V);
        logprobs[b] = NAN;
        if (!(fabsf(top) < INFINITY) || ids[b] < 0 || ids[b] >= V) {
            undecided++;
            continue;
        }
        const float rest = log_sum(x, V, top);
        logprobs[b] = x[ids[b]] - top - rest;
        int32_t *best_ids = top_ids + b * num;
        float *best = top_logprobs + b * num;  // logits until the end
        int64_t found = 0;
        for (int64_t start = 0; num && start < V; start += BLOCK) {
            const int64_t n = V - start < BLOCK ? V - start : BLOCK;
            if (found == num && !(largest(x + start, n) > best[num - 1])) continue;
            for (int64_t i = start; i < start + n; i++) {
                if (found == num && !(x[i] > best[num - 1])) continue;
                int64_t at = found < num ? found++ : num - 1;
                for (; at > 0 && best[at - 1] < x[i]; at--) best[at] = best[at - 1], best_ids[at] = best_ids[at - 1];
                best[at] = x[i], best_ids[at] = (int32_t)i;
            }
        }
        for (int64_t i = 0; i < num; i++) best[i] = best[i] - top - rest;
    }
    return undecided;
}
