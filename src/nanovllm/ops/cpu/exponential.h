// The exponential function of the C code. It compiles to vector instructions.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// exp(x) for x <= 0 after Cephes' expf: 2^n times a polynomial, within 2 units in the last place; below -87 it is 0.
static inline __attribute__((always_inline)) float exp_negative(float x) {
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t wide = (uint32_t)((int32_t)(n > -126.0f ? n : -126.0f) + 127) << 23;  // NaN takes the constant
    float power;
    memcpy(&power, &wide, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
