// Matrix products with integer weights of 8 and 4 bits, for any number of rows. Part of kernels.c.
//
// A vector has one lane per row of the matrix: LANES rows are transposed in registers, four codes of a row per lane, and meet inputs that all
// lanes share. Integer codes meet inputs in fixed point, 16 bits for bfloat16 and 32 for float32, with one power of two for 128 columns: the
// error of an input is at most 2^-15 (2^-29) of the largest of its 128, and the sums of products of a group are exact. So a row's bits depend
// on no other row and on no number of threads. With AVX2 alone, bfloat16 inputs of 4-bit codes have 15 bits (2^-14), as two bytes whose
// products need fewer instructions.
#pragma once
#include "fp8.h"
#define BLOCK 128  // columns whose inputs share a power of two, and whose 4-bit codes are packed together
#define PAIRS (BLOCK / 2)
#define SPANS 4  // most groups of a block
#define PANEL 64  // rows of x that share a pass over the codes
#define RUN 8  // blocks of a row of int8 codes that are read at once
#define AHEAD 8  // rows that a run is asked for in advance
#define SIDE (LANES * 4)  // bytes of a vector
#if defined(__AVX2__) && LANES == 8
#define BYTES(kind, parts) ((kind) == INT4 && (parts) == 1)
#else
#define BYTES(kind, parts) 0
#endif

typedef int16_t shorts __attribute__((vector_size(SIDE)));

enum kinds { PLAIN, INT8, INT4, FP8 };
enum types { FLOAT32, BFLOAT16, FLOAT16 };

// The fields of `Matrix` in native.py, in its order. PLAIN: `codes` are the weights, in the model's dtype.
struct matrix {
    const void *codes, *scales;
    const int16_t *zeros;
    const int32_t *order;
    int64_t kind, scale_type, group, rows;
};

// A row's 128 inputs: pairs of 16-bit integers (their upper halves, then their lower halves if there are any) or floats; the sums of their
// integers for each span of the block; the value of the lowest bit. Where BYTES holds, the upper and the lower bytes of the integers follow them.
struct cell {
    union {
        int32_t pairs[2 * PAIRS];
        float values[BLOCK];
        struct {
            int32_t all[PAIRS];
            int8_t bytes[2][BLOCK];
        };
    };
    int32_t sums[2][SPANS];
    float scale, unused[7];
};

INLINE int64_t blocks_of(int64_t K) { return (K + BLOCK - 1) / BLOCK; }

// Columns that have one scale and one zero, as far as a block goes.
INLINE int64_t span_of(const struct matrix *m, int64_t K) {
    return m->group >= K || m->group % BLOCK == 0 ? BLOCK : m->group % 64 == 0 ? 64 : 32;
}

// ---- inputs -----------------------------------------------------------------------------------------------------------------------

// The nearest integers of |v| < 2^22.
INLINE ints nearest(vec v) { return as_ints(v + 12582912.0f) - 0x4b400000; }

INLINE ints at_most(ints v, int32_t most) { return v + ((v > most) & (most - v)); }

