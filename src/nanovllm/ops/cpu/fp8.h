// Codes of eight bits with a sign, four bits of exponent and three of mantissa (e4m3), as float32. Part of kernels.c.
#pragma once
#include "matmul.h"

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t small __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

INLINE ints as_ints(vec v) {
    ints i;
    memcpy(&i, &v, sizeof i);
    return i;
}

INLINE vec as_floats(ints i) {
    vec v;
    memcpy(&v, &i, sizeof v);
    return v;
}

// Bytes as integers of 32 bits, by one instruction where GCC's own conversion takes many.
INLINE ints widened(bytes codes) {
#if LANES == 16
    __m128i narrow;
    memcpy(&narrow, &codes, sizeof narrow);
    return (ints)_mm512_cvtepi8_epi32(narrow);
#elif defined(__AVX2__)
    __m128i narrow = {0};
    memcpy(&narrow, &codes, sizeof codes);
    return (ints)_mm256_cvtepi8_epi32(narrow);
#else
    return __builtin_convertvector(__builtin_convertvector(codes, small), ints);
#endif
}

// The same bits seven places lower in the exponent, times 2^120. The code of "not a number" is read as 480.
INLINE vec numbers_of(bytes codes) { return as_floats(widened(codes) << 20 & (int32_t)0x87f00000) * 0x1p120f; }

// The first `count` codes of a vector, zeros behind them.
static __attribute__((noinline)) vec few_codes(const char *codes, int64_t i, int64_t count) {
    bytes some = {0};
    memcpy(&some, codes + i, count);
    return numbers_of(some);
}

INLINE vec load_codes(const char *codes, int64_t i, int64_t count) {
    if (count != LANES) return few_codes(codes, i, count);
    bytes whole;
    memcpy(&whole, codes + i, sizeof whole);
    return numbers_of(whole);
}
