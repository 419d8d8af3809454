/* Vectors, exp, fixed reductions and the parallel loop shared by the CPU kernels. C11 plus GCC/Clang vector extensions.
 *
 * Everything is built with -ffp-contract=off and asks for FMA by name, so no compiler decides where a product is fused:
 * two code paths that write the same expression give the same bits.
 */
#ifndef FENGINE_CPU_VECTOR_H
#define FENGINE_CPU_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16 /* floats in one hardware register */
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL(n) _Pragma("clang loop unroll(full)")
#else
#define UNROLL(n) _Pragma("GCC unroll 32")
#endif

/* `nf` is one hardware register; `vf` is always 16 floats, so that reductions have one shape on every machine. */
typedef float nf __attribute__((vector_size(4 * LANES)));
typedef uint32_t nu __attribute__((vector_size(4 * LANES)));
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef union {
    vf v;
    nf part[16 / LANES];
} vf_parts;

INLINE nf nf_fma(nf a, nf b, nf c) {
#if defined(__AVX512F__)
    return (nf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (nf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (nf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c; /* no fused instruction to be had: two roundings, everywhere alike */
#endif
}

INLINE nf nf_set(float x) {
    return x - (nf){0};
}

INLINE nf nf_load(const float *p) {
    nf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vf vf_set(float x) {
    return x - (vf){0};
}

INLINE vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vf_store(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}

/* The first n lanes of p, zeros behind; never reads past p[n-1]. */
INLINE vf vf_load_head(const float *p, int64_t n) {
    vf v = {0};
    memcpy(&v, p, (size_t)n * 4);
    return v;
}

INLINE vf vf_load_upto(const float *p, int64_t n) {
    return n >= 16 ? vf_load(p) : vf_load_head(p, n);
}

INLINE void vf_store_upto(float *p, vf v, int64_t n) {
    if (n >= 16)
        vf_store(p, v);
    else
        memcpy(p, &v, (size_t)n * 4);
}

INLINE vf vf_fma(vf a, vf b, vf c) {
    vf_parts pa = {a}, pb = {b}, pc = {c};
    for (int i = 0; i < 16 / LANES; i++)
        pc.part[i] = nf_fma(pa.part[i], pb.part[i], pc.part[i]);
    return pc.v;
}

INLINE vf vf_select(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

INLINE vf vf_max(vf a, vf b) {
    return vf_select(a > b, a, b);
}

/* Fixed tree: lanes i and i+8, then i+4, i+2, i+1. */
INLINE float vf_sum(vf v) {
    typedef float f8 __attribute__((vector_size(32)));
    typedef float f4 __attribute__((vector_size(16)));
    union {
        vf v;
        f8 half[2];
    } a = {v};
    union {
        f8 v;
        f4 half[2];
    } b = {a.half[0] + a.half[1]};
    f4 c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float vf_peak(vf v) {
    typedef float f8 __attribute__((vector_size(32)));
    typedef float f4 __attribute__((vector_size(16)));
    typedef int32_t i8 __attribute__((vector_size(32)));
    typedef int32_t i4 __attribute__((vector_size(16)));
    union {
        vf v;
        f8 half[2];
    } a = {v};
    i8 m8 = a.half[0] > a.half[1];
    union {
        f8 v;
        f4 half[2];
    } b = {(f8)((m8 & (i8)a.half[0]) | (~m8 & (i8)a.half[1]))};
    i4 m4 = b.half[0] > b.half[1];
    f4 c = (f4)((m4 & (i4)b.half[0]) | (~m4 & (i4)b.half[1]));
    float x = c[0] > c[2] ? c[0] : c[2], y = c[1] > c[3] ? c[1] : c[3];
    return x > y ? x : y;
}

/* exp of 16 lanes, error about 1 ulp on [-87, 88]; 0 below, exp(88) above, NaN stays NaN. Polynomial: Cephes expf. */
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits */
    vi low = x < vf_set(-87.0f);
    vf c = vf_select(x > vf_set(88.0f), vf_set(88.0f), vf_select(low, vf_set(-87.0f), x));
    vf shifted = vf_fma(c, vf_set(1.44269504088896341f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), c);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, r * r, r) + vf_set(1.0f);
    vi exponent = ((vi)shifted - (vi)magic + 127) << 23;
    return vf_select(low, (vf){0}, p * (vf)exponent);
}

/* Scratch aligned to a cache line, freed by the caller. Null, and `failed` is set, which the tasks of a call may share,
 * if there is no memory: kernels with scratch return whether that was so. */
static inline float *scratch_floats(int64_t n, int *failed) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)n * 4 + 64)) {
        __atomic_store_n(failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    return memory;
}

/* -- parallel loop ------------------------------------------------------------------------------------------------- */

/* The OpenMP runtime that torch has already loaded, reached through the one entry point that every libgomp and libomp
 * exports: no second thread pool, no -fopenmp. Absent (weak, null): the loop runs in the caller's thread. */
#ifdef __APPLE__
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak_import));
#else
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
#endif

typedef void task_fn(const void *context, int64_t task);
typedef struct {
    task_fn *run;
    const void *context;
    int64_t tasks, next;
} task_queue;

static void drain(void *opaque) {
    task_queue *queue = opaque;
    int64_t task;
    while ((task = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < queue->tasks)
        queue->run(queue->context, task);
}

/* Runs run(context, 0 .. tasks-1), each once, in any order. threads <= 1 stays in the calling thread. The team always
 * has `threads` members, never fewer: libgomp ends and recreates threads whenever the team size changes. */
static void run_tasks(task_fn *run, const void *context, int64_t tasks, int threads) {
    task_queue queue = {run, context, tasks, 0};
    if (threads > 1 && tasks > 1 && GOMP_parallel)
        GOMP_parallel(drain, &queue, (unsigned)threads, 0);
    else
        drain(&queue);
}

#endif
