/* y = x @ w.T + bias for weights in few bits, on the CPU. Called from cpu_quantized.py; inputs are trusted.
 *
 *   w[n, k] = rounded((value(code[n, k]) - zero[n, g]) * scale[n, g])    g: the group of column k
 *
 * with one float32 product and one rounding to the dtype that the matrix would have unquantized. The sum is linear's own
 * chain over these values, so the bits are those of the dequantized matrix. A few rows decode in registers; more rows
 * share a block of outputs that is decoded once. Blocks come in pairs; an odd last one is followed by one of zeros.
 */
#include "cpu_fp8.h"
#include "cpu_products.h"

enum { INT4, INT8, FP8, FP4 }; /* kinds of codes */

typedef struct {
    const float *x, *scale;
    const uint8_t *codes, *zero;
    const int32_t *index;
    const void *bias;
    float *y;
    int64_t m, n, k, groups, group, blocks_per_task;
    int code, kind, bias_kind, *failed;
} quantized_job;

INLINE vf from_integers(vu integer) {
    return __builtin_convertvector((vi)integer, vf);
}

#define HALVES 2 /* vectors of 16 outputs in a block */
#define COLUMNS 8 /* of 4-bit codes in a word */

/* Of one group of a block: the scales, and -(zero + offset) * scale. A 4-bit integer q at bit p of a float's mantissa is
 * the number q + 2^(23 - p) if the exponent says so: no more than a shift, a mask and one multiply-add, which is exact
 * where p >= 11 and scales have 11 bits. */
#define PLACES 5
#define LOWEST PLACES /* the shift of numbers that are in no such place */
static const int places[PLACES] = {11, 15, 19, 12, 16};
typedef struct {
    vf scale[HALVES], shift[PLACES + 1][HALVES];
} group_of;

/* The exponent and mantissa of a small float, in the place where a float has its own, are so many times less. The
 * smallest are no normal floats there: they are lost if somebody has the CPU flush these to zero. */
#define LESS(code) ((code) == FP8 ? 0x1p120f : 0x1p126f)

INLINE void load_group(const quantized_job *job, int64_t block, int64_t group, const int code, group_of *out) {
    int64_t at = (block * job->groups + group) * BLOCK;
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        out->scale[i] = vf_load(job->scale + at + 16 * i);
        if (code == INT4 || code == INT8) {
            vf zero = from_integers(from_bytes(job->zero + at + 16 * i, 0));
            out->shift[LOWEST][i] = -zero * out->scale[i];
            UNROLL(5) for (int p = 0; code == INT4 && p < PLACES; p++) out->shift[p][i] =
                -(zero + vf_set((float)(1 << (23 - places[p])))) * out->scale[i];
        } else {
            out->scale[i] *= LESS(code);
        }
    }
}

/* 16 codes of integers, column `j` of their words, and which shift they need. */
INLINE vf four_bits(vu word, const int j, int *place) {
    static const int place_of[COLUMNS] = {0, 1, 2, 3, 4, 0, 1, 2};
    const int p = places[*place = place_of[j]];
    vu at = j < 3 ? word << 11 : j < 5 ? word : word >> 9;
    vu mask = (vu){0} + (15u << p), exponent = (vu){0} + ((uint32_t)(150 - p) << 23);
#if LANES == 16
    return (vf)_mm512_ternarylogic_epi32((__m512i)at, (__m512i)mask, (__m512i)exponent, 0xea); /* (a & b) | c */
#else
    return (vf)((at & mask) | exponent);
#endif
}

/* The products of 32 outputs in one column, not yet rounded. `word`: their 4-bit codes, of which it is the j-th; whether
 * j is known to the compiler decides how it is taken out. */
INLINE void products(const uint8_t *codes, const vu word[HALVES], const int j, const int known, const int code,
                     const group_of *group, vf out[HALVES]) {
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        int place = LOWEST;
        if (code == INT4 || code == INT8) {
            vu raw = code == INT4 ? word[i] >> 4 * j & 15u : from_bytes(codes + 16 * i, 0);
            vf value = code == INT4 && known ? four_bits(word[i], j, &place) : from_integers(raw);
            out[i] = vf_fma(value, group->scale[i], group->shift[place][i]);
        } else if (code == FP8) {
            out[i] = (vf)(from_bytes(codes + 16 * i, 1) << 20 & 0x87f00000u) * group->scale[i];
        } else {
            vu raw = word[i] >> 4 * j;
            out[i] = (vf)((raw << 22 & 0x01c00000u) | (raw << 28 & 0x80000000u)) * group->scale[i];
        }
    }
}

