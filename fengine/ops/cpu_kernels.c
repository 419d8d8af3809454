/* Linear, RMS norm, RoPE + KV write and SiLU on the CPU. Called from cpu.py; inputs are trusted, sizes may be 0.
 *
 * Every output row is computed from its own inputs by one fixed tree, whatever the number of rows, threads or the tile:
 *   linear      acc = fma(x[k], w[k], acc) for k = 0, 1, ... K-1 from acc = 0, then + bias; lanes run over outputs
 *   rms_norm    four 16-lane chains of fma over the row, (a+b)+(c+d), then the tree of vf_sum
 *   the others  elementwise
 */
#include "cpu_fp8.h"
#include "cpu_products.h"

/* -- linear -------------------------------------------------------------------------------------------------------- */

#define REGISTERS (BLOCK / LANES) /* accumulators of one row of one block */
#ifdef __clang__
#define MAX_ROWS (LANES == 16 ? 8 : 6) /* clang does not keep taller tiles in registers */
#else
#define MAX_ROWS (LANES == 16 ? 12 : 6)
#endif
#define MAX_TILES 12 /* rows x blocks of the largest tile */
#define PART (LANES == 4 ? 4 : 2) /* accumulators at a time of a row of a tall tile, where registers are too few */
#define AHEAD 1024 /* 16-bit weights to prefetch ahead, where FEW_ROWS or more keep the FMA units busy */
#define FEW_ROWS (LANES == 16 ? 4 : 2)

typedef struct {
    const float *x;
    const void *w, *bias;
    float *y;
    int64_t m, n, k, x_stride;
    int kind, bias_kind;
    int64_t blocks_per_task, rows_per_task, row_tasks, first; /* first: the block of outputs that w begins with */
} linear_job;

#ifdef __clang__
#define SHUFFLE2(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE2(a, b, ...) __builtin_shuffle(a, b, (nu){__VA_ARGS__})
#endif
#if LANES == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

/* `vectors` registers of the weights of one k. bfloat16 comes out as even lanes, odd lanes, even, odd: a shift and a
 * mask, no shuffle. */
INLINE void load_weights(const void *w, int64_t at, int kind, const int vectors, nf out[REGISTERS]) {
    if (kind == F32) {
        UNROLL(8) for (int i = 0; i < vectors; i++) out[i] = nf_load((const float *)w + at + i * LANES);
    } else if (kind == BF16) {
        UNROLL(8) for (int i = 0; i < vectors; i += 2) {
            nu pair;
            memcpy(&pair, (const uint16_t *)w + at + i * LANES, sizeof pair);
            out[i] = (nf)(pair << 16);
            out[i + 1] = (nf)(pair & 0xffff0000u);
        }
    } else {
        UNROLL(2) for (int i = 0; i < vectors * LANES / 16; i++) {
            u16x16 half;
            memcpy(&half, (const uint16_t *)w + at + 16 * i, sizeof half);
            vf_parts wide = {vf_from_half(half)};
            UNROLL(8) for (int j = 0; j < 16 / LANES; j++) out[i * 16 / LANES + j] = wide.part[j];
        }
    }
}

/* Adds the bias and writes a tile; acc is row-major over (row, block). Out of line: it is small beside the sums. */
static __attribute__((noinline)) void store_tile(const linear_job *job, int64_t row, int64_t block, int rows,
                                                 int blocks, nf (*acc)[REGISTERS]) {
    for (int tile = 0; tile < rows * blocks; tile++, acc++) {
        vf_parts out[2];
        UNROLL(8) for (int i = 0; i < REGISTERS; i++) out[i * LANES / 16].part[i % (16 / LANES)] = (*acc)[i];
        if (job->kind == BF16) {
            UNROLL(8) for (int i = 0; i < REGISTERS; i += 2) {
                nf even = (*acc)[i], odd = (*acc)[i + 1];
                out[i * LANES / 16].part[i % (16 / LANES)] = SHUFFLE2(even, odd, ZIP_LOW);
                out[(i + 1) * LANES / 16].part[(i + 1) % (16 / LANES)] = SHUFFLE2(even, odd, ZIP_HIGH);
            }
        }
        for (int half = 0; half < 2; half++) {
            int64_t column = (block + tile % blocks) * BLOCK + half * 16, left = job->n - column;
            if (left <= 0)
                break;
            if (job->bias)
                out[half].v += vf_widen(job->bias, column, job->n, job->bias_kind);
            vf_store_upto(job->y + (row + tile / blocks) * job->n + column, out[half].v, left);
        }
    }
}

