"""Codes as the bytes of ggml's blocks (`ggml-common.h`, `block_q4_0` and so on).

    32 weights     [d] [m] [high bits] codes         q4_0 q4_1 q5_0 q5_1 q8_0 iq4_nl, and mxfp4 with a power of two
    256 weights    scales, codes, high bits, d, dmin   q2_k to q6_k, each in an order of its own

A nibble holds weight j below weight j + 16 in blocks of 32, and weight l below weight l + 32 of every 64 in those of
256. Codes are stored less the lowest of them. `gguf.quants.dequantize` reads all of it back, and is the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporters.gguf.architecture import BLOCK, type_of

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.formats import QuantTensor

Bytes = NDArray[Any]  # uint8
_SUPER = 256


@dataclass(frozen=True)
class Parts:
    """A quantized matrix [N, K], a block a row: what a layout puts together.

    Args:
        codes: [B, 32] or [B, 256], from 0 on.
        d, m: [B, 1] float16: the scale, and the minimum or what is subtracted under it; m is None where there is none.
        sc, mn: [B, groups of a super-block] whole numbers; None in plain blocks.
    """

    codes: Bytes
    d: NDArray[Any]
    m: NDArray[Any] | None = None
    sc: NDArray[Any] | None = None
    mn: NDArray[Any] | None = None


def packed(tensor: QuantTensor, where: str = "") -> tuple[str, Bytes]:
    """A quantized matrix as the rows of a file: its type, and uint8 [N, bytes of a row].

    Raises:
        InputError: `layout-unsupported`, `scale-inexact` where a float16 does not hold a scale or a minimum.
    """
    kind = type_of(tensor.scheme, where)
    rows = tensor.shape[0]
    return kind, _LAYOUTS[kind](_parts(tensor, where)).reshape(rows, -1)


def floats(values: Tensor, kind: str) -> NDArray[Any]:
    """Values [...] as a file holds them: float32, float16, or bfloat16's bytes."""
    if kind == "BF16":
        raw: NDArray[Any] = values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        return raw
    found: NDArray[Any] = values.to(torch.float16 if kind == "F16" else torch.float32).contiguous().numpy()
    return found


def _parts(tensor: QuantTensor, where: str) -> Parts:
    codes, stored = tensor.codes, tensor.super_blocks
    lowest = _LOWEST.get(tensor.scheme.format, 0)
    numbers = (codes.to(torch.int16) - lowest).to(torch.uint8).numpy()
    if tensor.scheme.format == "int8" and bool((numbers == 0).any()):
        raise InputError(
            "layout-unsupported",
            where=where,
            value="codes of -128",
            rule="llama.cpp's kernels take the magnitude of a code as a signed byte",
            remedy="--set scheme.weights.format=q8_0, which has none",
        )
    if stored is not None:
        cut = numbers.reshape(-1, _SUPER)
        groups = stored.sc.numel() // len(cut)
        below = (stored.dmin, stored.mn)
        m, mn = (None if each is None else each.numpy().reshape(len(cut), -1) for each in below)
        return Parts(cut, stored.d.numpy().reshape(-1, 1), m, stored.sc.numpy().reshape(-1, groups), mn)
    cut = numbers.reshape(-1, BLOCK)
    if tensor.scheme.scale == "e8m0":
        zeros = cut & 7 == 0  # of which a file of ggml's own has the one without a sign
        return Parts(np.where(zeros, 0, cut), tensor.scale.view(torch.uint8).numpy().reshape(-1, 1))
    offset = tensor.offset
    if tensor.zero is not None:  # (code - zero) s = s (code - lowest) + (lowest - zero) s
        offset = (lowest - tensor.zero.float()) * tensor.scale.float()
    m = None if offset is None else _float16(offset, where)
    return Parts(cut, _float16(tensor.scale, where), m)


def _float16(values: Tensor, where: str) -> NDArray[Any]:
    found = values.to(torch.float16)
    if not torch.equal(found.float(), values.float()):
        raise InputError(
            "scale-inexact",
            where=where,
            value=f"scales in {str(values.dtype).removeprefix('torch.')}",
            rule="a GGUF file holds float16, which not all of them fit",
            remedy="--set scheme.weights.scale=float16, of a source in float32 or float16",
        )
    return found.numpy().reshape(-1, 1)


