#include "attention.h"

#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#define INLINE static inline __attribute__((always_inline))
/* queries that share one read of keys and values */
#define QUERIES 8
#define LANES 16

typedef float Vector __attribute__((vector_size(64), aligned(4)));

INLINE Vector load(const float *from) {
    Vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store(float *to, Vector value) { memcpy(to, &value, sizeof value); }

size_t attention_across(const Attention *a) { return (size_t)(a->batch * a->heads * a->tokens * a->size); }

size_t attention_room(const Attention *a) {
    return attention_across(a) + (size_t)(attention_tiles(a) * a->size * LANES);
}

int64_t attention_rows(const Attention *a) { return a->batch * a->tokens; }

/* Rotate one head of one token: its first `turned` features, in two halves. */
static void turn(const Attention *a, const float *from, float *to, int64_t position, float by) {
    const int64_t half = a->cos ? a->turned / 2 : 0;
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        float left = from[i] * by, right = from[half + i] * by;
        to[i] = left * cos[i] - right * sin[i];
        to[half + i] = right * cos[i] + left * sin[i];
    }
    for (int64_t i = 2 * half; i < a->size; i++) to[i] = from[i] * by;
}

void attention_turn(const Attention *a, int64_t row) {
    const int64_t b = row / a->tokens, s = row % a->tokens, size = a->size, at = a->past + s;
    for (int64_t h = 0; h < a->heads; h++)
        turn(a, a->q + (size_t)row * a->q_stride + h * size, a->queries + ((b * a->heads + h) * a->tokens + s) * size, at,
             a->scale);
    for (int64_t h = 0; h < a->kv_heads; h++) {
        const size_t from = (size_t)row * a->kv_stride + (size_t)(h * size);
        const size_t to = (size_t)(((b * a->kv_heads + h) * a->capacity + at) * size);
        turn(a, a->k + from, a->keys + to, at, 1);
        memcpy(a->values + to, a->v + from, (size_t)size * sizeof(float));
    }
}

/* Tiles with the keys of 16 tokens side by side; none for few queries. */
static int64_t tiles_of(const Attention *a) { return a->tokens < QUERIES ? 0 : (a->past + a->tokens + LANES - 1) / LANES; }

int64_t attention_tiles(const Attention *a) { return a->batch * a->kv_heads * tiles_of(a); }

void attention_tile(const Attention *a, int64_t tile) {
    const int64_t tiles = tiles_of(a), first = tile % tiles * LANES, all = a->past + a->tokens, size = a->size;
    const float *from = a->keys + (tile / tiles * a->capacity + first) * size;
    float *to = a->across + tile * size * LANES;
    const int64_t here = all - first < LANES ? all - first : LANES;
    for (int64_t i = 0; i < size; i++)
        for (int64_t t = 0; t < LANES; t++) to[i * LANES + t] = t < here ? from[t * size + i] : 0;
}

static int64_t blocks_of(const Attention *a) { return (a->tokens + QUERIES - 1) / QUERIES; }

int64_t attention_parts(const Attention *a) { return a->batch * a->heads * blocks_of(a); }

/* Compute the scores [count, stride] of `count` queries (a constant) with keys begin … end - 1. */
INLINE void scores_of(const int count, const Attention *a, const float *q, const float *across, int64_t begin,
                      int64_t end, float *scores, size_t stride) {
    for (int64_t t = begin / LANES * LANES; t < end; t += LANES) {
        const float *tile = across + t * a->size;
        Vector sum[QUERIES] = {{0}};
        for (int64_t i = 0; i < a->size; i++) {
            const Vector keys = load(tile + i * LANES);
            for (int m = 0; m < count; m++) sum[m] += keys * q[m * a->size + i];
        }
        for (int m = 0; m < count; m++) store(scores + (size_t)m * stride + t, sum[m]);
    }
}

/* The same for one query, straight from the cache. */
static void scores_of_one(const Attention *a, const float *q, const float *keys, int64_t begin, int64_t end,
                          float *scores) {
    for (int64_t t = begin; t < end; t++) {
        const float *key = keys + t * a->size;
        Vector sum = {0};
        for (int64_t i = 0; i < a->size; i += LANES) sum += load(q + i) * load(key + i);
        float total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        scores[t] = total;
    }
}

