/* Sampling on the CPU: one row of logits to one token and its log-probability. The rules stand in sampling.py.
 *
 * Tree of the row's sum of exp(z - max): blocks of 4096 ids, in each four 16-lane chains and vf_sum; blocks are added
 * left to right in double. Masses for top-p (probability * 2^40) and counts for top-k are integers: exact in any order.
 */
#include "cpu_vector.h"

#define SUM_BLOCK 4096
#define NEAR 9.0f /* ids within this of the maximum usually hold all that top-k and top-p keep: look there first */

typedef struct {
    const float *logits, *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed;
    const int32_t *position;
    int32_t *token;
    float *logprob;
    int64_t vocab;
    int *failed; /* to tell that there was no memory */
} draw_job;

INLINE int any(vi mask) {
    union {
        vi v;
        uint64_t word[8];
    } u = {mask};
    return ((u.word[0] | u.word[1]) | (u.word[2] | u.word[3]) | (u.word[4] | u.word[5]) | (u.word[6] | u.word[7])) != 0;
}

/* -- Philox4x32-10 (Salmon et al. 2011), 16 counters at once ------------------------------------------------------- */

typedef uint64_t v64 __attribute__((vector_size(64)));

INLINE v64 multiply_low(v64 a, uint32_t factor) {
#if LANES == 16
    return (v64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif LANES == 8
    union {
        v64 v;
        __m256i half[2];
    } u = {a};
    u.half[0] = _mm256_mul_epu32(u.half[0], _mm256_set1_epi64x(factor));
    u.half[1] = _mm256_mul_epu32(u.half[1], _mm256_set1_epi64x(factor));
    return u.v;
#else
    return (a & 0xffffffffu) * (uint64_t)factor;
#endif
}

INLINE void multiply_wide(vu a, uint32_t factor, vu *high, vu *low) {
    v64 even = multiply_low((v64)a, factor), odd = multiply_low((v64)a >> 32, factor);
    *low = (vu)((even & 0xffffffffu) | (odd << 32));
    *high = (vu)((even >> 32) | (odd & ~(uint64_t)0xffffffffu));
}

/* First output word for key = seed and counter = (c0, c1, c2, c3). */
INLINE vu philox(vu c0, vu c1, vu c2, vu c3, uint64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        vu high0, low0, high1, low1;
        multiply_wide(c0, 0xD2511F53u, &high0, &low0);
        multiply_wide(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    return c0;
}

/* out[i] = first word for counters[4i .. 4i+3]; the published test vectors check it. */
API void fengine_philox(const uint32_t *counters, int64_t seed, uint32_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        vu c[4];
        for (int j = 0; j < 4; j++)
            c[j] = counters[4 * i + j] + (vu){0};
        out[i] = philox(c[0], c[1], c[2], c[3], (uint64_t)seed)[0];
    }
}

/* -- which ids are kept -------------------------------------------------------------------------------------------- */

/* Unsigned integers in the order of the floats (-0 was made +0 before). */
INLINE uint32_t order_of(float z) {
    int32_t bits;
    memcpy(&bits, &z, 4);
    return (uint32_t)(bits ^ ((bits >> 31) | INT32_MIN));
}

INLINE float float_of(uint32_t order) {
    uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
    float z;
    memcpy(&z, &bits, 4);
    return z;
}

/* The smallest z of which the ids with strictly larger z weigh less than `target`; -inf if all n weigh less.
 * An id weighs 1 where mass is 0, else round(p * mass). Radix select from the top: 11, 11 and 10 bits. */
static float lowest_kept(const float *z, const float *p, int64_t n, double mass, double target) {
    int64_t weight[2048], above = 0;
    uint32_t prefix = 0, known = 0;
    static const int shifts[3] = {21, 10, 0};
    for (int level = 0; level < 3; level++) {
        uint32_t last = level == 2 ? 1023 : 2047;
        memset(weight, 0, sizeof weight);
        for (int64_t i = 0; i < n; i++) {
            uint32_t order = order_of(z[i]);
            if ((order & known) == prefix)
                weight[order >> shifts[level] & last] += mass == 0.0 ? 1 : (int64_t)rint((double)p[i] * mass);
        }
        int64_t digit = last;
        while (digit >= 0 && (double)(above + weight[digit]) < target)
            above += weight[digit--];
        if (digit < 0)
            return -INFINITY;
        prefix |= (uint32_t)digit << shifts[level];
        known |= last << shifts[level];
    }
    return float_of(prefix);
}

/* z and p of the ids with z >= floor, packed; returns how many. */
static int64_t gather_near(const float *z, const float *p, int64_t padded, float floor, float *near_z, float *near_p) {
    int64_t n = 0;
    for (int64_t i = 0; i < padded; i += 16)
        if (any(vf_load(z + i) >= vf_set(floor)))
            for (int64_t j = i; j < i + 16; j++) {
                near_z[n] = z[j], near_p[n] = p[j];
                n += z[j] >= floor;
            }
    return n;
}

INLINE int by_count(const draw_job *job, int64_t row) {
    return job->top_k[row] < job->vocab;
}

INLINE int by_mass(const draw_job *job, int64_t row) {
    return job->top_p[row] < 1.0f;
}

/* Smallest z that top-k and top-p keep. total = sum of p; near_z and near_p are scratch for padded + 1 floats each. */
static float keep_floor(const draw_job *job, int64_t row, const float *z, const float *p, float top, double total,
                        float *near_z, float *near_p) {
    int64_t vocab = job->vocab, padded = (vocab + 15) & ~15;
    float floor = -INFINITY;
    if (!by_count(job, row) && !by_mass(job, row))
        return floor;
    int64_t near = gather_near(z, p, padded, top - NEAR, near_z, near_p);
    double mass = 0x1p40 / total, wanted = (double)job->top_p[row] * 0x1p40;
    if (by_count(job, row)) {
        floor = lowest_kept(near_z, near_p, near, 0.0, job->top_k[row]);
        floor = floor == -INFINITY ? lowest_kept(z, p, vocab, 0.0, job->top_k[row]) : floor;
    }
    if (by_mass(job, row)) {
        float found = lowest_kept(near_z, near_p, near, mass, wanted);
        found = found == -INFINITY ? lowest_kept(z, p, vocab, mass, wanted) : found;
        floor = found > floor ? found : floor;
    }
    return floor;
}

/* -- the row ------------------------------------------------------------------------------------------------------- */

/* z = logits / temperature, padded with -inf; returns the maximum, NaN if any is not finite. */
static float scale_row(const float *logits, float temperature, int64_t vocab, float *z) {
    vf top = vf_set(-INFINITY);
    vi bad = {0};
    for (int64_t i = 0; i < vocab; i += 16) {
        vf scaled = vf_load_upto(logits + i, vocab - i) / vf_set(temperature) + vf_set(0.0f);
        bad |= ((vi)scaled & 0x7f800000) == 0x7f800000;
        if (vocab - i < 16)
            for (int64_t j = vocab - i; j < 16; j++)
                scaled[j] = -INFINITY;
        vf_store(z + i, scaled);
        top = vf_max(scaled, top);
    }
    return any(bad) ? NAN : vf_peak(top);
}

/* Sum of exp(z - top); p, if given, takes the terms. */
static double exp_row(const float *z, float top, int64_t padded, float *p) {
    double total = 0.0;
    for (int64_t begin = 0; begin < padded; begin += SUM_BLOCK) {
        int64_t end = begin + SUM_BLOCK < padded ? begin + SUM_BLOCK : padded;
        vf acc[4] = {{0}};
        for (int64_t i = begin; i < end; i += 16) {
            vf e = vf_exp(vf_load(z + i) - vf_set(top));
            acc[i / 16 % 4] += e;
            if (p)
                vf_store(p + i, e);
        }
        total += vf_sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    }
    return total;
}

static int64_t first_equal(const float *z, float value, int64_t padded) {
    for (int64_t i = 0; i < padded; i += 16)
        if (any(vf_load(z + i) == vf_set(value)))
            for (int64_t j = i; j < i + 16; j++)
                if (z[j] == value)
                    return j;
    return 0;
}

/* The id with the largest z + gumbel among z >= floor and p >= min_p, lowest id on a tie.
 *
 * An id can only win if u <= -log1p(-u) < exp(z - best) = p * exp(top - best): most ids are passed over by that bound
 * (taken one part in a thousand too wide, for rounding), many before their noise is drawn; the few others are scored
 * in double. best starts at what the id with p = 1 reaches at least: -log(-log1p(-u)) > -3.2 for every u. */
static int64_t noisy_best(const draw_job *job, int64_t row, const float *z, const float *p, float top, float floor) {
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, zero = {0};
    int64_t padded = (job->vocab + 15) & ~15, winner = 0;
    double best = -INFINITY;
    float reach = 25.0f; /* exp(top - best), rounded up */
    for (int64_t i = 0; i < padded; i += 16) {
        vf limit = vf_load(p + i) * vf_set(reach);
        vi kept = (vf_load(z + i) >= vf_set(floor)) & (vf_load(p + i) >= vf_set(job->min_p[row]));
        if (!any(kept & (limit >= vf_set(0x1p-33f))))
            continue;
        vu x = philox((uint32_t)i + lane, (uint32_t)job->position[row] + zero, zero, zero, (uint64_t)job->seed[row]);
        vf u = (__builtin_convertvector(x, vf) + vf_set(0.5f)) * vf_set(0x1p-32f);
        vi able = kept & (u <= limit);
        if (!any(able))
            continue;
        for (int j = 0; j < 16; j++) {
            double score = able[j] ? z[i + j] - log(-log1p(-((double)x[j] + 0.5) * 0x1p-32)) : -INFINITY;
            if (score > best) {
                best = score, winner = i + j;
                float wider = (float)(exp(top - best) * 1.001);
                reach = wider < reach ? wider : reach;
            }
        }
    }
    return winner;
}

static void draw_task(const void *context, int64_t row) {
    const draw_job *job = context;
    int64_t padded = (job->vocab + 15) & ~15;
    int greedy = job->top_k[row] == 1, filtered = by_count(job, row) || by_mass(job, row);
    /* One allocation: malloc gives back to the system what several would leave on top of the heap, call after call. */
    float *z = scratch_floats((greedy ? 1 : filtered ? 4 : 2) * (padded + 16), job->failed);
    if (!z)
        return;
    float *p = greedy ? NULL : z + padded + 16;
    float top = scale_row(job->logits + row * job->vocab, job->temperature[row], job->vocab, z);
    job->token[row] = 0;
    job->logprob[row] = NAN;
    if (top == top) {
        double total = exp_row(z, top, padded, p);
        int64_t token = greedy ? first_equal(z, top, padded)
                               : noisy_best(job, row, z, p, top, keep_floor(job, row, z, p, top, total, p + padded + 16,
                                                                              p + 2 * (padded + 16)));
        job->token[row] = (int32_t)token;
        job->logprob[row] = (float)((double)z[token] - top - log(total));
    }
    free(z);
}

API int fengine_draw(const float *logits, const float *temperature, const int32_t *top_k, const float *top_p,
                     const float *min_p, const int64_t *seed, const int32_t *position, int32_t *token, float *logprob,
                     int64_t rows, int64_t vocab, int threads) {
    int failed = 0;
    draw_job job = {logits, temperature, top_k, top_p, min_p, seed, position, token, logprob, vocab, &failed};
    run_tasks(draw_task, &job, rows, threads);
    return failed;
}

/* -- logprobs of given ids, the likeliest ids, edits and masks: rules in logprobs.py, edit_logits.py ------------------- */

typedef struct {
    const float *logits, *temperature;
    const int32_t *id;
    float *logprob;
    int64_t vocab, count;
    int *failed;
} logprob_job;

static void logprob_task(const void *context, int64_t row) {
    const logprob_job *job = context;
    int64_t padded = (job->vocab + 15) & ~15;
    const int32_t *id = job->id + row * job->count;
    float *out = job->logprob + row * job->count, *z = scratch_floats(padded + 16, job->failed);
    if (!z)
        return;
    float top = scale_row(job->logits + row * job->vocab, job->temperature[row], job->vocab, z);
    double log_total = top == top ? log(exp_row(z, top, padded, NULL)) : NAN;
    for (int64_t k = 0; k < job->count; k++) {
        int banned = job->logits[row * job->vocab + id[k]] <= -1e30f;
        out[k] = top != top ? NAN : banned ? -INFINITY : (float)((double)z[id[k]] - top - log_total);
    }
    free(z);
}

API int fengine_logprobs(const float *logits, const float *temperature, const int32_t *id, float *logprob,
                         int64_t rows, int64_t vocab, int64_t count, int threads) {
    int failed = 0;
    logprob_job job = {logits, temperature, id, logprob, vocab, count, &failed};
    run_tasks(logprob_task, &job, rows, threads);
    return failed;
}

typedef struct {
    const float *logits;
    int32_t *id;
    int64_t vocab, count;
    int *failed;
} top_job;

/* Keeps the best so far in order; an id that only equals the last of them comes too late. */
static void top_task(const void *context, int64_t row) {
    const top_job *job = context;
    const float *z = job->logits + row * job->vocab;
    int32_t *id = job->id + row * job->count;
    float *best = scratch_floats(job->count, job->failed);
    if (!best)
        return;
    for (int64_t k = 0; k < job->count; k++)
        best[k] = -INFINITY, id[k] = 0;
    for (int64_t i = 0; i < job->vocab; i += 16) {
        int64_t n = job->vocab - i < 16 ? job->vocab - i : 16;
        if (n == 16 && !any(vf_load(z + i) > vf_set(best[job->count - 1])))
            continue;
        for (int64_t j = i; j < i + n; j++) {
            int64_t k = job->count;
            for (; k > 0 && z[j] > best[k - 1]; k--)
                if (k < job->count)
                    best[k] = best[k - 1], id[k] = id[k - 1];
            if (k < job->count)
                best[k] = z[j], id[k] = (int32_t)j;
        }
    }
    free(best);
}

API int fengine_top_ids(const float *logits, int32_t *id, int64_t rows, int64_t vocab, int64_t count, int threads) {
    int failed = 0;
    top_job job = {logits, id, vocab, count, &failed};
    run_tasks(top_task, &job, count ? rows : 0, threads);
    return failed;
}

static float clamped(float y, float ban) {
    return y < -ban ? -ban : y > ban ? ban : y;
}

API void fengine_penalize(float *logits, const int32_t *slot, const double *frequency, const double *presence,
                          const float *repetition, const int32_t *count, int64_t rows, int64_t vocab, float ban) {
    for (int64_t row = 0; row < rows; row++) {
        if (slot[row] < 0)
            continue;
        float *x = logits + row * vocab, scale = repetition[row];
        const int32_t *drawn = count + slot[row] * vocab;
        for (int64_t v = 0; v < vocab; v += 16) {
            int64_t end = v + 16 < vocab ? v + 16 : vocab;
            int32_t seen = 0;
            for (int64_t i = v; i < end; i++)
                seen |= drawn[i];
            for (int64_t i = v; seen && i < end; i++) {
                float y = x[i] - (float)(drawn[i] * frequency[row] + presence[row]);
                if (drawn[i] && isfinite(x[i]))
                    x[i] = clamped(y < 0.0f ? y * scale : y / scale, ban);
            }
        }
    }
}

API void fengine_add_at(float *logits, const int32_t *slot, const int32_t *id, const float *value, int64_t rows,
                        int64_t vocab, int64_t count, float ban) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = slot[row] * count; slot[row] >= 0 && k < (slot[row] + 1) * count; k++) {
            float *x = logits + row * vocab + id[k];
            if (id[k] >= 0 && isfinite(*x) && *x > -ban)
                *x = clamped(*x + value[k], ban);
        }
}

