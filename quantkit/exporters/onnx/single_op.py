"""One linear, y = x Wᵀ, as ONNX models: every way in which ONNX Runtime can be given a quantized weight.

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
    quantize.static        what int8.static does to its input, alone; quantize.dynamic likewise

A model holds several such products of one input, each with a weight of its own: the same matrix with its rows turned by
two, four, ... places, so that no two are equal and what each must give is known.
Operators: https://onnx.ai/onnx/operators and ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, did_you_mean
from quantkit.exporters.onnx.nbits import pack
from quantkit.exporters.onnx.single_product import SingleProduct, StorageVariant, StoredConstant, checked, named
from quantkit.formats import load_format
from quantkit.graph.protobuf import message
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import onnx
    import torch

    from quantkit.formats import QuantTensor

Array = NDArray[Any]
BASELINE = "float32"
GROUPS, LEVELS = (32, 64, 128), (0, 4)
_NBITS = ("int4", "int8")
# activations are drawn from N(0, 1): 4.5 standard deviations hold all but 7 of a million
_REACH = 4.5
_CODES = 255
_HALF = 128
# where a processor multiplies u8 by s8 with sums of two products in 16 bits (AVX2, AVX-512 without VNNI), ONNX Runtime
# lets them saturate unless told otherwise: 4 % of error for 1 % at K = 256
EXACT_SUMS = {"session.x64quantprecision": "1"}


def _scheme(name: str, group: int | None = None, symmetric: bool = True) -> WeightScheme:
    return WeightScheme(
        format=name, granularity="group" if group else "channel", group=group, symmetric=symmetric, scale="float32"
    )


def _all() -> dict[str, StorageVariant]:
    found = [StorageVariant(BASELINE), StorageVariant("float16", limit=5e-3, activations="float16")]
    found += [
        StorageVariant(f"int8.{how}", _scheme("int8"), "int8", limit=2e-2) for how in ("static", "dynamic", "token")
    ]
    for name in _NBITS:
        for group in GROUPS:
            scheme = _scheme(name, group, symmetric=name == "int8")
            found += [
                StorageVariant(
                    f"{name}.g{group}.level{level}", scheme, *(("int8", 2e-2) if level == 4 else ("fp32", 1e-4))
                )
                for level in LEVELS
            ]
    found.append(StorageVariant("int4.qdq", _scheme("int4", 32), "int8", limit=2e-2))
    found.append(StorageVariant("int4.qdq-transposed", _scheme("int4", 32)))
    found.append(StorageVariant("fp8_e4m3", _scheme("fp8_e4m3")))
    found += [StorageVariant(f"nf4.g{group}", _scheme("nf4", group)) for group in GROUPS]
    found += [StorageVariant(f"quantize.{how}") for how in ("static", "dynamic")]
    return {variant.name: variant for variant in found}


def names() -> list[str]:
    """Every variant with a weight, the baseline first."""
    return [name for name in _all() if not name.startswith("quantize")]


def variant(name: str) -> StorageVariant:
    """By its name. Raises InputError `unknown-variant`, with a did-you-mean."""
    known = _all()
    if name not in known:
        raise InputError("unknown-variant", where="--format", value=name, remedy=did_you_mean(name, names()))
    return known[name]


def usual(name: str, *, block: int, level: int) -> str:
    """The variant of a format as quantkit exports it: `int4` is `int4.g128.level4` where the target says so."""
    if name in _NBITS:
        return f"{name}.g{block}.level{level}"
    return "nf4.g64" if name == "nf4" else name


def check_shape(of: StorageVariant, K: int, N: int) -> None:
    """Refuse what a variant cannot hold. Raises InputError `group-indivisible`."""
    group = of.scheme.group if of.scheme else None
    if group and K % group:
        fitting = [size for size in GROUPS if K % size == 0]
        remedy = f"use {of.format} in groups of {' or '.join(map(str, fitting))}" if fitting else "choose another shape"
        raise InputError(
            "group-indivisible", where=f"{K}x{N}", value=f"group {group}, K {K}", rule="group divides K", remedy=remedy
        )
    if of.scheme and (N % 2 or K % 2):
        raise InputError("shape-invalid", where=f"{K}x{N}", value=f"{of.name} of odd sides", rule="K and N are even")


# x, y, constant -> its name
Nodes = Callable[[str, str, Mapping[str, str]], "list[onnx.NodeProto]"]


def product(of: StorageVariant, weight: torch.Tensor) -> SingleProduct:
    """Store a weight [N, K] float32 in one variant.

    Raises:
        InputError: `group-indivisible`, `shape-invalid`.
    """
    N, K = weight.shape
    check_shape(of, K, N)
    if not of.format:
        stored, nodes = _quantizer(of)
        return _made(of, (K, K), stored, nodes, [])
    if of.scheme is None:
        stored, nodes = _floats(of, weight.numpy())
        values = np.asarray(stored["w"].raw.T, np.float32)
    else:
        form = load_format(of.scheme.format)
        tensor = form.quantize(weight, of.scheme)
        stored, nodes = _BUILDERS[of.kind](of, tensor)
        values = form.dequantize(tensor).numpy()
    return _made(of, (K, N), stored, nodes, checked(values, of.activations))


def _made(
    of: StorageVariant,
    size: tuple[int, int],
    stored: Mapping[str, StoredConstant],
    nodes: Nodes,
    known: Sequence[tuple[Array, Array]],
) -> SingleProduct:
    def written(place: int) -> bytes:
        names = {name: named(name, each, place) for name, each in stored.items()}
        found = nodes("x0" if of.format else f"x{place}", f"y{place}", names)
        return b"".join(part for node in found for part in message(1, [node.SerializeToString(deterministic=True)]))

    return SingleProduct(of, *size, stored, written, known)


def _node(kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, list(inputs), list(outputs), domain=domain, **attributes)


def _constant(values: Array, axis: int | None = None) -> StoredConstant:
    from onnx import helper

    return StoredConstant(
        helper.np_dtype_to_tensor_dtype(values.dtype), values.shape, np.ascontiguousarray(values), axis
    )


def _floats(of: StorageVariant, values: Array) -> tuple[dict[str, StoredConstant], Nodes]:
    w = _constant(values.T.astype(of.activations), axis=1)
    return {"w": w}, lambda x, y, at: [_node("MatMul", [x, at["w"]], [y])]


def _input_scale() -> dict[str, StoredConstant]:
    scale = np.array(2 * _REACH / _CODES, np.float32)
    return {"x_scale": _constant(scale), "x_zero": _constant(np.array(_HALF, np.uint8))}


def _quantizer(of: StorageVariant) -> tuple[dict[str, StoredConstant], Nodes]:
    if of.kind == "quantize.static":
        return _input_scale(), lambda x, y, at: [_node("QuantizeLinear", [x, at["x_scale"], at["x_zero"]], [y])]
    return {}, lambda x, y, at: [_node("DynamicQuantizeLinear", [x], [y, f"{y}/scale", f"{y}/zero"])]


def _codes(tensor: QuantTensor) -> Array:
    found: Array = tensor.codes.numpy()
    return found


def _scales(tensor: QuantTensor) -> Array:
    found: Array = tensor.scale.float().numpy()
    return found


def _qdq(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    stored = {"w": _constant(_codes(tensor).T, axis=1), "scale": _constant(_scales(tensor)[:, 0], axis=0)}

    def nodes(x: str, y: str, at: Mapping[str, str]) -> list[Any]:
        how = [at["x_scale"], at["x_zero"]]
        return [
            _node("QuantizeLinear", [x, *how], [f"{y}/codes"]),
            _node("DequantizeLinear", [f"{y}/codes", *how], [f"{y}/x"]),
            _node("DequantizeLinear", [at["w"], at["scale"]], [f"{y}/w"], axis=1),
            _node("MatMul", [f"{y}/x", f"{y}/w"], [y]),
        ]

    return stored | _input_scale(), nodes


def _dynamic(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    stored = {"w": _constant(_codes(tensor).T, axis=1), "scale": _constant(_scales(tensor)[:, 0], axis=0)}

    def nodes(x: str, y: str, at: Mapping[str, str]) -> list[Any]:
        return [
            _node("DynamicQuantizeLinear", [x], [f"{y}/codes", f"{y}/scale", f"{y}/zero"]),
            _node("MatMulInteger", [f"{y}/codes", at["w"], f"{y}/zero"], [f"{y}/sums"]),
            _node("Cast", [f"{y}/sums"], [f"{y}/floats"], to=1),
            _node("Mul", [f"{y}/scale", at["scale"]], [f"{y}/both"]),
            _node("Mul", [f"{y}/floats", f"{y}/both"], [y]),
        ]

    return stored, nodes


def _by_token(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    """As `integers.py` writes it into a model's graph."""
    shared: dict[str, Array] = {
        "last": np.array([-1], np.int64),
        "reach": np.array(_CODES / 2, np.float32),
        "tiny": np.array(np.finfo(np.float32).tiny, np.float32),
        "one": np.array(1.0, np.float32),
        "half": np.array(_HALF, np.uint8),
    }
    stored = {"w": _constant(_codes(tensor).T, axis=1), "scale": _constant(_scales(tensor)[:, 0], axis=0)}

    def nodes(x: str, y: str, at: Mapping[str, str]) -> list[Any]:
        return [
            _node("Abs", [x], [f"{y}/abs"]),
            _node("ReduceMax", [f"{y}/abs", at["last"]], [f"{y}/absmax"], keepdims=1),
            _node("Div", [f"{y}/absmax", at["reach"]], [f"{y}/step"]),
            _node("Max", [f"{y}/step", at["tiny"]], [f"{y}/scale"]),
            _node("Reshape", [f"{y}/scale", at["last"]], [f"{y}/scales"]),
            _node("Shape", [f"{y}/scales"], [f"{y}/count"]),
            _node("Expand", [at["half"], f"{y}/count"], [f"{y}/zeros"]),
            _node("QuantizeLinear", [x, f"{y}/scales", f"{y}/zeros"], [f"{y}/codes"], axis=0),
            _node(
                "MatMulIntegerToFloat",
                [f"{y}/codes", at["w"], at["one"], at["scale"], at["half"]],
                [f"{y}/sums"],
                "com.microsoft",
            ),
            _node("Mul", [f"{y}/sums", f"{y}/scale"], [y]),
        ]

    return stored | {name: _constant(value) for name, value in shared.items()}, nodes