/* Where two vectors become bfloat16 in one instruction, they come back as even and odd outputs. */
#if defined(__AVX512BF16__)
#define PAIRED(kind) ((kind) == BF16)
#define PAIR(p) (vu) _mm512_cvtne2ps_pbh((__m512)(p)[1], (__m512)(p)[0])
#else
#define PAIRED(kind) 0
#define PAIR(p) (vu)(p)[0]
#endif

#define MOST 2 /* blocks of outputs at a time */
#define ROWS 4 /* and rows */

/* What goes through the columns of `blocks` blocks: sums of `rows` rows of x, or where the weights are stored. */
typedef struct {
    vf sum[ROWS][MOST][HALVES];
    vu word[MOST][HALVES];
    group_of group[MOST];
    const float *x[ROWS];
    float *out;
} columns;

INLINE void one_column(columns *at, const uint8_t *codes, int64_t stride, int64_t k, const int j, const int known,
                       const int rows, const int blocks, const int code, const int kind) {
    UNROLL(2) for (int b = 0; b < blocks; b++) {
        vf p[HALVES];
        products(codes + b * stride, at->word[b], j, known, code, &at->group[b], p);
        const int paired = PAIRED(kind) && rows;
        vu pair = paired ? PAIR(p) : (vu){0};
        vf low = paired ? (vf)(pair << 16) : vf_rounded(p[0], kind);
        vf high = paired ? (vf)(pair & 0xffff0000u) : vf_rounded(p[1], kind);
        UNROLL(8) for (int r = 0; r < rows; r++) {
            vf x = vf_set(at->x[r][k]);
            at->sum[r][b][0] = vf_fma(x, low, at->sum[r][b][0]);
            at->sum[r][b][1] = vf_fma(x, high, at->sum[r][b][1]);
        }
        if (rows == 0) {
            vf_store(at->out + k * BLOCK, low);
            vf_store(at->out + k * BLOCK + 16, high);
        }
    }
}

/* Every column of `blocks` blocks from `block`. */
INLINE void all_columns(const quantized_job *job, columns *at, int64_t block, const int rows, const int blocks,
                        const int code, const int kind) {
    const int four = code == INT4 || code == FP4, one = four ? 0 : BLOCK, step = four ? COLUMNS * BLOCK / 2 : COLUMNS * BLOCK;
    const int64_t k_end = job->k, stride = four ? (k_end + COLUMNS - 1) / COLUMNS * step : k_end * BLOCK;
    const int64_t aligned = job->index || job->group % COLUMNS ? 0 : job->group; /* groups begin with words */
    const uint8_t *codes = job->codes + block * stride;
    int64_t group = -1, boundary = 0;
    for (int64_t k = 0; k < k_end; codes += step) {
        if (four)
            UNROLL(2) for (int b = 0; b < blocks; b++) memcpy(at->word[b], codes + b * stride, sizeof at->word[b]);
        if (aligned && k == boundary) {
            group++, boundary += aligned;
            UNROLL(2) for (int b = 0; b < blocks; b++) load_group(job, block + b, group, code, &at->group[b]);
        }
        if (aligned && k + COLUMNS <= k_end) {
            UNROLL(8) for (int j = 0; j < COLUMNS; j++)
                one_column(at, codes + j * one, stride, k + j, j, 1, rows, blocks, code, kind);
            k += COLUMNS;
            continue;
        }
        for (int j = 0; j < COLUMNS && k < k_end; j++, k++) {
            int64_t mine = job->index ? job->index[k] : k / job->group;
            if (mine != group) {
                group = mine;
                UNROLL(2) for (int b = 0; b < blocks; b++) load_group(job, block + b, group, code, &at->group[b]);
            }
            one_column(at, codes + j * one, stride, k, j, 0, rows, blocks, code, kind);
        }
    }
}

/* Adds the bias and stores 32 outputs of a row. Out of line: it is small beside the sums. */
static __attribute__((noinline)) void store_block(const quantized_job *job, int64_t row, int64_t block, int paired,
                                                  const vf sum[HALVES]) {
    for (int i = 0; i < HALVES; i++) {
        int64_t column = block * BLOCK + i * 16, left = job->n - column;
        vf y = sum[i];
        if (left <= 0)
            break;
        for (int j = 0; paired && j < 16; j++)
            y[j] = sum[j % 2][i * 8 + j / 2];
        if (job->bias)
            y += vf_widen(job->bias, column, job->n, job->bias_kind);
        vf_store_upto(job->y + row * job->n + column, y, left);
    }
}

