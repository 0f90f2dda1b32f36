"""How far a right model's outputs may depart where a library multiplies in kernels of its own, of half precision.

    u = 2^-8                  what rounding to bfloat16, 8 significant bits, changes a number by at most, of its size;
                              u √(0.541 / 3) = 0.42 u as root mean square, over mantissas that are spread as logarithms
    √5 · 0.42 u = 0.95 u      one product, whose sums are kept in float32: the input, the scale, the code's value and
                              the weight that the two make are rounded, each for itself, and at the end the result
    √(4 n) · 0.95 u = 1.9 u √n   n blocks: errors of products one after the other add as their squares do, and four are
                              on the longest way through a block (values, output, gate or up, down)

Root mean squares they are, and the worst logit of all is judged: half as much again is allowed, 2.83 u √n, which is
2^-6 for two blocks. 2^-7 would be 2 u, less than two blocks come to on average. With every product rounded so, a random
model of two blocks is 2.8 u off and one of eight 4.5 u; SmolLM2-135M's 30 blocks are 4.2 u off at the worst logit and
10.8 u at the worst token, of the 15.5 u that are allowed. On a processor with AVX512-BF16 bitsandbytes' nf4 left 2.3 u
after two blocks. Kernels of float16 round to an eighth of that.

What this lets through is found elsewhere: stored tensors are compared one by one, to 1e-4.
"""

from __future__ import annotations

import math

_OF_TWO = 2.0**-6


def kernel_limit(blocks: int) -> float:
    """Of what a model of so many blocks gives, as a share of its size; of one block what two may."""
    return _OF_TWO * math.sqrt(max(blocks, 2) / 2)
