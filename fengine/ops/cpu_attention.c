/* Paged attention on the CPU: one kernel for prefill, chunked prefill and decode, grouped-query heads.
 *
 * Reduction tree of one (token, head), a function of the token's position only:
 *   keys stand in blocks of 32 at absolute positions 0, 32, 64, ...; blocks stand in chunks of 512
 *   score   = chain of fma over the head width of (q * scale) and k
 *   block   m' = max(m, scores), p = exp(score - m'), l = l * exp(m - m') + tree(p[:16] + p[16:]), acc = fma chain over
 *           keys of p * v on top of acc * exp(m - m'); keys behind the token have p = 0 and end the chain
 *   chunks  start from m = -inf, l = 0, acc = 0 and are merged left to right; out = acc / l
 * A token sees the keys up to itself, or to a last one of its own, or all of its row (causal 0); with a window no earlier ones than itself and
 * window - 1 before it, and as many behind it (causal 0): what it does not see leaves (m, l, acc) as they are. With a
 * cap, score = cap * tanh(score / cap). A head's sink is one more (m, 1, 0), merged last.
 * Query rows that share keys (heads of a group, tokens of a span) share the loads; long rows may give their chunks to
 * different threads; a task takes one kv head or several. Slots that the row does not own are never read.
 * Pages in few bits (kv_fp8.py) become floats block by block: the bits are those of pages that hold these floats.
 */
#include "cpu_fp8.h"

#define KEYS 32 /* keys per block: two vectors of scores */
#define CHUNK 512 /* keys per chunk */
#define SPAN_ROWS 64 /* query rows (tokens x heads of the group) that walk the keys together, if a group is smaller */
#define SCORE_ROWS (LANES == 16 ? 8 : 2) /* query rows per register tile */
#define VALUE_ROWS (LANES == 16 ? 4 : 2)
#define VALUE_VECTORS (LANES == 16 ? 4 : 2)

typedef struct {
    int32_t row, token, tokens, position; /* position of the first token */
    int32_t seen; /* keys up to the last that some token sees */
} span;

typedef struct {
    const float *q;
    const void *k, *v; /* floats, or codes behind which a page holds exponents */
    float *o;
    const int32_t *table;
    const span *spans;
    float *partials; /* null: a task walks all chunks itself */
    int64_t heads, kv_heads, width, padded, page_size, table_width;
    int64_t groups_per_task, chunks, stride; /* stride: floats per partial */
    float scale, cap; /* cap 0: none */
    int64_t window; /* 0: none */
    int64_t reach; /* keys behind itself that a token sees, if the row has them */
    const int32_t *last; /* [tokens], ascending in a row: the last key of each; null: as `reach` says */
    const float *sinks; /* [heads]; null: none */
    int few; /* whether pages are in few bits */
    int *failed; /* to tell that there was no memory */
} attention_job;

/* The first key that a token at `position` sees. */
INLINE int64_t first_key(const attention_job *job, int64_t position) {
    return job->window && position >= job->window ? position - job->window + 1 : 0;
}

/* The last key that token `i` of a span sees, if the row has it. */
INLINE int64_t last_key(const attention_job *job, const span *s, int64_t i) {
    return job->last ? job->last[s->token + i] : s->position + i + job->reach;
}

/* How many tokens of a span see no key from `key` on; more than it has: all. */
INLINE int64_t tokens_before(const attention_job *job, const span *s, int64_t key) {
    int64_t last = s->position + job->reach, count = 0;
    if (!job->last)
        return key > last ? key - last : 0;
    while (count < s->tokens && last_key(job, s, count) < key)
        count++;
    return count;
}

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

/* -- keys and values of one block ---------------------------------------------------------------------------------- */

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
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

