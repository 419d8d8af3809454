/* y = x @ w.T + bias for weights in few bits, on the CPU. Called from quantized.py; inputs are trusted.
 *
 *   w[n, k] = rounded((value(code[n, k]) - zero[n, g]) * scale[n, g])    g: the group of column k
 *
 * with one float32 product and one rounding to the dtype that the matrix would have unquantized. The sum is linear's own
 * chain over these values, so the bits are those of the dequantized matrix. A few rows decode in registers; more rows
 * share a block of outputs that is decoded once. Blocks come in pairs, whose codes of some columns lie together, so that
 * they are read as one stream; an odd last block is followed by one of zeros.
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
#define COLUMNS 8 /* whose 4-bit codes lie together */
#define FOUR(code) ((code) == INT4 || (code) == FP4)
#define BYTES(code) (FOUR(code) ? COLUMNS * BLOCK / 2 : BLOCK) /* of a block's codes that lie together */

/* Codes of a block from the first column on; those of the next columns lie 2 BYTES(code) behind. */
INLINE const uint8_t *codes_of(const quantized_job *job, int64_t block, const int code) {
    const int64_t columns_of = FOUR(code) ? (job->k + COLUMNS - 1) / COLUMNS * COLUMNS / 2 : job->k;
    return job->codes + block / 2 * 2 * columns_of * BLOCK + block % 2 * BYTES(code);
}

/* The scales of one group of a block, and -zero * scale; of 4 bits for each place that `four_bits` knows. */
#define PLACES 3
#define OFFSET(place) ((float)(4096 >> 4 * (place)))
typedef struct {
    vf scale[HALVES], shift[HALVES][PLACES];
} group_of;

/* Weights of int4 come as so many times what they are: see `nearest`. */
#define LARGER(code, kind) ((code) == INT4 && (kind) == BF16 ? 65536.0f : 1.0f)

INLINE void load_group(const quantized_job *job, int64_t block, int64_t group, const int code, const int kind,
                       group_of *out) {
    int64_t at = (block * job->groups + group) * BLOCK;
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        out->scale[i] = vf_load(job->scale + at + 16 * i) * vf_set(LARGER(code, kind));
        vf zero = code == INT4 || code == INT8 ? from_integers(from_bytes(job->zero + at + 16 * i, 0)) : (vf){0};
        if (code == INT4)
            UNROLL(3) for (int place = 0; place < PLACES; place++)
                out->shift[i][place] = -(vf_set(OFFSET(place)) + zero) * out->scale[i];
        else if (code == INT8)
            out->shift[i][0] = -zero * out->scale[i];
        else if (code == FP8)
            out->scale[i] *= SMALLER;
    }
}

/* Codes of 4 bits that begin at bit 11 + 4 place of each word, as floats, without a conversion: under an exponent they
 * are OFFSET(place) + code. Of each word, bits 11 to 22 serve: (offset + zero) * scale has 13 + 11 bits at most. */
INLINE vf four_bits(vu words, const int place) {
    const vu mask = (vu){0} + (0x7800u << 4 * place), exponent = (vu){0} + (0x45800000u - 0x02000000u * (uint32_t)place);
#if LANES == 16
    return (vf)_mm512_ternarylogic_epi32((__m512i)words, (__m512i)mask, (__m512i)exponent, 0xea); /* a & b | c */
#else
    return (vf)((words & mask) | exponent);
#endif
}

/* What codes of fp4 stand for that each word begins with: a sign and a size. */
INLINE vf small_floats(vu words) {
#if LANES == 16
    const vf values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vf)_mm512_permutexvar_ps((__m512i)words, (__m512)values);
#elif LANES == 8
    const nf sizes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    vf_parts out = {(vf)words};
    for (int i = 0; i < 2; i++)
        out.part[i] = (nf)_mm256_permutevar8x32_ps((__m256)sizes, (__m256i)out.part[i]);
    return (vf)((vu)out.v | (words << 28 & 0x80000000u));
#else /* the size is a float's exponent and mantissa, but for what 2^126 makes up for */
    return (vf)((words << 22 & 0x01c00000u) | (words << 28 & 0x80000000u)) * vf_set(0x1p126f);
#endif
}

/* The products of 32 outputs in one column, not yet rounded. Of 4 bits it is column j of those that lie together. */
INLINE void products(const uint8_t *codes, const vu words[HALVES], const int j, const int code, const group_of *group,
                     vf out[HALVES]) {
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        if (code == INT4) { /* columns 0, 3 and 6 are brought to the first place */
            vu w = j < 3 ? words[i] << 11 : j < 6 ? words[i] >> 1 : words[i] >> 13;
            out[i] = vf_fma(four_bits(w, j % PLACES), group->scale[i], group->shift[i][j % PLACES]);
        } else if (code == INT8)
            out[i] = vf_fma(from_integers(from_bytes(codes + 16 * i, 0)), group->scale[i], group->shift[i][0]);
        else if (code == FP8)
            out[i] = (vf)(from_bytes(codes + 16 * i, 1) << 20 & 0x87f00000u) * group->scale[i];
        else
            out[i] = small_floats(words[i] >> 4u * j) * group->scale[i];
    }
}

/* Products rounded to what `kind` holds. Those of int4 have 15 bits at most, and come 65536 times as large as a weight:
 * with the weight added, a float holds it to its nearest of 8 bits, ties to even. */
INLINE vf nearest(vf product, const int code, const int kind) {
    return LARGER(code, kind) > 1 ? product * vf_set(1 + 0x1p-16f) - product : vf_rounded(product, kind);
}