API void fengine_count(int32_t *count, const int32_t *slot, const int32_t *token, int64_t rows, int64_t vocab) {
    for (int64_t row = 0; row < rows; row++)
        if (slot[row] >= 0)
            count[slot[row] * vocab + token[row]]++;
}

API void fengine_apply_bitmask(float *logits, const int32_t *row, const int32_t *mask, int64_t rows, int64_t vocab,
                               float ban) {
    int64_t words = (vocab + 31) / 32;
    for (int64_t k = 0; k < rows; k++) {
        float *x = logits + row[k] * vocab;
        if (row[k] < 0)
            continue;
        for (int64_t w = 0; w < words; w++) {
            uint32_t allowed = (uint32_t)mask[k * words + w];
            int64_t count = vocab - 32 * w < 32 ? vocab - 32 * w : 32;
            if (allowed != UINT32_MAX)
                for (int64_t i = 0; i < count; i++)
                    x[32 * w + i] = allowed >> i & 1 || !isfinite(x[32 * w + i]) ? x[32 * w + i] : -ban;
        }
    }
}

/* -- the edges of a step: edges.py ----------------------------------------------------------------------------------- */

API void fengine_feed(const int32_t *token, const int32_t *last, const int32_t *index, const uint8_t *from, int32_t *out,
                      int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        out[t] = from[t] ? last[index[t]] : token[t];
}

API void fengine_take(const float *x, const int32_t *index, float *out, int64_t rows, int64_t d) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(out + row * d, x + index[row] * d, (size_t)d * 4);
}