/* out[i][j] = rows[j][at + i] for 16 x n floats, zeros behind n: exchange halves, quarters, pairs, lanes. */
static __attribute__((noinline)) void transpose(const float *const *rows, int64_t at, int64_t n, float *out) {
    vf r[16];
    if (n >= 16) {
        UNROLL(16) for (int j = 0; j < 16; j++) r[j] = vf_load(rows[j] + at);
    } else {
        for (int j = 0; j < 16; j++)
            r[j] = vf_load_head(rows[j] + at, n);
    }
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

/* One block of one kv head, ready for use: keys transposed, values where they stand (or padded copies). */
typedef struct {
    const float *values[KEYS];
    float *keys_t; /* two of [padded, 16] */
    float *copies; /* [KEYS, padded] for widths that are no multiple of 16, and two of them for codes */
    float *zeros; /* [padded] */
} key_block;

/* Where the keys of one block lie: offsets of kv head 0 in the pages. */
typedef struct {
    int64_t owned, offset[KEYS], exponent[KEYS];
} key_places;

/* Places of positions first .. end-1, at most a block. The table is not read beyond. */
INLINE key_places locate(const attention_job *job, const int32_t *pages, int64_t first, int64_t end) {
    key_places places = {.owned = end - first < KEYS ? end - first : KEYS};
    int64_t page = first / job->page_size, in_page = first % job->page_size, slot_size = job->kv_heads * job->width;
    for (int64_t j = 0; j < places.owned; j++) {
        places.offset[j] = (pages[page] * job->page_size + in_page) * slot_size;
        if (job->few) { /* a page's codes lie head by head, and so do its exponents, one a slot, behind them */
            int64_t begin = pages[page] * job->page_size * (slot_size + job->kv_heads);
            places.offset[j] = begin + in_page * job->width;
            places.exponent[j] = begin + job->page_size * slot_size + in_page;
        }
        if (++in_page == job->page_size)
            page++, in_page = 0;
    }
    return places;
}

/* Asks for the keys and values of the next block: hardware does not foresee scattered pages. */
INLINE void prefetch_keys(const attention_job *job, const key_places *places, int64_t group) {
    int64_t size = job->few ? 1 : 4, head = group * job->width * (job->few ? job->page_size : 1);
    for (int64_t j = 0; j < places->owned; j++)
        for (int64_t i = 0; i < job->width * size; i += 64) {
            int64_t at = (places->offset[j] + head) * size + i;
            __builtin_prefetch((const char *)job->k + at, 0, 2);
            __builtin_prefetch((const char *)job->v + at, 0, 2);
        }
}

/* One head of one slot as floats: a power of two times the codes, which no rounding changes. */
static const float *decode_head(const attention_job *job, const void *pages, const key_places *places, int64_t j,
                                int64_t group, float *out) {
    const uint8_t *codes = (const uint8_t *)pages + places->offset[j] + group * job->page_size * job->width;
    vf scale = vf_set(power_of_two(((const uint8_t *)pages)[places->exponent[j] + group * job->page_size]));
    for (int64_t i = 0; i < job->width; i += 16) {
        uint8_t last[16] = {0};
        if (job->width - i < 16)
            memcpy(last, codes + i, (size_t)(job->width - i));
        vf_store(out + i, from_e4m3(job->width - i < 16 ? last : codes + i) * scale);
    }
    return out;
}

/* Brings a block of keys and values; zeros stand for keys that are not owned. */
static void load_keys(const attention_job *job, const key_places *places, int64_t group, key_block *block) {
    const float *k[KEYS];
    int64_t width = job->width;
    for (int64_t j = 0; j < KEYS; j++) {
        float *copy = block->copies + j * job->padded;
        int64_t at = places->offset[j] + group * width;
        if (j >= places->owned) {
            k[j] = block->values[j] = block->zeros;
        } else if (job->few) {
            k[j] = decode_head(job, job->k, places, j, group, copy + KEYS * job->padded);
            block->values[j] = decode_head(job, job->v, places, j, group, copy);
        } else {
            k[j] = (const float *)job->k + at;
            block->values[j] = (const float *)job->v + at;
            for (int64_t i = 0; width % 16 && i < width; i += 16)
                vf_store(copy + i, vf_load_upto(block->values[j] + i, width - i));
            block->values[j] = width % 16 ? copy : block->values[j];
        }
    }
    for (int64_t half = 0; half < KEYS && half < places->owned; half += 16)
        for (int64_t i = 0; i < width; i += 16)
            transpose(k + half, i, width - i, block->keys_t + half * job->padded + 16 * i);
}

/* -- one block for a few query rows -------------------------------------------------------------------------------- */

/* scores[r][h] = sum over the width of q[r] * keys, lanes over the 16 keys of half h. */
INLINE void score_rows(const float *q, int64_t padded, const float *keys_t, int64_t width, const int rows,
                       const int halves, vf (*scores)[2]) {
    vf acc[SCORE_ROWS][2];
    UNROLL(8) for (int r = 0; r < rows; r++)
        UNROLL(2) for (int h = 0; h < halves; h++) acc[r][h] = (vf){0};
    for (int64_t i = 0; i < width; i++) {
        vf key[2];
        UNROLL(2) for (int h = 0; h < halves; h++) key[h] = vf_load(keys_t + 16 * (h * padded + i));
        UNROLL(8) for (int r = 0; r < rows; r++) {
            vf x = vf_set(q[r * padded + i]);
            UNROLL(2) for (int h = 0; h < halves; h++) acc[r][h] = vf_fma(x, key[h], acc[r][h]);
        }
    }
    UNROLL(8) for (int r = 0; r < rows; r++)
        UNROLL(2) for (int h = 0; h < halves; h++) scores[r][h] = acc[r][h];
}

/* Out of line, as `add_block`. */
static __attribute__((noinline)) void score_block(const float *q, int64_t padded, const float *keys_t, int64_t width,
                                                  int rows, int halves, vf (*scores)[2]) {
#define SCORE(n)                                                    \
    case n:                                                         \
        if (halves == 2)                                            \
            score_rows(q, padded, keys_t, width, n, 2, scores);     \
        else                                                        \
            score_rows(q, padded, keys_t, width, n, 1, scores);     \
        break;
    switch (rows) {
        SCORE(1) SCORE(2)
#if LANES == 16
        SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8)
#endif
    }
#undef SCORE
}

