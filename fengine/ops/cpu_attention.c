/* Causal paged attention on the CPU: one kernel for prefill, chunked prefill and decode, grouped-query heads.
 *
 * Reduction tree of one (token, head), a function of the token's position only:
 *   keys stand in blocks of 16 at absolute positions 0, 16, 32, ...; blocks stand in chunks of 512
 *   score   = chain of fma over the head width of (q * scale) and k
 *   block   m' = max(m, scores), p = exp(score - m'), l = l * exp(m - m') + tree(p), acc = fma chain over keys of p * v
 *           on top of acc * exp(m - m'); keys behind the token take no part
 *   chunks  start from m = -inf, l = 0, acc = 0 and are merged left to right; out = acc / l
 * Query rows that share keys (heads of a group, tokens of a span) share the loads; long rows may give their chunks to
 * different threads. Slots that the row does not own are never read.
 */
#include "cpu_vector.h"

#define KEYS 16 /* keys per block */
#define CHUNK 512 /* keys per chunk */
#define SPAN_ROWS 64 /* query rows (tokens x heads of the group) that walk the keys together, if a group is smaller */
#define SCORE_ROWS (LANES == 16 ? 8 : 4) /* query rows per register tile */
#define VALUE_ROWS (LANES == 16 ? 4 : 2)
#define VALUE_VECTORS (LANES == 16 ? 4 : 2)

typedef struct {
    int32_t row, token, tokens, position; /* position of the first token */
} span;

typedef struct {
    const float *q, *k, *v;
    float *o;
    const int32_t *table;
    const span *spans;
    float *partials; /* null: a task walks all chunks itself */
    int64_t heads, kv_heads, width, padded, page_size, table_width, chunks, stride; /* stride: floats per partial */
    float scale;
} attention_job;

/* Of each query row of a span: running maximum, running sum, and the unnormalised output. */
typedef struct {
    float *peak, *sum, *acc;
} softmax_state;

INLINE int64_t state_floats(const attention_job *job, int64_t rows) {
    return ((2 * rows + 15) & ~15) + rows * job->padded;
}

INLINE softmax_state state_at(float *memory, int64_t rows) {
    return (softmax_state){memory, memory + rows, memory + ((2 * rows + 15) & ~15)};
}

/* -- keys and values of one block -------------------------------------------------------------------------------- */

#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define EXCHANGE(a, b, low, high) \
    do {                          \
        vf x = a, y = b;          \
        a = MIX(x, y, low);       \
        b = MIX(x, y, high);      \
    } while (0)
#define UNPACK(...) __VA_ARGS__
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

/* out[i][j] = in[j][i] for 16 x 16 floats: exchange halves, quarters, pairs, lanes. */
INLINE void transpose(vf r[16], float *out) {
#if LANES == 16
    UNROLL(16) for (int i = 0; i < 8; i++) EXCHANGE(r[i], r[i + 8], LOW8, HIGH8);
    UNROLL(16) for (int i = 0; i < 16; i++) if (!(i & 4)) EXCHANGE(r[i], r[i + 4], LOW4, HIGH4);
    UNROLL(16) for (int i = 0; i < 16; i++) if (!(i & 2)) EXCHANGE(r[i], r[i + 2], LOW2, HIGH2);
    UNROLL(16) for (int i = 0; i < 16; i += 2) EXCHANGE(r[i], r[i + 1], LOW1, HIGH1);
    UNROLL(16) for (int i = 0; i < 16; i++) vf_store(out + 16 * i, r[i]);
#else
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++)
            out[16 * i + j] = r[j][i];
#endif
}

/* Brings `owned` keys and values from position `first` on: keys_t [width, 16], values [16, padded]; zeros elsewhere. */
static void load_keys(const attention_job *job, const int32_t *pages, int64_t group, int64_t first, int64_t owned,
                      float *keys_t, float *values) {
    const float *k[KEYS];
    int64_t page = first / job->page_size, offset = first % job->page_size;
    for (int64_t j = 0; j < owned; j++) {
        int64_t slot = pages[page] * job->page_size + offset, at = (slot * job->kv_heads + group) * job->width;
        k[j] = job->k + at;
        for (int64_t i = 0; i < job->width; i += 16)
            vf_store(values + j * job->padded + i, vf_load_upto(job->v + at + i, job->width - i));
        if (++offset == job->page_size)
            page++, offset = 0;
    }
    for (int64_t i = 0; i < job->width; i += 16) {
        vf r[KEYS];
        for (int64_t j = 0; j < KEYS; j++)
            r[j] = j < owned ? vf_load_upto(k[j] + i, job->width - i) : (vf){0};
        transpose(r, keys_t + 16 * i);
    }
}

