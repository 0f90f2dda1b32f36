/* Products of 4-bit weights and inputs that are rounded to 8 bits group by group. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* rows of a weight side by side: the float32 lanes of 512 bits */
#define TILE 16
/* rows of the input that share one read of the weight */
#define DEEP 8
/* largest group */
#define WIDEST 256

/* A weight [rows, columns] as one stream of records, in the order: pair of tiles of 16 rows, group of columns, tile of the
 * pair. A record is a head and codes. The head has 64 bytes (16 scales in float16, 16 zero points in bytes) or 128 (scales
 * in float32). 8 columns of codes have 64 bytes: byte 4 r + i holds row r's column i, and column 4 + i in its high half. */
typedef struct {
    int64_t rows, columns, group, groups, tiles;
    size_t head, record; /* bytes of a head, and of a whole record */
    int narrow;          /* 1 if scales are float16 */
    uint8_t *bytes;
} Weight;

/* Rounded inputs [rows, columns]: codes, and for each group a scale and the sum of its codes. */
typedef struct {
    int64_t rows, columns, groups; /* columns: a whole number of groups */
    int8_t *codes;
    float *scales, *sums;
    int infinite; /* 1 if any group has an infinite scale */
} Inputs;

/* Pack codes [rows, groups, group / 2], the lower half of a byte first, scales [rows, groups], and zeros
 * [rows, ceil(groups / 2)] (NULL: all 8). Returns 0, or -1 if memory is short. */
int weight_pack(Weight *, int64_t rows, int64_t columns, int64_t group, const uint8_t *codes, const float *scales,
                const uint8_t *zeros);
void weight_free(Weight *);

int inputs_make(Inputs *, int64_t rows, const Weight *);
void inputs_free(Inputs *);
/* Round one group of a row, `here` of whose `group` columns exist: code = round(x / s), s = max |x| / 127. If the group has
 * infinities, their codes are ±1, all others 0, and s is infinite; a NaN makes s NaN. Products are then those of floats:
 * infinite if all infinite terms of a sum have one sign, else NaN. */
void inputs_round(Inputs *, int64_t row, int64_t g, int64_t here, int64_t group, const float *x);

/* out[m - row, n - 32 pair] = inputs[m] · weight[n]ᵀ for input rows `row` … `end` - 1 and a pair of tiles. */
void multiply(const Weight *, const Inputs *, int64_t pair, int64_t row, int64_t end, float *out, size_t stride);
int64_t pairs(const Weight *);
