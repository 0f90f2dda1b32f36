/* Loops of solvers over the columns of a weight, for rows side by side: rows are independent (passes/solvers).
 *
 * Matrices are stored by column of the weight: [columns, rows]. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define ROWS 32 /* at a time: two vectors */
#define PANEL 32 /* columns that are chosen one by one before the next are updated */
#define TILE 8 /* columns that an earlier column is taken off at a time: their sums stay in registers */

typedef float vector __attribute__((vector_size(64), aligned(4)));

static inline float within(float value, float low, float high) {
    value = value < low ? low : value; /* NaN stays NaN */
    return value > high ? high : value;
}

/* Takes off `aim` [PANEL, ROWS] what the errors [columns, ROWS] of all earlier columns cost. */
static void take_off(long columns, long wide, long width, const float *restrict unit, const float *restrict errors,
                     float *restrict aim) {
    for (long tile = 0; tile < wide; tile += TILE) {
        vector sums[TILE][ROWS / 16];
        memcpy(sums, aim + tile * ROWS, sizeof sums);
        for (long column = 0; column < columns; column++) {
            const float *weights = unit + column * width + tile;
            for (int part = 0; part < ROWS / 16; part++) {
                const vector error = *(const vector *)(errors + column * ROWS + 16 * part);
                for (int one = 0; one < TILE; one++) sums[one][part] -= weights[one] * error;
            }
        }
        memcpy(aim + tile * ROWS, sums, sizeof sums);
    }
}

/* Rounds each column to its grid, after those before it: what they miss moves its aim. 1 without memory.
 *
 * `unit` [columns, width] is M_ij / M_jj, with zeros up to a multiple of TILE columns, and `costs` [columns] are the
 * pivots, both in `order` [columns]. A `group` of columns has a row of the tables [groups, rows]; `cost` is [rows]. */
API int quantkit_choose(long columns, long rows, long width, long group, const float *restrict unit,
                        const long *restrict order, const float *restrict costs,
                        const float *restrict scale, const float *restrict inverse,
                        const float *restrict low, const float *restrict high, const float *restrict wanted,
                        float *restrict codes, float *restrict errors, float *restrict cost) {
    float *missed = malloc((size_t)(columns + PANEL) * ROWS * sizeof(float));
    if (!missed) return 1;
    for (long first = 0; first < rows; first += ROWS) {
        const long count = rows - first < ROWS ? rows - first : ROWS;
        float total[ROWS] = {0};
        for (long start = 0; start < columns; start += PANEL) {
            const long wide = columns - start < PANEL ? columns - start : PANEL;
            float aim[PANEL][ROWS] = {{0}};
            for (long column = 0; column < wide; column++)
                memcpy(aim[column], wanted + order[start + column] * rows + first, (size_t)count * sizeof(float));
            take_off(start, wide, width, unit + start, missed, aim[0]);
            for (long column = 0; column < wide; column++) {
                const long at = start + column, own = order[at] * rows + first;
                const long table = order[at] / group * rows + first;
                float *off = missed + at * ROWS;
                memset(off, 0, ROWS * sizeof(float));
                for (long row = 0; row < count; row++) {
                    const float step = rintf(aim[column][row] * inverse[table + row]);
                    codes[own + row] = within(step, low[table + row], high[table + row]);
                    const float value = codes[own + row] * scale[table + row];
                    off[row] = errors[own + row] = value - wanted[own + row];
                    total[row] += costs[at] * (value - aim[column][row]) * (value - aim[column][row]);
                }
                for (long later = column + 1; later < wide; later++) {
                    const float weight = unit[at * width + start + later];
                    for (int row = 0; row < ROWS; row++) aim[later][row] -= weight * off[row];
                }
            }
        }
        memcpy(cost + first, total, (size_t)count * sizeof(float));
    }
    free(missed);
    return 0;
}

/* Rounds a scale as it is stored: bounded, then `even` bits of its mantissa are rounded away, ties to even, then `half`
 * bits, ties up. */
static inline float kept(float scale, const float *bounds, long even, long half) {
    union { float value; unsigned bits; } word = {within(scale, bounds[0], bounds[1])};
    if (even) word.bits = (word.bits + ((1u << (even - 1)) - 1) + ((word.bits >> even) & 1)) & (~0u << even);
    if (half) word.bits = (word.bits + (1u << (half - 1))) & (~0u << half);
    return word.value;
}

