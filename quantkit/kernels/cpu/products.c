#include "products.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

static uint16_t half_of(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

int64_t pairs(const Weight *w) { return w->tiles / 2; }

int weight_pack(Weight *w, int64_t rows, int64_t columns, int64_t group, const uint8_t *codes, const float *scales,
                const uint8_t *zeros) {
    int64_t groups = (columns + group - 1) / group, tiles = (rows + 2 * TILE - 1) / (2 * TILE) * 2;
    int narrow = 1;
    for (int64_t i = 0; i < rows * groups; i++) narrow &= (float)(_Float16)scales[i] == scales[i];
    size_t head = narrow ? 64 : 128, record = head + (size_t)group * TILE / 2;
    uint8_t *bytes = aligned_alloc(64, (size_t)(tiles * groups) * record);
    if (!bytes) return -1;
    memset(bytes, 0, (size_t)(tiles * groups) * record);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = bytes + (size_t)((row / (2 * TILE) * groups + g) * 2 + row / TILE % 2) * record;
            int64_t lane = row % TILE;
            float scale = scales[row * groups + g];
            if (narrow)
                ((uint16_t *)to)[lane] = half_of(scale);
            else
                ((float *)to)[lane] = scale;
            uint8_t zero = 8;
            if (zeros) zero = zeros[row * ((groups + 1) / 2) + g / 2] >> (g % 2 * 4) & 15;
            to[(narrow ? 32 : 64) + lane] = zero;
            const uint8_t *from = codes + (row * groups + g) * (group / 2);
            for (int64_t k = 0; k < group; k++) {
                uint8_t code = from[k / 2] >> (k % 2 * 4) & 15;
                to[head + (size_t)(k / 8 * 64 + lane * 4 + k % 4)] |= (uint8_t)(code << (k % 8 / 4 * 4));
            }
        }
    *w = (Weight){rows, columns, group, groups, tiles, head, record, narrow, bytes};
    return 0;
}

void weight_free(Weight *w) {
    free(w->bytes);
    w->bytes = NULL;
}

int inputs_make(Inputs *in, int64_t rows, const Weight *w) {
    int64_t columns = w->groups * w->group;
    size_t codes = ((size_t)(rows * columns) + 63) & ~(size_t)63, floats = (size_t)(rows * w->groups) * 4;
    uint8_t *room = aligned_alloc(64, (codes + 2 * floats + 63) & ~(size_t)63);
    if (!room) return -1;
    *in = (Inputs){rows, columns, w->groups, (int8_t *)room, (float *)(room + codes), (float *)(room + codes + floats), 0};
    return 0;
}

void inputs_free(Inputs *in) { free(in->codes); }

