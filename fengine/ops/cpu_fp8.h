/* e4m3 numbers (OCP's FP8 with NaN and without infinities) to floats and back, 16 at a time. */
#ifndef FENGINE_CPU_FP8_H
#define FENGINE_CPU_FP8_H

#include "cpu_vector.h"

/* 16 bytes as 32-bit lanes: GCC takes lanes one by one where it is not told. */
INLINE vu from_bytes(const uint8_t *bytes, const int has_sign) {
#if LANES == 16
    __m128i raw = _mm_loadu_si128((const void *)bytes);
    return (vu)(has_sign ? _mm512_cvtepi8_epi32(raw) : _mm512_cvtepu8_epi32(raw));
#elif LANES == 8
    union {
        vu v;
        __m256i half[2];
    } wide;
    for (int i = 0; i < 2; i++) {
        __m128i raw = _mm_loadl_epi64((const void *)(bytes + 8 * i));
        wide.half[i] = has_sign ? _mm256_cvtepi8_epi32(raw) : _mm256_cvtepu8_epi32(raw);
    }
    return wide.v;
#else
    vu wide;
    for (int i = 0; i < 16; i++)
        wide[i] = has_sign ? (uint32_t)(int8_t)bytes[i] : bytes[i];
    return wide;
#endif
}

/* The exponent and mantissa in the place where a float has its own; so the float is 2^120 times smaller. The smallest
 * are no normal floats: they are lost if somebody has the CPU flush these to zero. */
#define SMALLER 0x1p120f
INLINE vf from_e4m3(const uint8_t *codes) {
    return (vf)(from_bytes(codes, 1) << 20 & 0x87f00000u) * vf_set(SMALLER);
}

/* The nearest codes, ties to even, of floats of at most 448; one a lane. */
INLINE vu to_e4m3(vf x) {
    vu bits = (vu)x & 0x7fffffffu, sign = ((vu)x & 0x80000000u) >> 24;
    vu normal = (bits + 0x7ffffu + (bits >> 20 & 1u) >> 20) - (120u << 3);
    vu small = (vu)((vf)bits + vf_set(16384.0f)) - 0x46800000u; /* codes below 2^-6 lie 2^-9 apart, as floats at 2^14 */
    return ((vu)vf_select((vf)bits < vf_set(0x1p-6f), (vf)small, (vf)normal) & 127u) | sign;
}

INLINE void store_e4m3(uint8_t *out, vf x, int64_t n) {
    vu codes = to_e4m3(x);
    for (int64_t i = 0; i < 16 && i < n; i++)
        out[i] = (uint8_t)codes[i];
}

/* The largest size of n floats; NaN if one is. */
INLINE float top_of(const float *x, int64_t n) {
    vi top = {0}; /* sizes are ordered as the whole numbers of their bits are */
    for (int64_t i = 0; i < n; i += 16) {
        vi size = (vi)vf_load_upto(x + i, n - i) & 0x7fffffff;
        top = (vi)vf_select(size > top, (vf)size, (vf)top);
    }
    int32_t most = 0;
    for (int i = 0; i < 16; i++)
        most = top[i] > most ? top[i] : most;
    float out;
    memcpy(&out, &most, 4);
    return out;
}

INLINE float power_of_two(uint32_t biased) {
    uint32_t bits = biased << 23;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* The exponent, plus 127, of the smallest power of two of which `top` is at most 448 times; at least 1. */
INLINE uint32_t exponent_of(float top) {
    uint32_t bits;
    memcpy(&bits, &top, 4);
    bits = bits + 0x1fffffu >> 23; /* 448 = 1.75 * 2^8 */
    return bits > 9 ? bits - 8 : 1;
}

#endif
