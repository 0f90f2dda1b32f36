"""Write one linear, y = x Wᵀ, as an ONNX model in every way to store a quantized weight for ONNX Runtime.

    float32, float16       MatMul
    int8.static            QDQ: QuantizeLinear with a fixed scale, int8 weights by channel
    int8.dynamic           DynamicQuantizeLinear, MatMulInteger
    int8.token             the same with a scale for each row of x: symmetric, s = max|x| / 127.5
    intB.gG.levelL         MatMulNBits of B bits in blocks of G; level 4 rounds activations to int8, level 0 computes in
                           float32
    int4.qdq               DequantizeLinear in blocks of W [K, N], which the runtime fuses into a MatMulNBits
    int4.qdq-transposed    the same of W [N, K] and a Transpose, which it does not fuse
    fp8_e4m3               DequantizeLinear of FP8 by channel
    nf4.gG                 MatMulBnb4
    quantize.static        only the quantization of the input in int8.static; quantize.dynamic likewise

A model holds several products of one input. Their weights are one matrix with its rows rotated by two, four, ...
places, so they differ, and each expected result is known. `product` makes a product and needs torch and onnx.
`SingleProduct.read` reads it from a file without them, so a device times the same bytes.
Operators: https://onnx.ai/onnx/operators and ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, did_you_mean
from quantkit.exporters.onnx.nbits import pack
from quantkit.formats import load_format
from quantkit.graph.protobuf import Chunks, message, number, text
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

    from quantkit.formats import QuantTensor

Array = NDArray[Any]
BASELINE = "float32"
GROUPS, LEVELS = (32, 64, 128), (0, 4)
_NBITS = ("int4", "int8")
# activations are drawn from N(0, 1): 4.5 standard deviations cover all but 7 of a million
_REACH, _STEPS, _HALF = 4.5, 255, 128
# a processor with AVX2 or AVX-512 but without VNNI multiplies u8 by s8 with sums of two products in 16 bits. Without
# this option ONNX Runtime lets them saturate: an error of 4 % instead of 1 % at K = 256
EXACT_SUMS = {"session.x64quantprecision": "1"}
# largest number of products in one model
MOST = 32
# rows for checking a product: kernels for one row and for many differ
_CHECKED = (1, 17)
_OPSET, _IR = 21, 10
# of onnx/onnx.proto: TensorProto.DataType
_KINDS = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "float16": 10}
_FLOAT8E4M3, _INT4 = 17, 22


@dataclass(frozen=True)
class StorageVariant:
    """One way to store a weight and multiply with it."""

    name: str  # `int4.g128.level4`
    scheme: WeightScheme | None = None  # scheme of the weight; None for floats, or without a weight
    compute: str = "fp32"  # input type of the multiplication; its rate bounds it
    # largest relative error (Frobenius) of y against our own dequantization. Exact but for the order of sums where
    # activations stay in float32; 8-bit activations lose about 1 %, float16 3e-4
    limit: float = 1e-4
    activations: str = "float32"  # dtype of x and y

    @property
    def kind(self) -> str:
        """Name without group and level: `int4`, `int8.dynamic`, `nf4`."""
        head, *rest = self.name.split(".")
        return ".".join([head, *(part for part in rest if not part.startswith(("g", "level")))])

    @property
    def format(self) -> str:
        """Number format of the weight; "" if there is none."""
        return self.scheme.format if self.scheme else "" if self.kind.startswith("quantize") else self.kind

    @property
    def level(self) -> int | None:
        """Accuracy level of a MatMulNBits."""
        return int(self.name[-1]) if ".level" in self.name else None

    @property
    def quantizer(self) -> str:
        """Variant with only this one's quantization of x; "" if a kernel does it inside."""
        return f"quantize.{self.kind.partition('.')[2]}" if self.kind in ("int8.static", "int8.dynamic") else ""


def _scheme(name: str, group: int | None = None, symmetric: bool = True) -> WeightScheme:
    own: dict[str, Any] = {"granularity": "group", "group": group} if group else {"granularity": "channel"}
    return WeightScheme(format=name, symmetric=symmetric, scale="float32", **own)