/* acc[r] = acc[r] * decay[r] + sum over keys `hidden` .. `visible` - 1 of p[r] * values, for 16 x vectors columns from `column` on. */
INLINE void add_values(float *acc, int64_t padded, const float *decay, const vf (*p)[2], const float *const *values,
                       int64_t column, int64_t hidden, int64_t visible, const int rows, const int vectors) {
    vf out[VALUE_ROWS][VALUE_VECTORS];
    UNROLL(4) for (int r = 0; r < rows; r++)
        UNROLL(4) for (int i = 0; i < vectors; i++) out[r][i] = vf_load(acc + r * padded + 16 * i) * vf_set(decay[r]);
    for (int64_t j = hidden; j < visible; j++) {
        vf value[VALUE_VECTORS];
        UNROLL(4) for (int i = 0; i < vectors; i++) value[i] = vf_load(values[j] + column + 16 * i);
        UNROLL(4) for (int r = 0; r < rows; r++) {
            vf weight = vf_set(((const float *)p[r])[j]);
            UNROLL(4) for (int i = 0; i < vectors; i++) out[r][i] = vf_fma(weight, value[i], out[r][i]);
        }
    }
    UNROLL(4) for (int r = 0; r < rows; r++)
        UNROLL(4) for (int i = 0; i < vectors; i++) vf_store(acc + r * padded + 16 * i, out[r][i]);
}

