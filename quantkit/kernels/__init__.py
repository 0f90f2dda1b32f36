"""GPU kernels for quantized weights (Triton), with the reference they must equal.

    y[m, n] = sum_k x[m, k] * value(codes[n, k], zero[n, g(k)]) * scale[n, g(k)]

`layout` packs a weight so that the kernels read it in whole 16-byte pieces; one file a format decodes such a piece in
registers (`int4`, `int8`, `fp8_e4m3`, `nf4`), and `matmul` is the skeleton around all of them. `native` multiplies
8-bit codes by 8-bit codes, and so do torch's `operators`; what none of these takes is left to other people's kernels
(`backends`). `ahead` reads the machine code. Importing this package needs neither torch nor Triton.
"""