INLINE int32_t lanes_add(ints v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

// Where the pairs of the LANES columns from k on of a block begin. Four columns 4 d ... 4 d + 3 of half h of a block are the pairs (0, 2) and
// (1, 3), numbers 32 h + d and 32 h + 16 + d, as codes leave `unpack`.
INLINE int64_t pair_of(int64_t k) { return k / 64 * 32 + k % 64 / 4; }

INLINE void put_pairs(int32_t *to, int64_t k, ints v) {
#if LANES == 16
    small s = __builtin_convertvector(SHUFFLE(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), small);
#else
    small s = __builtin_convertvector(SHUFFLE(v, v, 0, 2, 4, 6, 1, 3, 5, 7), small);
#endif
    memcpy(to + pair_of(k), &s, LANES);
    memcpy(to + pair_of(k) + 16, (const char *)&s + LANES, LANES);
}

// An integer of at most 2^14 as two bytes with a sign.
INLINE void split(const int16_t *x, int8_t bytes[2][BLOCK]) {
    for (int k = 0; k < BLOCK; k++) {
        bytes[1][k] = (int8_t)x[k];
        bytes[0][k] = (int8_t)((x[k] + 128) >> 8);
    }
}

INLINE void fixed_point(const float *x, struct cell *cell, int64_t span, int parts, int bytes) {
    ints top = {0};
    for (int k = 0; k < BLOCK; k += LANES) {
        ints size = as_ints(load(x, k, 0)) & 0x7fffffff, more = size > top;
        top = (size & more) | (top & ~more);
    }
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    // The largest lies in 2^14 ... 2^15 units, with two parts or two bytes in 2^13 ... 2^14, so that the upper one needs no bound. A unit is at
    // least 2^-126, so that its inverse is finite.
    int32_t exponent = (largest >> 23) - (parts < 2 && !bytes ? 14 : 13);
    int16_t whole[BLOCK];
    exponent = exponent < 1 ? 1 : exponent;
    int32_t unit_bits = exponent << 23, inverse_bits = (254 - exponent) << 23;
    float unit, inverse;
    memcpy(&unit, &unit_bits, 4);
    memcpy(&inverse, &inverse_bits, 4);
    int broken = largest >= 0x7f800000;  // infinite or not a number: so is the product
    cell->scale = broken ? NAN : unit;
    if (broken) inverse = 0;
    for (int64_t s = 0; s < BLOCK / span; s++) {
        ints upper_sum = {0}, lower_sum = {0};
        for (int64_t k = s * span; k < (s + 1) * span; k += LANES) {
            vec v = load(x, k, 0) * inverse;
            ints upper = broken ? (ints){0} : at_most(nearest(v), 32767);
            put_pairs(cell->pairs, k, upper);
            upper_sum += upper;
            if (bytes) {
                small s = __builtin_convertvector(upper, small);
                memcpy(whole + k, &s, sizeof s);
            }
            if (parts < 2) continue;
            ints lower = broken ? (ints){0} : at_most(nearest((v - __builtin_convertvector(upper, vec)) * 65536.0f), 32767);
            put_pairs(cell->pairs + PAIRS, k, lower);
            lower_sum += lower;
        }
        cell->sums[0][s] = lanes_add(upper_sum);
        cell->sums[1][s] = lanes_add(lower_sum);
    }
    if (bytes) split(whole, cell->bytes);
}

// The cells of row t of T rows x[T, K], for a matrix; cells[block * T + t]. `row` holds K rounded up to whole blocks.
INLINE void make_cells(const void *x, int64_t t, int64_t T, int64_t K, const struct matrix *m, struct cell *cells, int x16, int parts) {
    for (int64_t b = 0; b < blocks_of(K); b++) {
        float row[BLOCK] = {0};
        int64_t lo = b * BLOCK, n = K - lo < BLOCK ? K - lo : BLOCK;
        if (m->order)
            for (int64_t k = 0; k < n; k++) row[k] = load1(x, t * K + m->order[lo + k], x16);
        else
            for (int64_t k = 0; k < n; k += LANES) {
                vec v = load_some(x, t * K + lo + k, n - k < LANES ? n - k : LANES, x16);
                memcpy(row + k, &v, sizeof v);
            }
        struct cell *cell = cells + b * T + t;
        if (m->kind == FP8) memcpy(cell->values, row, sizeof row);
        else fixed_point(row, cell, span_of(m, K), parts, BYTES(m->kind, parts));
    }
}

// ---- codes ------------------------------------------------------------------------------------------------------------------------

// rows[i], lane d -> rows[d], lane i.
INLINE void transpose(ints rows[LANES]) {
    ints a[LANES], b[LANES];
#if LANES == 8
#define HALVES_LOW 0, 1, 2, 3, 8, 9, 10, 11
#define HALVES_HIGH 4, 5, 6, 7, 12, 13, 14, 15
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2) {
        a[i] = SHUFFLE(rows[i], rows[i + 1], EVEN);
        a[i + 1] = SHUFFLE(rows[i], rows[i + 1], ODD);
    }
    // Lane 4 L + i of b[4 g + j] is word 4 L + j of row 4 g + i.
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 4) {
        b[i] = SHUFFLE(a[i], a[i + 2], LOW);
        b[i + 1] = SHUFFLE(a[i], a[i + 2], HIGH);
        b[i + 2] = SHUFFLE(a[i + 1], a[i + 3], LOW);
        b[i + 3] = SHUFFLE(a[i + 1], a[i + 3], HIGH);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
#if LANES == 16
#define QUARTERS(x, y, p, q) SHUFFLE(x, y, 4 * p, 4 * p + 1, 4 * p + 2, 4 * p + 3, 4 * q, 4 * q + 1, 4 * q + 2, 4 * q + 3, \
                                  4 * p + 16, 4 * p + 17, 4 * p + 18, 4 * p + 19, 4 * q + 16, 4 * q + 17, 4 * q + 18, 4 * q + 19)
        ints even = QUARTERS(b[j], b[j + 4], 0, 2), odd = QUARTERS(b[j], b[j + 4], 1, 3);
        ints even2 = QUARTERS(b[j + 8], b[j + 12], 0, 2), odd2 = QUARTERS(b[j + 8], b[j + 12], 1, 3);
        rows[j] = QUARTERS(even, even2, 0, 2);
        rows[j + 8] = QUARTERS(even, even2, 1, 3);
        rows[j + 4] = QUARTERS(odd, odd2, 0, 2);
        rows[j + 12] = QUARTERS(odd, odd2, 1, 3);