INLINE void add_columns(float *acc, int64_t padded, const float *decay, const vf (*p)[2], const float *const *values,
                        int64_t hidden, int64_t visible, const int rows) {
    int64_t i = 0;
    for (; i + 16 * VALUE_VECTORS <= padded; i += 16 * VALUE_VECTORS)
        add_values(acc + i, padded, decay, p, values, i, hidden, visible, rows, VALUE_VECTORS);
    for (; i + 32 <= padded; i += 32)
        add_values(acc + i, padded, decay, p, values, i, hidden, visible, rows, 2);
    for (; i < padded; i += 16)
        add_values(acc + i, padded, decay, p, values, i, hidden, visible, rows, 1);
}

/* Out of line, or the compiler keeps the constants of exp in the registers that the sums need. */
static __attribute__((noinline)) void add_block(float *acc, int64_t padded, const float *decay, const vf (*p)[2],
                                                const float *const *values, int64_t hidden, int64_t visible, int rows) {
    int r = 0;
    for (; r + VALUE_ROWS <= rows; r += VALUE_ROWS)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, hidden, visible, VALUE_ROWS);
    if (LANES == 16 && rows - r == 3)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, hidden, visible, LANES == 16 ? 3 : 1);
    else if (rows - r == 2)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, hidden, visible, 2);
    else if (rows - r == 1)
        add_columns(acc + r * padded, padded, decay + r, p + r, values, hidden, visible, 1);
}

/* cap * tanh(x / cap) */
INLINE vf capped(vf x, float cap) {
    return vf_set(cap) * (vf_set(1.0f) - vf_set(2.0f) / (vf_exp(x * vf_set(2.0f / cap)) + vf_set(1.0f)));
}

/* One block of keys, of which `hidden` .. `visible` - 1 count, for up to SCORE_ROWS query rows. */
static void attend_rows(const attention_job *job, const float *q, const key_block *block, int64_t hidden,
                        int64_t visible, int rows, float *peak, float *sum, float *acc) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi from = lane >= (int32_t)hidden, from16 = lane + 16 >= (int32_t)hidden;
    const vi seen[2] = {from & (lane < (int32_t)visible), from16 & (lane + 16 < (int32_t)visible)};
    const vf unseen = vf_set(-INFINITY);
    int64_t padded = job->padded;
    vf p[SCORE_ROWS][2], change = {0};
    score_block(q, padded, block->keys_t, job->width, rows, visible > 16 ? 2 : 1, p);
    for (int r = 0; r < rows && job->cap > 0.0f; r++) {
        p[r][0] = capped(p[r][0], job->cap);
        if (visible > 16)
            p[r][1] = capped(p[r][1], job->cap);
    }
    for (int r = 0; r < rows; r++) {
        p[r][0] = vf_select(seen[0], p[r][0], unseen);
        p[r][1] = visible > 16 ? vf_select(seen[1], p[r][1], unseen) : unseen;
        float top = vf_peak(vf_max(p[r][0], p[r][1]));
        top = top > peak[r] ? top : peak[r];
        change[r] = peak[r] - top;
        peak[r] = top;
    }
    for (int r = 0; r < rows; r++) {
        p[r][0] = vf_select(seen[0], vf_exp(p[r][0] - vf_set(peak[r])), (vf){0});
        p[r][1] = visible > 16 ? vf_select(seen[1], vf_exp(p[r][1] - vf_set(peak[r])), (vf){0}) : (vf){0};
    }
    float decay[16];
    vf_store(decay, vf_exp(change));
    for (int r = 0; r < rows; r++)
        sum[r] = sum[r] * decay[r] + vf_sum(p[r][0] + p[r][1]);
    add_block(acc, padded, decay, p, block->values, hidden, visible, rows);
}

/* -- spans --------------------------------------------------------------------------------------------------------- */

/* The query rows of a span under some kv heads, ordered by kv head, token, head of the group. */
typedef struct {
    span s;
    int64_t group, groups, rows; /* rows: of one kv head */
} patch;

