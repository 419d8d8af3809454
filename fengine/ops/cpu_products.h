/* Kernels that others build on: one declaration for both sides. */
#ifndef FENGINE_CPU_PRODUCTS_H
#define FENGINE_CPU_PRODUCTS_H

#include "cpu_vector.h"

enum { F32, BF16, F16 }; /* how weights are stored */
#define BLOCK 32 /* outputs per packed block */

/* -- weights to float ---------------------------------------------------------------------------------------------- */

typedef uint16_t u16x16 __attribute__((vector_size(32)));

/* IEEE half to float, exact for every half. */
INLINE vf vf_from_half(u16x16 half) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)half);
#else
    vu h = __builtin_convertvector(half, vu);
    vu sign = (h & 0x8000u) << 16;
    vf scaled = (vf)((h & 0x7fffu) << 13) * vf_set(0x1p112f);
    vu special = (vu)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vf)((vu)scaled | special | sign);
#endif
}

/* Elements at .. at+15 of a stored vector of n, zeros behind its end. */
INLINE vf vf_widen(const void *stored, int64_t at, int64_t n, int kind) {
    if (kind == F32)
        return vf_load_upto((const float *)stored + at, n - at);
    u16x16 raw = {0};
    const uint16_t *p = (const uint16_t *)stored + at;
    if (n - at >= 16)
        memcpy(&raw, p, 32);
    else
        memcpy(&raw, p, (size_t)(n - at) * 2);
    return kind == BF16 ? (vf)(__builtin_convertvector(raw, vu) << 16) : vf_from_half(raw);
}

/* 16 floats rounded to what `kind` holds, nearest even, as floats. For bfloat16 they are 0, or from 2^-110 to 2^110. */
INLINE vf vf_rounded(vf x, int kind) {
    if (kind == F32)
        return x;
    if (kind == BF16) { /* Veltkamp's splitting: seen to round every mantissa to its nearest, ties to even */
        vf high = x * vf_set(65537.0f);
        return high + (x - high);
    }
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif LANES == 8 && defined(__F16C__)
    vf_parts out = {x};
    for (int i = 0; i < 2; i++)
        out.part[i] = (nf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)out.part[i], _MM_FROUND_TO_NEAREST_INT));
    return out.v;
#else
    vu bits = (vu)x & 0x7fffffffu, sign = (vu)x & 0x80000000u;
    vf normal = (vf)((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu);
    vf small = ((vf)bits + vf_set(0.5f)) - vf_set(0.5f); /* halves below 2^-14 lie 2^-24 apart, as floats at 1/2 */
    vf size = vf_select((vf)bits < vf_set(0x1p-14f), small, normal);
    size = vf_select(size > vf_set(65504.0f), vf_set(INFINITY), size);
    return (vf)((vu)size | sign);
#endif
}

API int fengine_linear(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                       int kind, int bias_kind, int threads);
/* Outputs of block `block` alone, whose weights [k, 32] are w; y, bias and n are as for `fengine_linear`. */
void linear_block(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                  int64_t block, int kind, int bias_kind);
API void fengine_e4m3_rows(const float *x, float *q, float *scale, int64_t rows, int64_t k, int64_t group, int threads);
API int fengine_w8a8_linear(const float *x, const float *x_scale, const uint8_t *codes, const float *scale,
                            const void *bias, float *y, int64_t m, int64_t n, int64_t k, int64_t step, int by_step,
                            int bias_kind, int threads);
API void fengine_silu_mul(const float *x, float *y, int64_t rows, int64_t f, int act, int gated,
                          int threads);

#endif