#else
        rows[j] = SHUFFLE(b[j], b[j + 4], HALVES_LOW);
        rows[j + 4] = SHUFFLE(b[j], b[j + 4], HALVES_HIGH);
#endif
    }
}

// Four bytes of a lane as integers: the pairs (0, 2) and (1, 3).
INLINE void unpack_int8(ints w, ints *to) {
    shorts s;
    memcpy(&s, &w, sizeof s);
    shorts even = (s << 8) >> 8, odd = s >> 8;
    memcpy(to, &even, sizeof even);
    memcpy(to + 16, &odd, sizeof odd);
}

INLINE void unpack_int4(ints w, ints *to) {
    bits u;
    memcpy(&u, &w, sizeof u);
    to[0] = (ints)(u & 0x000f000f);
    to[16] = (ints)(u >> 8 & 0x000f000f);
    to[32] = (ints)(u >> 4 & 0x000f000f);
    to[48] = (ints)(u >> 12 & 0x000f000f);
}

// Asks for a part of the next LANES rows, in the order of their addresses.
INLINE void fetch(const char *codes) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES * SIDE; i += 64) __builtin_prefetch(codes + i, 0, 2);
}

// Block `b` of LANES rows of codes, each `stride` bytes after the last; rows from `n` on repeat the last one.
INLINE void unpack(const char *codes, int64_t stride, int64_t n, int64_t b, int kind, ints *to) {
    const int64_t bytes = kind == INT4 ? BLOCK / 2 : BLOCK, ahead = b * bytes * LANES + stride * LANES;
    for (int64_t at = 0; at < bytes; at += SIDE) {
        ints rows[LANES];
        const int64_t from = b * bytes + at, left = stride - from;
        if (left >= SIDE && n >= LANES) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) memcpy(&rows[i], codes + i * stride + from, SIDE);
        } else {
            for (int i = 0; i < LANES; i++) {
                char some[SIDE] = {0};
                if (left > 0) memcpy(some, codes + (i < n ? i : n - 1) * stride + from, left < SIDE ? left : SIDE);
                memcpy(&rows[i], some, SIDE);
            }
        }
        fetch(codes + ahead + at * LANES);
        transpose(rows);
        const int64_t word = at / 4;
