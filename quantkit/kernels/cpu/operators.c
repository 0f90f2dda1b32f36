/* Custom operators for ONNX Runtime, in domain `quantkit`:
 *
 *   Product    y = (x + skip, normed by gamma) · wᵀ + bias
 *   GatedMlp   y = (activation(n · gateᵀ) * (n · upᵀ)) · downᵀ        n = (x + skip, normed by gamma)
 *   Attention  com.microsoft GroupQueryAttention for sequences of equal length; see attention.h
 *
 * skip, gamma and bias are optional; the second output is x + skip. Weights, scales and zero points have the layout of
 * com.microsoft MatMulNBits, and are repacked when a session opens. */
#include "attention.h"
#include "exponential.h"
#include "ort.h"
#include "products.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CALL(api, type, place) ((type)(api)->functions[place])
#define GUARD(call)                       \
    do {                                  \
        OrtStatus *failed = (call);       \
        if (failed) return failed;        \
    } while (0)

typedef OrtStatus *(*Status)(int, const char *);
typedef OrtStatus *(*GetInput)(const OrtContext *, size_t, const OrtValue **);
typedef OrtStatus *(*GetOutput)(OrtContext *, size_t, const int64_t *, size_t, OrtValue **);
typedef OrtStatus *(*GetData)(const OrtValue *, void **);
typedef OrtStatus *(*GetShape)(const OrtValue *, OrtShape **);
typedef OrtStatus *(*GetCount)(const OrtShape *, size_t *);
typedef OrtStatus *(*GetSizes)(const OrtShape *, int64_t *, size_t);
typedef void (*Release)(OrtShape *);
typedef OrtStatus *(*GetInt)(const OrtInfo *, const char *, int64_t *);
typedef OrtStatus *(*GetFloat)(const OrtInfo *, const char *, float *);
typedef OrtStatus *(*GetConstant)(const OrtInfo *, size_t, int *, const OrtValue **);
typedef OrtStatus *(*Parallel)(const OrtContext *, void (*)(void *, size_t), size_t, size_t, void *);

#define MOST_DIMENSIONS 8
/* limits of rows and columns, and of heads and their features: their products fit into 64 bits */
#define MOST_ROWS INT32_MAX
#define MOST_HEADS 65536
#define STRIP 32 /* rows to activate before the next are multiplied */
enum { SILU, GELU };
enum { X, SKIP, GAMMA, BIAS, WEIGHTS };

typedef struct {
    const OrtApi *api;
    int gated;
    int64_t activation; /* SILU or GELU (by tanh) */
    float epsilon;
    Weight first, second;
} Kernel;

typedef struct {
    const Kernel *kernel;
    const Weight *weight;
    Inputs *inputs;
    int64_t columns;
    const float *x, *skip, *gamma, *bias;
    float *sum, *out;
} Work;

static OrtStatus *fail(const OrtApi *api, const char *why) { return CALL(api, Status, CREATE_STATUS)(1, why); }

static OrtStatus *data_of(const OrtApi *api, const OrtValue *value, void **data) {
    return CALL(api, GetData, TENSOR_DATA)(value, data);
}

static OrtStatus *count_of(const OrtApi *api, const OrtValue *value, int64_t *count) {
    OrtShape *shape = NULL;
    GUARD(CALL(api, GetShape, TYPE_AND_SHAPE)(value, &shape));
    size_t found = 0;
    OrtStatus *status = CALL(api, GetCount, ELEMENTS)(shape, &found);
    CALL(api, Release, RELEASE_SHAPE)(shape);
    *count = (int64_t)found;
    return status;
}

/* Return the buffer of an output; NULL if the graph does not read it. */
static OrtStatus *output_of(const OrtApi *api, OrtContext *context, size_t at, const int64_t *sizes, size_t count,
                            void **data) {
    OrtValue *made = NULL;
    GUARD(CALL(api, GetOutput, OUTPUT)(context, at, sizes, count, &made));
    return made ? data_of(api, made, data) : NULL;
}