/* rows x blocks outputs-of-32, summed in registers. rows, blocks and kind are compile-time constants. */
INLINE void tile(const linear_job *job, int64_t row, int64_t block, const int rows, const int blocks, const int kind) {
    const int vectors = rows > 3 ? PART : REGISTERS;
    const int64_t k_end = job->k, x_stride = job->x_stride;
    const float *x = job->x + row * x_stride;
    nf out[MAX_TILES][REGISTERS];
    for (int from = 0; from < REGISTERS; from += vectors) {
        nf acc[MAX_TILES][REGISTERS];
        UNROLL(16) for (int r = 0; r < rows; r++)
            UNROLL(4) for (int b = 0; b < blocks; b++)
                UNROLL(8) for (int i = 0; i < vectors; i++) acc[r * blocks + b][i] = (nf){0};
        int64_t at = (block - job->first) * k_end * BLOCK + from * LANES;
        for (int64_t k = 0; k < k_end; k++, at += BLOCK) {
            UNROLL(4) for (int b = 0; b < blocks; b++) {
                nf w[REGISTERS];
                if (kind != F32 && rows >= FEW_ROWS)
                    __builtin_prefetch((const uint16_t *)job->w + at + b * k_end * BLOCK + AHEAD, 0, 3);
                load_weights(job->w, at + b * k_end * BLOCK, kind, vectors, w);
                UNROLL(16) for (int r = 0; r < rows; r++) {
                    nf xk = nf_set(x[r * x_stride + k]);
                    UNROLL(8) for (int i = 0; i < vectors; i++)
                        acc[r * blocks + b][i] = nf_fma(xk, w[i], acc[r * blocks + b][i]);
                }
            }
        }
        UNROLL(16) for (int r = 0; r < rows; r++)
            UNROLL(4) for (int b = 0; b < blocks; b++)
                UNROLL(8) for (int i = 0; i < vectors; i++) out[r * blocks + b][from + i] = acc[r * blocks + b][i];
    }
    store_tile(job, row, block, rows, blocks, out);
}

/* One function per register tile: few rows take several blocks at once, so that enough chains are in flight. */
typedef void tile_fn(const linear_job *, int64_t, int64_t);
#define TILE(rows, blocks, kind)                                                                                       \
    static void tile_##rows##_##blocks##_##kind(const linear_job *job, int64_t row, int64_t block) {                   \
        tile(job, row, block, rows, blocks, kind);                                                                     \
    }
#define EACH_KIND(rows, blocks) TILE(rows, blocks, F32) TILE(rows, blocks, BF16) TILE(rows, blocks, F16)
#define ROW_OF(rows, blocks) {tile_##rows##_##blocks##_F32, tile_##rows##_##blocks##_BF16, tile_##rows##_##blocks##_F16}
EACH_KIND(1, 1) EACH_KIND(2, 1) EACH_KIND(3, 1) EACH_KIND(4, 1) EACH_KIND(5, 1) EACH_KIND(6, 1)
#if LANES == 16
EACH_KIND(7, 1) EACH_KIND(8, 1) EACH_KIND(9, 1) EACH_KIND(10, 1) EACH_KIND(11, 1) EACH_KIND(12, 1)
EACH_KIND(1, 4) EACH_KIND(2, 4) EACH_KIND(3, 4) EACH_KIND(4, 2) EACH_KIND(5, 2) EACH_KIND(6, 2)
static tile_fn *const narrow[12][3] = {
    ROW_OF(1, 1), ROW_OF(2, 1), ROW_OF(3, 1), ROW_OF(4, 1),  ROW_OF(5, 1),  ROW_OF(6, 1),
    ROW_OF(7, 1), ROW_OF(8, 1), ROW_OF(9, 1), ROW_OF(10, 1), ROW_OF(11, 1), ROW_OF(12, 1)};