#pragma GCC unroll 16
        for (int d = 0; d < LANES; d++) {
            if (kind == INT4) unpack_int4(rows[d], to + word + d);
            else unpack_int8(rows[d], to + word / 16 * 32 + word % 16 + d);
        }
    }
}

INLINE float number(const void *values, int64_t at, int64_t type) {
    if (type != FLOAT16) return load1(values, at, type == BFLOAT16);
    uint16_t half = ((const uint16_t *)values)[at];
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    if (bits >= 0x0f800000) bits += 0x70000000, memcpy(&value, &bits, 4);  // infinite or not a number
    else memcpy(&value, &bits, 4), value *= 0x1p112f;
    return half & 0x8000 ? -value : value;
}

// ---- products ---------------------------------------------------------------------------------------------------------------------

// acc + the two products of 16-bit integers in each lane.
INLINE ints multiply_add(ints acc, ints w, ints x) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif LANES == 16
    return acc + (ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return acc + (ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return acc + ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}

// Scales and zeros of LANES rows, of which `n` exist, for one group.
struct group {
    vec scales, zeros;
};

INLINE void load_group(const struct matrix *m, int64_t lo, int64_t n, int64_t groups, int64_t g, struct group *to) {
    if (n >= LANES && m->rows == 1 && !m->zeros && m->scale_type != FLOAT16) {  // the usual forms
        // In a register: what is written number by number cannot be read as a vector soon.
        vec scales = {0};
        if (m->scale_type == FLOAT32)
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) scales[i] = load1(m->scales, (lo + i) * groups + g, 0);
        else
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) scales[i] = load1(m->scales, (lo + i) * groups + g, 1);
        to->scales = scales;
        return;
    }
    for (int64_t i = 0; i < LANES; i++) {
        const int64_t row = lo + (i < n ? i : n - 1), at = (m->rows == 1 ? row : row / m->rows) * groups + g;
        to->scales[i] = number(m->scales, at, m->scale_type);
        to->zeros[i] = m->zeros ? m->zeros[at] : 0;
    }
}

// Adds the products of a span, exact integers in units of the cell and of the group, to a row's sums.
INLINE void add_products(const struct cell *cell, ints upper, ints lower, float *sums, const struct group *group, int zeros, int64_t s, int PARTS) {
    vec sum, product = __builtin_convertvector(upper, vec);
    memcpy(&sum, sums, sizeof sum);
    if (zeros) product -= group->zeros * (float)cell->sums[0][s];
    if (PARTS == 2) {
        vec rest = __builtin_convertvector(lower, vec);
        if (zeros) rest -= group->zeros * (float)cell->sums[1][s];
        product += rest * 0x1p-16f;
    }
    sum += product * (group->scales * cell->scale);
    memcpy(sums, &sum, sizeof sum);
}

// Adds a span of COUNT rows (cells) to their sums. CHAINS accumulators per row hide the latency of an addition; integer sums are exact, so their
// number changes no bit.
INLINE void add_span(const struct cell *cells, const ints *codes, float (*sums)[STRIP], const struct group *group, int zeros, int64_t span,
                     int64_t s, int COUNT, int CHAINS, int PARTS, int offset) {
    ints acc[8][4];
    const int64_t first = pair_of(s * span), runs = span < 64 ? 2 : 1, length = span < 64 ? span / 4 : span / 2;
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS * PARTS; c++) acc[r][c] = (ints){0} - (c < PARTS ? offset * cells[r].sums[c][s] : 0);
    for (int64_t run = first; run < first + 16 * runs; run += 16)
        for (int64_t k = run; k < run + length; k += CHAINS) {
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                const ints w = codes[k + c];
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < PARTS; p++)
                        acc[r][c * PARTS + p] = multiply_add(acc[r][c * PARTS + p], w, (ints){0} + cells[r].pairs[p * PAIRS + k + c]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) {
        ints upper = acc[r][0], lower = acc[r][PARTS - 1];
#pragma GCC unroll 4
        for (int c = 1; c < CHAINS; c++) upper += acc[r][c * PARTS], lower += acc[r][c * PARTS + PARTS - 1];
        add_products(cells + r, upper, lower, sums[r], group, zeros, s, PARTS);
    }
}

