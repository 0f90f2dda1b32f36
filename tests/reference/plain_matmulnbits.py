"""What MatMulNBits' tensors stand for, one weight at a time, from the words of ONNX Runtime's ContribOperators.md.

B is [N, blocks, block·bits/8] bytes, each block's codes least significant bits first; scales [N, blocks]; zero points
[N, ceil(blocks·bits/8)] packed alike, 2^(bits-1) where there are none. w[n, k] = (code - zero) * scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def word(row: bytes, place: int, bits: int) -> int:
    """The unsigned number at a place of a row that is one long little-endian integer."""
    return (int.from_bytes(row, "little") >> (place * bits)) & (2**bits - 1)


def weights(
    codes: Array, scales: Array, zeros: Array | None, *, rows: int, columns: int, bits: int, block: int
) -> Array:
    """[N, K] float32, by Python's integers; raises where a tensor has not the size it must have."""
    blocks = -(-columns // block)
    scales = scales.reshape(rows, blocks)
    packed = codes.reshape(rows, blocks, block * bits // 8)
    points = None if zeros is None else zeros.reshape(rows, -(-blocks * bits // 8))
    found = np.empty((rows, columns), np.float32)
    for n in range(rows):
        steps = [bytes(packed[n, part]) for part in range(blocks)]
        for k in range(columns):
            part = k // block
            zero = 2 ** (bits - 1) if points is None else word(bytes(points[n]), part, bits)
            found[n, k] = np.float32(word(steps[part], k % block, bits) - zero) * scales[n, part]
    return found


def product(x: Array, node: Any, tensors: dict[str, Array]) -> Array:
    """What a MatMulNBits node gives for x [..., K], in float64."""
    return x.astype(np.float64) @ of(node, tensors).astype(np.float64).T


def of(node: Any, tensors: dict[str, Array]) -> Array:
    """The weights [N, K] of a node of a written graph."""
    said = {attribute.name: attribute.i for attribute in node.attribute}
    names = list(node.input)[1:]
    zeros = tensors[names[2]] if len(names) > 2 and names[2] else None
    return weights(
        tensors[names[0]],
        tensors[names[1]],
        zeros,
        rows=said["N"],
        columns=said["K"],
        bits=said["bits"],
        block=said["block_size"],
    )
