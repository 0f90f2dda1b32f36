/* Products with weights of 4 bits, whose inputs are rounded to 8 bits block by block. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* rows of a weight that lie side by side: the lanes of 512 bits */
#define TILE 16
/* rows of the input that share what was read of a weight */
#define DEEP 8
/* the largest group */
#define WIDEST 256

/* A weight [rows, columns] as the kernels read it: one stream. Of two tiles of 16 rows, of each group of columns, of each
 * tile: a head of 64 bytes (16 scales as float16, 16 zero points as bytes) or of 128 (scales as float32), then its codes:
 * 64 bytes for 8 columns, byte 4 r + i holding row r's columns i and, in its high half, 4 + i. */
typedef struct {
    int64_t rows, columns, group, groups, tiles;
    size_t head, record; /* bytes of one, and of one with its codes */
    int narrow;          /* scales are float16 */
    uint8_t *bytes;
} Weight;

/* Rows of inputs [rows, columns], rounded: codes, and of each group its scale and the sum of its codes. */
typedef struct {
    int64_t rows, columns, groups; /* columns: those of whole groups */
    int8_t *codes;
    float *scales, *sums;
    int infinite; /* whether some group has an infinite scale */
} Inputs;

/* codes [rows, groups, group / 2], the lower half of a byte first; scales [rows, groups]; zeros [rows, ceil(groups / 2)],
 * NULL: 8. 0, or -1 where memory is short. */
int weight_pack(Weight *, int64_t rows, int64_t columns, int64_t group, const uint8_t *codes, const float *scales,
                const uint8_t *zeros);
void weight_free(Weight *);

int inputs_make(Inputs *, int64_t rows, const Weight *);
void inputs_free(Inputs *);
/* Round one group of a row, of which `here` of `group` columns are there: code = round(x / s), s = max |x| / 127. With
 * infinities among them, these are ±1, all else 0 and s infinite; with what is no number, s is none either. Products are
 * then those of floats: infinite where all that is infinite in a sum has one sign, else no number. */
void inputs_round(Inputs *, int64_t row, int64_t g, int64_t here, int64_t group, const float *x);

/* out[m - row, n - 32 pair] = inputs[m] · weight[n]ᵀ for rows `row` to `end` of the inputs, and two tiles of the weight. */
void multiply(const Weight *, const Inputs *, int64_t pair, int64_t row, int64_t end, float *out, size_t stride);
int64_t pairs(const Weight *);
