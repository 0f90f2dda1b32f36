"""Codes of 2 and 4 bits as ONNX Runtime's operators hold them: several a byte, the first in the low bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def pack(words: Array, bits: int) -> Array:
    """Unsigned words along the last axis into bytes, least significant first: [..., n] -> [..., n·bits/8]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return words
    grouped = words.reshape(*words.shape[:-1], -1, per_byte)
    result = np.zeros(grouped.shape[:-1], np.uint8)
    for place in range(per_byte):
        result |= grouped[..., place] << np.uint8(place * bits)
    return result