static tile_fn *const broad[12][3] = {ROW_OF(1, 4), ROW_OF(2, 4), ROW_OF(3, 4),
                                      ROW_OF(4, 2), ROW_OF(5, 2), ROW_OF(6, 2)};
static const int broad_blocks[12] = {4, 4, 4, 2, 2, 2, 1, 1, 1, 1, 1, 1};
#else
EACH_KIND(1, 2)
static tile_fn *const narrow[6][3] = {ROW_OF(1, 1), ROW_OF(2, 1), ROW_OF(3, 1),
                                      ROW_OF(4, 1), ROW_OF(5, 1), ROW_OF(6, 1)};
static tile_fn *const broad[6][3] = {ROW_OF(1, 2)};
static const int broad_blocks[6] = {2, 1, 1, 1, 1, 1};
#endif

static void linear_task(const void *context, int64_t task) {
    const linear_job *job = context;
    int64_t all_blocks = (job->n + BLOCK - 1) / BLOCK;
    int64_t first = task / job->row_tasks * job->blocks_per_task;
    int64_t row_begin = task % job->row_tasks * job->rows_per_task;
    int64_t last = first + job->blocks_per_task < all_blocks ? first + job->blocks_per_task : all_blocks;
    int64_t rows = job->m - row_begin < job->rows_per_task ? job->m - row_begin : job->rows_per_task;
    int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t block = first, step; block < last; block += step) {
        int64_t row = row_begin;
        step = 1;
        for (int64_t i = 0; i < tiles; i++) {
            int64_t height = rows / tiles + (i < rows % tiles);
            int many = tiles == 1 ? broad_blocks[height - 1] : 1;
            if (many > 1 && block + many <= last) {
                broad[height - 1][job->kind](job, row, block);
                step = many;
            } else {
                narrow[height - 1][job->kind](job, row, block);
            }
            row += height;
        }
    }
}

/* y[m,n] = x[m,k] @ w.T + bias; w packed as [ceil(n/32), k, 32]. */
API int fengine_linear(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                       int kind, int bias_kind, int threads) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    linear_job job = {x, w, bias, y, m, n, k, k, kind, bias_kind, blocks, m, 1};
    if (m == 0 || n == 0)
        return 0;
    float *spread = NULL;
    int failed = 0;
    if (k % 1024 == 0 && m > 4) { /* rows 4 KiB apart fall into one set of the L1 cache: copy them farther apart */
        job.x_stride = k + 16;
        spread = scratch_floats(m * job.x_stride, &failed);
        if (failed)
            return failed;
        for (int64_t row = 0; row < m; row++)
            memcpy(spread + row * job.x_stride, x + row * k, (size_t)k * 4);
        job.x = spread;
    }
    if (threads > 1) {
        int64_t wanted = 4 * (int64_t)threads, tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
        job.blocks_per_task = blocks / wanted > 1 ? blocks / wanted : 1;
        if (blocks < wanted && tiles > 1) {
            int64_t parts = (wanted + blocks - 1) / blocks;
            job.row_tasks = parts < tiles ? parts : tiles;
            job.rows_per_task = (m + job.row_tasks - 1) / job.row_tasks;
            job.row_tasks = (m + job.rows_per_task - 1) / job.rows_per_task;
        }
    }
    int64_t column_tasks = (blocks + job.blocks_per_task - 1) / job.blocks_per_task;
    run_tasks(linear_task, &job, column_tasks * job.row_tasks, threads);
    free(spread);
    return failed;
}

void linear_block(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                  int64_t block, int kind, int bias_kind) {
    int64_t tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
    linear_job job = {x, w, bias, y, m, n, k, k, kind, bias_kind, 1, m, 1, block};
    for (int64_t i = 0, row = 0, height; i < tiles; i++, row += height) {
        height = m / tiles + (i < m % tiles);
        narrow[height - 1][kind](&job, row, block);
    }
}

