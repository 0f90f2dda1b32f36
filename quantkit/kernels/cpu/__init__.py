"""Products with 4-bit weights on a CPU, in C, as operators of ONNX Runtime.

    y[m, n] = sum over groups g of  s[n, g] * t[m, g] * (sum of q[n, k] * a[m, k]  -  z[n, g] * sum of a[m, k])

q, s and z are a weight's codes, scales and zero points, as in MatMulNBits. a and t are the input's 8-bit codes and
scales by group, rounded as by MatMulNBits of accuracy level 4. The addition before a norm, the norm, the rounding, the
gate and up products and the activation between them are fused with their neighbours, so that a block's MLP is one
operator. `products.c` has the arithmetic, `operators.c` the operators, `ort.h` the used part of ONNX Runtime's C
interface; `library` compiles them for the present processor.

Weights lie in one stream in the order of reading: 16 rows side by side are the lanes of 512 bits, so no sum crosses
lanes. For one row of input a thread prefetches 8 KiB ahead; several rows share the unpacked weights.
"""