/* Make a weight from three constant inputs, the third optional. A file's attributes may be wrong, so check them. */
static OrtStatus *weight_of(const OrtApi *api, const OrtInfo *info, size_t at, const char *names[3], Weight *weight) {
    int64_t sizes[3];
    for (int i = 0; i < 3; i++) GUARD(CALL(api, GetInt, ATTRIBUTE_INT)(info, names[i], &sizes[i]));
    const int64_t rows = sizes[0], columns = sizes[1], group = sizes[2];
    if (rows < 1 || rows > MOST_ROWS || columns < 1 || columns > MOST_ROWS || group < 16 || group > WIDEST ||
        group & (group - 1))
        return fail(api, "a quantkit operator needs positive sizes of its weight, and groups of 16, 32, 64, 128 or 256");
    const int64_t groups = (columns + group - 1) / group;
    const int64_t counts[] = {rows * groups * (group / 2), rows * groups, rows * ((groups + 1) / 2)};
    void *parts[3] = {NULL, NULL, NULL};
    for (size_t i = 0; i < 3; i++) {
        const OrtValue *value = NULL;
        int constant = 0;
        OrtStatus *missing = CALL(api, GetConstant, CONSTANT_INPUT)(info, at + i, &constant, &value);
        if (missing) {
            if (i < 2) return missing;
            CALL(api, void (*)(OrtStatus *), RELEASE_STATUS)(missing);
        } else if (constant && value) {
            int64_t count = 0;
            GUARD(count_of(api, value, &count));
            if (count != counts[i]) return fail(api, "the tensors of a quantkit operator's weight do not have the size of its attributes");
            GUARD(data_of(api, value, &parts[i]));
        }
    }
    if (!parts[0] || !parts[1]) return fail(api, "the weight of a quantkit operator is not constant");
    if (weight_pack(weight, rows, columns, group, parts[0], parts[1], parts[2]))
        return fail(api, "no memory for a weight");
    return NULL;
}

static void destroy(void *given) {
    Kernel *kernel = given;
    weight_free(&kernel->first);
    weight_free(&kernel->second);
    free(kernel);
}

static OrtStatus *create(const OrtApi *api, const OrtInfo *info, int gated, void **made) {
    Kernel *kernel = calloc(1, sizeof(Kernel));
    if (!kernel) return fail(api, "no memory");
    kernel->api = api;
    kernel->gated = gated;
    const char *first[] = {"rows", "columns", "group"}, *second[] = {"rows_after", "columns_after", "group_after"};
    OrtStatus *status = CALL(api, GetFloat, ATTRIBUTE_FLOAT)(info, "epsilon", &kernel->epsilon);
    if (!status) status = weight_of(api, info, WEIGHTS, first, &kernel->first);
    if (!status && gated) status = weight_of(api, info, WEIGHTS + 3, second, &kernel->second);
    if (!status && gated) status = CALL(api, GetInt, ATTRIBUTE_INT)(info, "activation", &kernel->activation);
    const int64_t hidden = kernel->first.rows / 2;
    if (!status && gated && (hidden * 2 != kernel->first.rows || hidden % (2 * TILE) || hidden != kernel->second.columns))
        status = fail(api, "gate, up and down of a GatedMlp have sizes that do not match");
    if (!status && gated && kernel->activation != SILU && kernel->activation != GELU)
        status = fail(api, "the activation of a GatedMlp is neither SiLU nor GELU");
    if (status) {
        destroy(kernel);
        return status;
    }
    *made = kernel;
    return NULL;
}

static OrtStatus *create_product(const OrtCustomOp *op, const OrtApi *api, const OrtInfo *info, void **made) {
    (void)op;
    return create(api, info, 0, made);
}

static OrtStatus *create_gated(const OrtCustomOp *op, const OrtApi *api, const OrtInfo *info, void **made) {
    (void)op;
    return create(api, info, 1, made);
}