/* Scale and zero point of grids over a share of what lies between `bottom` and `top`: `IntegerFormat.parameters`, bit by
 * bit, so nothing here is fused or reordered. */
__attribute__((noinline, optimize("fp-contract=off", "no-associative-math")))
static void span(const float *bottom, const float *top, float share, const float *bounds, long symmetric, long even,
                 long half, float *scale, float *zero) {
#ifdef __clang__
#pragma clang fp contract(off) reassociate(off)
#endif
    const float low = bounds[2], high = bounds[3];
    for (int row = 0; row < ROWS; row++) {
        const float least = bottom[row] * share, most = top[row] * share;
        if (symmetric) {
            scale[row] = kept((-least > most ? -least : most) / (high + 0.5f), bounds, even, half);
            zero[row] = 0;
        } else {
            scale[row] = kept((most - least) / (high - low), bounds, even, half);
            zero[row] = within(rintf(low - least / scale[row]), low, high);
        }
    }
}

/* Finds the best of some grids for each group of `length` columns of a row. They span shares of the smallest to the
 * largest weight; then the scale that is best for the codes is tried, a few times. The cost is the squared errors times
 * `costs` [columns].
 *
 * `weights` [columns, rows], each column times its factor in `factors` [columns]; `bounds`: smallest and largest scale,
 * first and last code; bits to round off as in `kept`; `scale`, `zero` and `cost` [groups, rows]. 1 without memory. */
API int quantkit_ranges(long groups, long length, long rows, long tries, long refinements, long symmetric, long even,
                        long half, const float *restrict weights, const float *restrict factors,
                        const float *restrict costs, const float *restrict shares, const float *restrict bounds,
                        float *restrict scale, float *restrict zero, float *restrict cost) {
    float(*tile)[ROWS] = calloc((size_t)length, sizeof *tile);
    if (!tile) return 1;
    for (long group = 0; group < groups; group++) {
        const float *own = weights + group * length * rows, *dear = costs + group * length;
        const float *times = factors + group * length;
        for (long first = 0; first < rows; first += ROWS) {
            const long count = rows - first < ROWS ? rows - first : ROWS;
            float bottom[ROWS] = {0}, top[ROWS] = {0}, spoilt[ROWS] = {0};
            for (long column = 0; column < length; column++) {
                for (long row = 0; row < count; row++)
                    tile[column][row] = own[column * rows + first + row] * times[column];
                for (int row = 0; row < ROWS; row++) {
                    bottom[row] = tile[column][row] < bottom[row] ? tile[column][row] : bottom[row];
                    top[row] = tile[column][row] > top[row] ? tile[column][row] : top[row];
                    spoilt[row] += tile[column][row] * 0; /* NaN stays NaN */
                }
            }
            for (int row = 0; row < ROWS; row++) bottom[row] += spoilt[row], top[row] += spoilt[row];
            float least[ROWS], best[ROWS], shift[ROWS], fitted[ROWS]; /* of the best grid so far */
            for (long one = 0; one < tries + refinements; one++) {
                float width[ROWS], zeros[ROWS], missed[ROWS] = {0}, along[ROWS] = {0}, bent[ROWS] = {0};
                if (one < tries) span(bottom, top, shares[one], bounds, symmetric, even, half, width, zeros);
                for (int row = 0; one >= tries && row < ROWS; row++) { /* a group of zeros keeps its scale */
                    const float wide = isfinite(fitted[row]) && fitted[row] > 0 ? fitted[row] : best[row];
                    width[row] = kept(wide, bounds, even, half), zeros[row] = shift[row];
                }
                float inverse[ROWS], low[ROWS], high[ROWS];
                for (int row = 0; row < ROWS; row++)
                    inverse[row] = 1 / width[row], low[row] = bounds[2] - zeros[row], high[row] = bounds[3] - zeros[row];
                for (long column = 0; column < length; column++)
                    for (int row = 0; row < ROWS; row++) {
                        const float exact = tile[column][row] * inverse[row];
                        const float unit = rintf(within(exact, low[row], high[row]));
                        const float off = unit - exact;
                        missed[row] += dear[column] * off * off;
                        along[row] += dear[column] * unit * tile[column][row];
                        bent[row] += dear[column] * unit * unit;
                    }
                for (int row = 0; row < ROWS; row++) {
                    const float paid = missed[row] * width[row] * width[row];
                    if (one && !(paid < least[row])) continue;
                    least[row] = paid, best[row] = width[row], shift[row] = zeros[row];
                    fitted[row] = along[row] / bent[row];
                }
            }
            for (long row = 0; row < count; row++) {
                const long at = group * rows + first + row;
                scale[at] = best[row], zero[at] = shift[row], cost[at] = least[row];
            }
        }
    }
    free(tile);
    return 0;
}