def _all() -> dict[str, StorageVariant]:
    variants = [StorageVariant(BASELINE), StorageVariant("float16", limit=5e-3, activations="float16")]
    variants += [
        StorageVariant(f"int8.{how}", _scheme("int8"), "int8", limit=2e-2) for how in ("static", "dynamic", "token")
    ]
    for name in _NBITS:
        for group in GROUPS:
            scheme = _scheme(name, group, symmetric=name == "int8")
            for level in LEVELS:
                bounds = ("int8", 2e-2) if level == 4 else ("fp32", 1e-4)
                variants.append(StorageVariant(f"{name}.g{group}.level{level}", scheme, *bounds))
    variants.append(StorageVariant("int4.qdq", _scheme("int4", 32), "int8", limit=2e-2))
    variants.append(StorageVariant("int4.qdq-transposed", _scheme("int4", 32)))
    variants.append(StorageVariant("fp8_e4m3", _scheme("fp8_e4m3")))
    variants += [StorageVariant(f"nf4.g{group}", _scheme("nf4", group)) for group in GROUPS]
    variants += [StorageVariant(f"quantize.{how}") for how in ("static", "dynamic")]
    return {variant.name: variant for variant in variants}


def names() -> list[str]:
    """List every variant with a weight, the baseline first."""
    return [name for name in _all() if not name.startswith("quantize")]


def variant(name: str) -> StorageVariant:
    """Return the variant of a name. Raises InputError `unknown-variant`, with a did-you-mean."""
    known = _all()
    if name not in known:
        raise InputError("unknown-variant", where="--format", value=name, remedy=did_you_mean(name, names()))
    return known[name]


def usual(name: str, *, block: int, level: int) -> str:
    """Name the variant for quantkit's export of a format: `int4` is `int4.g128.level4` if the target says so."""
    if name in _NBITS:
        return f"{name}.g{block}.level{level}"
    return "nf4.g64" if name == "nf4" else name


def check_shape(of: StorageVariant, K: int, N: int) -> None:
    """Refuse shapes beyond a variant. Raises InputError `group-indivisible`, `shape-invalid`."""
    group = of.scheme.group if of.scheme else None
    if group and K % group:
        fitting = [size for size in GROUPS if K % size == 0]
        remedy = f"use {of.format} in groups of {' or '.join(map(str, fitting))}" if fitting else "choose another shape"
        value, rule = f"group {group}, K {K}", "the group must divide K"
        raise InputError("group-indivisible", where=f"{K}x{N}", value=value, rule=rule, remedy=remedy)
    if of.scheme and (N % 2 or K % 2):
        raise InputError("shape-invalid", where=f"{K}x{N}", value=f"{of.name} of odd sides", rule="K and N are even")