def _matmul_nbits(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    assert of.scheme is not None
    bits, block = load_format(of.scheme.format).bits, of.scheme.group or 0
    N, K = tensor.shape
    half = 1 << (bits - 1)
    words = (_codes(tensor).astype(np.int16) + half).astype(np.uint8).reshape(N, K // block, block)
    stored = {"w": _constant(pack(words, bits), axis=0), "scale": _constant(_scales(tensor), axis=0)}
    if tensor.zero is not None:
        zero = (tensor.zero.numpy().astype(np.int16) + half).astype(np.uint8)
        zero = np.pad(zero, ((0, 0), (0, -zero.shape[1] % (8 // bits))))
        stored["zero"] = _constant(pack(zero, bits), axis=0)
    how = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": of.level}
    order = list(stored)
    return stored, lambda x, y, at: [
        _node("MatMulNBits", [x, *(at[name] for name in order)], [y], "com.microsoft", **how)
    ]


def _int4(codes: Array, axis: int) -> StoredConstant:
    """Codes of an INT4 tensor, two a byte, the first in the low half."""
    from onnx import TensorProto

    packed = pack((codes & 15).astype(np.uint8), 4)
    return StoredConstant(TensorProto.INT4, codes.shape, packed, axis, each=2 if axis == 1 else 1)


def _blocks(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    assert of.scheme is not None
    group = of.scheme.group
    stored = {"w": _int4(_codes(tensor).T, 1), "scale": _constant(_scales(tensor).T, axis=1)}
    return stored, lambda x, y, at: [
        _node("DequantizeLinear", [at["w"], at["scale"]], [f"{y}/w"], axis=0, block_size=group),
        _node("MatMul", [x, f"{y}/w"], [y]),
    ]


def _blocks_transposed(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    assert of.scheme is not None
    group = of.scheme.group
    stored = {"w": _int4(_codes(tensor), 0), "scale": _constant(_scales(tensor), axis=0)}
    return stored, lambda x, y, at: [
        _node("DequantizeLinear", [at["w"], at["scale"]], [f"{y}/rows"], axis=1, block_size=group),
        _node("Transpose", [f"{y}/rows"], [f"{y}/w"], perm=[1, 0]),
        _node("MatMul", [x, f"{y}/w"], [y]),
    ]


def _fp8(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    import torch
    from onnx import TensorProto

    raw = np.ascontiguousarray(tensor.codes.view(torch.uint8).numpy().T)
    w = StoredConstant(TensorProto.FLOAT8E4M3FN, raw.shape, raw, 1)
    stored = {"w": w, "scale": _constant(_scales(tensor)[:, 0], axis=0)}
    return stored, lambda x, y, at: [
        _node("DequantizeLinear", [at["w"], at["scale"]], [f"{y}/w"], axis=1),
        _node("MatMul", [x, f"{y}/w"], [y]),
    ]


def _bnb4(of: StorageVariant, tensor: QuantTensor) -> tuple[dict[str, StoredConstant], Nodes]:
    assert of.scheme is not None
    from onnx import TensorProto

    packed = load_format("nf4").pack(tensor.codes).numpy()
    scales = _scales(tensor)
    stored = {
        "w": StoredConstant(TensorProto.UINT8, (packed.size,), packed, 0),
        "scale": StoredConstant(TensorProto.FLOAT, (scales.size,), scales, 0),
    }
    N, K = tensor.shape
    how = {"K": K, "N": N, "block_size": of.scheme.group, "quant_type": 1}
    return stored, lambda x, y, at: [_node("MatMulBnb4", [x, at["w"], at["scale"]], [y], "com.microsoft", **how)]


_BUILDERS: Mapping[str, Callable[[StorageVariant, Any], tuple[dict[str, StoredConstant], Nodes]]] = {
    "int8.static": _qdq,
    "int8.dynamic": _dynamic,
    "int8.token": _by_token,
    "int8": _matmul_nbits,
    "int4": _matmul_nbits,
    "int4.qdq": _blocks,
    "int4.qdq-transposed": _blocks_transposed,
    "fp8_e4m3": _fp8,
    "nf4": _bnb4,
}