/* Chooses codes of weights [rows, columns] as `quantkit_choose` does, on grids as of `quantkit_ranges`, for some rows at a
 * time, which are turned.
 *
 * `dear` [columns] are the costs of the search, in the order of the weights. Writes `codes` [rows, columns] and `scales`
 * and `zeros` [rows, groups]. 1 without memory. */
API int quantkit_solve(long columns, long rows, long width, long group, long tries, long refinements, long symmetric,
                       long even, long half, const float *restrict weights, const float *restrict unit,
                       const long *restrict order, const float *restrict costs, const float *restrict dear,
                       const float *restrict shares, const float *restrict bounds, signed char *restrict codes,
                       float *restrict scales, float *restrict zeros, float *restrict cost) {
    const long groups = columns / group, matrix = columns * ROWS, table = groups * ROWS;
    float *turned = malloc((size_t)(3 * matrix + 6 * table + columns) * sizeof(float));
    if (!turned) return 1;
    float *values = turned + matrix, *errors = values + matrix, *scale = errors + matrix, *zero = scale + table;
    float *inverse = zero + table, *low = inverse + table, *high = low + table, *paid = high + table;
    float *ones = paid + table, total[ROWS];
    int failed = 0;
    for (long column = 0; column < columns; column++) ones[column] = 1;
    for (long first = 0; first < rows && !failed; first += ROWS) {
        const long count = rows - first < ROWS ? rows - first : ROWS;
        for (long column = 0; column < columns; column++)
            for (long row = 0; row < ROWS; row++)
                turned[column * ROWS + row] = row < count ? weights[(first + row) * columns + column] : 0;
        failed = quantkit_ranges(groups, group, ROWS, tries, refinements, symmetric, even, half, turned, ones, dear,
                                 shares, bounds, scale, zero, paid);
        for (long at = 0; at < table; at++)
            inverse[at] = 1 / scale[at], low[at] = bounds[2] - zero[at], high[at] = bounds[3] - zero[at];
        failed |= quantkit_choose(columns, ROWS, width, group, unit, order, costs, scale, inverse, low, high, turned,
                                  values, errors, total);
        for (long row = 0; row < count; row++) {
            for (long at = 0; at < groups; at++) {
                scales[(first + row) * groups + at] = scale[at * ROWS + row];
                zeros[(first + row) * groups + at] = zero[at * ROWS + row];
            }
            for (long column = 0; column < columns; column++) {
                const float code = values[column * ROWS + row] + zero[column / group * ROWS + row];
                codes[(first + row) * columns + column] = (signed char)(code == code ? code : 0);
            }
            cost[first + row] = total[row];
        }
    }
    free(turned);
    return failed;
}

/* Moves each column to the best place on its grid; its change moves the wishes of the later columns of the block.
 * The block is in one group: `scale`, `inverse`, `low` and `high` are [rows]. */
API int quantkit_descend(long length, long rows, const float *restrict inside, const float *restrict scale,
                         const float *restrict inverse, const float *restrict low, const float *restrict high,
                         const float *restrict target, float *restrict wish, float *restrict codes,
                         float *restrict errors) {
    for (long first = 0; first < rows; first += ROWS) {
        const long count = rows - first < ROWS ? rows - first : ROWS;
        for (long column = 0; column < length; column++) {
            const long own = column * rows + first;
            float moved[ROWS];
            for (long row = 0; row < count; row++) {
                const float free = target[own + row] + errors[own + row] - wish[own + row];
                const float unit = rintf(free * inverse[first + row]);
                codes[own + row] = within(unit, low[first + row], high[first + row]);
                const float error = codes[own + row] * scale[first + row] - target[own + row];
                moved[row] = error - errors[own + row];
                errors[own + row] = error;
            }
            for (long later = column + 1; later < length; later++) {
                const float weight = inside[column * length + later];
                float *pulled = wish + later * rows + first;
                for (long row = 0; row < count; row++) pulled[row] += weight * moved[row];
            }
        }
    }
    return 0;
}
