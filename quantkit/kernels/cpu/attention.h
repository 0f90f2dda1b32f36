/* Causal attention of new tokens over a cache, with rotary embedding, in float32. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* new queries, keys and values [batch, tokens, heads or kv_heads, size], `*_stride` floats from token to token; caches
 * [batch, kv_heads, capacity, size], whose first `past` tokens are there; cos, sin [positions, turned / 2] or NULL; bias
 * [batch or 1, 1, tokens, past + tokens], added to scores, or NULL; out [batch, tokens, heads, size]. */
typedef struct {
    int64_t batch, tokens, past, capacity, heads, kv_heads, size, turned, window; /* window: keys seen, 0 for all */
    size_t q_stride, kv_stride, bias_stride; /* bias_stride: from sequence to sequence */
    float scale;
    const float *q, *k, *v, *cos, *sin, *bias;
    float *keys, *values, *out;
    float *queries, *across; /* room: queries turned [batch, heads, tokens, size], keys in tiles of 16 */
} Attention;

/* Floats of room that `queries` and `across` need together; `across` begins at `attention_across`. */
size_t attention_room(const Attention *);
size_t attention_across(const Attention *);
/* Three steps, each of so many independent parts. */
int64_t attention_rows(const Attention *);
void attention_turn(const Attention *, int64_t row);
int64_t attention_tiles(const Attention *);
void attention_tile(const Attention *, int64_t tile);
int64_t attention_parts(const Attention *);
int attention_part(const Attention *, int64_t part); /* -1 where memory is short */