/* Add, norm and round one row. */
static void prepare(void *given, size_t row) {
    const Work *work = given;
    const int64_t columns = work->columns, group = work->weight->group;
    const float *x = work->x + (int64_t)row * columns;
    const float *skip = work->skip ? work->skip + (int64_t)row * columns : NULL;
    if (work->sum) {
        float *sum = work->sum + (int64_t)row * columns;
        for (int64_t k = 0; k < columns; k++) sum[k] = skip ? x[k] + skip[k] : x[k];
        x = sum;
        skip = NULL;
    }
    float by = 1;
    if (work->gamma) {
        float squares = 0;
        for (int64_t k = 0; k < columns; k++) {
            float value = skip ? x[k] + skip[k] : x[k];
            squares += value * value;
        }
        by = 1 / sqrtf(squares / (float)columns + work->kernel->epsilon);
    }
    for (int64_t g = 0; g < work->inputs->groups; g++) {
        const int64_t at = g * group, here = columns - at < group ? columns - at : group;
        const float *part = x + at;
        float room[WIDEST];
        if (skip || work->gamma) {
            for (int64_t k = 0; k < here; k++) room[k] = skip ? part[k] + skip[at + k] : part[k];
            if (work->gamma)
                for (int64_t k = 0; k < here; k++) room[k] = room[k] * by * work->gamma[at + k];
            part = room;
        }
        inputs_round(work->inputs, (int64_t)row, g, here, group, part);
    }
}

static void product(void *given, size_t pair) {
    const Work *work = given;
    const Weight *weight = work->weight;
    multiply(weight, work->inputs, (int64_t)pair, 0, work->inputs->rows, work->out + pair * 2 * TILE, (size_t)weight->rows);
    if (!work->bias) return;
    int64_t from = (int64_t)pair * 2 * TILE, to = from + 2 * TILE < weight->rows ? from + 2 * TILE : weight->rows;
    for (int64_t m = 0; m < work->inputs->rows; m++)
        for (int64_t n = from; n < to; n++) work->out[m * weight->rows + n] += work->bias[n];
}

/* Multiply by gate and up, rows 0 … H - 1 and H … 2 H - 1 of the first weight; out [rows, H]. */
static void gated(void *given, size_t part) {
    const Work *work = given;
    const Weight *weight = work->weight;
    const int64_t half = weight->rows / 2, rows = work->inputs->rows;
    float gate[STRIP * 2 * TILE], up[STRIP * 2 * TILE];
    for (int64_t row = 0; row < rows; row += STRIP) {
        const int64_t end = row + STRIP < rows ? row + STRIP : rows;
        multiply(weight, work->inputs, (int64_t)part, row, end, gate, 2 * TILE);
        multiply(weight, work->inputs, (int64_t)part + half / (2 * TILE), row, end, up, 2 * TILE);
        const int64_t count = (end - row) * 2 * TILE;
        if (work->kernel->activation == SILU)
            for (int64_t i = 0; i < count; i++) gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
        else
            for (int64_t i = 0; i < count; i++) {
                float inner = 1.5957691216f * (gate[i] + 0.044715f * gate[i] * gate[i] * gate[i]);
                gate[i] = gate[i] / (1 + exponential(-inner)) * up[i];
            }
        for (int64_t m = row; m < end; m++)
            memcpy(work->out + m * half + (int64_t)part * 2 * TILE, gate + (m - row) * 2 * TILE, 2 * TILE * sizeof(float));
    }
}

static OrtStatus *run(const Work *work, const OrtContext *context, void (*step)(void *, size_t), int64_t count) {
    if (count == 1) {
        step((void *)work, 0);
        return NULL;
    }
    return CALL(work->kernel->api, Parallel, PARALLEL_FOR)(context, step, (size_t)count, 0, (void *)work);
}