/* All query rows of a patch against the keys of one chunk. q [groups, rows, padded]. */
static void attend_chunk(const attention_job *job, const patch *at, int64_t chunk, const float *q, float *scratch,
                         softmax_state state) {
    int64_t share = job->heads / job->kv_heads, padded = job->padded, position = at->s.position;
    int64_t end = at->s.seen < (chunk + 1) * CHUNK ? at->s.seen : (chunk + 1) * CHUNK;
    int64_t begin = first_key(job, position) / KEYS * KEYS;
    begin = begin > chunk * CHUNK ? begin : chunk * CHUNK;
    const int32_t *pages = job->table + at->s.row * job->table_width;
    key_block block = {.keys_t = scratch, .zeros = scratch + KEYS * padded, .copies = scratch + (KEYS + 1) * padded};
    key_places places = locate(job, pages, begin, end);
    memset(block.zeros, 0, (size_t)padded * 4);
    for (int64_t i = 0; i < at->groups * at->rows; i++)
        state.peak[i] = -INFINITY, state.sum[i] = 0.0f;
    memset(state.acc, 0, (size_t)(at->groups * at->rows * padded) * 4);
    for (int64_t first = begin; first < end; first += KEYS) {
        key_places next = locate(job, pages, first + KEYS, end);
        for (int64_t g = 0; g < at->groups; g++) {
            prefetch_keys(job, &next, at->group + g);
            load_keys(job, &places, at->group + g, &block);
            /* Tokens before `first` see nothing here; tokens from the block's last key on see all and mix freely. */
            int64_t row = tokens_before(job, &at->s, first) * share;
            int64_t whole = tokens_before(job, &at->s, first + KEYS - 1);
            /* With a window, tokens behind `clear` see not all of its beginning, and from `past` on nothing. */
            int64_t clear = job->window ? first + job->window - 1 - position : at->s.tokens, past = clear + KEYS;
            int64_t rows = past < at->s.tokens ? past * share : at->rows;
            while (row < rows) {
                int64_t token = row / share, hidden = 0, limit = rows, i = g * at->rows + row;
                int64_t visible = at->s.seen - first < KEYS ? at->s.seen - first : KEYS;
                if (token < whole) {
                    int64_t upto = last_key(job, &at->s, token) + 1 - first;
                    visible = upto < visible ? upto : visible;
                    limit = (token + 1) * share;
                }
                if (token > clear)
                    hidden = token - clear, limit = (token + 1) * share;
                else if (limit > (clear + 1) * share)
                    limit = (clear + 1) * share;
                int step = limit - row < SCORE_ROWS ? (int)(limit - row) : SCORE_ROWS;
                attend_rows(job, q + i * padded, &block, hidden, visible, step, state.peak + i, state.sum + i,
                            state.acc + i * padded);
                row += step;
            }
        }
        places = next;
    }
}

/* Adds the partial state of a later chunk, for the rows that see keys of it; it is all that those beginning there have. */
static void merge_chunk(const attention_job *job, const patch *at, int64_t chunk, softmax_state total,
                        softmax_state part) {
    int64_t share = job->heads / job->kv_heads, padded = job->padded;
    int64_t blind = tokens_before(job, &at->s, chunk * CHUNK);
    for (int64_t row = 0; row < at->groups * at->rows; row++) {
        int64_t from = first_key(job, at->s.position + row % at->rows / share) / CHUNK;
        if (row % at->rows < blind * share || from > chunk)
            continue;
        if (from == chunk) {
            total.peak[row] = part.peak[row], total.sum[row] = part.sum[row];
            memcpy(total.acc + row * padded, part.acc + row * padded, (size_t)padded * 4);
            continue;
        }
        float top = part.peak[row] > total.peak[row] ? part.peak[row] : total.peak[row];
        vf change = {total.peak[row] - top, part.peak[row] - top}, decay = vf_exp(change);
        total.peak[row] = top;
        total.sum[row] = total.sum[row] * decay[0] + part.sum[row] * decay[1];
        float *acc = total.acc + row * padded;
        const float *more = part.acc + row * padded;
        for (int64_t i = 0; i < padded; i += 16)
            vf_store(acc + i, vf_load(acc + i) * vf_set(decay[0]) + vf_load(more + i) * vf_set(decay[1]));
    }
}