// The sums of the lanes of LANES vectors.
INLINE ints lane_sums(ints v[LANES]) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVEN) + SHUFFLE(v[2 * i], v[2 * i + 1], ODD);
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], LOW) + SHUFFLE(v[2 * i], v[2 * i + 1], HIGH);
#if LANES == 16
    v[0] = QUARTERS(v[0], v[1], 0, 2) + QUARTERS(v[0], v[1], 1, 3);
    v[1] = QUARTERS(v[2], v[3], 0, 2) + QUARTERS(v[2], v[3], 1, 3);
    return QUARTERS(v[0], v[1], 0, 2) + QUARTERS(v[0], v[1], 1, 3);
#else
    return SHUFFLE(v[0], v[1], HALVES_LOW) + SHUFFLE(v[0], v[1], HALVES_HIGH);
#endif
}

#if defined(__AVX2__) && LANES == 8
// The products of a block of one row of 4-bit codes with the bytes of its inputs. A sum of 8 products of a code and a byte has 16 bits.
INLINE ints block_by_bytes(const struct cell *cell, const char *codes) {
    const __m256i mask = _mm256_set1_epi8(15), *const x = (const __m256i *)cell->bytes;
    __m256i upper = _mm256_setzero_si256(), lower = upper;
#pragma GCC unroll 2
    for (int at = 0; at < 2; at++) {
        const __m256i w = _mm256_loadu_si256((const __m256i *)codes + at);
        const __m256i first = w & mask, second = _mm256_srli_epi16(w, 4) & mask;
        upper = _mm256_add_epi16(upper, _mm256_add_epi16(_mm256_maddubs_epi16(first, x[at]), _mm256_maddubs_epi16(second, x[2 + at])));
        lower = _mm256_add_epi16(lower, _mm256_add_epi16(_mm256_maddubs_epi16(first, x[4 + at]), _mm256_maddubs_epi16(second, x[6 + at])));
    }
    return (ints)_mm256_madd_epi16(upper, _mm256_set1_epi16(256)) + (ints)_mm256_madd_epi16(lower, _mm256_set1_epi16(1));
}
#else
INLINE ints block_by_bytes(const struct cell *cell, const char *codes) { return (void)cell, (void)codes, (ints){0}; }
#endif

// One row of x and LANES rows of 4-bit codes, in the order of addresses: blocks `first` ... `last` - 1 of one row after another.
INLINE void multiply_bytes(const struct cell *cells, int64_t T, const char *codes, int64_t stride, int64_t first, int64_t last, ints acc[RUN][2][LANES]) {
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t b = first; b < last; b++) {
            const char *const block = codes + i * stride + b * (BLOCK / 2);
            acc[b - first][0][i] = block_by_bytes(cells + b * T, block);
            __builtin_prefetch(block + AHEAD * stride, 0, 2);
        }
}