static OrtStatus *compute(void *given, OrtContext *context) {
    const Kernel *kernel = given;
    const OrtApi *api = kernel->api;
    void *inputs[4] = {NULL, NULL, NULL, NULL};
    int64_t counts[4] = {0, 0, 0, 0};
    int64_t sizes[MOST_DIMENSIONS];
    size_t count = 0;
    for (size_t i = 0; i < 4; i++) {
        const OrtValue *value = NULL;
        GUARD(CALL(api, GetInput, INPUT)(context, i, &value));
        if (!value) continue;
        GUARD(data_of(api, value, &inputs[i]));
        GUARD(count_of(api, value, &counts[i]));
        if (i) continue;
        OrtShape *shape = NULL;
        GUARD(CALL(api, GetShape, TYPE_AND_SHAPE)(value, &shape));
        OrtStatus *status = CALL(api, GetCount, DIMENSIONS_COUNT)(shape, &count);
        if (!status && count <= MOST_DIMENSIONS) status = CALL(api, GetSizes, DIMENSIONS)(shape, sizes, count);
        CALL(api, Release, RELEASE_SHAPE)(shape);
        if (status) return status;
    }
    if (count == 0 || count > MOST_DIMENSIONS) return fail(api, "inputs of a quantkit operator have 1 to 8 dimensions");
    const int64_t columns = sizes[count - 1];
    if (columns != kernel->first.columns) return fail(api, "inputs and weight differ in their columns");
    const Weight *last = kernel->gated ? &kernel->second : &kernel->first;
    if ((inputs[SKIP] && counts[SKIP] != counts[X]) || (inputs[GAMMA] && counts[GAMMA] != columns) ||
        (inputs[BIAS] && counts[BIAS] != last->rows))
        return fail(api, "skip, gamma or bias of a quantkit operator does not match its inputs or its weight");
    const int64_t rows = counts[X] / columns;
    if (rows > MOST_ROWS) return fail(api, "inputs of a quantkit operator have too many rows: 2^31 or more");
    void *sum = NULL, *out = NULL;
    GUARD(output_of(api, context, 1, sizes, count, &sum));
    sizes[count - 1] = last->rows;
    GUARD(output_of(api, context, 0, sizes, count, &out));
    if (!rows) return NULL;
    if (!out) return fail(api, "a quantkit operator lacks an output");

    Inputs rounded, inner;
    if (inputs_make(&rounded, rows, &kernel->first)) return fail(api, "no memory for rounded inputs");
    Work work = {kernel, &kernel->first, &rounded, columns, inputs[X], inputs[SKIP], inputs[GAMMA], inputs[BIAS], sum,
                 out};
    OrtStatus *status = run(&work, context, prepare, rows);
    if (!kernel->gated) {
        if (!status) status = run(&work, context, product, pairs(&kernel->first));
        inputs_free(&rounded);
        return status;
    }
    const int64_t both = kernel->first.rows;
    float *hidden = malloc((size_t)(rows * both / 2) * sizeof(float));
    if (!hidden || inputs_make(&inner, rows, &kernel->second)) {
        free(hidden);
        inputs_free(&rounded);
        return status ? status : fail(api, "no memory for a hidden layer");
    }
    work.out = hidden;
    if (!status) status = run(&work, context, gated, both / 2 / (2 * TILE));
    Work after = {kernel, &kernel->second, &inner, both / 2, hidden, NULL, NULL, inputs[BIAS], NULL, out};
    if (!status) status = run(&after, context, prepare, rows);
    if (!status) status = run(&after, context, product, pairs(&kernel->second));
    inputs_free(&inner);
    free(hidden);
    inputs_free(&rounded);
    return status;
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

enum { Q, K, V, PAST_KEYS, PAST_VALUES, TOTAL, COS, SIN, SCORE_BIAS, ATTENTION_INPUTS };

typedef struct {
    const OrtApi *api;
    int64_t heads, kv_heads, window;
    float scale;
} AttentionKernel;

static OrtStatus *create_attention(const OrtCustomOp *op, const OrtApi *api, const OrtInfo *info, void **made) {
    (void)op;
    AttentionKernel found = {.api = api};
    GUARD(CALL(api, GetInt, ATTRIBUTE_INT)(info, "heads", &found.heads));
    GUARD(CALL(api, GetInt, ATTRIBUTE_INT)(info, "kv_heads", &found.kv_heads));
    GUARD(CALL(api, GetInt, ATTRIBUTE_INT)(info, "window", &found.window));
    GUARD(CALL(api, GetFloat, ATTRIBUTE_FLOAT)(info, "scale", &found.scale));
    if (found.kv_heads < 1 || found.heads > MOST_HEADS || found.heads < found.kv_heads || found.heads % found.kv_heads)
        return fail(api, "the heads of an Attention are not a multiple of its key heads");
    if (found.window < 0 || found.window > INT32_MAX || !isfinite(found.scale))
        return fail(api, "the window or the scale of an Attention is out of range");
    AttentionKernel *kernel = malloc(sizeof found);
    if (!kernel) return fail(api, "no memory");
    *kernel = found;
    *made = kernel;
    return NULL;
}

typedef struct {
    const Attention *attention;
    int failed;
} AttentionWork;

static void turn_row(void *given, size_t row) { attention_turn(((AttentionWork *)given)->attention, (int64_t)row); }
static void turn_tile(void *given, size_t tile) { attention_tile(((AttentionWork *)given)->attention, (int64_t)tile); }
static void attend(void *given, size_t part) {
    AttentionWork *work = given;
    if (attention_part(work->attention, (int64_t)part)) work->failed = 1;
}

static OrtStatus *each(const OrtApi *api, const OrtContext *context, void (*step)(void *, size_t), int64_t count,
                       AttentionWork *work) {
    if (count == 0) return NULL;
    if (count == 1) {
        step(work, 0);
        return NULL;
    }
    return CALL(api, Parallel, PARALLEL_FOR)(context, step, (size_t)count, 0, work);
}

static OrtStatus *shape_of(const OrtApi *api, const OrtValue *value, size_t dimensions, int64_t *sizes) {
    OrtShape *shape = NULL;
    size_t count = 0;
    GUARD(CALL(api, GetShape, TYPE_AND_SHAPE)(value, &shape));
    OrtStatus *status = CALL(api, GetCount, DIMENSIONS_COUNT)(shape, &count);
    if (!status && count != dimensions) status = fail(api, "an input of an Attention has a wrong number of dimensions");
    if (!status) status = CALL(api, GetSizes, DIMENSIONS)(shape, sizes, count);
    CALL(api, Release, RELEASE_SHAPE)(shape);
    return status;
}

static OrtStatus *compute_attention(void *given, OrtContext *context) {
    const AttentionKernel *kernel = given;
    const OrtApi *api = kernel->api;
    const OrtValue *values[ATTENTION_INPUTS] = {NULL};
    void *data[ATTENTION_INPUTS] = {NULL};
    for (size_t i = 0; i < ATTENTION_INPUTS; i++) {
        GUARD(CALL(api, GetInput, INPUT)(context, i, &values[i]));
        if (values[i]) GUARD(data_of(api, values[i], &data[i]));
    }
    int64_t q[3], k[3], v[3], cache[4], other[4], table[2] = {0, 0}, sines[2] = {0, 0}, bias[4] = {1, 1, 0, 0};
    if (!values[Q] || !values[PAST_KEYS] || !values[PAST_VALUES] || !values[TOTAL] || !values[K] != !values[V] ||
        !values[COS] != !values[SIN])
        return fail(api, "an Attention lacks an input");
    int64_t ones = 0;
    GUARD(count_of(api, values[TOTAL], &ones));
    GUARD(shape_of(api, values[Q], 3, q));
    GUARD(shape_of(api, values[PAST_KEYS], 4, cache));
    GUARD(shape_of(api, values[PAST_VALUES], 4, other));
    if (values[COS]) {
        GUARD(shape_of(api, values[COS], 2, table));
        GUARD(shape_of(api, values[SIN], 2, sines));
    }
    if (values[K]) {
        GUARD(shape_of(api, values[K], 3, k));
        GUARD(shape_of(api, values[V], 3, v));
    }
    if (values[SCORE_BIAS]) GUARD(shape_of(api, values[SCORE_BIAS], 4, bias));
    if (ones != 1) return fail(api, "the length of an Attention is not one number for all sequences");
    const int64_t size = cache[3], total = *(const int32_t *)data[TOTAL], packed = !values[K];
    /* check before any product */
    if (size < 16 || size > MOST_HEADS || size % 16 || q[0] > MOST_ROWS)
        return fail(api, "an Attention needs heads of a multiple of 16 features");
    const int64_t narrow = kernel->kv_heads * size;
    const int64_t width = (kernel->heads + (packed ? 2 * kernel->kv_heads : 0)) * size;
    if (q[2] != width || cache[1] != kernel->kv_heads || total < q[1] || cache[0] != q[0] ||
        (values[COS] && table[0] < total) || table[1] > size / 2 || memcmp(table, sines, sizeof table) ||
        memcmp(cache, other, sizeof cache) || (values[SCORE_BIAS] && ((bias[0] != 1 && bias[0] != q[0]) || bias[1] != 1)) ||
        (!packed && (k[0] != q[0] || k[1] != q[1] || k[2] != narrow || memcmp(k, v, sizeof k))) ||
        cache[2] < total - q[1] ||
        (values[SCORE_BIAS] && (bias[2] != q[1] || bias[3] != total)))
        return fail(api, "inputs of an Attention have sizes that do not match");
    const int64_t held = cache[2], capacity = held > total ? held : total;
    int64_t sizes[] = {q[0], kernel->kv_heads, capacity, size}, wide[] = {q[0], q[1], kernel->heads * size};
    void *out = NULL, *keys = NULL, *stored = NULL;
    GUARD(output_of(api, context, 0, wide, 3, &out));
    GUARD(output_of(api, context, 1, sizes, 4, &keys));
    GUARD(output_of(api, context, 2, sizes, 4, &stored));
    if (!q[0]) return NULL;
    /* an empty tensor has no buffer */
    if ((q[1] && !out) || (capacity && (!keys || !stored))) return fail(api, "an Attention lacks an output");
    const int64_t past = total - q[1];
    /* copy the cache if the output is not in place */
    for (int which = 0; which < 2; which++) {
        const float *from = data[which ? PAST_VALUES : PAST_KEYS];
        float *to = which ? stored : keys;
        const size_t bytes = (size_t)(held * size) * sizeof(float);
        for (int64_t i = 0; bytes && from != to && i < q[0] * kernel->kv_heads; i++)
            memmove(to + i * capacity * size, from + i * held * size, bytes);
    }
    if (!q[1]) return NULL;
    const float *query = data[Q];
    Attention attention = {
        .batch = q[0], .tokens = q[1], .past = past, .capacity = capacity, .heads = kernel->heads,
        .kv_heads = kernel->kv_heads, .size = size, .turned = 2 * table[1], .window = kernel->window,
        .q_stride = (size_t)width, .kv_stride = (size_t)(packed ? width : kernel->kv_heads * size),
        .bias_stride = bias[0] > 1 ? (size_t)(q[1] * total) : 0, .scale = kernel->scale, .q = query,
        .k = packed ? query + kernel->heads * size : data[K],
        .v = packed ? query + (kernel->heads + kernel->kv_heads) * size : data[V], .cos = data[COS], .sin = data[SIN],
        .bias = data[SCORE_BIAS], .keys = keys, .values = stored, .out = out,
    };
    float *room = malloc(attention_room(&attention) * sizeof(float));
    if (!room) return fail(api, "no memory for attention");
    attention.queries = room;
    attention.across = room + attention_across(&attention);
    AttentionWork work = {&attention, 0};
    OrtStatus *status = each(api, context, turn_row, attention_rows(&attention), &work);
    if (!status) status = each(api, context, turn_tile, attention_tiles(&attention), &work);
    if (!status) status = each(api, context, attend, attention_parts(&attention), &work);
    free(room);
    if (!status && work.failed) status = fail(api, "no memory for the scores of attention");
    return status;
}

static const char *attention_name(const OrtCustomOp *op) { (void)op; return "Attention"; }
static size_t attention_inputs(const OrtCustomOp *op) { (void)op; return ATTENTION_INPUTS; }
static size_t three(const OrtCustomOp *op) { (void)op; return 3; }
/* ONNX type 6 is INT32, 1 is FLOAT */
static int attention_input_type(const OrtCustomOp *op, size_t i) { (void)op; return i == TOTAL ? 6 : 1; }
static int attention_input_kind(const OrtCustomOp *op, size_t i) {
    (void)op;
    return i == K || i == V || i == COS || i == SIN || i == SCORE_BIAS;
}
static int none_optional(const OrtCustomOp *op, size_t i) { (void)op; (void)i; return 0; }

static const char *product_name(const OrtCustomOp *op) { (void)op; return "Product"; }
static const char *gated_name(const OrtCustomOp *op) { (void)op; return "GatedMlp"; }
static const char *provider(const OrtCustomOp *op) { (void)op; return "CPUExecutionProvider"; }
static size_t seven(const OrtCustomOp *op) { (void)op; return WEIGHTS + 3; }
static size_t ten(const OrtCustomOp *op) { (void)op; return WEIGHTS + 6; }
static size_t two(const OrtCustomOp *op) { (void)op; return 2; }
/* ONNX type 1 is FLOAT, 2 is UINT8 for codes and zero points */
static int input_type(const OrtCustomOp *op, size_t i) { (void)op; return i < WEIGHTS || (i - WEIGHTS) % 3 == 1 ? 1 : 2; }
static int output_type(const OrtCustomOp *op, size_t i) { (void)op; (void)i; return 1; }
static int input_kind(const OrtCustomOp *op, size_t i) {
    (void)op;
    return (i > X && i < WEIGHTS) || (i >= WEIGHTS && (i - WEIGHTS) % 3 == 2);
}
static int output_kind(const OrtCustomOp *op, size_t i) { (void)op; return i == 1; }
static int memory(const OrtCustomOp *op, size_t i) { (void)op; (void)i; return 0; }
static int one(const OrtCustomOp *op) { (void)op; return 1; }
static int any_version(const OrtCustomOp *op) { (void)op; return INT32_MAX; }

#define OPERATOR(name_, count_, create_)                                                                        \
    {                                                                                                           \
        .version = ORT_VERSION, .name = name_, .provider = provider, .input_type = input_type, .inputs = count_, \
        .output_type = output_type, .outputs = two, .destroy = destroy, .input_kind = input_kind,               \
        .output_kind = output_kind, .input_memory = memory, .input_arity = one, .input_alike = one,             \
        .output_arity = one, .output_alike = one, .create_v2 = create_, .compute_v2 = compute,                  \
        .first_version = one, .last_version = any_version,                                                      \
    }

static const OrtCustomOp operators[] = {
    OPERATOR(product_name, seven, create_product),
    OPERATOR(gated_name, ten, create_gated),
    {
        .version = ORT_VERSION, .name = attention_name, .provider = provider, .input_type = attention_input_type,
        .inputs = attention_inputs, .output_type = output_type, .outputs = three, .destroy = free,
        .input_kind = attention_input_kind, .output_kind = none_optional, .input_memory = memory, .input_arity = one,
        .input_alike = one, .output_arity = one, .output_alike = one, .create_v2 = create_attention,
        .compute_v2 = compute_attention, .first_version = one, .last_version = any_version,
    },
};

__attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtOptions *options, const OrtApiBase *base) {
    const OrtApi *api = base->api(ORT_VERSION);
    if (!api) return CALL(base->api(1), Status, CREATE_STATUS)(1, "this onnxruntime is older than 1.17");
    OrtDomain *domain = NULL;
    GUARD(CALL(api, OrtStatus * (*)(const char *, OrtDomain **), CREATE_DOMAIN)("quantkit", &domain));
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        GUARD(CALL(api, OrtStatus * (*)(OrtDomain *, const OrtCustomOp *), DOMAIN_ADD)(domain, &operators[i]));
    return CALL(api, OrtStatus * (*)(OrtOptions *, OrtDomain *), ADD_DOMAIN)(options, domain);
}