/* -- one block for a few query rows -------------------------------------------------------------------------------- */

/* scores[r] = sum over the width of q[r] * keys, lanes over the 16 keys. */
INLINE void score_rows(const float *q, int64_t padded, const float *keys_t, int64_t width, const int rows, vf *scores) {
    vf acc[SCORE_ROWS];
    UNROLL(8) for (int r = 0; r < rows; r++) acc[r] = (vf){0};
    for (int64_t i = 0; i < width; i++) {
        vf key = vf_load(keys_t + 16 * i);
        UNROLL(8) for (int r = 0; r < rows; r++) acc[r] = vf_fma(vf_set(q[r * padded + i]), key, acc[r]);
    }
    UNROLL(8) for (int r = 0; r < rows; r++) scores[r] = acc[r];
}

/* acc[r] = acc[r] * decay[r] + sum over `visible` keys of p[r] * values, for `vectors` x 16 columns. */
INLINE void add_values(float *acc, int64_t padded, const float *decay, const vf *p, const float *values, int64_t visible,
                       const int rows, const int vectors) {
    vf out[VALUE_ROWS][VALUE_VECTORS];
    UNROLL(4) for (int r = 0; r < rows; r++)
        UNROLL(4) for (int i = 0; i < vectors; i++) out[r][i] = vf_load(acc + r * padded + 16 * i) * vf_set(decay[r]);
    for (int64_t j = 0; j < visible; j++)
        UNROLL(4) for (int i = 0; i < vectors; i++) {
            vf value = vf_load(values + j * padded + 16 * i);
            UNROLL(4) for (int r = 0; r < rows; r++)
                out[r][i] = vf_fma(vf_set(((const float *)&p[r])[j]), value, out[r][i]);
        }
    UNROLL(4) for (int r = 0; r < rows; r++)
        UNROLL(4) for (int i = 0; i < vectors; i++) vf_store(acc + r * padded + 16 * i, out[r][i]);
}

INLINE void add_columns(float *acc, int64_t padded, const float *decay, const vf *p, const float *values, int64_t visible,
                        const int rows) {
    int64_t i = 0;
    for (; i + 16 * VALUE_VECTORS <= padded; i += 16 * VALUE_VECTORS)
        add_values(acc + i, padded, decay, p, values + i, visible, rows, VALUE_VECTORS);
    for (; i + 32 <= padded; i += 32)
        add_values(acc + i, padded, decay, p, values + i, visible, rows, 2);
    for (; i < padded; i += 16)
        add_values(acc + i, padded, decay, p, values + i, visible, rows, 1);
}

/* One block of keys, of which the first `visible` count, for up to SCORE_ROWS query rows. */
static void attend_rows(const attention_job *job, const float *q, const float *keys_t, const float *values, int64_t visible,
                        int rows, float *peak, float *sum, float *acc) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi seen = lane < (int32_t)visible;
    vf p[SCORE_ROWS], change = {0};
    int64_t padded = job->padded, width = job->width;
    switch (rows) {
    case 1: score_rows(q, padded, keys_t, width, 1, p); break;
    case 2: score_rows(q, padded, keys_t, width, 2, p); break;
    case 3: score_rows(q, padded, keys_t, width, 3, p); break;
#if LANES == 16
    case 4: score_rows(q, padded, keys_t, width, 4, p); break;
    case 5: score_rows(q, padded, keys_t, width, 5, p); break;
    case 6: score_rows(q, padded, keys_t, width, 6, p); break;
    case 7: score_rows(q, padded, keys_t, width, 7, p); break;
#endif
    default: score_rows(q, padded, keys_t, width, SCORE_ROWS, p);
    }
    for (int r = 0; r < rows; r++) {
        float top = vf_peak(vf_select(seen, p[r], vf_set(-INFINITY)));
        top = top > peak[r] ? top : peak[r];
        change[r] = peak[r] - top;
        peak[r] = top;
        p[r] = vf_select(seen, vf_exp(p[r] - vf_set(top)), (vf){0});
    }
    float decay[16];
    vf_store(decay, vf_exp(change));
    for (int r = 0; r < rows; r++)
        sum[r] = sum[r] * decay[r] + vf_sum(p[r]);
    int r = 0;
    for (; r + VALUE_ROWS <= rows; r += VALUE_ROWS)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, visible, VALUE_ROWS);
    if (LANES == 16 && rows - r == 3)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, visible, LANES == 16 ? 3 : 1);
    else if (rows - r == 2)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, visible, 2);
    else if (rows - r == 1)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, visible, 1);
}

