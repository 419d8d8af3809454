/* LoRA on the CPU: y[t] += (scale * x[t] A) B for tokens with an adapter. Called from cpu.py; inputs are trusted.
 *
 * Every token by one tree, whatever its neighbours and the threads:
 *   h    four chains of fma over k mod 4, (0 + 1) + (2 + 3), times scale; lanes run over ranks
 *   y    acc = fma(h[r], B[r], acc) for r = 0, 1, ... rank-1 from acc = 0, then y + acc; lanes run over columns
 */
#include "cpu_vector.h"

#define TOGETHER 4 /* tokens of one slot that share a reading of A and B */
#define COLUMNS 256 /* of a task of the second product */

typedef struct {
    const float *x, *a, *b, *scale;
    const int32_t *rank, *token;
    const int64_t *width;
    float *y, *h;
    int64_t n, k, parts, ranks, a_stride, b_stride, scale_stride, rank_stride, tiles;
    const int32_t *group; /* of each group: slot, first index into token, tokens */
} lora_job;

/* 16 ranks of h for `count` tokens; count is a compile-time constant. */
INLINE void shrink(const lora_job *job, const int32_t *token, int64_t slot, int64_t part, int64_t r, float *h,
                   const int count) {
    const float *a = job->a + slot * job->a_stride + part * job->k * job->ranks + r;
    const float scale = job->scale[slot * job->scale_stride + part];
    vf acc[TOGETHER][4] = {{{0}}};
    int64_t k = 0;
    for (; k + 4 <= job->k; k += 4)
        UNROLL(4) for (int j = 0; j < 4; j++) {
            vf row = vf_load(a + (k + j) * job->ranks);
            UNROLL(4) for (int t = 0; t < count; t++)
                acc[t][j] = vf_fma(vf_set(job->x[token[t] * job->k + k + j]), row, acc[t][j]);
        }
    for (int j = 0; k < job->k; k++, j++)
        for (int t = 0; t < count; t++)
            acc[t][j] = vf_fma(vf_set(job->x[token[t] * job->k + k]), vf_load(a + k * job->ranks), acc[t][j]);
    for (int t = 0; t < count; t++)
        vf_store(h + t * job->parts * job->ranks + part * job->ranks + r,
                 ((acc[t][0] + acc[t][1]) + (acc[t][2] + acc[t][3])) * vf_set(scale));
}

static void shrink_task(const void *context, int64_t task) {
    const lora_job *job = context;
    const int32_t *group = job->group + 3 * (task / job->parts), *token = job->token + group[1];
    int64_t slot = group[0], part = task % job->parts, rank = job->rank[slot * job->rank_stride + part];
    float *h = job->h + (int64_t)group[1] * job->parts * job->ranks;
    for (int64_t r = 0; r < rank; r += 16)
        switch (group[2]) {
        case 1: shrink(job, token, slot, part, r, h, 1); break;
        case 2: shrink(job, token, slot, part, r, h, 2); break;
        case 3: shrink(job, token, slot, part, r, h, 3); break;
        default: shrink(job, token, slot, part, r, h, 4);
        }
}

/* Columns [column, column + 16 blocks) of y for `count` tokens; blocks and count are compile-time constants. `left` is
 * how many columns the part still has. */
INLINE void expand(const lora_job *job, const int32_t *token, const float *b, const float *h, int64_t rank,
                   int64_t column, int64_t left, const int blocks, const int count) {
    vf acc[TOGETHER][2] = {{{0}}};
    for (int64_t r = 0; r < rank; r++)
        UNROLL(2) for (int i = 0; i < blocks; i++) {
            vf row = vf_load_upto(b + r * job->n + 16 * i, left - 16 * i);
            UNROLL(4) for (int t = 0; t < count; t++)
                acc[t][i] = vf_fma(vf_set(h[t * job->parts * job->ranks + r]), row, acc[t][i]);
        }
    for (int t = 0; t < count; t++)
        for (int i = 0; i < blocks; i++) {
            float *y = job->y + token[t] * job->n + column + 16 * i;
            vf_store_upto(y, vf_load_upto(y, left - 16 * i) + acc[t][i], left - 16 * i);
        }
}

INLINE void expand_columns(const lora_job *job, const int32_t *group, int64_t part, int64_t first, int64_t column,
                           int64_t end, const int count) {
    const int32_t *token = job->token + group[1];
    int64_t slot = group[0], rank = job->rank[slot * job->rank_stride + part];
    const float *b = job->b + slot * job->b_stride + first, *h = job->h + group[1] * job->parts * job->ranks;
    for (; column + 32 <= end; column += 32)
        expand(job, token, b + column, h + part * job->ranks, rank, first + column, 32, 2, count);
    for (; column < end; column += 16)
        expand(job, token, b + column, h + part * job->ranks, rank, first + column, end - column, 1, count);
}

static void expand_task(const void *context, int64_t task) {
    const lora_job *job = context;
    const int32_t *group = job->group + 3 * (task / job->tiles);
    int64_t tile = task % job->tiles, part = 0, first = 0;
    for (; tile >= (job->width[part] + COLUMNS - 1) / COLUMNS; part++) {
        tile -= (job->width[part] + COLUMNS - 1) / COLUMNS;
        first += job->width[part];
    }
    int64_t column = tile * COLUMNS, end = column + COLUMNS < job->width[part] ? column + COLUMNS : job->width[part];
    if (!job->rank[group[0] * job->rank_stride + part])
        return;
    switch (group[2]) {
    case 1: expand_columns(job, group, part, first, column, end, 1); break;
    case 2: expand_columns(job, group, part, first, column, end, 2); break;
    case 3: expand_columns(job, group, part, first, column, end, 3); break;
    default: expand_columns(job, group, part, first, column, end, 4);
    }
}

/* Modifies y [T, n]. a [slots, parts, k, ranks], b [slots, ranks, n], ranks a multiple of 16; slot s owns tokens
 * token[start[s]] .. token[start[s + 1] - 1]. */
API int fengine_lora_add(float *y, const float *x, const float *a, const float *b, const float *scale,
                         const int32_t *rank, const int64_t *width, const int32_t *token, const int32_t *start,
                         int64_t slots, int64_t n, int64_t k, int64_t parts, int64_t ranks, int64_t a_stride,
                         int64_t b_stride, int64_t scale_stride, int64_t rank_stride, int threads) {
    lora_job job = {x, a, b, scale, rank, token, width, y, NULL, n, k, parts, ranks, a_stride, b_stride,
                    scale_stride, rank_stride, 0, NULL};
    int64_t tokens = start[slots], groups = 0;
    if (tokens == 0)
        return 0;
    for (int64_t part = 0; part < parts; part++)
        job.tiles += (width[part] + COLUMNS - 1) / COLUMNS;
    int failed = 0;
    float *h = scratch_floats(tokens * parts * ranks, &failed);
    int32_t *group = (int32_t *)scratch_floats(3 * tokens, &failed);
    for (int64_t slot = 0; slot < slots && !failed; slot++)
        for (int32_t at = start[slot]; at < start[slot + 1]; at += TOGETHER, groups++) {
            group[3 * groups] = (int32_t)slot;
            group[3 * groups + 1] = at;
            group[3 * groups + 2] = start[slot + 1] - at < TOGETHER ? start[slot + 1] - at : TOGETHER;
        }
    job.h = h;
    job.group = group;
    run_tasks(shrink_task, &job, groups * parts, threads);
    run_tasks(expand_task, &job, groups * job.tiles, threads);
    free(h);
    free(group);
    return failed;
}
