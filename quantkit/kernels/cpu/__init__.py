"""Products with 4-bit weights on a CPU, in C, as operators of ONNX Runtime.

    y[m, n] = sum over groups g of  s[n, g] * t[m, g] * (sum of q[n, k] * a[m, k]  -  z[n, g] * sum of a[m, k])

q, s and z are a weight's codes, scales and zero points, as MatMulNBits has them; a and t are the input's, rounded to 8
bits by group, as MatMulNBits of accuracy level 4 rounds it. What is added before a norm, the norm, the rounding, the
products of gate and up, the activation between them: each is part of the product beside it, so that a block's MLP is
one operator. `products.c` is the arithmetic, `operators.c` the operators, `ort.h` what they need of ONNX Runtime's
C interface, and `library` compiles them for the processor at hand.

Weights lie in one stream in the order in which they are read: 16 rows side by side, which are the lanes of 512 bits, so
no sum runs across lanes. A thread that multiplies one row asks for it 8 KiB ahead; several rows share what was
unpacked.
"""