/* -- RMS norm ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const float *x, *residual;
    const void *weight, *post;
    float *y, *sum;
    int64_t rows, d, rows_per_task;
    int kind;
    float eps, shift;
    int biased; /* layer norm */
} norm_job;

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float inverse_rms(const float *x, int64_t d, float eps) {
    vf acc[4] = {{0}};
    int64_t i = 0;
    for (; i + 64 <= d; i += 64)
        UNROLL(4) for (int j = 0; j < 4; j++) {
            vf v = vf_load(x + i + 16 * j);
            acc[j] = vf_fma(v, v, acc[j]);
        }
    for (int j = 0; i < d; i += 16, j++) {
        vf v = vf_load_upto(x + i, d - i);
        acc[j] = vf_fma(v, v, acc[j]);
    }
    return 1.0f / sqrtf(vf_sum((acc[0] + acc[1]) + (acc[2] + acc[3])) / (float)d + eps);
}

/* y = (shift + weight) * (x / rms(x)); y may be x. */
INLINE void norm_row(const float *x, const void *weight, int kind, float *y, int64_t d, float eps, float shift) {
    vf scale = vf_set(inverse_rms(x, d, eps));
    for (int64_t i = 0; i < d; i += 16) {
        vf w = vf_widen(weight, i, d, kind);
        if (shift != 0.0f)
            w += vf_set(shift);
        vf_store_upto(y + i, w * (vf_load_upto(x + i, d - i) * scale), d - i);
    }
}

static void norm_task(const void *context, int64_t task) {
    const norm_job *job = context;
    int64_t end = (task + 1) * job->rows_per_task < job->rows ? (task + 1) * job->rows_per_task : job->rows;
    for (int64_t row = task * job->rows_per_task; row < end; row++) {
        const float *x = job->x + row * job->d;
        if (job->residual) {
            const float *residual = job->residual + row * job->d;
            float *sum = job->sum + row * job->d;
            if (job->post) {
                norm_row(x, job->post, job->kind, sum, job->d, job->eps, job->shift);
                x = sum;
            }
            for (int64_t i = 0; i < job->d; i += 16) {
                int64_t left = job->d - i;
                vf_store_upto(sum + i, vf_load_upto(residual + i, left) + vf_load_upto(x + i, left), left);
            }
            x = sum;
        }
        if (job->weight)
            norm_row(x, job->weight, job->kind, job->y + row * job->d, job->d, job->eps, job->shift);
    }
}

#define ELEMENTS_PER_TASK 16384 /* elementwise work that is worth one task */

INLINE int64_t rows_per_task(int64_t width) {
    return width < ELEMENTS_PER_TASK ? ELEMENTS_PER_TASK / (width + 1) + 1 : 1;
}

/* residual null: y = norm(x). Else sum = residual + x, or + x normed by `post`, y = norm(sum) if there is a
 * weight. All [rows, d]. */
API void fengine_rms_norm(const float *x, const float *residual, const void *weight, const void *post, float *y,
                          float *sum, int64_t rows, int64_t d, int kind, float eps, float shift, int threads) {
    norm_job job = {x, residual, weight, post, y, sum, rows, d, rows_per_task(d), kind, eps, shift, 0};
    run_tasks(norm_task, &job, (rows + job.rows_per_task - 1) / job.rows_per_task, threads);
}