// One row of x and LANES rows of codes, without a transposition: lanes run along the columns until the products of a block are summed. For int4,
// a block of all rows at once, because its inputs then stay in registers.
INLINE void multiply_int4(const struct cell *cell, const char *codes, int64_t stride, int64_t b, ints acc[2][LANES], int PARTS) {
    const char *const from = codes + b * (BLOCK / 2), *const ahead = codes + stride * LANES + b * (BLOCK / 2) * LANES;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        ints sum[2] = {{0}, {0}};
#pragma GCC unroll 2
        for (int at = 0; at < BLOCK / 2; at += SIDE) {
            ints w, part[64], x;
            memcpy(&w, from + i * stride + at, sizeof w);
            unpack_int4(w, part);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
                for (int p = 0; p < PARTS; p++) {
                    memcpy(&x, cell->pairs + p * PAIRS + at / 4 + 16 * j, sizeof x);
                    sum[p] = multiply_add(sum[p], part[16 * j], x);
                }
        }
        acc[0][i] = sum[0];
        if (PARTS == 2) acc[1][i] = sum[1];
        __builtin_prefetch(ahead + i * (BLOCK / 2), 0, 2);
    }
}

// For int8, blocks `first` ... `last` - 1 of TOGETHER rows after another: memory is the limit, and is fastest in the order of addresses. So where
// a run is a whole row, it is one row after another. Where it is not, four rows keep as many bytes on the way.
INLINE void multiply_int8(const struct cell *cells, int64_t T, const char *codes, int64_t stride, int64_t first, int64_t last, int64_t blocks,
                          ints acc[RUN][2][LANES], int PARTS, int TOGETHER) {
    // The run after this one: of the same rows, or the first of the next LANES rows.
    const char *const next = last < blocks ? codes + last * BLOCK : codes + LANES * stride;
    for (int64_t i = 0; i < LANES; i += TOGETHER) {
        const char *const row = codes + i * stride;
        const char *const ahead = i + AHEAD < LANES ? row + AHEAD * stride + first * BLOCK : next + (i + AHEAD - LANES) * stride;
        for (int64_t b = first; b < last; b++) {
            ints sum[4][2] = {{{0}, {0}}, {{0}, {0}}, {{0}, {0}}, {{0}, {0}}};  // of which TOGETHER are used
#pragma GCC unroll 4
            for (int at = 0; at < BLOCK; at += SIDE)
#pragma GCC unroll 4
                for (int r = 0; r < TOGETHER; r++) {
                    ints w, part[32], x;
                    memcpy(&w, row + r * stride + b * BLOCK + at, sizeof w);
                    unpack_int8(w, part);
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++)
#pragma GCC unroll 2
                        for (int p = 0; p < PARTS; p++) {
                            memcpy(&x, cells[b * T].pairs + p * PAIRS + at / 64 * 32 + at % 64 / 4 + 16 * j, sizeof x);
                            sum[r][p] = multiply_add(sum[r][p], part[16 * j], x);
                        }
                    if (at % 64 == 0) __builtin_prefetch(ahead + r * stride + (b - first) * BLOCK + at, 0, 3);
                }
#pragma GCC unroll 4
            for (int r = 0; r < TOGETHER; r++) {
                acc[b - first][0][i + r] = sum[r][0];
                if (PARTS == 2) acc[b - first][1][i + r] = sum[r][1];
            }
        }
    }
}

// Adds a block that was multiplied so to the sums of a row.
INLINE void add_block(const struct cell *cell, ints acc[2][LANES], float *sums, const struct group *group, int zeros, int kind, int PARTS) {
    const int32_t offset = kind == INT4 ? 8 : 0;
    const ints upper = lane_sums(acc[0]) - offset * cell->sums[0][0];
    add_products(cell, upper, PARTS == 2 ? lane_sums(acc[1]) - offset * cell->sums[1][0] : upper, sums, group, zeros, 0, PARTS);
}

// As many rows at a time as the registers hold.
#define TAKE(COUNT, CHAINS)                                                                                                                \
    for (; rows - r >= COUNT; r += COUNT)                                                                                                  \
        add_span(at + r, codes, sums + r, group, zeros, span, s, COUNT, parts == 2 && CHAINS == 4 ? 2 : CHAINS, parts, kind == INT4 ? 8 : 0);

