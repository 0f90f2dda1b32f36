/* Causal attention of new tokens over a cache, with rotary embedding, in float32. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* q, k, v of the new tokens: [batch, tokens, heads or kv_heads, size], `*_stride` floats from token to token. keys,
 * values: caches [batch, kv_heads, capacity, size] that hold `past` tokens. cos, sin: [positions, turned / 2] or NULL.
 * bias: [batch or 1, 1, tokens, past + tokens], added to the scores, or NULL. out: [batch, tokens, heads, size]. */
typedef struct {
    int64_t batch, tokens, past, capacity, heads, kv_heads, size, turned, window; /* window: keys a query sees, 0: all */
    size_t q_stride, kv_stride, bias_stride; /* bias_stride: floats from sequence to sequence */
    float scale;
    const float *q, *k, *v, *cos, *sin, *bias;
    float *keys, *values, *out;
    float *queries, *across; /* scratch: rotated queries [batch, heads, tokens, size]; keys in tiles of 16 */
} Attention;

/* Floats of scratch for `queries` and `across` together; `across` begins at float `attention_across`. */
size_t attention_room(const Attention *);
size_t attention_across(const Attention *);
/* Three steps in order. Each has a number of independent parts, which threads may run in any order. */
int64_t attention_rows(const Attention *);
void attention_turn(const Attention *, int64_t row);
int64_t attention_tiles(const Attention *);
void attention_tile(const Attention *, int64_t tile);
int64_t attention_parts(const Attention *);
int attention_part(const Attention *, int64_t part); /* -1: out of memory */