/* -- spans ------------------------------------------------------------------------------------------------------- */

/* All query rows of a span against the keys of one chunk. q [rows, padded], rows ordered by token, then head. */
static void attend_chunk(const attention_job *job, const span *s, int64_t group, int64_t chunk, const float *q,
                         float *scratch, softmax_state state) {
    int64_t share = job->heads / job->kv_heads, padded = job->padded, rows = s->tokens * share;
    int64_t end = s->position + s->tokens < (chunk + 1) * CHUNK ? s->position + s->tokens : (chunk + 1) * CHUNK;
    float *keys_t = scratch, *values = scratch + KEYS * padded;
    const int32_t *pages = job->table + s->row * job->table_width;
    for (int64_t i = 0; i < rows; i++)
        state.peak[i] = -INFINITY, state.sum[i] = 0.0f;
    memset(state.acc, 0, (size_t)(rows * padded) * 4);
    for (int64_t first = chunk * CHUNK; first < end; first += KEYS) {
        load_keys(job, pages, group, first, end - first < KEYS ? end - first : KEYS, keys_t, values);
        /* Tokens before `first` see nothing here; tokens from first+15 on see all 16 keys and mix freely. */
        int64_t blind = first > s->position ? first - s->position : 0;
        int64_t row = blind * share, whole = first + KEYS - 1 > s->position ? first + KEYS - 1 - s->position : 0;
        while (row < rows) {
            int64_t token = row / share, visible = KEYS, limit = rows;
            if (token < whole)
                visible = s->position + token + 1 - first, limit = (token + 1) * share;
            int step = limit - row < SCORE_ROWS ? (int)(limit - row) : SCORE_ROWS;
            attend_rows(job, q + row * padded, keys_t, values, visible, step, state.peak + row, state.sum + row,
                        state.acc + row * padded);
            row += step;
        }
    }
}

/* Adds the partial state of a later chunk, for the rows that see keys of it. */
static void merge_chunk(const attention_job *job, const span *s, int64_t chunk, softmax_state total, softmax_state part) {
    int64_t share = job->heads / job->kv_heads, padded = job->padded;
    int64_t blind = chunk * CHUNK > s->position ? chunk * CHUNK - s->position : 0;
    for (int64_t row = blind * share; row < s->tokens * share; row++) {
        float top = part.peak[row] > total.peak[row] ? part.peak[row] : total.peak[row];
        vf change = {total.peak[row] - top, part.peak[row] - top}, decay = vf_exp(change);
        total.peak[row] = top;
        total.sum[row] = total.sum[row] * decay[0] + part.sum[row] * decay[1];
        float *acc = total.acc + row * padded;
        for (int64_t i = 0; i < padded; i += 16)
            vf_store(acc + i, vf_load(acc + i) * vf_set(decay[0]) + vf_load(part.acc + row * padded + i) * vf_set(decay[1]));
    }
}

static void write_out(const attention_job *job, const span *s, int64_t group, softmax_state state) {
    int64_t share = job->heads / job->kv_heads;
    for (int64_t row = 0; row < s->tokens * share; row++) {
        float *o = job->o + ((s->token + row / share) * job->heads + group * share + row % share) * job->width;
        for (int64_t i = 0; i < job->width; i += 16)
            vf_store_upto(o + i, vf_load(state.acc + row * job->padded + i) / vf_set(state.sum[row]), job->width - i);
    }
}

/* The span's queries of one group times scale, rows padded with zeros. */
static void load_queries(const attention_job *job, const span *s, int64_t group, float *q) {
    int64_t share = job->heads / job->kv_heads;
    for (int64_t row = 0; row < s->tokens * share; row++) {
        const float *from = job->q + ((s->token + row / share) * job->heads + group * share + row % share) * job->width;
        for (int64_t i = 0; i < job->width; i += 16)
            vf_store(q + row * job->padded + i, vf_load_upto(from + i, job->width - i) * vf_set(job->scale));
    }
}