# --- how each variant is stored ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredConstant:
    """A constant of a model."""

    kind: int  # `TensorProto.DataType`
    dims: tuple[int, ...]
    raw: Array  # its bytes, as numbers of NumPy
    axis: int | None = None  # axis of N; None: all copies share it
    per_element: int = 1  # rows of N in an element of `raw`

    @property
    def floats(self) -> bool:
        """True if numpy has its type and it is large enough to matter."""
        return self.raw.dtype.kind == "f" and self.raw.ndim > 0

    def turned(self, rows: int) -> Array:
        """Rotate the rows of W by this number."""
        return self.raw if self.axis is None or rows == 0 else np.roll(self.raw, rows // self.per_element, self.axis)


Stored = dict[str, StoredConstant]
# operator, inputs, outputs and attributes; a name is x, y, a constant, or an inner value of the product
Node = tuple[str, str, str, dict[str, Any]]
_CONTRIBUTED = ("MatMulNBits", "MatMulBnb4", "MatMulIntegerToFloat")
_QUANTIZE: dict[str, list[Node]] = {
    "quantize.static": [("QuantizeLinear", "x x_scale x_zero", "y", {})],
    "quantize.dynamic": [("DynamicQuantizeLinear", "x", "y scale zero", {})],
}
_INT8: dict[str, list[Node]] = {
    "int8.static": [
        ("QuantizeLinear", "x x_scale x_zero", "codes", {}),
        ("DequantizeLinear", "codes x_scale x_zero", "input", {}),
        ("DequantizeLinear", "w scale", "weight", {"axis": 1}),
        ("MatMul", "input weight", "y", {}),
    ],
    "int8.dynamic": [
        ("DynamicQuantizeLinear", "x", "codes step zero", {}),
        ("MatMulInteger", "codes w zero", "sums", {}),
        ("Cast", "sums", "floats", {"to": 1}),
        ("Mul", "step scale", "both", {}),
        ("Mul", "floats both", "y", {}),
    ],
    # as `integers.py` writes it into a model's graph
    "int8.token": [
        ("Abs", "x", "abs", {}),
        ("ReduceMax", "abs last", "absmax", {"keepdims": 1}),
        ("Div", "absmax reach", "quotient", {}),
        ("Max", "quotient tiny", "step", {}),
        ("Reshape", "step last", "steps", {}),
        ("Shape", "steps", "count", {}),
        ("Expand", "half count", "zeros", {}),
        ("QuantizeLinear", "x steps zeros", "codes", {"axis": 0}),
        ("MatMulIntegerToFloat", "codes w one scale half", "sums", {}),
        ("Mul", "sums step", "y", {}),
    ],
}


def _constant(values: Array, axis: int | None = None) -> StoredConstant:
    return StoredConstant(_KINDS[values.dtype.name], values.shape, np.ascontiguousarray(values), axis)


def _shared(kind: str) -> Stored:
    """Return the constants of a kind that all copies share."""
    if kind.endswith(".static"):
        step = np.array(2 * _REACH / _STEPS, np.float32)
        return {"x_scale": _constant(step), "x_zero": _constant(np.array(_HALF, np.uint8))}
    if kind != "int8.token":
        return {}
    return {
        "last": _constant(np.array([-1], np.int64)),
        "reach": _constant(np.array(_STEPS / 2, np.float32)),
        "tiny": _constant(np.array(np.finfo(np.float32).tiny, np.float32)),
        "one": _constant(np.array(1.0, np.float32)),
        "half": _constant(np.array(_HALF, np.uint8)),
    }


def _written(of: StorageVariant, tensor: QuantTensor) -> tuple[Stored, list[Node]]:
    """Make the constants and nodes of a quantized weight."""
    import torch

    scheme, (N, K) = tensor.scheme, tensor.shape
    scales: Array = tensor.scale.float().numpy()
    by_channel = _constant(scales[:, 0], axis=0)
    if of.kind in _INT8:
        codes = {"w": _constant(tensor.codes.numpy().T, axis=1), "scale": by_channel}
        return {**codes, **_shared(of.kind)}, _INT8[of.kind]
    if scheme.format == "fp8_e4m3":
        raw = np.ascontiguousarray(tensor.codes.view(torch.uint8).numpy().T)
        w = StoredConstant(_FLOAT8E4M3, raw.shape, raw, 1)
        expand: Node = ("DequantizeLinear", "w scale", "weight", {"axis": 1})
        return {"w": w, "scale": by_channel}, [expand, ("MatMul", "x weight", "y", {})]
    if scheme.format == "nf4":
        packed = load_format("nf4").pack(tensor.codes).numpy()
        how = {"K": K, "N": N, "block_size": scheme.group, "quant_type": 1}
        # rows, though the operator takes them one after another
        parts = {"w": packed, "scale": scales}
        codes = {name: StoredConstant(_KINDS[raw.dtype.name], (raw.size,), raw, 0) for name, raw in parts.items()}
        return codes, [("MatMulBnb4", "x w scale", "y", how)]
    if of.kind == "int4.qdq":
        expand = ("DequantizeLinear", "w scale", "weight", {"axis": 0, "block_size": scheme.group})
        codes = {"w": _int4(tensor.codes.numpy().T, 1), "scale": _constant(scales.T, axis=1)}
        return codes, [expand, ("MatMul", "x weight", "y", {})]
    if of.kind == "int4.qdq-transposed":
        expand = ("DequantizeLinear", "w scale", "rows", {"axis": 1, "block_size": scheme.group})
        turn: Node = ("Transpose", "rows", "weight", {"perm": [1, 0]})
        codes = {"w": _int4(tensor.codes.numpy(), 0), "scale": _constant(scales, axis=0)}
        return codes, [expand, turn, ("MatMul", "x weight", "y", {})]
    bits, block = load_format(scheme.format).bits, scheme.group or 0
    half = 1 << (bits - 1)
    words = (tensor.codes.numpy().astype(np.int16) + half).astype(np.uint8).reshape(N, K // block, block)
    codes = {"w": _constant(pack(words, bits), axis=0), "scale": _constant(scales, axis=0)}
    if tensor.zero is not None:
        zero = (tensor.zero.numpy().astype(np.int16) + half).astype(np.uint8)
        zero = np.pad(zero, ((0, 0), (0, -zero.shape[1] % (8 // bits))))
        codes["zero"] = _constant(pack(zero, bits), axis=0)
    how = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": of.level}
    return codes, [("MatMulNBits", " ".join(["x", *codes]), "y", how)]


def _int4(codes: Array, axis: int) -> StoredConstant:
    """Pack codes of an INT4 tensor, two a byte, the first in the low half."""
    packed = pack((codes & 15).astype(np.uint8), 4)
    return StoredConstant(_INT4, codes.shape, packed, axis, per_element=2 if axis == 1 else 1)


def product(of: StorageVariant, weight: torch.Tensor) -> SingleProduct:
    """Store a weight [N, K] float32 in one variant. Raises InputError: `group-indivisible`, `shape-invalid`."""
    N, K = weight.shape
    check_shape(of, K, N)
    if not of.format:
        return _made(of, K, K, _shared(of.kind), _QUANTIZE[of.kind], [])
    if of.scheme is None:
        w = _constant(weight.numpy().T.astype(of.activations), axis=1)
        return _made(of, K, N, {"w": w}, [("MatMul", "x w", "y", {})], _known(np.asarray(w.raw.T, np.float32), of))
    form = load_format(of.scheme.format)
    tensor = form.quantize(weight, of.scheme)
    stored, nodes = _written(of, tensor)
    return _made(of, K, N, stored, nodes, _known(form.dequantize(tensor).numpy(), of))


def _made(
    of: StorageVariant, K: int, N: int, stored: Stored, nodes: Sequence[Node], known: Sequence[tuple[Array, Array]]
) -> SingleProduct:
    from onnx import helper

    def written(place: int) -> bytes:
        called = {name: _named(name, constant, place) for name, constant in stored.items()}
        called |= {"x": "x0" if of.format else f"x{place}", "y": f"y{place}"}
        chunks: Chunks = []
        for kind, inputs, outputs, attributes in nodes:
            sides = [[called.get(name, f"y{place}/{name}") for name in side.split()] for side in (inputs, outputs)]
            domain = "com.microsoft" if kind in _CONTRIBUTED else ""
            node = helper.make_node(kind, *sides, domain=domain, **attributes)
            chunks += message(1, [node.SerializeToString(deterministic=True)])
        return b"".join(chunks)

    return SingleProduct(of, K, N, stored, written, known)


def _known(values: Array, of: StorageVariant) -> list[tuple[Array, Array]]:
    """Compute `SingleProduct.known` for W [N, K] float32."""
    inputs = [activations(M, values.shape[1], of.activations) for M in _CHECKED]
    return [(x, x.astype(np.float32) @ values.T) for x in inputs]


def activations(M: int, K: int, dtype: str) -> Array:
    """Draw x [M, K] of N(0, 1)."""
    return np.random.default_rng(M).standard_normal((M, K), np.float32).astype(dtype)


# --- models of products -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SingleProduct:
    """A weight, stored as one variant."""

    variant: StorageVariant
    # K, N: columns of x and of y
    K: int
    N: int
    stored: Mapping[str, StoredConstant]
    # function from a product's place in its model to its nodes (fields of a GraphProto). Its input is x0, or x`place`
    # without a weight; its output is y`place`; a constant that copies do not share has `place` after its name
    nodes: Callable[[int], bytes]
    # (x [M, K], y [M, N]) for the checked rows, in float32 from our own dequantization; none without a weight
    known: Sequence[tuple[Array, Array]]

    @property
    def weighs(self) -> bool:
        """True if there is a weight."""
        return bool(self.variant.format)

    @property
    def weight_bytes(self) -> int:
        """Size of one weight in bytes: codes, scales, zero points."""
        return sum(int(constant.raw.nbytes) for constant in self.stored.values() if constant.axis is not None)

    def model(self, copies: Sequence[int], *, apart: bool = False) -> bytes:
        """Write a model with inputs x0, x1, ... of [M, K] and outputs y0, y1, ...

        Args:
            copies: rotation of each weight's rows; products with a weight share the input x0.
            apart: True leaves out floats, which `floats` returns: a protobuf holds at most 2 GiB.
        """
        kind, places = _KINDS[self.variant.activations], range(len(copies))
        graph = text(2, self.variant.name) + [self.nodes(place) for place in places]
        constants = {
            _named(name, constant, place): (constant, copy)
            for place, copy in enumerate(copies)
            for name, constant in self.stored.items()
        }
        for name, (constant, copy) in constants.items():
            graph += message(5, _tensor(name, constant, copy, apart))
        for place in places[:1] if self.weighs else places:
            graph += message(11, _value(f"x{place}", kind, self.K))
        for place in places:
            graph += message(12, _value(f"y{place}", kind if self.weighs else _KINDS["uint8"], self.N))
        model = number(1, _IR) + message(7, graph)
        for domain, version in (("", _OPSET), ("com.microsoft", 1)):
            model += message(8, text(1, domain) + number(2, version))
        return b"".join(model)

    def floats(self, copies: Sequence[int]) -> dict[str, Array]:
        """Return the constants left out by `apart`: name -> values."""
        return {
            _named(name, constant, place): constant.turned(2 * copy)
            for place, copy in enumerate(copies)
            for name, constant in self.stored.items()
            if constant.floats
        }

    def error(self, run: Callable[[Array], Sequence[Array]], copies: Sequence[int]) -> float:
        """Return the largest relative error of y over the copies and every known x; NaN if any y has one.

        Args:
            run: function from x to y [M, N] of each copy.
            copies: rotation of each weight's rows.
        """
        errors = [
            np.linalg.norm(np.asarray(y, np.float32) - np.roll(expected, 2 * copy, axis=1))
            / (np.linalg.norm(expected) or 1.0)
            for x, expected in self.known
            for y, copy in zip(run(x), copies, strict=True)
        ]
        return float(np.max(errors))

    def save(self, file: Path) -> None:
        """Write a .npz; the same product makes the same bytes."""
        nodes = [self.nodes(place) for place in range(MOST)]
        about = {
            "K": self.K,
            "N": self.N,
            "stored": {name: [part.kind, part.dims, part.axis, part.per_element] for name, part in self.stored.items()},
            "nodes": [*map(len, nodes)],
            "known": len(self.known),
            "bytes": self.weight_bytes,
        }
        arrays = {f"stored/{name}": constant.raw for name, constant in self.stored.items()}
        for place, (x, y) in enumerate(self.known):
            arrays |= {f"x{place}": x, f"y{place}": y}
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        arrays["nodes"] = np.frombuffer(b"".join(nodes), np.uint8)
        np.savez(file, allow_pickle=False, **arrays)

    @staticmethod
    def bytes_in(file: Path) -> int:
        """Read only the `weight_bytes` of a file. Raises as `read`."""
        with np.load(file, allow_pickle=False) as arrays:
            return int(json.loads(arrays["about"].tobytes())["bytes"])

    @classmethod
    def read(cls, file: Path, variant: StorageVariant) -> SingleProduct:
        """Read a file by `save`. Raises ValueError, KeyError, OSError for another file."""
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            nodes, ends = arrays["nodes"].tobytes(), np.cumsum([0, *about["nodes"]]).tolist()
            stored = {
                name: StoredConstant(kind, tuple(dims), arrays[f"stored/{name}"], axis, per_element)
                for name, (kind, dims, axis, per_element) in about["stored"].items()
            }
            known = [(arrays[f"x{i}"], arrays[f"y{i}"]) for i in range(about["known"])]
        return cls(variant, about["K"], about["N"], stored, lambda i: nodes[ends[i] : ends[i + 1]], known)


def _named(name: str, constant: StoredConstant, place: int) -> str:
    """Return a constant's name in the nodes of one product."""
    return name if constant.axis is None else f"{name}{place}"


def _tensor(name: str, constant: StoredConstant, copy: int, apart: bool) -> Chunks:
    """Write a TensorProto, or its placeholder if its numbers are passed separately."""
    about = [part for size in constant.dims for part in number(1, size)]
    about += number(2, constant.kind) + text(8, name)
    if not (apart and constant.floats):
        return about + message(9, [constant.turned(2 * copy).tobytes()])
    for key, value in {"location": "memory", "offset": "0", "length": str(constant.raw.nbytes)}.items():
        about += message(13, text(1, key) + text(2, value))
    return about + number(14, 1)


def _value(name: str, kind: int, columns: int) -> Chunks:
    """Write a ValueInfoProto of [M, columns]."""
    shape = message(1, text(2, "M")) + message(1, number(1, columns))
    return text(1, name) + message(2, message(1, number(1, kind) + message(2, shape)))