/* Sum of (x - mean)^power over a row, in the chains of inverse_rms. */
INLINE float centred_sum(const float *x, int64_t d, float mean, const int squares) {
    vf acc[4] = {{0}};
    for (int64_t i = 0, j = 0; i < d; i += 16, j++) {
        vf v = vf_load_upto(x + i, d - i) - vf_set(mean);
        if (d - i < 16)
            for (int64_t lane = d - i; lane < 16; lane++)
                v[lane] = 0.0f;
        acc[j & 3] = squares ? vf_fma(v, v, acc[j & 3]) : acc[j & 3] + v;
    }
    return vf_sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

static void layer_norm_task(const void *context, int64_t task) {
    const norm_job *job = context;
    int64_t d = job->d;
    int64_t end = (task + 1) * job->rows_per_task < job->rows ? (task + 1) * job->rows_per_task : job->rows;
    const void *bias = (const char *)job->weight + d * (job->kind == F32 ? 4 : 2);
    for (int64_t row = task * job->rows_per_task; row < end; row++) {
        const float *x = job->x + row * d;
        float *y = job->y + row * d, mean = centred_sum(x, d, 0.0f, 0) / (float)d;
        vf scale = vf_set(1.0f / sqrtf(centred_sum(x, d, mean, 1) / (float)d + job->eps));
        for (int64_t i = 0; i < d; i += 16) {
            vf centred = vf_load_upto(x + i, d - i) - vf_set(mean);
            vf normed = vf_widen(job->weight, i, d, job->kind) * (centred * scale);
            vf_store_upto(y + i, job->biased ? normed + vf_widen(bias, i, d, job->kind) : normed, d - i);
        }
    }
}

/* y = weight * ((x - mean(x)) / deviation(x)), both [rows, d]; plus the bias behind the weight, if it is biased. */
API void fengine_layer_norm(const float *x, const void *weight, float *y, int64_t rows, int64_t d, int kind, float eps,
                            int biased, int threads) {
    norm_job job = {x, NULL, weight, NULL, y, NULL, rows, d, rows_per_task(d), kind, eps, 0.0f, biased};
    run_tasks(layer_norm_task, &job, (rows + job.rows_per_task - 1) / job.rows_per_task, threads);
}

/* -- rows of a packed weight: embeddings --------------------------------------------------------------------------- */

typedef struct {
    const void *packed, *weight;
    const int32_t *index;
    float *y, *taken;
    int64_t rows, d, rows_per_task;
    int kind, weight_kind;
    float eps, shift;
} rows_job;

/* One output's weights, which lie BLOCK elements apart, widened. */
INLINE void take_row(const void *packed, int64_t index, int64_t d, int kind, float *out) {
    int64_t at = index / BLOCK * d * BLOCK + index % BLOCK;
    for (int64_t i = 0; i < d; i += 16, at += 16 * BLOCK) {
        int64_t left = d - i < 16 ? d - i : 16;
        float wide[16];
        uint16_t narrow[16];
        for (int64_t j = 0; j < left; j++)
            if (kind == F32)
                wide[j] = ((const float *)packed)[at + j * BLOCK];
            else
                narrow[j] = ((const uint16_t *)packed)[at + j * BLOCK];
        vf_store_upto(out + i, vf_widen(kind == F32 ? (const void *)wide : narrow, 0, left, kind), left);
    }
}

static void rows_task(const void *context, int64_t task) {
    const rows_job *job = context;
    int64_t end = (task + 1) * job->rows_per_task < job->rows ? (task + 1) * job->rows_per_task : job->rows;
    for (int64_t row = task * job->rows_per_task; row < end; row++) {
        float *taken = job->taken + row * job->d;
        take_row(job->packed, job->index[row], job->d, job->kind, taken);
        norm_row(taken, job->weight, job->weight_kind, job->y + row * job->d, job->d, job->eps, job->shift);
    }
}

/* taken[r] = row index[r] of the weight that was packed as [ceil(n/32), d, 32], y = norm(taken). Both [rows, d]. */
API void fengine_rows_rms_norm(const void *packed, const int32_t *index, const void *weight, float *y, float *taken,
                               int64_t rows, int64_t d, int kind, int weight_kind, float eps, float shift,
                               int threads) {
    rows_job job = {packed, weight, index, y, taken, rows, d, rows_per_task(8 * d), kind, weight_kind, eps, shift};
    run_tasks(rows_task, &job, (rows + job.rows_per_task - 1) / job.rows_per_task, threads);
}

/* -- RoPE and KV write --------------------------------------------------------------------------------------------- */

typedef struct {
    const float *qkv, *rope;
    const int32_t *position, *slot;
    float *q;
    void *k, *v;
    const void *q_norm, *k_norm;
    int64_t tokens, heads, kv_heads, width, page_size, tokens_per_task;
    int kind, few;
    float eps, shift;
} rope_job;

/* out[i] = a[i] cos[i] - b[i] sin[i], out[h+i] = b[i] cos[i] + a[i] sin[i], where a, b are the halves of `in`. */
INLINE void rotate(const float *in, const float *cosine, float *out, int64_t half) {
    const float *sine = cosine + half;
    for (int64_t i = 0; i < half; i += 16) {
        int64_t left = half - i;
        vf a = vf_load_upto(in + i, left), b = vf_load_upto(in + half + i, left);
        vf c = vf_load_upto(cosine + i, left), s = vf_load_upto(sine + i, left);
        vf_store_upto(out + i, a * c - b * s, left);
        vf_store_upto(out + half + i, b * c + a * s, left);
    }
}

/* Writes one head of a slot to pages in few bits, whose layout kv_fp8.py tells. */
static void encode_head(const rope_job *job, uint8_t *pages, int64_t slot, int64_t head, const float *x) {
    int64_t codes = job->page_size * job->kv_heads * job->width, at = head * job->page_size + slot % job->page_size;
    uint8_t *page = pages + slot / job->page_size * (codes + job->page_size * job->kv_heads);
    uint32_t exponent = exponent_of(top_of(x, job->width));
    vf inverse = vf_set(power_of_two(254 - exponent));
    for (int64_t i = 0; i < job->width; i += 16)
        store_e4m3(page + at * job->width + i, vf_load_upto(x + i, job->width - i) * inverse, job->width - i);
    page[codes + at] = (uint8_t)exponent;
}

static void rope_task(const void *context, int64_t task) {
    const rope_job *job = context;
    int64_t width = job->width, kv_size = job->kv_heads * width, q_size = job->heads * width;
    int64_t end = (task + 1) * job->tokens_per_task < job->tokens ? (task + 1) * job->tokens_per_task : job->tokens;
    float normed[width], turned[width];
    for (int64_t t = task * job->tokens_per_task; t < end; t++) {
        const float *in = job->qkv + t * (q_size + 2 * kv_size), *angle = job->rope + job->position[t] * width;
        for (int64_t head = 0; head < job->heads + job->kv_heads; head++, in += width) {
            int64_t group = head - job->heads; /* negative: a head of q */
            float *out = group < 0 ? job->q + t * q_size + head * width
                         : job->few ? turned
                                    : (float *)job->k + job->slot[t] * kv_size + group * width;
            const void *norm = group < 0 ? job->q_norm : job->k_norm;
            if (norm)
                norm_row(in, norm, job->kind, normed, width, job->eps, job->shift);
            rotate(norm ? normed : in, angle, out, width / 2);
            if (group >= 0 && job->few)
                encode_head(job, job->k, job->slot[t], group, turned);
        }
        for (int64_t group = 0; job->few && group < job->kv_heads; group++)
            encode_head(job, job->v, job->slot[t], group, in + group * width);
        if (!job->few)
            memcpy((float *)job->v + job->slot[t] * kv_size, in, (size_t)kv_size * 4);
    }
}

/* Modifies slots `slot` of k and v. qkv [tokens, (heads + 2 kv_heads) width], q [tokens, heads, width]. */
API void fengine_rope_kv_write(const float *qkv, const float *rope, const int32_t *position, const int32_t *slot,
                               float *q, void *k, void *v, const void *q_norm, const void *k_norm, int64_t tokens,
                               int64_t heads, int64_t kv_heads, int64_t width, int64_t page_size, int kind, int few,
                               float eps, float shift, int threads) {
    rope_job job = {qkv, rope, position, slot, q, k, v, q_norm, k_norm, tokens, heads, kv_heads, width,
                    page_size, 0, kind, few, eps, shift};
    job.tokens_per_task = rows_per_task((heads + 2 * kv_heads) * width);
    run_tasks(rope_task, &job, (tokens + job.tokens_per_task - 1) / job.tokens_per_task, threads);
}

/* -- SiLU ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;
    float *y;
    int64_t rows, f, rows_per_task;
    int act, gated;
} silu_job;

enum { SILU, GELU_TANH, GELU };

/* The tanh form of gelu: x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf gelu_exponent(vf x) {
    return vf_set(-2.0f * 0.7978845608028654f) * (x + vf_set(0.044715f) * x * x * x);
}

/* x / 2 * (1 + erf(x / sqrt(2))): of erfc the polynomial of Numerical Recipes (erfcc), error 1.2e-7 of it. */
INLINE vf gelu(vf x) {
    const float factors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                             0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
    vf z = vf_select(x < vf_set(0.0f), -x, x) * vf_set(0.7071067811865476f);
    vf t = vf_set(1.0f) / vf_fma(z, vf_set(0.5f), vf_set(1.0f)), p = vf_set(0.17087277f);
    UNROLL(9) for (int i = 0; i < 9; i++) p = vf_fma(p, t, vf_set(factors[i]));
    vf half = vf_set(0.5f) * t * vf_exp(vf_fma(-z, z, p));
    return x * vf_select(x < vf_set(0.0f), half, vf_set(1.0f) - half);
}

INLINE vf activated(vf x, int act) {
    return act == GELU ? gelu(x) : x / (vf_set(1.0f) + vf_exp(act == GELU_TANH ? gelu_exponent(x) : -x));
}

static void silu_task(const void *context, int64_t task) {
    const silu_job *job = context;
    int64_t end = (task + 1) * job->rows_per_task < job->rows ? (task + 1) * job->rows_per_task : job->rows, f = job->f;
    for (int64_t row = task * job->rows_per_task; row < end; row++) {
        const float *gate = job->x + row * (1 + job->gated) * f, *up = gate + f;
        for (int64_t i = 0; i < f; i += 16) {
            vf y = activated(vf_load_upto(gate + i, f - i), job->act);
            vf_store_upto(job->y + row * f + i, job->gated ? y * vf_load_upto(up + i, f - i) : y, f - i);
        }
    }
}

/* y[rows, f] = act(x[:, :f]) * x[:, f:], or act(x) */
API void fengine_silu_mul(const float *x, float *y, int64_t rows, int64_t f, int act, int gated, int threads) {
    silu_job job = {x, y, rows, f, rows_per_task(2 * f), act, gated};
    run_tasks(silu_task, &job, (rows + job.rows_per_task - 1) / job.rows_per_task, threads);
}

/* -- soft cap ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const float *x;
    float *y;
    int64_t count;
    float cap;
} cap_job;

static void cap_task(const void *context, int64_t task) {
    const cap_job *job = context;
    int64_t end = (task + 1) * ELEMENTS_PER_TASK < job->count ? (task + 1) * ELEMENTS_PER_TASK : job->count;
    for (int64_t i = task * ELEMENTS_PER_TASK; i < end; i += 16) {
        vf x = vf_load_upto(job->x + i, end - i);
        vf tanh = vf_set(1.0f) - vf_set(2.0f) / (vf_exp(x * vf_set(2.0f / job->cap)) + vf_set(1.0f));
        vf_store_upto(job->y + i, vf_set(job->cap) * tanh, end - i);
    }
}

/* y = cap * tanh(x / cap) */
API void fengine_soft_cap(const float *x, float *y, int64_t count, float cap, int threads) {
    cap_job job = {x, y, count, cap};
    run_tasks(cap_task, &job, (count + ELEMENTS_PER_TASK - 1) / ELEMENTS_PER_TASK, threads);
}

/* -- two in one call, which a step of few rows has time for: linear, then what stands behind it -------------------- */

API int fengine_gated_linear(const float *x, const void *w, const void *bias, float *y, int64_t m, int64_t n, int64_t k,
                             int kind, int bias_kind, int act, int threads, int act_threads) {
    int failed = 0;
    float *both = scratch_floats(m * 2 * n, &failed);
    failed = failed || fengine_linear(x, w, bias, both, m, 2 * n, k, kind, bias_kind, threads);
    if (!failed)
        fengine_silu_mul(both, y, m, n, act, 1, act_threads);
    free(both);
    return failed;
}
