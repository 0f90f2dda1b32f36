"""Pack weights for MatMulNBits: codes of 2, 4 or 8 bits in blocks along K, a scale and a zero point a block.

Operators: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.exporters import LayerSpec, unattended, unheld
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.activation import InputCodes
from quantkit.scheme import ActivationScheme, WeightScheme

Array = NDArray[Any]
BITS = (2, 4, 8)
_BLOCKS = (256, 128, 64, 32, 16)
# accuracy level that rounds inputs; smallest and largest block of 2 bits with a kernel
_ROUNDED, _LEAST, _LARGEST = 4, 32, 128
# codes of 7 bits in bytes never saturate
_BYTES = ("int8", "int7")
# GroupQueryAttention needs heads of a multiple of the first number of features; of the second with rotary embedding
_HEAD, ROTARY_HEAD = 8, 16
_LEAVE = "leave `onnx` out of `export`"


@dataclass(frozen=True)
class LinearSpec:
    """A linear without its weight [rows, columns], for dialects.

    `scheme` is None in high precision, `input` is None for a float input, `shared` names a tied embedding's parameter.
    """

    rows: int
    columns: int
    scheme: WeightScheme | None
    shared: str | None = None
    input: InputCodes | None = None


@dataclass(frozen=True)
class EmbeddingTable:
    """A quantized table of token embeddings [V, columns]: the sum of a head's dequantized codes and of its own.

    Args:
        parameter: name in the skeleton.
        head: name of the head's linear; "" for a table with only its own codes.
        own: own codes; None for a table with only the head's.
        columns: width of an embedding.
    """

    parameter: str
    head: str
    own: QuantTensor | None
    columns: int


@dataclass(frozen=True)
class GraphEnds:
    """A quantized table of embeddings, and the first `rows` [R, K] of a `head` in more bits, if any."""

    table: EmbeddingTable | None = None
    head: str = ""
    rows: QuantTensor | None = None


@dataclass(frozen=True)
class WeightsByName:
    """Weights by name, read when they are written."""

    linears: Mapping[str, LinearSpec]  # by their name in the skeleton
    shapes: Mapping[str, tuple[int, ...]]  # parameter or buffer -> shape
    tensor: Callable[[str], Array]  # parameter or buffer -> float32 values
    codes: Callable[[str], Array]  # quantized linear -> codes [N, K + padding] int8
    # quantized linear -> scale [N, G] float32, and zero [N, G] int8 or None; [1, 1] of a whole matrix
    grid: Callable[[str], tuple[Array, Array | None]]
    ends: GraphEnds | None = None  # storage of token embeddings and head, if other than the passes'

    def dense(self, linear: str) -> Array:
        """Expand the codes of a quantized linear, [N, K] float32."""
        of = self.linears[linear]
        assert of.scheme is not None
        codes = self.codes(linear).astype(np.float32)
        scale, zero = self.grid(linear)
        group = (of.scheme.group or codes.shape[1]) if scale.shape[1] > 1 else codes.shape[1]
        step, point = (
            np.repeat(part, group, axis=1)[:, : codes.shape[1]]
            for part in (scale, np.zeros_like(scale) if zero is None else zero)
        )
        return np.asarray(((codes - point) * step)[:, : of.columns])

    def packed(self, *names: str) -> PackedWeights:
        """Return the weights of stacked linears in blocks. Raises InputError `layout-unsupported`."""
        first = self.linears[names[0]]
        assert first.scheme is not None
        bits = load_format(first.scheme.format).bits
        return PackedWeights(self, names, bits, block_size(first.columns, first.scheme, names[0]), first.columns)


def block_size(columns: int, scheme: WeightScheme, where: str) -> int:
    """Choose MatMulNBits' block for a scheme: a power of two that divides the group.

    Raises InputError: `layout-unsupported`.
    """
    group = scheme.group or columns
    if scheme.granularity != "group":
        # one scale for all blocks; the last one may be incomplete
        return next(block for block in (128, 64, 32, 16) if block <= columns or block == 16)
    largest = _LARGEST if scheme.format == "int2" else _BLOCKS[0]
    fitting = [block for block in _BLOCKS if group % block == 0 and block <= largest]
    if not fitting:
        rule = "MatMulNBits supports blocks of 16, 32, 64, 128 and 256"
        raise unheld(where, f"groups of {group}", rule, "use a group that is a multiple of 16")
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
    def rows(self) -> int:
        """Rows N of all linears together."""
        return sum(self.weights.linears[name].rows for name in self.names)

    @property
    def count(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.block)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], Any, Callable[[], Array]]]:
        """Name the operator's inputs with shape, type and maker: codes, scales, and zeros if there are any."""
        scheme = self.weights.linears[self.names[0]].scheme
        inputs: dict[str, tuple[tuple[int, ...], Any, Callable[[], Array]]] = {
            "codes": ((self.rows, self.count, self.block * self.bits // 8), np.uint8, self.codes),
            "scales": ((self.rows, self.count), np.float32, self.scales),
        }
        if scheme is not None and not scheme.symmetric:
            inputs["zeros"] = ((self.rows, -(-self.count * self.bits // 8)), np.uint8, self.zeros)
        return inputs

    def _spread(self, per_group: Array, name: str) -> Array:
        """Repeat [N, G] (or [1, 1]) to [N, blocks]."""
        linear, groups = self.weights.linears[name], per_group.shape[1]
        if groups == 1:
            return np.broadcast_to(per_group, (linear.rows, self.count))
        assert linear.scheme is not None
        return np.repeat(per_group, (linear.scheme.group or 0) // self.block, axis=1)[:, : self.count]

    def codes(self) -> Array:
        """Pack codes, starting at 0, least significant first: uint8 [N, blocks, block·bits/8]."""
        parts, half = [], 1 << (self.bits - 1)
        for name in self.names:
            words = (self.weights.codes(name).astype(np.int16) + half).astype(np.uint8)
            rows, columns = words.shape
            filled = self.count * self.block
            words = np.pad(words, ((0, 0), (0, max(0, filled - columns))), constant_values=half)
            parts.append(pack(words[:, :filled].reshape(rows, self.count, self.block), self.bits))
        return np.concatenate(parts)

    def scales(self) -> Array:
        """Repeat scales for each block: float32 [N, blocks]."""
        return np.concatenate([self._spread(self.weights.grid(name)[0], name) for name in self.names])

    def zeros(self) -> Array:
        """Pack zero points, starting at 0, like codes: uint8 [N, ceil(blocks·bits/8)]."""
        parts, per_byte = [], 8 // self.bits
        for name in self.names:
            _, zero = self.weights.grid(name)
            assert zero is not None
            spread = self._spread(zero, name).astype(np.int16) + (1 << (self.bits - 1))
            filled = np.pad(spread, ((0, 0), (0, -spread.shape[1] % per_byte))).astype(np.uint8)
            parts.append(pack(filled, self.bits))
        return np.concatenate(parts)


def pack(words: Array, bits: int) -> Array:
    """Put unsigned words along the last axis into bytes, least significant first: [..., n] -> [..., n·bits/8]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return words
    grouped = words.reshape(*words.shape[:-1], -1, per_byte)
    result = np.zeros(grouped.shape[:-1], np.uint8)
    for place in range(per_byte):
        result |= grouped[..., place] << np.uint8(place * bits)
    return result


def refuse(asked: LayerSpec) -> None:
    """Refuse layers beyond a graph for ONNX Runtime. Raises InputError `layout-unsupported`."""
    asked.demand_float_cache("onnx")
    for linear, inputs in asked.activations.items():
        _refuse_input(linear, inputs, asked.schemes[linear])
    for linear, scheme in asked.schemes.items():
        if linear not in asked.activations:
            rule = f"MatMulNBits supports integers of {', '.join(map(str, BITS))} bits"
            refuse_bits(linear, scheme, BITS, rule, f"use int4 or int8, or {_LEAVE}")


def refuse_bits(linear: str, scheme: WeightScheme, bits: tuple[int, ...], rule: str, remedy: str) -> None:
    """Refuse schemes other than integers of these bits in blocks. Raises InputError `layout-unsupported`."""
    if load_format(scheme.format).bits not in bits or not scheme.format.startswith("int"):
        raise unheld(linear, f"weights in {scheme.format}", rule, remedy)
    block_size(scheme.group or 128, scheme, linear)


def without_kernel(asked: LayerSpec, level: int) -> str:
    """Name products without a kernel in ONNX Runtime: it expands their weights at every step; "" for none.

    Of 2 bits it has kernels at accuracy level 4 in blocks of 32 to 128, of 8 bits at level 4, of 4 bits always
    (ONNX Runtime 1.31 on x86-64; `benchmarks/cpu_blocks.py`).
    """

    def expanded(scheme: WeightScheme) -> bool:
        small = scheme.format == "int2" and (scheme.group or _LEAST) % _LEAST > 0
        return small or (scheme.format in ("int2", "int8") and level != _ROUNDED)

    slow = [name for name, scheme in asked.schemes.items() if name not in asked.activations and expanded(scheme)]
    if not slow:
        return ""
    rule = f"ONNX Runtime multiplies 2 and 8 bits at accuracy level 4, 2 bits in blocks of {_LEAST} to {_LARGEST}"
    return f"{rule}; it expands {slow[0]} and {len(slow) - 1} others at every step, many times slower than floats"


def refuse_heads(config: Any, where: str) -> None:
    """Refuse heads beyond ONNX Runtime's cached attention. Raises InputError `attention-unsupported`.

    Args:
        config: transformers', of a decoder.
    """
    from quantkit.model.structure.traced import layer_config  # torch, which a plan goes without

    layers = range(getattr(config, "num_hidden_layers", 1))
    sizes = sorted({_head_size(layer_config(config, index)) for index in layers})
    if len(sizes) > 1 or sizes[0] % _HEAD:
        rule = f"ONNX Runtime's GroupQueryAttention needs heads of one size, a multiple of {_HEAD} features"
        raise unattended(where, f"heads of {' and '.join(map(str, sizes))} features", rule, _LEAVE)


def _head_size(config: Any) -> int:
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    return int(getattr(config, "head_dim", None) or (hidden // heads if heads and hidden else 0))


def _refuse_input(linear: str, inputs: ActivationScheme, weight: WeightScheme) -> None:
    """Refuse inputs without an integer kernel in ONNX Runtime."""
    value, rule = f"activations in {inputs.format}", ""
    if inputs.format != "int8":
        rule = "ONNX Runtime fuses QuantizeLinear and DequantizeLinear only for 8-bit integers, not for floats"
    elif inputs.granularity == "group":
        value, rule = "activations in groups", "an integer kernel sums over all of K with one scale"
    elif weight.format not in _BYTES or weight.granularity not in ("channel", "tensor"):
        value = f"activations in int8, weights in {weight.format} by {weight.granularity}"
        rule = "an integer kernel multiplies int8 by int8 with one scale a channel"
    if rule:
        remedy = f"use int8 by channel with int8 activations by tensor or token, or {_LEAVE}"
        raise unheld(linear, value, rule, remedy)