// out[T, N] = x[T, K] @ matrix[N, K]^T for inputs that `make_cells` made. Called by all threads of a parallel region.
INLINE void product(const struct cell *cells, int64_t T, int64_t K, const struct matrix *m, int64_t N, struct target t, int bf16, int kind, int parts) {
    const int64_t blocks = blocks_of(K), stride = kind == INT4 ? blocks * BLOCK / 2 : K, span = span_of(m, K);
    const int64_t groups = m->group >= K ? 1 : (K + m->group - 1) / m->group;
    const int zeros = m->zeros != 0;
#pragma omp for schedule(static)
    for (int64_t strip = 0; strip < (N + STRIP - 1) / STRIP; strip++)
        for (int64_t row = 0; row < T; row += PANEL) {
            float whole[PANEL][STRIP];
            ints codes[BLOCK] __attribute__((aligned(64)));
            struct group now, *group = &now;
            const int64_t lo = strip * STRIP, n = N - lo < STRIP ? N - lo : STRIP, rows = T - row < PANEL ? T - row : PANEL;
            memset(whole, 0, rows * sizeof *whole);
            for (int64_t part = 0; part < n; part += LANES) {
                const char *from = (const char *)m->codes + (lo + part) * stride;
                float(*const sums)[STRIP] = (float(*)[STRIP])&whole[0][part];
                int64_t loaded = -1, b = 0;
                if (rows == 1 && span == BLOCK && n - part >= LANES)
                    for (const int64_t whole = kind == INT4 ? blocks : K / BLOCK; b < whole;) {
                        ints acc[RUN][2][LANES];
                        const int64_t first = b, most = kind == INT4 && !BYTES(kind, parts) ? 1 : RUN, last = whole - b < most ? whole : b + most;
                        if (BYTES(kind, parts)) multiply_bytes(cells + row, T, from, stride, first, last, acc);
                        else if (kind == INT4) multiply_int4(cells + b * T + row, from, stride, b, acc[0], parts);
                        else if (blocks <= RUN) multiply_int8(cells + row, T, from, stride, first, last, blocks, acc, parts, 1);
                        else multiply_int8(cells + row, T, from, stride, first, last, blocks, acc, parts, 4);
                        for (; b < last; b++) {
                            const int64_t g = groups == 1 ? 0 : b * BLOCK / m->group;
                            if (g != loaded) load_group(m, lo + part, n - part, groups, loaded = g, group);
                            add_block(cells + b * T + row, acc[b - first], sums[0], group, zeros, kind, parts);
                        }
                    }
                for (; b < blocks; b++) {
                    unpack(from, stride, n - part, b, kind, codes);
                    for (int64_t s = 0; s < BLOCK / span && b * BLOCK + s * span < K; s++) {
                        const int64_t g = groups == 1 ? 0 : (b * BLOCK + s * span) / m->group;
                        if (g != loaded) load_group(m, lo + part, n - part, groups, loaded = g, group);
                        const struct cell *const at = cells + b * T + row;
                        int64_t r = 0;
                        if (LANES == 16 || parts == 1) TAKE(8, 1)
                        TAKE(4, (LANES == 16 || parts == 1 ? 2 : 1))
                        TAKE(2, 2)
                        TAKE(1, 4)
                    }
                }
            }
            finish(whole, t, row, (int)rows, lo, n, N, bf16);
        }
}

#define PRODUCT(NAME, KIND, PARTS)                                                                                                      \
    static void NAME(const struct cell *cells, int64_t T, int64_t K, const struct matrix *m, int64_t N, struct target t, int bf16) { \
        product(cells, T, K, m, N, t, bf16, KIND, PARTS);                                                                               \
    }
PRODUCT(product_int8, INT8, 1)
PRODUCT(product_int8_exact, INT8, 2)
PRODUCT(product_int4, INT4, 1)
PRODUCT(product_int4_exact, INT4, 2)
