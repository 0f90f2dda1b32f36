"""Weights as MatMulNBits holds them: codes of 2, 4 or 8 bits in blocks along K, a scale and a zero point a block.

Operators: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

Array = NDArray[Any]
BITS = (2, 4, 8)
_BLOCKS = (256, 128, 64, 32, 16)


@dataclass(frozen=True)
class InputCodes:
    """How the input of a linear is quantized.

    Args:
        scheme: granularity, and whether it has a zero point.
        scale: fixed by calibration; None where it comes from the values as the model runs.
        zero: as int8 has it; 0 where there is none.
        moved: shift and scale of each channel, (x - shift) / scale, before that; empty where they stay.
    """

    scheme: ActivationScheme
    scale: float | None = None
    zero: int = 0
    moved: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class LinearSpec:
    """What the dialect needs to know of a linear without reading its weight.

    Args:
        rows, columns: N and K.
        scheme: None in high precision.
        shared: the parameter it shares its weight with (an embedding's), if any.
        input: how its input is quantized; None where it stays in float32.
    """

    rows: int
    columns: int
    scheme: WeightScheme | None
    shared: str | None = None
    input: InputCodes | None = None


@dataclass(frozen=True)
class EmbeddingTable:
    """A table of token embeddings [V, K] in codes.

    Args:
        parameter: its name in the skeleton.
        head: the linear whose codes it is the sum of, with `own`; "" where it is `own` alone.
        own: None where the head's codes are all of it.
        columns: K.
    """

    parameter: str
    head: str
    own: QuantTensor | None
    columns: int


@dataclass(frozen=True)
class GraphEnds:
    """What is stored otherwise than the passes decided, or with more.

    Args:
        table: of token embeddings; None where it stays in floats.
        head: the linear whose first rows have 8 bits; "" where none have.
        rows: these rows, [R, K].
    """

    table: EmbeddingTable | None = None
    head: str = ""
    rows: QuantTensor | None = None


@dataclass(frozen=True)
class WeightsByName:
    """Weights by name, read when they are written.

    Args:
        linears: by their name in the skeleton.
        shapes: parameter or buffer -> shape.
        tensor: parameter or buffer -> float32 values.
        codes: quantized linear -> codes [N, K + padding] int8.
        grid: quantized linear -> scale [N, G] float32, and zero [N, G] int8 or None; [1, 1] of a whole matrix.
        ends: how token embeddings and head are stored, where not as the passes decided.
    """

    linears: Mapping[str, LinearSpec]
    shapes: Mapping[str, tuple[int, ...]]
    tensor: Callable[[str], Array]
    codes: Callable[[str], Array]
    grid: Callable[[str], tuple[Array, Array | None]]
    ends: GraphEnds | None = None

    def dense(self, linear: str) -> Array:
        """What a quantized linear's codes stand for, [N, K] float32."""
        of = self.linears[linear]
        assert of.scheme is not None
        codes = self.codes(linear).astype(np.float32)
        scale, zero = self.grid(linear)
        group = (of.scheme.group or codes.shape[1]) if scale.shape[1] > 1 else codes.shape[1]
        step, point = (
            np.repeat(each, group, axis=1)[:, : codes.shape[1]]
            for each in (scale, np.zeros_like(scale) if zero is None else zero)
        )
        found: Array = ((codes - point) * step)[:, : of.columns]
        return found


def block_size(columns: int, scheme: WeightScheme, where: str) -> int:
    """The block in which MatMulNBits can hold a scheme: a power of two that divides the group.

    Raises:
        InputError: `layout-unsupported`.
    """
    group = scheme.group or columns
    if scheme.granularity != "group":
        # one scale for all blocks; the last one may be incomplete
        return next(block for block in (128, 64, 32, 16) if block <= columns or block == 16)
    fitting = [block for block in _BLOCKS if group % block == 0]
    if not fitting:
        raise InputError(
            "layout-unsupported",
            where=where,
            value=f"groups of {group}",
            rule="MatMulNBits has blocks of 16, 32, 64, 128 or 256",
            remedy="use a group that is a multiple of 16",
        )
    return fitting[0]


@dataclass(frozen=True)
class PackedWeights:
    """The tensors of a MatMulNBits of one or more linears."""

    weights: WeightsByName
    names: tuple[str, ...]
    bits: int
    block: int
    columns: int

    @property
    def _count(self) -> int:
        return -(-self.columns // self.block)

    def _spread(self, per_group: Array, name: str) -> Array:
        """[N, G] (or [1, 1]) as [N, blocks]."""
        linear, groups = self.weights.linears[name], per_group.shape[1]
        if groups == 1:
            return np.broadcast_to(per_group, (linear.rows, self._count))
        assert linear.scheme is not None
        return np.repeat(per_group, (linear.scheme.group or 0) // self.block, axis=1)[:, : self._count]

    def codes(self) -> Array:
        """uint8 [N, blocks, block·bits/8]: codes from 0, least significant first."""
        parts = []
        for name in self.names:
            codes = self.weights.codes(name)
            rows, columns = codes.shape
            words = (codes.astype(np.int16) + (1 << (self.bits - 1))).astype(np.uint8)
            filled = self._count * self.block
            if filled > columns:
                words = np.pad(words, ((0, 0), (0, filled - columns)), constant_values=1 << (self.bits - 1))
            words = words[:, :filled].reshape(rows, self._count, self.block)
            parts.append(pack(words, self.bits))
        return np.concatenate(parts)

    def scales(self) -> Array:
        """float32 [N, blocks]."""
        return np.concatenate([self._spread(self.weights.grid(name)[0], name) for name in self.names])

    def zeros(self) -> Array:
        """uint8 [N, ceil(blocks·bits/8)]: zero points from 0, packed as codes are."""
        found = []
        for name in self.names:
            _, zero = self.weights.grid(name)
            assert zero is not None
            spread = self._spread(zero, name).astype(np.int16) + (1 << (self.bits - 1))
            per_byte = 8 // self.bits
            filled = np.pad(spread, ((0, 0), (0, -spread.shape[1] % per_byte))).astype(np.uint8)
            found.append(pack(filled, self.bits))
        return np.concatenate(found)


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


# codes of 7 bits in bytes never saturate
_BYTES = ("int8", "int7")
# features of a head of GroupQueryAttention are a multiple of the first, and where it rotates of the second
_HEAD, ROTARY_HEAD = 8, 16


def refuse(
    weights: Mapping[str, WeightScheme], activations: Mapping[str, ActivationScheme], cache: CacheScheme | None
) -> None:
    """Refuse what a graph cannot hold.

    Raises:
        InputError: `layout-unsupported`, naming the first layer.
    """
    if cache is not None:
        raise InputError(
            "layout-unsupported",
            where="scheme.kv_cache",
            value=f"a KV cache in {cache.format}",
            rule="this exporter's cache is in float32",
            remedy="leave `onnx` out of `export`",
        )
    for linear, each in activations.items():
        _refuse_input(linear, each, weights[linear])
    for linear, scheme in weights.items():
        if linear in activations:
            continue
        bits = load_format(scheme.format).bits
        if bits not in BITS or not scheme.format.startswith("int"):
            raise InputError(
                "layout-unsupported",
                where=linear,
                value=f"weights in {scheme.format}",
                rule=f"MatMulNBits holds integers of {', '.join(map(str, BITS))} bits",
                remedy="use int4 or int8, or leave `onnx` out of `export`",
            )
        block_size(scheme.group or 128, scheme, linear)


def refuse_heads(config: Any, where: str) -> None:
    """Refuse heads that ONNX Runtime's cached attention does not take.

    Args:
        config: transformers', of a decoder.

    Raises:
        InputError: `attention-unsupported`.
    """
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    size = getattr(config, "head_dim", None) or (hidden // heads if heads and hidden else 0)
    if size % _HEAD:
        raise InputError(
            "attention-unsupported",
            where=where,
            value=f"heads of {size} features",
            rule=f"ONNX Runtime's GroupQueryAttention takes heads of a multiple of {_HEAD} features",
            remedy="leave `onnx` out of `export`",
        )


def _refuse_input(linear: str, inputs: ActivationScheme, weight: WeightScheme) -> None:
    """Refuse what ONNX Runtime has no integer kernel for."""
    value, rule = f"activations in {inputs.format}", ""
    if inputs.format != "int8":
        rule = "ONNX Runtime fuses QuantizeLinear and DequantizeLinear of 8-bit integers alone, not of floats"
    elif inputs.granularity == "group":
        value, rule = "activations in groups", "an integer kernel sums over all of K with one scale"
    elif weight.format not in _BYTES or weight.granularity not in ("channel", "tensor"):
        value = f"activations in int8, weights in {weight.format} by {weight.granularity}"
        rule = "an integer kernel multiplies int8 by int8 with one scale a channel"
    if rule:
        raise InputError(
            "layout-unsupported",
            where=linear,
            value=value,
            rule=rule,
            remedy="use int8 by channel with int8 activations by tensor or token, or leave `onnx` out of `export`",
        )