/* Up to `rows` rows from `row` and `blocks` blocks of outputs, summed in registers. rows 0: weights [k, 32] to `out`. */
INLINE void some_rows(const quantized_job *job, int64_t row, int64_t block, const int rows, const int blocks,
                      const int code, const int kind, float *out) {
    columns at;
    at.out = out;
    UNROLL(8) for (int r = 0; r < rows; r++) {
        at.x[r] = job->x + (row + r < job->m ? row + r : row) * job->k;
        UNROLL(2) for (int b = 0; b < blocks; b++) at.sum[r][b][0] = at.sum[r][b][1] = (vf){0};
    }
    all_columns(job, &at, block, rows, blocks, code, kind);
    UNROLL(8) for (int r = 0; r < rows; r++)
        UNROLL(2) for (int b = 0; b < blocks; b++) if (row + r < job->m)
            store_block(job, row + r, block + b, PAIRED(kind), at.sum[r][b]);
}

/* By rows: none, one, two, up to four. One and two rows take two blocks, so that enough chains are in flight. */
#define SHAPES 4
static const int rows_of[SHAPES] = {0, 1, 2, 4}, blocks_of[SHAPES] = {1, 2, 2, 1};
typedef void rows_fn(const quantized_job *, int64_t, int64_t, float *);
#define OF_SHAPE(shape, kind, CODE)                                                                                    \
    static void rows_##shape##_##CODE##_##kind(const quantized_job *job, int64_t row, int64_t block, float *out) {     \
        some_rows(job, row, block, rows_of[shape], blocks_of[shape], CODE, kind, out);                                 \
    }
#define OF_CODE(kind, CODE)                                                                                            \
    OF_SHAPE(0, kind, CODE) OF_SHAPE(1, kind, CODE) OF_SHAPE(2, kind, CODE) OF_SHAPE(3, kind, CODE)
#define OF_KIND(kind) OF_CODE(kind, INT4) OF_CODE(kind, INT8) OF_CODE(kind, FP8) OF_CODE(kind, FP4)
OF_KIND(BF16)
OF_KIND(F16)
#define SHAPES_OF(CODE, kind)                                                                                          \
    {rows_0_##CODE##_##kind, rows_1_##CODE##_##kind, rows_2_##CODE##_##kind, rows_3_##CODE##_##kind}
#define KINDS_OF(CODE) {SHAPES_OF(CODE, BF16), SHAPES_OF(CODE, F16)}
static rows_fn *const functions[4][2][SHAPES] = {KINDS_OF(INT4), KINDS_OF(INT8), KINDS_OF(FP8), KINDS_OF(FP4)};

static void quantized_task(const void *context, int64_t task) {
    const quantized_job *job = context;
    int64_t all = (job->n + BLOCK - 1) / BLOCK, block = task * job->blocks_per_task;
    int64_t last = block + job->blocks_per_task < all ? block + job->blocks_per_task : all;
    int shape = 0;
    while (job->m <= ROWS && rows_of[shape] < job->m)
        shape++;
    rows_fn *const *of = functions[job->code][job->kind - BF16];
    if (shape) {
        for (; block < last; block += blocks_of[shape])
            of[shape](job, 0, block, NULL);
        return;
    }
    float *room = scratch_floats(job->k * BLOCK, job->failed);
    for (; room && block < last; block++) {
        of[0](job, 0, block, room);
        linear_block(job->x, room, job->bias, job->y, job->m, job->n, job->k, block, F32, job->bias_kind);
    }
    free(room);
}

/* codes: of 4 bits in words of 8 columns [ceil(n/32), ceil(k/8), 32], of 8 bits [ceil(n/32), k, 32]; scale, zero [ceil(n/32), groups, 32]; index: the
 * group of each column, or null: k / group. `kind`: what weights are rounded to, of 16 bits. */
API int fengine_quantized_linear(const float *x, const uint8_t *codes, const float *scale, const uint8_t *zero,
                                 const int32_t *index, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                                 int64_t groups, int64_t group, int code, int kind, int bias_kind, int threads) {
    int failed = 0;
    int64_t blocks = (n + BLOCK - 1) / BLOCK, wanted = 4 * (int64_t)threads;
    if (m == 0 || n == 0)
        return 0;
    quantized_job job = {x, scale, codes, zero, index, bias, y, m, n, k, groups, group, blocks,
                         code, kind, bias_kind, &failed};
    if (threads > 1)
        job.blocks_per_task = (blocks / wanted + 1) / 2 * 2 > 2 ? (blocks / wanted + 1) / 2 * 2 : 2;
    run_tasks(quantized_task, &job, (blocks + job.blocks_per_task - 1) / job.blocks_per_task, threads);
    return failed;
}