/* Offset in q and o of a patch's row. */
INLINE int64_t row_offset(const attention_job *job, const patch *at, int64_t row) {
    int64_t share = job->heads / job->kv_heads, in_group = row % at->rows;
    int64_t head = (at->group + row / at->rows) * share + in_group % share;
    return ((at->s.token + in_group / share) * job->heads + head) * job->width;
}

static void write_out(const attention_job *job, const patch *at, softmax_state state) {
    for (int64_t row = 0; row < at->groups * at->rows; row++) {
        int64_t offset = row_offset(job, at, row);
        float *o = job->o + offset, sum = state.sum[row], kept = 1.0f;
        if (job->sinks) {
            float sink = job->sinks[offset / job->width % job->heads];
            float top = sink > state.peak[row] ? sink : state.peak[row];
            vf decay = vf_exp((vf){state.peak[row] - top, sink - top});
            kept = decay[0], sum = sum * decay[0] + decay[1];
        }
        for (int64_t i = 0; i < job->width; i += 16) {
            vf acc = vf_load(state.acc + row * job->padded + i) * vf_set(kept);
            vf_store_upto(o + i, acc / vf_set(sum), job->width - i);
        }
    }
}

/* The patch's queries times scale, rows padded with zeros. */
static void load_queries(const attention_job *job, const patch *at, float *q) {
    for (int64_t row = 0; row < at->groups * at->rows; row++) {
        const float *from = job->q + row_offset(job, at, row);
        for (int64_t i = 0; i < job->width; i += 16)
            vf_store(q + row * job->padded + i, vf_load_upto(from + i, job->width - i) * vf_set(job->scale));
    }
}

INLINE int64_t chunks_of(const span *s) {
    return (s->seen + CHUNK - 1) / CHUNK;
}

INLINE patch patch_of(const attention_job *job, int64_t index) {
    int64_t per_span = (job->kv_heads + job->groups_per_task - 1) / job->groups_per_task;
    patch at = {.s = job->spans[index / per_span], .group = index % per_span * job->groups_per_task};
    at.groups = job->kv_heads - at.group < job->groups_per_task ? job->kv_heads - at.group : job->groups_per_task;
    at.rows = at.s.tokens * (job->heads / job->kv_heads);
    return at;
}

/* Task = patch, or (patch, chunk) when partials are kept. */
static void attention_task(const void *context, int64_t task) {
    const attention_job *job = context;
    patch at = patch_of(job, job->partials ? task / job->chunks : task);
    int64_t rows = at.groups * at.rows, size = state_floats(job, rows), chunks = chunks_of(&at.s);
    int64_t begin = first_key(job, at.s.position) / CHUNK;
    if (job->partials && (task % job->chunks >= chunks || task % job->chunks < begin))
        return;
    int64_t blocks = job->few ? 3 : 2; /* of KEYS rows: keys_t and copies */
    float *memory = scratch_floats((rows + blocks * KEYS + 1) * job->padded + 2 * size, job->failed);
    if (!memory)
        return;
    float *q = memory, *scratch = q + rows * job->padded, *states = scratch + (blocks * KEYS + 1) * job->padded;
    load_queries(job, &at, q);
    if (job->partials) {
        attend_chunk(job, &at, task % job->chunks, q, scratch, state_at(job->partials + task * job->stride, rows));
    } else {
        softmax_state total = state_at(states, rows), part = state_at(states + size, rows);
        attend_chunk(job, &at, begin, q, scratch, total);
        for (int64_t chunk = begin + 1; chunk < chunks; chunk++) {
            attend_chunk(job, &at, chunk, q, scratch, part);
            merge_chunk(job, &at, chunk, total, part);
        }
        write_out(job, &at, total);
    }
    free(memory);
}

