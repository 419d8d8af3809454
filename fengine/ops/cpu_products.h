/* Kernels of cpu_kernels.c that others build on: one declaration for both sides. */
#ifndef FENGINE_CPU_PRODUCTS_H
#define FENGINE_CPU_PRODUCTS_H

#include "cpu_vector.h"

API int fengine_linear(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                       int kind, int bias_kind, int threads);
API void fengine_silu_mul(const float *x, float *y, int64_t rows, int64_t f, int act, int gated,
                          int threads);

#endif