void inputs_round(Inputs *in, int64_t row, int64_t g, int64_t here, int64_t group, const float *restrict x) {
    int8_t *restrict codes = in->codes + row * in->columns + g * group;
    /* as integers, magnitudes keep the order of the floats, and NaN is the largest */
    int32_t most = 0;
    for (int64_t k = 0; k < here; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float top;
    memcpy(&top, &most, 4);
    const float inverse = top < 1e-30f ? 0 : 127 / top;
    int32_t sum = 0;
    if (top <= FLT_MAX)
        for (int64_t k = 0; k < here; k++) {
            int32_t code = (int32_t)rintf(x[k] * inverse);
            codes[k] = (int8_t)code;
            sum += code;
        }
    else {
        for (int64_t k = 0; k < here; k++) {
            codes[k] = (int8_t)(isinf(x[k]) ? (x[k] > 0 ? 1 : -1) : 0);
            sum += codes[k];
        }
        __atomic_store_n(&in->infinite, 1, __ATOMIC_RELAXED); /* other threads round other rows meanwhile */
    }
    for (int64_t k = here; k < group; k++) codes[k] = 0;
    in->scales[row * in->groups + g] = top / 127;
    in->sums[row * in->groups + g] = (float)sum;
}

/* Write NaN where a group sums infinities of both signs, or multiplies an infinity by a weight of 0. */
static void cancel(const Weight *w, const Inputs *in, int64_t pair, int64_t row, int64_t end, float *out, size_t stride) {
    const int64_t left = w->rows - pair * 2 * TILE, here = left < 2 * TILE ? left : 2 * TILE;
    for (; row < end; row++, out += stride)
        for (int64_t g = 0; g < w->groups; g++) {
            const int8_t *codes = in->codes + row * in->columns + g * w->group;
            for (int64_t n = 0; n < here && isinf(in->scales[row * in->groups + g]); n++) {
                const uint8_t *at = w->bytes + (size_t)((pair * w->groups + g) * 2 + n / TILE) * w->record;
                const int zero = at[(w->narrow ? 32 : 64) + n % TILE];
                int signs = 0;
                for (int64_t k = 0; k < w->group; k++) {
                    const int code = at[w->head + (size_t)(k / 8 * 64 + n % TILE * 4 + k % 4)] >> (k % 8 / 4 * 4) & 15;
                    const int sign = codes[k] * (code - zero);
                    if (codes[k]) signs |= sign > 0 ? 1 : sign < 0 ? 2 : 3;
                }
                if (signs == 3) out[n] = NAN;
            }
        }
}

#if defined(__AVX512VNNI__)

/* bytes that a single row, which waits for memory, prefetches ahead of its product */
#define AHEAD 8192

/* Multiply `deep` rows of inputs (a constant once inlined) by two tiles; out [deep, 32], `left` of whose columns exist. */
INLINE void block(const int deep, const Weight *w, const Inputs *in, int64_t pair, int64_t row, float *out,
                  size_t stride, int64_t left) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 found[2][DEEP];
    for (int t = 0; t < 2; t++)
        for (int m = 0; m < deep; m++) found[t][m] = _mm512_setzero_ps();
    const int64_t chunks = w->group / 8;
    const uint8_t *from = w->bytes + (size_t)(pair * 2 * w->groups) * w->record;
    const int8_t *codes = in->codes + row * in->columns;
    const float *scales = in->scales + row * in->groups, *sums = in->sums + row * in->groups;
    for (int64_t g = 0; g < w->groups; g++, from += 2 * w->record, codes += w->group) {
        __m512i dot[2][DEEP];
        for (int t = 0; t < 2; t++)
            for (int m = 0; m < deep; m++) dot[t][m] = _mm512_setzero_si512();
        for (int64_t c = 0; c < chunks; c++) {
            __m512i first[2], second[2];
            for (int t = 0; t < 2; t++) {
                const uint8_t *at = from + t * w->record + w->head + 64 * c;
                /* with one row each byte is read once, so memory is the limit */
                if (deep == 1) _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                __m512i both = _mm512_load_si512(at);
                first[t] = _mm512_and_si512(both, low);
                second[t] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
            for (int m = 0; m < deep; m++) {
                const int8_t *at = codes + m * in->columns + 8 * c;
                __m512i a = _mm512_set1_epi32(*(const int32_t *)at), b = _mm512_set1_epi32(*(const int32_t *)(at + 4));
                for (int t = 0; t < 2; t++) {
                    dot[t][m] = _mm512_dpbusd_epi32(dot[t][m], first[t], a);
                    dot[t][m] = _mm512_dpbusd_epi32(dot[t][m], second[t], b);
                }
            }
        }
        for (int t = 0; t < 2; t++) {
            const uint8_t *head = from + t * w->record;
            __m512 scale = w->narrow ? _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)head)) : _mm512_load_ps(head);
            const uint8_t *zeros = head + (w->narrow ? 32 : 64);
            __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)zeros)));
            for (int m = 0; m < deep; m++) {
                __m512 sum = _mm512_set1_ps(sums[m * in->groups + g]), by = _mm512_set1_ps(scales[m * in->groups + g]);
                __m512 value = _mm512_fnmadd_ps(zero, sum, _mm512_cvtepi32_ps(dot[t][m]));
                found[t][m] = _mm512_fmadd_ps(value, _mm512_mul_ps(scale, by), found[t][m]);
            }
        }
    }
    for (int t = 0; t < 2; t++, left -= TILE) {
        __mmask16 mask = left >= TILE ? 0xffff : left <= 0 ? 0 : (__mmask16)((1 << left) - 1);
        for (int m = 0; m < deep; m++) _mm512_mask_storeu_ps(out + (size_t)m * stride + t * TILE, mask, found[t][m]);
    }
}