/* Where two vectors become bfloat16 in one instruction, they come back as even and odd outputs. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRED(kind, code) ((kind) == BF16 && !FOUR(code))
#define PAIR(p) (vu) _mm512_cvtne2ps_pbh((__m512)(p)[1], (__m512)(p)[0])
#else
#define PAIRED(kind, code) 0
#define PAIR(p) (vu)(p)[0]
#endif

#define MOST 2 /* blocks of outputs at a time */
#define ROWS 4 /* and rows */
#define AHEAD 4096 /* bytes: hardware looks ahead within a page */

/* What goes through the columns of `blocks` blocks: sums of `rows` rows of x, or where the weights are stored. */
typedef struct {
    vf sum[ROWS][MOST][HALVES];
    group_of group[MOST];
    const float *x[ROWS];
    float *out;
} columns;

/* Takes the weights of 16 outputs in column k into account. */
INLINE void take(columns *at, vf w, int64_t k, const int b, const int i, const int rows) {
    UNROLL(4) for (int r = 0; r < rows; r++) at->sum[r][b][i] = vf_fma(vf_set(at->x[r][k]), w, at->sum[r][b][i]);
    if (rows == 0)
        vf_store(at->out + k * BLOCK + 16 * i, w);
}

/* One column; of 4 bits column j of the words whose lowest bits were dropped. */
INLINE void one_column(columns *at, const uint8_t *codes, const int j, int drop, int64_t k, const int rows,
                       const int blocks, const int code, const int kind) {
    if (j == 0 && (FOUR(code) || blocks > 1))
        UNROLL(4) for (int line = 0; line < (FOUR(code) ? 2 * blocks : 1); line++)
            __builtin_prefetch(codes + AHEAD + 64 * line, 0, 2);
    UNROLL(2) for (int b = 0; b < blocks; b++) {
        const uint8_t *own = codes + b * BYTES(code);
        vu words[HALVES];
        UNROLL(2) for (int i = 0; FOUR(code) && i < HALVES; i++) {
            memcpy(&words[i], own + 64 * i, 64);
            words[i] = words[i] >> (uint32_t)drop;
        }
        vf p[HALVES];
        products(own, words, j, code, &at->group[b], p);
        const int paired = PAIRED(kind, code) && rows;
        vu pair = paired ? PAIR(p) : (vu){0};
        take(at, paired ? (vf)(pair << 16) : nearest(p[0], code, kind), k, b, 0, rows);
        take(at, paired ? (vf)(pair & 0xffff0000u) : nearest(p[1], code, kind), k, b, 1, rows);
    }
}

/* Every column of `blocks` blocks from `block`. */
INLINE void all_columns(const quantized_job *job, columns *at, int64_t block, const int rows, const int blocks,
                        const int code, const int kind) {
    const uint8_t *codes = codes_of(job, block, code);
    const int64_t step = 2 * BYTES(code);
    int64_t group = -1, boundary = 0;
    for (int64_t k = 0; k < job->k;) {
        int64_t mine = job->index ? job->index[k] : k < boundary ? group : k / job->group;
        if (mine != group) {
            group = mine, boundary = (k / job->group + 1) * job->group;
            UNROLL(2) for (int b = 0; b < blocks; b++) load_group(job, block + b, group, code, kind, &at->group[b]);
        }
        int64_t last = job->index ? k : boundary < job->k ? boundary : job->k;
        if (FOUR(code) && k % COLUMNS == 0 && k + COLUMNS <= last) {
            for (const uint8_t *own = codes + k / COLUMNS * step; k + COLUMNS <= last; k += COLUMNS, own += step)
                UNROLL(8) for (int j = 0; j < COLUMNS; j++) one_column(at, own, j, 0, k + j, rows, blocks, code, kind);
        } else {
            int64_t together = FOUR(code) ? k / COLUMNS : k;
            one_column(at, codes + together * step, 0, FOUR(code) ? k % COLUMNS * 4 : 0, k, rows, blocks, code, kind);
            k++;
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
            store_block(job, row + r, block + b, PAIRED(kind, code), at.sum[r][b]);
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

/* codes: of 4 bits, eight columns of an output in a word, the first lowest, [ceil(n/64), ceil(k/8), 64 words], of 8
 * bits [ceil(n/64), k, 64]; scale, zero [2 ceil(n/64), groups, 32], where scales are such as `fits` of quantized.py
 * says; index: the group of each column, or null: k / group. `kind`: what weights are rounded to, of 16 bits. */
API int fengine_quantized_linear(const float *x, const uint8_t *codes, const float *scale, const uint8_t *zero,
                                 const int32_t *index, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                                 int64_t groups, int64_t group, int code, int kind, int bias_kind, int threads) {
    int failed = 0;
    int64_t blocks = (n + BLOCK - 1) / BLOCK, wanted = 4 * (int64_t)threads;
    if (m == 0 || n == 0)
        return 0;
    quantized_job job = {x, scale, codes, zero, index, bias, y, m, n, k, groups, group, blocks,
                         code, kind, bias_kind, &failed};
    if (threads > 1) /* few rows: small tasks end together; else memory for each task's weights */
        job.blocks_per_task = m > ROWS && (blocks / wanted + 1) / 2 > 1 ? (blocks / wanted + 1) / 2 * 2 : 2;
    run_tasks(quantized_task, &job, (blocks + job.blocks_per_task - 1) / job.blocks_per_task, threads);
    return failed;
}