/* Find the largest value lane by lane: compilers do not vectorise a maximum that keeps NaN. */
static float largest(const float *from, int64_t count) {
    float most[LANES];
    for (int i = 0; i < LANES; i++) most[i] = -INFINITY;
    int64_t t = 0;
    for (; t + LANES <= count; t += LANES)
        for (int i = 0; i < LANES; i++) most[i] = from[t + i] > most[i] ? from[t + i] : most[i];
    for (; t < count; t++) most[0] = from[t] > most[0] ? from[t] : most[0];
    for (int i = 1; i < LANES; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    return most[0];
}

/* Add the bias to the scores and replace them by e^(score - largest) / sum; keys that the query does not see get 0. */
static void weigh(float *scores, const float *bias, int64_t from, int64_t begin, int64_t end, int64_t to) {
    if (bias)
        for (int64_t t = begin; t < end; t++) scores[t] += bias[t];
    const float most = largest(scores + begin, end - begin);
    float sum = 0;
    for (int64_t t = begin; t < end; t++) {
        scores[t] = exponential(scores[t] - most);
        sum += scores[t];
    }
    const float by = 1 / sum;
    for (int64_t t = begin; t < end; t++) scores[t] *= by;
    for (int64_t t = from; t < begin; t++) scores[t] = 0;
    for (int64_t t = end; t < to; t++) scores[t] = 0;
}

/* out[m] = sum over t of weights[m, t] · values[t], for up to 64 features at once. */
INLINE void mixed(const int count, const int vectors, const Attention *a, const float *weights, size_t stride,
                  const float *values, int64_t begin, int64_t end, float *out, size_t out_stride) {
    Vector sum[QUERIES][4];
    for (int m = 0; m < count; m++)
        for (int i = 0; i < vectors; i++) sum[m][i] = (Vector){0};
    for (int64_t t = begin; t < end; t++) {
        Vector value[4];
        for (int i = 0; i < vectors; i++) value[i] = load(values + t * a->size + i * LANES);
        for (int m = 0; m < count; m++) {
            const float weight = weights[(size_t)m * stride + (size_t)t];
            for (int i = 0; i < vectors; i++) sum[m][i] += value[i] * weight;
        }
    }
    for (int m = 0; m < count; m++)
        for (int i = 0; i < vectors; i++) store(out + (size_t)m * out_stride + i * LANES, sum[m][i]);
}

INLINE void mix(const int count, const Attention *a, const float *weights, size_t stride, const float *values,
                int64_t begin, int64_t end, float *out, size_t out_stride) {
    int64_t i = 0;
    for (; i + 2 * LANES <= a->size; i += 2 * LANES)
        mixed(count, 2, a, weights, stride, values + i, begin, end, out + i, out_stride);
    for (; i < a->size; i += LANES) mixed(count, 1, a, weights, stride, values + i, begin, end, out + i, out_stride);
}

int attention_part(const Attention *a, int64_t part) {
    const int64_t blocks = blocks_of(a), head = part / blocks % a->heads, b = part / blocks / a->heads;
    const int64_t s = part % blocks * QUERIES, size = a->size, all = a->past + a->tokens;
    const int64_t count = a->tokens - s < QUERIES ? a->tokens - s : QUERIES;
    const int64_t cache = b * a->kv_heads + head / (a->heads / a->kv_heads);
    /* rows that are a multiple of 4096 bytes apart would share a set of the cache */
    const int64_t wide = (all + LANES - 1) / LANES * LANES + LANES;
    const float *q = a->queries + ((b * a->heads + head) * a->tokens + s) * size;
    const float *keys = a->keys + cache * a->capacity * size, *values = a->values + cache * a->capacity * size;
    const float *across = a->across + cache * tiles_of(a) * size * LANES;
    float *out = a->out + ((b * a->tokens + s) * a->heads + head) * size;
    const size_t out_stride = (size_t)(a->heads * size);
    float *scores = malloc((size_t)(count * wide) * sizeof(float));
    if (!scores) return -1;
    /* keys that the first and the last query see */
    const int64_t first = a->past + s, end = first + count;
    const int64_t begin = a->window && first + 1 > a->window ? first + 1 - a->window : 0;
    if (tiles_of(a) && count == QUERIES)
        scores_of(QUERIES, a, q, across, begin, end, scores, (size_t)wide);
    else
        for (int64_t m = 0; m < count; m++)
            scores_of_one(a, q + m * size, keys, begin, first + m + 1, scores + m * wide);
    for (int64_t m = 0; m < count; m++) {
        const int64_t last = first + m + 1, from = a->window && last > a->window ? last - a->window : 0;
        const float *bias = a->bias ? a->bias + (size_t)b * a->bias_stride + (size_t)((s + m) * all) : NULL;
        weigh(scores + m * wide, bias, begin, from, last, end);
    }
    if (count == QUERIES)
        mix(QUERIES, a, scores, (size_t)wide, values, begin, end, out, out_stride);
    else
        for (int64_t m = 0; m < count; m++)
            mix(1, a, scores + m * wide, 0, values, begin, first + m + 1, out + (size_t)m * out_stride, 0);
    free(scores);
    return 0;
}
