/* A mixture of experts on the CPU, by the trees of experts.py. Called from experts.py; inputs are trusted.
 *
 * Each expert's rows are copied beside each other and go through fengine_linear, whose rows know nothing of each other;
 * the experts are taken by ascending id, so a token's sum is in that order. Activations are float32: nothing is rounded.
 */
#include "cpu_products.h"

/* What orders as the number does: NaN first, -0 as +0. */
INLINE int64_t order(float x) {
    int32_t bits;
    if (x != x)
        return INT64_C(1) << 32;
    x = x == 0.0f ? 0.0f : x;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

INLINE float exp_of(float x) {
    return vf_exp(vf_set(x))[0];
}

/* The sum of width numbers, a power of two: the later half added to the earlier, again and again. Modifies x. */
static float halved_sum(float *x, int64_t width) {
    for (width /= 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; i++)
            x[i] += x[i + width];
    return x[0];
}

/* The `top` experts of one token by ascending id, and their weights. room: [2 * width] floats, width a power of two. */
static void route(const float *logits, const float *correction, int64_t experts, int64_t top, int renormalise,
                  int sigmoid, float scale, int32_t *id, float *weight, float *room, int64_t width) {
    float *score = room, *sum = room + width, largest = logits[0];
    for (int64_t e = 0; e < experts; e++)
        largest = logits[e] > largest || largest != largest ? logits[e] : largest;
    for (int64_t e = 0; e < experts; e++)
        score[e] = sigmoid ? 1.0f / (1.0f + exp_of(-logits[e])) : exp_of(logits[e] - largest);
    int64_t found = 0;
    memset(sum, 0, (size_t)width * 4);
    for (int64_t e = 0; e < experts; e++) {
        float mine = (sigmoid ? score[e] : logits[e]) + (correction ? correction[e] : 0.0f);
        int64_t rank = 0, key = order(mine);
        for (int64_t o = 0; o < experts && rank < top; o++) {
            int64_t other = order((sigmoid ? score[o] : logits[o]) + (correction ? correction[o] : 0.0f));
            rank += other > key || (other == key && o < e);
        }
        if (rank < top)
            id[found++] = (int32_t)e;
        if (rank < top || !renormalise)
            sum[e] = score[e];
    }
    float all = sigmoid && !renormalise ? 1.0f : halved_sum(sum, width) + (sigmoid ? 1e-20f : 0.0f);
    for (int64_t i = 0; i < found; i++)
        weight[i] = score[id[i]] / all * scale;
}

typedef struct {
    const float *logits, *correction;
    int32_t *id;
    float *weight;
    int64_t tokens, experts, top;
    int renormalise, sigmoid, *failed;
    float scale;
} route_job;

#define TOKENS_PER_TASK 8

static void route_task(const void *context, int64_t task) {
    const route_job *job = context;
    int64_t width = 1, end = (task + 1) * TOKENS_PER_TASK;
    while (width < job->experts)
        width *= 2;
    float *room = scratch_floats(2 * width, job->failed);
    for (int64_t t = task * TOKENS_PER_TASK; room && t < end && t < job->tokens; t++)
        route(job->logits + t * job->experts, job->correction, job->experts, job->top, job->renormalise, job->sigmoid,
              job->scale, job->id + t * job->top, job->weight + t * job->top, room, width);
    free(room);
}

/* (up + 1) gate sigmoid(1.702 gate), both clamped. both [rows, 2f], y [rows, f]. */
static void clamped(const float *both, float *y, int64_t rows, int64_t f, float limit) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < f; i += 16) {
            const float *at = both + row * 2 * f + i;
            vf g = vf_load_upto(at, f - i), u = vf_load_upto(at + f, f - i);
            g = vf_select(g > vf_set(limit), vf_set(limit), g);
            u = vf_select(u > vf_set(limit), vf_set(limit), u);
            u = vf_select(u < vf_set(-limit), vf_set(-limit), u);
            vf glu = g / (vf_set(1.0f) + vf_exp(vf_set(-1.702f) * g));
            vf_store_upto(y + row * f + i, (u + vf_set(1.0f)) * glu, f - i);
        }
}

/* y[token] += weight * part for the rows of one expert. */
static void add_parts(float *y, const float *part, const float *weight, const int64_t *pair, int64_t rows, int64_t top,
                      int64_t d) {
    for (int64_t row = 0; row < rows; row++) {
        float *to = y + pair[row] / top * d;
        vf scale = vf_set(weight[pair[row]]);
        for (int64_t i = 0; i < d; i += 16)
            vf_store_upto(to + i, vf_load_upto(to + i, d - i) + vf_load_upto(part + row * d + i, d - i) * scale, d - i);
    }
}

INLINE const void *of_expert(const void *w, int64_t expert, int64_t numbers, int kind) {
    return (const char *)w + expert * numbers * (kind == 0 ? 4 : 2);
}

/* The matrices [n, k] of all experts. With scales they are e4m3 codes of w8a8.py: a scale for each `step` columns, or
 * one for all where step is 0. */
typedef struct {
    const void *w, *bias;
    const float *scale;
    int64_t n, k, step;
    int kind, bias_kind, threads;
} matrices;

#define PART 128 /* columns of a part of the sum where all have one scale */

