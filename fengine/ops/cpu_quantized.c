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

/* The scales of one group of a block, and -zero * scale. */
typedef struct {
    vf scale[HALVES], shift[HALVES];
} group_of;

/* The exponent and mantissa of a small float, in the place where a float has its own, are so many times less. The
 * smallest are no normal floats there: they are lost if somebody has the CPU flush these to zero. */
#define LESS(code) ((code) == FP8 ? SMALLER : 0x1p126f)

INLINE void load_group(const quantized_job *job, int64_t block, int64_t group, const int code, group_of *out) {
    int64_t at = (block * job->groups + group) * BLOCK;
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        out->scale[i] = vf_load(job->scale + at + 16 * i);
        if (code == INT4 || code == INT8)
            out->shift[i] = -from_integers(from_bytes(job->zero + at + 16 * i, 0)) * out->scale[i];
        else
            out->scale[i] *= LESS(code);
    }
}

/* The 4-bit codes of 16 outputs in column j of the 8 that `words` holds: dword 4 i + j / 2 has those of outputs 4 i to
 * 4 i + 3, from bit 8 (j % 2) on. */
INLINE vu four_bits(vu words, int j) {
    const vu place = {0, 4, 16, 20, 0, 4, 16, 20, 0, 4, 16, 20, 0, 4, 16, 20};
    vu from = (vu){0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12} + (uint32_t)(j / 2), spread;
#if LANES == 16
    spread = (vu)_mm512_permutexvar_epi32((__m512i)from, (__m512i)words);
#elif LANES == 8
    for (int i = 0; i < 2; i++) { /* eight indices count three bits, so that those of the later half count on */
        __m256i half, index;
        memcpy(&half, (const char *)&words + 32 * i, 32), memcpy(&index, (const char *)&from + 32 * i, 32);
        half = _mm256_permutevar8x32_epi32(half, index);
        memcpy((char *)&spread + 32 * i, &half, 32);
    }
#else
    for (int i = 0; i < 16; i++)
        spread[i] = words[from[i]];
#endif
    return spread >> (place + 8u * (j % 2)) & 15u;
}

