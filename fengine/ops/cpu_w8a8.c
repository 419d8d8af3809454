/* y = x @ w.T + bias where both x and w are e4m3 numbers with scales, on the CPU. Called from w8a8.py; inputs are
 * trusted. The tree is w8a8.py's: chains of multiply-adds from zero over `step` columns, which are joined left to right.
 * Products of two e4m3 numbers are exact, so a chain's only rounding is that of its sums.
 */
#include "cpu_fp8.h"
#include "cpu_products.h"

typedef struct {
    const float *x;
    float *q, *scale;
    int64_t rows, k, group, rows_per_task;
} rows_job;

static void rows_task(const void *context, int64_t task) {
    const rows_job *job = context;
    int64_t k = job->k, groups = (k + job->group - 1) / job->group, row = task * job->rows_per_task;
    int64_t end = row + job->rows_per_task < job->rows ? row + job->rows_per_task : job->rows;
    for (; row < end; row++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t first = g * job->group, n = k - first < job->group ? k - first : job->group;
            const float *x = job->x + row * k + first;
            float top = top_of(x, n);
            top = top < 0x1p-100f ? 448.0f : top;
            job->scale[row * groups + g] = top / 448.0f;
            vf inverse = vf_set(448.0f / top);
            for (int64_t i = 0; i < n; i += 16) {
                vu codes = to_e4m3(vf_load_upto(x + i, n - i) * inverse);
                vf value = (vf)((codes & 127u) << 20 | (codes & 128u) << 24) * vf_set(SMALLER);
                vf_store_upto(job->q + row * k + first + i, value, n - i);
            }
        }
}

/* The e4m3 numbers q [rows, k] of x, and scales [rows, ceil(k / group)], as w8a8.py defines them. */
API void fengine_e4m3_rows(const float *x, float *q, float *scale, int64_t rows, int64_t k, int64_t group,
                           int threads) {
    rows_job job = {x, q, scale, rows, k, group, 1 + (1 << 14) / (k + 1)};
    run_tasks(rows_task, &job, (rows + job.rows_per_task - 1) / job.rows_per_task, threads);
}

typedef struct {
    const float *x, *x_scale, *scale;
    const uint8_t *codes;
    const void *bias;
    float *y;
    int64_t m, n, k, step, blocks_per_task;
    int by_step, bias_kind, *failed;
} w8a8_job;

#define ROWS 4

/* Sums of up to ROWS rows over columns first .. end-1 of a block, whose weights lie in `w`, joined to `sum`. */
INLINE void some_rows(const w8a8_job *job, int64_t row, int64_t first, int64_t end, const float *w, const vf weight[2],
                      float *sum, const int rows) {
    vf part[ROWS][2];
    UNROLL(4) for (int r = 0; r < rows; r++) part[r][0] = part[r][1] = (vf){0};
    for (int64_t k = first; k < end; k++, w += BLOCK) {
        vf low = vf_load(w), high = vf_load(w + 16);
        UNROLL(4) for (int r = 0; r < rows; r++) {
            vf x = vf_set(job->x[(row + r) * job->k + k]);
            part[r][0] = vf_fma(x, low, part[r][0]);
            part[r][1] = vf_fma(x, high, part[r][1]);
        }
    }
    int64_t steps = (job->k + job->step - 1) / job->step;
    UNROLL(4) for (int r = 0; r < rows; r++)
        UNROLL(2) for (int i = 0; i < 2; i++) {
            float *at = sum + (row + r) * BLOCK + 16 * i;
            vf total = vf_load(at), scale = weight[i];
            if (job->by_step)
                scale = vf_set(job->x_scale[(row + r) * steps + first / job->step]) * scale;
            vf_store(at, job->by_step ? vf_fma(part[r][i], scale, total) : total + part[r][i]);
        }
}

static void w8a8_block(const w8a8_job *job, int64_t block, float *w, float *sum) {
    int64_t steps = job->by_step ? (job->k + job->step - 1) / job->step : 1;
    const float *scale = job->scale + block * steps * BLOCK;
    const uint8_t *codes = job->codes + block * job->k * BLOCK;
    memset(sum, 0, (size_t)(job->m * BLOCK) * 4);
    for (int64_t first = 0; first < job->k; first += job->step) {
        int64_t end = first + job->step < job->k ? first + job->step : job->k, row = 0;
        vf weight[2] = {vf_load(scale), vf_load(scale + 16)};
        scale += job->by_step ? BLOCK : 0;
        for (int64_t i = 0; i < (end - first) * BLOCK; i += 16)
            vf_store(w + i, from_e4m3(codes + first * BLOCK + i));
        for (; row + ROWS <= job->m; row += ROWS)
            some_rows(job, row, first, end, w, weight, sum, ROWS);
        for (; row < job->m; row++)
            some_rows(job, row, first, end, w, weight, sum, 1);
    }
    for (int64_t row = 0; row < job->m; row++)
        for (int i = 0; i < 2 && block * BLOCK + 16 * i < job->n; i++) {
            int64_t column = block * BLOCK + 16 * i;
            vf y = vf_load(sum + row * BLOCK + 16 * i);
            if (!job->by_step)
                y = y * (vf_set(job->x_scale[row]) * vf_load(scale + 16 * i));
            if (job->bias)
                y += vf_widen(job->bias, column, job->n, job->bias_kind);
            vf_store_upto(job->y + row * job->n + column, y, job->n - column);
        }
}

static void w8a8_task(const void *context, int64_t task) {
    const w8a8_job *job = context;
    int64_t all = (job->n + BLOCK - 1) / BLOCK, block = task * job->blocks_per_task;
    int64_t last = block + job->blocks_per_task < all ? block + job->blocks_per_task : all;
    int64_t columns = job->step < job->k ? job->step : job->k;
    float *room = scratch_floats((columns + job->m) * BLOCK, job->failed);
    for (; room && block < last; block++)
        w8a8_block(job, block, room, room + columns * BLOCK);
    free(room);
}

/* x [m, k] of e4m3 numbers; codes [ceil(n/32), k, 32]. by_step: a scale for each `step` columns, x_scale [m, steps] and
 * scale [ceil(n/32), steps, 32]; else one for all, x_scale [m] and scale [ceil(n/32), 32]. */
API int fengine_w8a8_linear(const float *x, const float *x_scale, const uint8_t *codes, const float *scale,
                            const void *bias, float *y, int64_t m, int64_t n, int64_t k, int64_t step, int by_step,
                            int bias_kind, int threads) {
    int failed = 0;
    int64_t blocks = (n + BLOCK - 1) / BLOCK, wanted = 4 * (int64_t)threads;
    if (m == 0 || n == 0)
        return 0;
    w8a8_job job = {x, x_scale, scale, codes, bias, y, m, n, k, step, (blocks + wanted - 1) / wanted, by_step, bias_kind,
                    &failed};
    run_tasks(w8a8_task, &job, (blocks + job.blocks_per_task - 1) / job.blocks_per_task, threads);
    return failed;
}