/* y [rows, n] = x [rows, k] @ w.T + bias of an expert. room: [rows, 2k] floats. */
static int product(const matrices *m, int64_t expert, const float *x, float *y, int64_t rows, float *room) {
    int64_t numbers = (m->n + BLOCK - 1) / BLOCK * BLOCK, steps = m->step ? (m->k + m->step - 1) / m->step : 1;
    const void *bias = m->bias ? of_expert(m->bias, expert, m->n, m->bias_kind) : NULL;
    if (!m->scale)
        return fengine_linear(x, of_expert(m->w, expert, numbers * m->k, m->kind), bias, y, rows, m->n, m->k, m->kind,
                              m->bias_kind, m->threads);
    fengine_e4m3_rows(x, room, room + rows * m->k, rows, m->k, m->step ? m->step : m->k, m->threads);
    return fengine_w8a8_linear(room, room + rows * m->k, (const uint8_t *)m->w + expert * numbers * m->k,
                               m->scale + expert * numbers * steps, bias, y, rows, m->n, m->k,
                               m->step ? m->step : PART, m->step != 0, m->bias_kind, m->threads);
}

/* y[t, d] = the weighted sum of t's experts + shared; gate_up packed [e, ceil(2f/32), d, 32], down [e, ceil(d/32), f,
 * 32], with scales [e, blocks, steps, 32] where they are e4m3 codes. shared, its gate [t], correction, the biases and
 * the scales may be null. Without down, y[t top, f] are the gated products of the pairs; without gate_up, x are these.
 */
API int fengine_experts(const float *x, const float *logits, const void *gate_up, const void *down, const float *shared,
                        const float *gate, const float *correction, const void *gate_up_bias, const void *down_bias,
                        const float *gate_up_scale, const float *down_scale, float *y, int64_t t, int64_t e,
                        int64_t top, int64_t f, int64_t d, int64_t gate_up_step, int64_t down_step, int gate_kind,
                        int down_kind, int gate_bias_kind, int down_bias_kind, int renormalise, int sigmoid,
                        int threads, float scale, float limit, int silu_threads) {
    matrices wide = {gate_up, gate_up_bias, gate_up_scale, 2 * f, d, gate_up_step, gate_kind, gate_bias_kind, threads};
    matrices narrow = {down, down_bias, down_scale, d, f, down_step, down_kind, down_bias_kind, threads};
    int failed = 0;
    int64_t pairs = t * top, most = 0, *start = calloc((size_t)e + 1, 8), *pair = malloc((size_t)pairs * 8 + 8);
    float *weight = scratch_floats(2 * pairs, &failed), *room = NULL;
    int32_t *id = (int32_t *)weight + pairs;
    failed = failed || !start || !pair;
    if (!failed) {
        route_job job = {logits, correction, id, weight, t, e, top, renormalise, sigmoid, &failed, scale};
        run_tasks(route_task, &job, (t + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, threads);
    }
    if (!failed) {
        for (int64_t p = 0; p < pairs; p++)
            start[id[p] + 1]++;
        for (int64_t i = 0; i < e; i++) {
            most = start[i + 1] > most ? start[i + 1] : most;
            start[i + 1] += start[i];
        }
        for (int64_t p = 0; p < pairs; p++)
            pair[start[id[p]]++] = p; /* start[i] is now where expert i ends */
        room = scratch_floats(most * (2 * d + 3 * f + 2 * (gate_up_scale || down_scale) * (d > f ? d : f)), &failed);
    }
    memset(y, 0, (size_t)(down ? t * d : pairs * f) * 4);
    float *rows = room, *both = room + most * d, *h = both + most * 2 * f, *part = h + most * f;
    float *codes = part + most * d;
    for (int64_t i = 0; i < e && !failed; i++) {
        int64_t first = i ? start[i - 1] : 0, count = start[i] - first;
        if (count == 0)
            continue;
        for (int64_t row = 0; row < count; row++) {
            int64_t from = pair[first + row];
            if (gate_up)
                memcpy(rows + row * d, x + from / top * d, (size_t)d * 4);
            else
                memcpy(h + row * f, x + from * f, (size_t)f * 4);
        }
        if (gate_up) {
            failed |= product(&wide, i, rows, both, count, codes);
            if (limit > 0.0f)
                clamped(both, h, count, f, limit);
            else
                fengine_silu_mul(both, h, count, f, 0, 1, silu_threads);
        }
        if (!down) {
            for (int64_t row = 0; row < count; row++)
                memcpy(y + pair[first + row] * f, h + row * f, (size_t)f * 4);
            continue;
        }
        failed |= product(&narrow, i, h, part, count, codes);
        if (!failed)
            add_parts(y, part, weight, pair + first, count, top, d);
    }
    for (int64_t row = 0; shared && row < t; row++) {
        vf scale = vf_set(gate ? 1.0f / (1.0f + exp_of(-gate[row])) : 1.0f);
        for (int64_t i = row * d, left = d; left > 0; i += 16, left -= 16)
            vf_store_upto(y + i, vf_load_upto(y + i, left) + vf_load_upto(shared + i, left) * scale, left);
    }
    free(start);
    free(pair);
    free(weight);
    free(room);
    return failed;
}