# what code 0 of a file is here; the codes of other formats begin at 0
_LOWEST = {"int4": -8, "int8": -128, "q4_0": -8, "q5_0": -16, "q8_0": -128, "q3_k": -4, "q6_k": -32}


def _bytes(values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _nibbles(codes: Bytes, half: int = 16) -> Bytes:
    """[B, K] as K / 2 bytes: of every 2 * half codes the first half below the second."""
    low, high = np.moveaxis(codes.reshape(len(codes), -1, 2, half), 2, 0)
    found: Bytes = (low & 15 | (high & 15) << 4).reshape(len(codes), -1)
    return found


def _planes(codes: Bytes, bits: int, run: int = 32) -> Bytes:
    """[B, K] of a few bits: of every 8 / bits runs, a byte holds the same place of each, the first one lowest."""
    several = codes.reshape(len(codes), -1, 8 // bits, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    found: Bytes = np.bitwise_or.reduce(several << shifts, axis=2).reshape(len(codes), -1)
    return found


def _plain(parts: Parts, *codes: Bytes) -> Bytes:
    heads = [_bytes(each) for each in (parts.d, parts.m) if each is not None]
    return np.concatenate([*heads, *codes], axis=1)


def _block4(parts: Parts) -> Bytes:
    return _plain(parts, _nibbles(parts.codes))


def _block5(parts: Parts) -> Bytes:
    high = np.packbits(parts.codes >> 4, axis=1, bitorder="little")
    return _plain(parts, high, _nibbles(parts.codes))


def _block8(parts: Parts) -> Bytes:
    return _plain(parts, parts.codes ^ 128)  # two's complement


def _q2_k(parts: Parts) -> Bytes:
    assert parts.sc is not None and parts.mn is not None and parts.m is not None
    scales = (parts.sc | parts.mn << 4).astype(np.uint8)
    return np.concatenate([scales, _planes(parts.codes, 2), _bytes(parts.d), _bytes(parts.m)], axis=1)


def _q3_k(parts: Parts) -> Bytes:
    assert parts.sc is not None
    high = _planes(parts.codes >> 2, 1)
    sc = (parts.sc.astype(np.int16) + 32).astype(np.uint8)
    scales = [_nibbles(sc, 8), _planes(sc >> 4, 2, 4)]
    return np.concatenate([high, _planes(parts.codes & 3, 2), *scales, _bytes(parts.d)], axis=1)


def _scales_of_6_bits(parts: Parts) -> list[Bytes]:
    """d, dmin, and in 12 bytes eight scales and eight minimums (`get_scale_min_k4`)."""
    assert parts.sc is not None and parts.mn is not None and parts.m is not None
    sc, mn = parts.sc.astype(np.uint8), parts.mn.astype(np.uint8)
    first = [each[:, :4] | (each[:, 4:] >> 4) << 6 for each in (sc, mn)]
    last = sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4
    return [_bytes(parts.d), _bytes(parts.m), *first, last]


def _q4_k(parts: Parts) -> Bytes:
    return np.concatenate([*_scales_of_6_bits(parts), _nibbles(parts.codes, 32)], axis=1)


def _q5_k(parts: Parts) -> Bytes:
    high = _planes(parts.codes >> 4, 1)
    return np.concatenate([*_scales_of_6_bits(parts), high, _nibbles(parts.codes, 32)], axis=1)


def _q6_k(parts: Parts) -> Bytes:
    assert parts.sc is not None
    # nibbles pair weights 64 apart, high bits stand 32 apart
    low = _nibbles(parts.codes, 64)
    return np.concatenate(
        [low, _planes(parts.codes >> 4, 2), _bytes(parts.sc.astype(np.int8)), _bytes(parts.d)], axis=1
    )


_LAYOUTS: dict[str, Callable[[Parts], Bytes]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "IQ4_NL", "MXFP4"), _block4),
    **dict.fromkeys(("Q5_0", "Q5_1"), _block5),
    "Q8_0": _block8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