INLINE int64_t chunks_of(const span *s) {
    return (s->position + s->tokens + CHUNK - 1) / CHUNK;
}

/* Task = (span, group), or (span, group, chunk) when partials are kept. */
static void attention_task(const void *context, int64_t task) {
    const attention_job *job = context;
    int64_t pair = job->partials ? task / job->chunks : task, group = pair % job->kv_heads;
    const span *s = job->spans + pair / job->kv_heads;
    int64_t rows = s->tokens * (job->heads / job->kv_heads), size = state_floats(job, rows);
    int64_t chunks = chunks_of(s);
    if (job->partials && task % job->chunks >= chunks)
        return;
    float *memory = scratch_floats(rows * job->padded + 2 * KEYS * job->padded + 2 * size);
    float *q = memory, *scratch = q + rows * job->padded, *states = scratch + 2 * KEYS * job->padded;
    load_queries(job, s, group, q);
    if (job->partials) {
        attend_chunk(job, s, group, task % job->chunks, q, scratch, state_at(job->partials + task * job->stride, rows));
    } else {
        softmax_state total = state_at(states, rows), part = state_at(states + size, rows);
        attend_chunk(job, s, group, 0, q, scratch, total);
        for (int64_t chunk = 1; chunk < chunks; chunk++) {
            attend_chunk(job, s, group, chunk, q, scratch, part);
            merge_chunk(job, s, chunk, total, part);
        }
        write_out(job, s, group, total);
    }
    free(memory);
}

static void merge_task(const void *context, int64_t pair) {
    const attention_job *job = context;
    const span *s = job->spans + pair / job->kv_heads;
    int64_t rows = s->tokens * (job->heads / job->kv_heads), size = job->stride;
    float *states = job->partials + pair * job->chunks * size;
    for (int64_t chunk = 1; chunk < chunks_of(s); chunk++)
        merge_chunk(job, s, chunk, state_at(states, rows), state_at(states + chunk * size, rows));
    write_out(job, s, pair % job->kv_heads, state_at(states, rows));
}

/* q, o [tokens, heads, width]; k, v [pages, page_size, kv_heads, width]; table [rows, table_width]. */
API void fengine_attention(const float *q, const float *k, const float *v, float *o, const int32_t *q_start,
                           const int32_t *kv_len, const int32_t *table, int64_t tokens, int64_t rows, int64_t heads,
                           int64_t kv_heads, int64_t width, int64_t page_size, int64_t table_width, float scale,
                           int threads) {
    attention_job job = {q, k, v, o, table, NULL, NULL, heads, kv_heads, width, (width + 15) & ~15, page_size, table_width,
                         0, 0, scale};
    int64_t live = rows ? q_start[rows] : 0, share = heads / kv_heads, work = 0, count = 0;
    int64_t longest = share >= SPAN_ROWS ? 1 : SPAN_ROWS / share;
    memset(o + live * heads * width, 0, (size_t)((tokens - live) * heads * width) * 4);
    if (live == 0)
        return;
    span *spans = malloc(sizeof(span) * (size_t)(live < rows + live / longest ? live : rows + live / longest));
    if (!spans)
        abort();
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = q_start[r]; t < q_start[r + 1]; t += longest) {
            int64_t n = q_start[r + 1] - t < longest ? q_start[r + 1] - t : longest;
            int64_t position = kv_len[r] - (q_start[r + 1] - t);
            spans[count++] = (span){(int32_t)r, (int32_t)t, (int32_t)n, (int32_t)position};
            work += n * heads * (position + n) * width;
            job.chunks = chunks_of(&spans[count - 1]) > job.chunks ? chunks_of(&spans[count - 1]) : job.chunks;
        }
    job.spans = spans;
    threads = work < 1 << 17 ? 1 : threads;
    if (job.chunks > 1 && count * kv_heads < 2 * threads) {
        int64_t largest = 0;
        for (int64_t i = 0; i < count; i++)
            largest = spans[i].tokens > largest ? spans[i].tokens : largest;
        job.stride = state_floats(&job, largest * share);
        job.partials = scratch_floats(count * kv_heads * job.chunks * job.stride);
        run_tasks(attention_task, &job, count * kv_heads * job.chunks, threads);
        run_tasks(merge_task, &job, count * kv_heads, 1);
        free(job.partials);
    } else {
        run_tasks(attention_task, &job, count * kv_heads, threads);
    }
    free(spans);
}
