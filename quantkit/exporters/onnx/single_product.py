"""A linear as it is stored in one way: what makes a model of it, and what that must give. No torch, no package onnx.

Whoever has both makes it (`single_op`). Where neither is, it is read from a file: a device times the very same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.graph.protobuf import Chunks, message, number, text
from quantkit.scheme import WeightScheme

Array = NDArray[Any]
# products of one model, at most
MOST = 32
# rows at which a product is checked: kernels for one row and for many are not the same
_CHECKED = (1, 17)
_OPSET, _IR = 21, 10
# of onnx/onnx.proto: TensorProto.DataType
_KINDS = {"float32": 1, "float16": 10, "uint8": 2}


@dataclass(frozen=True)
class StorageVariant:
    """One way to store a weight and multiply with it.

    Args:
        name: `int4.g128.level4`.
        scheme: of the weight; None of floats, and of what has no weight.
        compute: the input type of the multiplication, whose rate bounds it.
        limit: largest relative error (Frobenius) of y against our own dequantization. Exact but for the order of sums
            where activations stay in float32; 8-bit activations lose about 1 %, float16 3e-4.
        activations: dtype of x and y.
    """

    name: str
    scheme: WeightScheme | None = None
    compute: str = "fp32"
    limit: float = 1e-4
    activations: str = "float32"

    @property
    def kind(self) -> str:
        """What builds it: `int4`, `int8.dynamic`, `nf4`."""
        head, *rest = self.name.split(".")
        return ".".join([head, *(part for part in rest if not part.startswith(("g", "level")))])

    @property
    def format(self) -> str:
        """The number format of the weight; "" where there is none."""
        return self.scheme.format if self.scheme else "" if self.kind.startswith("quantize") else self.kind

    @property
    def level(self) -> int | None:
        """The accuracy level of a MatMulNBits."""
        return int(self.name[-1]) if ".level" in self.name else None

    @property
    def quantizer(self) -> str:
        """The variant that does to x alone what this one does to x; "" where that happens inside of a kernel."""
        return f"quantize.{self.kind.partition('.')[2]}" if self.kind in ("int8.static", "int8.dynamic") else ""


@dataclass(frozen=True)
class StoredConstant:
    """A constant of a model.

    Args:
        kind: `TensorProto.DataType`.
        dims: its shape.
        raw: its bytes, as numbers of NumPy.
        axis: where its N is; None: all copies share it.
        each: how many of N an element of `raw` holds.
    """

    kind: int
    dims: tuple[int, ...]
    raw: Array
    axis: int | None = None
    each: int = 1

    @property
    def floats(self) -> bool:
        """Whether numpy has its type and it is large enough to matter."""
        return self.raw.dtype.kind == "f" and self.raw.ndim > 0

    def turned(self, rows: int) -> Array:
        """With the rows of W turned by so many places."""
        return self.raw if self.axis is None or rows == 0 else np.roll(self.raw, rows // self.each, self.axis)


@dataclass(frozen=True)
class SingleProduct:
    """A weight as one variant stores it.

    Args:
        variant: which.
        K: columns of x.
        N: columns of y.
        stored: constants.
        nodes: place of a product in its model -> its nodes, fields of a GraphProto: x0 or, without a weight, x`place`
            in, y`place` out, each constant by its name, with `place` behind it where copies do not share it.
        known: (x [M, K], y [M, N] in float32 by our own reading of what is stored) for the rows that are checked; none
            where there is no weight.
    """

    variant: StorageVariant
    K: int
    N: int
    stored: Mapping[str, StoredConstant]
    nodes: Callable[[int], bytes]
    known: Sequence[tuple[Array, Array]]

    @property
    def weighs(self) -> bool:
        """Whether there is a weight."""
        return bool(self.variant.format)

    @property
    def weight_bytes(self) -> int:
        """Of one weight: codes, scales, zero points."""
        return sum(int(each.raw.nbytes) for each in self.stored.values() if each.axis is not None)

    def model(self, copies: Sequence[int], *, apart: bool = False) -> bytes:
        """A model with inputs x0, x1, ... of [M, K] and outputs y0, y1, ...; `copies` are the turns of each weight.

        Products with a weight share the input x0. With `apart` the file is without floats, which `floats` has: a
        protobuf holds no more than 2 GiB.
        """
        kind = _KINDS[self.variant.activations]
        graph = text(2, self.variant.name)
        graph += [self.nodes(place) for place in range(len(copies))]
        constants = {
            named(name, each, place): (each, copy)
            for place, copy in enumerate(copies)
            for name, each in self.stored.items()
        }
        for name, (each, copy) in constants.items():
            graph += message(5, _tensor(name, each, copy, apart))
        for place in range(1 if self.weighs else len(copies)):
            graph += message(11, _value(f"x{place}", kind, self.K))
        for place in range(len(copies)):
            graph += message(12, _value(f"y{place}", kind if self.weighs else _KINDS["uint8"], self.N))
        opsets = [("", _OPSET), ("com.microsoft", 1)]
        model = number(1, _IR) + message(7, graph)
        for domain, version in opsets:
            model += message(8, text(1, domain) + number(2, version))
        return b"".join(model)

    def floats(self, copies: Sequence[int]) -> dict[str, Array]:
        """What a model with `apart` is without: constant -> values."""
        return {
            named(name, each, place): each.turned(2 * copy)
            for place, copy in enumerate(copies)
            for name, each in self.stored.items()
            if each.floats
        }

    def error(self, run: Callable[[Array], Sequence[Array]], copies: Sequence[int]) -> float:
        """The largest relative error of y [M, N] over the copies, for every x whose y is known; NaN if any y has one.

        Args:
            run: x -> y of each copy.
            copies: as in `model`.
        """
        errors = [
            np.linalg.norm(np.asarray(y, np.float32) - np.roll(expected, 2 * copy, axis=1))
            / (np.linalg.norm(expected) or 1.0)
            for x, expected in self.known
            for y, copy in zip(run(x), copies, strict=True)
        ]
        return float(np.max(errors))

    def save(self, file: Path) -> None:
        """As a .npz; the same product makes the same bytes."""
        nodes = [self.nodes(place) for place in range(MOST)]
        stored = {name: [each.kind, each.dims, each.axis, each.each] for name, each in self.stored.items()}
        about = {
            "K": self.K,
            "N": self.N,
            "stored": stored,
            "nodes": [*map(len, nodes)],
            "known": len(self.known),
            "bytes": self.weight_bytes,
        }
        arrays = {f"stored/{name}": each.raw for name, each in self.stored.items()}
        arrays |= {
            f"{side}{i}": array for i, pair in enumerate(self.known) for side, array in zip("xy", pair, strict=True)
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(file, allow_pickle=False, about=text, nodes=np.frombuffer(b"".join(nodes), np.uint8), **arrays)

    @staticmethod
    def bytes_in(file: Path) -> int:
        """`weight_bytes` of what a file holds, which is not read for that. Raises as `read`."""
        with np.load(file, allow_pickle=False) as found:
            return int(json.loads(found["about"].tobytes())["bytes"])

    @classmethod
    def read(cls, file: Path, variant: StorageVariant) -> SingleProduct:
        """The opposite of `save`. Raises ValueError, KeyError, OSError: the file is another."""
        with np.load(file, allow_pickle=False) as found:
            about = json.loads(found["about"].tobytes())
            nodes, ends = found["nodes"].tobytes(), np.cumsum([0, *about["nodes"]]).tolist()
            stored = {
                name: StoredConstant(kind, tuple(dims), found[f"stored/{name}"], axis, each)
                for name, (kind, dims, axis, each) in about["stored"].items()
            }
            known = [(found[f"x{i}"], found[f"y{i}"]) for i in range(about["known"])]
        return cls(variant, about["K"], about["N"], stored, lambda i: nodes[ends[i] : ends[i + 1]], known)


def named(name: str, constant: StoredConstant, place: int) -> str:
    """What a constant is called in the nodes of one product."""
    return name if constant.axis is None else f"{name}{place}"


def activations(M: int, K: int, dtype: str) -> Array:
    """x [M, K] of N(0, 1)."""
    return np.random.default_rng(M).standard_normal((M, K), np.float32).astype(dtype)


def checked(values: Array, dtype: str) -> list[tuple[Array, Array]]:
    """What `SingleProduct.known` is of W [N, K] float32."""
    inputs = [activations(M, values.shape[1], dtype) for M in _CHECKED]
    return [(x, x.astype(np.float32) @ values.T) for x in inputs]


def _tensor(name: str, constant: StoredConstant, copy: int, apart: bool) -> Chunks:
    """A TensorProto, or its place where its numbers are handed over by themselves."""
    about = [part for size in constant.dims for part in number(1, size)]
    about += number(2, constant.kind) + text(8, name)
    if not (apart and constant.floats):
        return about + message(9, [constant.turned(2 * copy).tobytes()])
    place = {"location": "memory", "offset": "0", "length": str(constant.raw.nbytes)}
    for key, value in place.items():
        about += message(13, text(1, key) + text(2, value))
    return about + number(14, 1)


def _value(name: str, kind: int, columns: int) -> Chunks:
    """A ValueInfoProto of [M, columns]."""
    shape = message(1, text(2, "M")) + message(1, number(1, columns))
    return text(1, name) + message(2, message(1, number(1, kind) + message(2, shape)))