static void merge_task(const void *context, int64_t index) {
    const attention_job *job = context;
    patch at = patch_of(job, index);
    float *states = job->partials + index * job->chunks * job->stride;
    int64_t begin = first_key(job, at.s.position) / CHUNK;
    softmax_state total = state_at(states + begin * job->stride, at.groups * at.rows);
    for (int64_t chunk = begin + 1; chunk < chunks_of(&at.s); chunk++)
        merge_chunk(job, &at, chunk, total, state_at(states + chunk * job->stride, at.groups * at.rows));
    write_out(job, &at, total);
}

/* q, o [tokens, heads, width]; k, v [pages, page_size, kv_heads, width], `few`: as kv_fp8.py says; table [rows,
 * table_width]. */
API int fengine_attention(const float *q, const void *k, const void *v, float *o, const int32_t *q_start,
                          const int32_t *kv_len, const int32_t *table, int64_t tokens, int64_t rows, int64_t heads,
                          int64_t kv_heads, int64_t width, int64_t page_size, int64_t table_width, int64_t window,
                          int causal, float scale, float cap, const float *sinks, const int32_t *last, int few,
                          int threads) {
    int failed = 0;
    int64_t reach = causal ? 0 : window ? window - 1 : INT32_MAX;
    attention_job job = {q, k, v, o, table, NULL, NULL, heads, kv_heads, width, (width + 15) & ~15, page_size,
                         table_width, 1, 0, 0, scale, cap, window, reach, last, sinks, few, &failed};
    int64_t live = rows ? q_start[rows] : 0, share = heads / kv_heads, work = 0, count = 0;
    int64_t longest = share >= SPAN_ROWS ? 1 : SPAN_ROWS / share;
    memset(o + live * heads * width, 0, (size_t)((tokens - live) * heads * width) * 4);
    if (live == 0)
        return 0;
    int64_t most_spans = live < rows + live / longest ? live : rows + live / longest;
    span *spans = (span *)scratch_floats(most_spans * (int64_t)(sizeof(span) / sizeof(float)), &failed);
    if (failed)
        return failed;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = q_start[r]; t < q_start[r + 1]; t += longest) {
            int64_t n = q_start[r + 1] - t < longest ? q_start[r + 1] - t : longest;
            int64_t position = kv_len[r] - (q_start[r + 1] - t);
            span found = {(int32_t)r, (int32_t)t, (int32_t)n, (int32_t)position, kv_len[r]};
            int64_t seen = last_key(&job, &found, n - 1) + 1;
            found.seen = seen = seen < kv_len[r] ? seen : kv_len[r];
            spans[count++] = found;
            work += n * heads * (seen - first_key(&job, position)) * width;
            job.chunks = chunks_of(&spans[count - 1]) > job.chunks ? chunks_of(&spans[count - 1]) : job.chunks;
        }
    job.spans = spans;
    threads = work < 1 << 17 ? 1 : threads;
    int64_t most = 0; /* tokens of the largest span */
    for (int64_t i = 0; i < count; i++)
        most = spans[i].tokens > most ? spans[i].tokens : most;
    /* All kv heads of a slot lie together: few queries read them best in one task, if there are tasks enough. */
    while (job.groups_per_task < kv_heads && most * share * job.groups_per_task * 2 <= SPAN_ROWS &&
           (threads == 1 || count * kv_heads >= 8 * threads * job.groups_per_task))
        job.groups_per_task *= 2;
    int64_t patches = count * ((kv_heads + job.groups_per_task - 1) / job.groups_per_task);
    if (job.chunks > 1 && patches < 2 * threads) {
        job.stride = state_floats(&job, most * share * job.groups_per_task);
        job.partials = scratch_floats(patches * job.chunks * job.stride, &failed);
        if (!failed)
            run_tasks(attention_task, &job, patches * job.chunks, threads);
        if (!failed)
            run_tasks(merge_task, &job, patches, 1);
        free(job.partials);
    } else {
        run_tasks(attention_task, &job, patches, threads);
    }
    free(spans);
    return failed;
}