/* The products of 32 outputs in one column, not yet rounded. */
INLINE void products(const uint8_t *codes, const int j, const int code, const group_of *group, vf out[HALVES]) {
    UNROLL(2) for (int i = 0; i < HALVES; i++) {
        vu raw;
        if (FOUR(code)) {
            memcpy(&raw, codes + 64 * i, sizeof raw);
            raw = four_bits(raw, j);
        }
        if (code == INT4 || code == INT8)
            out[i] = vf_fma(from_integers(code == INT4 ? raw : from_bytes(codes + 16 * i, 0)), group->scale[i],
                            group->shift[i]);
        else if (code == FP8)
            out[i] = (vf)(from_bytes(codes + 16 * i, 1) << 20 & 0x87f00000u) * group->scale[i];
        else
            out[i] = (vf)((raw << 22 & 0x01c00000u) | (raw << 28 & 0x80000000u)) * group->scale[i];
    }
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

INLINE void one_column(columns *at, const uint8_t *codes, int64_t k, const int rows, const int blocks, const int code,
                       const int kind) {
    if (!FOUR(code) && blocks > 1)
        __builtin_prefetch(codes + AHEAD, 0, 2);
    UNROLL(2) for (int b = 0; b < blocks; b++) {
        vf p[HALVES];
        products(codes + b * BYTES(code), k % COLUMNS, code, &at->group[b], p);
        const int paired = PAIRED(kind, code) && rows;
        vu pair = paired ? PAIR(p) : (vu){0};
        take(at, paired ? (vf)(pair << 16) : vf_rounded(p[0], kind), k, b, 0, rows);
        take(at, paired ? (vf)(pair & 0xffff0000u) : vf_rounded(p[1], kind), k, b, 1, rows);
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

/* The 16 weights that the codes of an output stand for in a group, rounded to bfloat16: of 16 outputs the low bytes of
 * the even ones in two registers, then of the odd ones; and the high bytes. */
typedef struct {
    __m512i of[HALVES][2][4];
} tables;

INLINE void make_tables(const quantized_job *job, int64_t block, int64_t group, const int code, tables *out) {
    static const float integers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const float floats[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const vf value = vf_load(code == INT4 ? integers : floats);
    const vu low = 0x06040200u + 0x08080808u * (vu){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t at = (block * job->groups + group) * BLOCK;
    float shift[BLOCK];
    for (int o = 0; o < BLOCK; o += 16) {
        vf zero = code == INT4 ? from_integers(from_bytes(job->zero + at + o, 0)) : (vf){0};
        vf_store(shift + o, -(zero * vf_load(job->scale + at + o)));
    }
    UNROLL(2) for (int half = 0; half < HALVES; half++)
        UNROLL(4) for (int four = 0; four < 4; four++) {
            const int first = 16 * half + 8 * (four % 2) + four / 2;
            vf w[4];
            UNROLL(4) for (int i = 0; i < 4; i++)
                w[i] = vf_fma(value, vf_set(job->scale[at + first + 2 * i]), vf_set(shift[first + 2 * i]));
            __m512i a = (__m512i)PAIR(w), c = (__m512i)PAIR(w + 2);
            out->of[half][0][four] = _mm512_permutex2var_epi8(a, (__m512i)low, c);
            out->of[half][1][four] = _mm512_permutex2var_epi8(a, (__m512i)(low + 0x01010101u), c);
        }
}

/* Pairs of bfloat16 of 16 outputs in eight columns: bytes are looked up, joined, and even outputs put between odd ones. */
INLINE void look_up(const uint8_t *codes, const __m512i of[2][4], __m512i pair[4]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i table =
        (__m512i)(0x10100000u + 0x20202020u * (vu){0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3});
    __m512i word[2] = {_mm512_loadu_si512(codes)}, half[2][2];
    word[1] = _mm512_srli_epi16(word[0], 4);
    UNROLL(2) for (int odd = 0; odd < 2; odd++) {
        __m512i index = _mm512_ternarylogic_epi32(word[odd], nibble, table, 0xea); /* a & b | c */
        __m512i low = _mm512_permutex2var_epi8(of[0][2 * odd], index, of[0][2 * odd + 1]);
        __m512i high = _mm512_permutex2var_epi8(of[1][2 * odd], index, of[1][2 * odd + 1]);
        half[0][odd] = _mm512_unpacklo_epi8(low, high), half[1][odd] = _mm512_unpackhi_epi8(low, high);
    }
    UNROLL(2) for (int i = 0; i < 2; i++) {
        pair[2 * i] = _mm512_unpacklo_epi32(half[i][0], half[i][1]);
        pair[2 * i + 1] = _mm512_unpackhi_epi32(half[i][0], half[i][1]);
    }
}

/* Eight columns from k. Sums of all outputs take turns: each waits for its own last one. */
INLINE void eight_columns(columns *at, const uint8_t *codes, const tables *of, int64_t k, const int rows,
                          const int blocks) {
    const __m512i even = _mm512_set1_epi32((int32_t)0xffff0000);
    __m512i pair[MOST][HALVES][4];
    UNROLL(2) for (int b = 0; b < blocks; b++)
        UNROLL(2) for (int i = 0; i < HALVES; i++) {
            const uint8_t *own = codes + b * BYTES(INT4) + 64 * i;
            __builtin_prefetch(own + AHEAD, 0, 2);
            look_up(own, of[b].of[i], pair[b][i]);
        }
    UNROLL(4) for (int p = 0; p < 4; p++) {
        UNROLL(2) for (int b = 0; b < blocks; b++)
            UNROLL(2) for (int i = 0; i < HALVES; i++)
                take(at, (vf)_mm512_slli_epi32(pair[b][i][p], 16), k + 2 * p, b, i, rows);
        UNROLL(2) for (int b = 0; b < blocks; b++)
            UNROLL(2) for (int i = 0; i < HALVES; i++)
                take(at, (vf)_mm512_and_si512(pair[b][i][p], even), k + 2 * p + 1, b, i, rows);
    }
}

/* Takes the columns up to the last whole eight by tables, if groups begin with eights. Returns how many. */
INLINE int64_t by_tables(const quantized_job *job, columns *at, int64_t block, const int rows, const int blocks,
                         const int code) {
    int64_t end = job->k / COLUMNS * COLUMNS;
    const uint8_t *codes = codes_of(job, block, code);
    if (job->index || job->group % COLUMNS)
        return 0;
    for (int64_t first = 0; first < end; first += job->group) {
        tables of[MOST];
        int64_t last = end - first < job->group ? end : first + job->group;
        UNROLL(2) for (int b = 0; b < blocks; b++) make_tables(job, block + b, first / job->group, code, &of[b]);
        for (int64_t k = first; k < last; k += COLUMNS, codes += 2 * BYTES(code))
            eight_columns(at, codes, of, k, rows, blocks);
    }
    return end;
}

#else
#define by_tables(job, at, block, rows, blocks, code) 0
#endif

/* Every column of `blocks` blocks from `block`. */
INLINE void all_columns(const quantized_job *job, columns *at, int64_t block, const int rows, const int blocks,
                        const int code, const int kind) {
    const uint8_t *codes = codes_of(job, block, code);
    int64_t group = -1, boundary = 0, k = FOUR(code) && kind == BF16 ? by_tables(job, at, block, rows, blocks, code) : 0;
    for (; k < job->k; k++) {
        int64_t mine = job->index ? job->index[k] : k < boundary ? group : k / job->group;
        if (mine != group) {
            group = mine, boundary = (k / job->group + 1) * job->group;
            UNROLL(2) for (int b = 0; b < blocks; b++) load_group(job, block + b, group, code, &at->group[b]);
        }
        int64_t together = FOUR(code) ? k / COLUMNS : k;
        one_column(at, codes + together * 2 * BYTES(code), k, rows, blocks, code, kind);
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

/* codes: of 4 bits, as `four_bits` says, [ceil(n/64), ceil(k/8), 4, 64 bytes], of 8 bits [ceil(n/64), k, 64]; scale,
 * zero [2 ceil(n/64), groups, 32]; index: the group of each column, or null: k / group. `kind`: what weights are rounded
 * to, of 16 bits. */
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