static void blocks(const Weight *w, const Inputs *in, int64_t pair, int64_t row, int64_t end, float *out, size_t stride) {
    const int64_t left = w->rows - pair * 2 * TILE;
    for (; row + 8 <= end; row += 8, out += 8 * stride) block(8, w, in, pair, row, out, stride, left);
    for (; row + 4 <= end; row += 4, out += 4 * stride) block(4, w, in, pair, row, out, stride, left);
    for (; row + 2 <= end; row += 2, out += 2 * stride) block(2, w, in, pair, row, out, stride, left);
    for (; row < end; row++, out += stride) block(1, w, in, pair, row, out, stride, left);
}
#else
#define LANES 8

/* Any other processor: correct, but slow. */

/* Multiply `deep` rows of inputs by half a tile, 8 rows of the weight; out [deep, 8], `left` of whose columns exist. */
INLINE void block(const int deep, const Weight *w, const Inputs *in, int64_t pair, int part, int64_t row, float *out,
                  size_t stride, int64_t left) {
    float found[2][LANES] = {{0}};
    const uint8_t *from = w->bytes + (size_t)(pair * 2 * w->groups + part / 2) * w->record;
    const size_t lane = (size_t)(part % 2) * LANES;
    const int8_t *codes = in->codes + row * in->columns;
    for (int64_t g = 0; g < w->groups; g++, from += 2 * w->record, codes += w->group) {
        int32_t dot[2][LANES];
        const uint8_t *at = from + w->head + 4 * lane;
        memset(dot, 0, sizeof dot);
        for (int64_t c = 0; c < w->group / 8; c++)
            for (int m = 0; m < deep; m++)
                for (int r = 0; r < LANES; r++)
                    for (int i = 0; i < 4; i++) {
                        const int8_t *x = codes + m * in->columns + 8 * c + i;
                        uint8_t both = at[64 * c + 4 * r + i];
                        dot[m][r] += (both & 15) * x[0] + (both >> 4) * x[4];
                    }
        for (int m = 0; m < deep; m++) {
            const float by = in->scales[(row + m) * in->groups + g], sum_of = in->sums[(row + m) * in->groups + g];
            for (int r = 0; r < LANES; r++) {
                float scale;
                if (w->narrow) {
                    _Float16 half;
                    memcpy(&half, from + 2 * (lane + (size_t)r), 2);
                    scale = (float)half;
                } else
                    memcpy(&scale, from + 4 * (lane + (size_t)r), 4);
                const float zero = from[(w->narrow ? 32 : 64) + lane + (size_t)r];
                found[m][r] += ((float)dot[m][r] - zero * sum_of) * (scale * by);
            }
        }
    }
    for (int m = 0; m < deep; m++)
        for (int r = 0; r < LANES && r < left; r++) out[(size_t)m * stride + (size_t)r] = found[m][r];
}

static void blocks(const Weight *w, const Inputs *in, int64_t pair, int64_t row, int64_t end, float *out, size_t stride) {
    const int64_t left = w->rows - pair * 2 * TILE;
    for (; row < end; row += 2, out += 2 * stride)
        for (int part = 0; part < 4; part++) {
            if (row + 2 <= end)
                block(2, w, in, pair, part, row, out + part * LANES, stride, left - part * LANES);
            else
                block(1, w, in, pair, part, row, out + part * LANES, stride, left - part * LANES);
        }
}
#endif

void multiply(const Weight *w, const Inputs *in, int64_t pair, int64_t row, int64_t end, float *out, size_t stride) {
    blocks(w, in, pair, row, end, out, stride);
    if (in->infinite) cancel(w, in, pair, row, end, out, stride);
}
