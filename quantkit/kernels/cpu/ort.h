/* The part of ONNX Runtime's C interface that custom operators need (`onnxruntime_c_api.h`). Later versions only append to
 * these structures. The numbers are indices into `struct OrtApi`. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 17 /* first version with KernelContext_ParallelFor */

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtShape OrtShape; /* OrtTensorTypeAndShapeInfo */
typedef struct OrtInfo OrtInfo;   /* OrtKernelInfo */
typedef struct OrtContext OrtContext;
typedef struct OrtDomain OrtDomain;
typedef struct OrtOptions OrtOptions;

enum {
    CREATE_STATUS = 0,
    CREATE_DOMAIN = 26,
    DOMAIN_ADD = 27,
    ADD_DOMAIN = 28,
    TENSOR_DATA = 51,
    DIMENSIONS_COUNT = 61,
    DIMENSIONS = 62,
    ELEMENTS = 64,
    TYPE_AND_SHAPE = 65,
    ATTRIBUTE_FLOAT = 85,
    ATTRIBUTE_INT = 86,
    INPUT = 90,
    OUTPUT = 91,
    RELEASE_STATUS = 93,
    RELEASE_SHAPE = 99,
    CONSTANT_INPUT = 249,
    PARALLEL_FOR = 274,
};

typedef struct {
    void *functions[PARALLEL_FOR + 1];
} OrtApi;

typedef struct {
    const OrtApi *(*api)(uint32_t version);
    const char *(*version)(void);
} OrtApiBase;

typedef struct OrtCustomOp {
    uint32_t version;
    void *(*create)(const struct OrtCustomOp *, const OrtApi *, const OrtInfo *);
    const char *(*name)(const struct OrtCustomOp *);
    const char *(*provider)(const struct OrtCustomOp *);
    int (*input_type)(const struct OrtCustomOp *, size_t);
    size_t (*inputs)(const struct OrtCustomOp *);
    int (*output_type)(const struct OrtCustomOp *, size_t);
    size_t (*outputs)(const struct OrtCustomOp *);
    void (*compute)(void *, OrtContext *);
    void (*destroy)(void *);
    int (*input_kind)(const struct OrtCustomOp *, size_t);
    int (*output_kind)(const struct OrtCustomOp *, size_t);
    int (*input_memory)(const struct OrtCustomOp *, size_t);
    int (*input_arity)(const struct OrtCustomOp *);
    int (*input_alike)(const struct OrtCustomOp *);
    int (*output_arity)(const struct OrtCustomOp *);
    int (*output_alike)(const struct OrtCustomOp *);
    OrtStatus *(*create_v2)(const struct OrtCustomOp *, const OrtApi *, const OrtInfo *, void **);
    OrtStatus *(*compute_v2)(void *, OrtContext *);
    OrtStatus *(*infer_shape)(const struct OrtCustomOp *, void *);
    int (*first_version)(const struct OrtCustomOp *);
    int (*last_version)(const struct OrtCustomOp *);
} OrtCustomOp;
