"""One linear as an export stores it.

checkpoint    what the recipe's layout lists of a linear (`model/layouts`: their headers are torch-free); without a
              layout the values that its codes stand for
onnx          codes in the blocks of MatMulNBits with float32 scales (`exporters/onnx/nbits.py`), or one scale a channel
              where its input is quantized too (`exporters/onnx/integers/products.py`)
tensorrt      codes, with scales in 16 bits (`exporters/tensorrt/network/weights.py`)
gguf          blocks of codes with their scales, as many bits as the format says (`exporters/gguf/blocks.py`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Protocol

from quantkit.formats import load_format
from quantkit.formats.base.layout import scale_shape
from quantkit.planning.model.architecture import Matrix
from quantkit.planning.model.assigned import padded
from quantkit.plugins import Kind
from quantkit.scheme import ActivationScheme, WeightScheme

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
# bytes of an element, by its type in a safetensors header
_ELEMENTS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}
# of a tensor in a safetensors header beside its name, type, shape and two offsets
ENTRY = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
# name, type, shape
_Header = tuple[str, str, tuple[int, ...]]


class LayoutHeaders(Protocol):
    """What a plan asks of a checkpoint's layout; see `quantkit.model.layouts.Layout`."""

    @property
    def codes(self) -> str:
        """Suffix of the tensor that holds the codes."""
        ...

    @property
    def libraries(self) -> tuple[str, ...]:
        """The packages without which transformers does not load it."""
        ...

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[_Header]:
        """(name, safetensors dtype, shape) of what is stored of [N, K]."""
        ...


LAYOUTS: Kind[LayoutHeaders] = Kind("model.layouts")


@dataclass(frozen=True)
class StoredLinear:
    """A linear as it is stored; all bytes are those of one of its `count`.

    Args:
        matrix: its sizes; of experts that are stored in several ways, an entry for each way.
        scheme: None where its weights are not quantized.
        activations: how its input is quantized, if it is.
        format: of its weights: `int4`, or the dtype that they are in.
        codes: of its weights, without what fills them up.
        scales, zeros: of the scheme.
        padding: what fills up blocks and words.
        tables: shapes, codebooks, orders, sums, fixed scales of its input.
    """

    matrix: Matrix
    scheme: WeightScheme | None = None
    activations: ActivationScheme | None = None
    format: str = ""
    codes: float = 0.0
    scales: float = 0.0
    zeros: float = 0.0
    padding: float = 0.0
    tables: float = 0.0
    bias: float = 0.0

    @property
    def bytes(self) -> float:
        """All of it, of one."""
        return self.codes + self.scales + self.zeros + self.padding + self.tables + self.bias


def in_layout(each: StoredLinear, dtype: str, layout: LayoutHeaders | None) -> StoredLinear:
    """In a checkpoint.

    Args:
        dtype: of what is not quantized.
        layout: of `model/layouts`; None stores values.

    Raises:
        InputError: `layout-unsupported`, groups that a layout cannot fill up.
    """
    matrix, scheme, width = each.matrix, each.scheme, WIDTHS[dtype]
    bias = float(width * matrix.N * matrix.bias)
    if scheme is None or layout is None:
        return replace(_plain(each, dtype), bias=bias)
    if scheme.padding(matrix.K):
        raise padded(matrix.name, scheme, matrix.K)
    sizes = dict.fromkeys(("codes", "scales", "zeros", "tables"), 0.0)
    for name, kind, shape in _headers(each, layout):
        sizes[_role(name.removeprefix(matrix.name), layout.codes)] += _ELEMENTS[kind] * prod(shape)
    exact = _exact(each)
    return replace(
        each,
        format=scheme.format,
        codes=exact,
        scales=sizes["scales"],
        zeros=sizes["zeros"],
        padding=sizes["codes"] - exact,
        tables=sizes["tables"],
        bias=bias,
    )


def in_graph(each: StoredLinear, options: Any) -> StoredLinear:
    """In an ONNX graph in the dialect of ONNX Runtime; `options`: of the exporter."""
    matrix, scheme = each.matrix, each.scheme
    rows, columns, bias = matrix.N, matrix.K, 4.0 * matrix.N * matrix.bias
    if scheme is None:
        return replace(_plain(each, "float32"), bias=bias)
    if each.activations is not None:
        signed = scheme.format == "int7" or options.weight_codes == "int8"
        centred = each.activations.granularity == "token" and not each.activations.symmetric
        return replace(
            each,
            format=scheme.format,
            codes=float(rows * columns),
            scales=4.0 * rows,
            zeros=0.0 if scheme.symmetric and signed else float(rows),
            tables=4.0 * rows * centred,
            bias=bias,
        )
    bits, block, exact = load_format(scheme.format).bits, _block(columns, scheme), _exact(each)
    count = ceil(columns / block)
    return replace(
        each,
        format=scheme.format,
        codes=exact,
        scales=4.0 * rows * count,
        zeros=0.0 if scheme.symmetric else float(rows * ceil(count * bits / 8)),
        padding=rows * count * block * bits / 8 - exact,
        bias=bias,
    )


def in_engine(each: StoredLinear) -> StoredLinear:
    """In a TensorRT engine, at least."""
    matrix, scheme, bias = each.matrix, each.scheme, 2.0 * each.matrix.N * each.matrix.bias
    if scheme is None:
        return replace(_plain(each, "float16"), bias=bias)
    rows, columns = scale_shape((matrix.N, matrix.K + scheme.padding(matrix.K)), scheme)
    width = 1 if scheme.scale == "fp8_e4m3" else 2
    codes = float(matrix.N * matrix.K) if scheme.format == "int7" else _exact(each)
    return replace(each, format=scheme.format, codes=codes, scales=float(rows * columns * width), bias=bias)


def in_file(each: StoredLinear, dtype: str) -> StoredLinear:
    """In a file of blocks; `dtype`: of weights without codes."""
    matrix, scheme, bias = each.matrix, each.scheme, 4.0 * each.matrix.N * each.matrix.bias
    if scheme is None:
        return replace(_plain(each, dtype), bias=bias)
    exact, shape = _exact(each), (matrix.N, matrix.K)
    whole = load_format(scheme.format).bits_per_weight(shape, scheme) * matrix.N * matrix.K / 8
    return replace(each, format=scheme.format, codes=exact, scales=whole - exact, bias=bias)


def header_bytes(each: StoredLinear, layout: LayoutHeaders | None, digits: int) -> int:
    """What all `count` of a linear add to the header of a safetensors file; `digits`: of an offset."""
    matrix = each.matrix
    headers: list[_Header] = [(f"{matrix.name}.weight", "BF16", (matrix.N, matrix.K))]
    if each.scheme is not None and layout is not None:
        headers = _headers(each, layout)
    if matrix.bias:
        headers = [*headers, (f"{matrix.name}.bias", "BF16", (matrix.N,))]
    return matrix.count * sum(
        ENTRY + len(name) + len(kind) + len(",".join(map(str, shape))) + 2 * digits for name, kind, shape in headers
    )


def _headers(each: StoredLinear, layout: LayoutHeaders) -> list[_Header]:
    """What a layout lists of a linear, and the fixed scale and zero point of its input."""
    matrix = each.matrix
    assert each.scheme is not None
    found = layout.headers(matrix.name, (matrix.N, matrix.K), each.scheme)
    if each.activations is None or each.activations.dynamic:
        return found
    found = [*found, (f"{matrix.name}.input_scale", "F32", (1,))]
    return found if each.activations.symmetric else [*found, (f"{matrix.name}.input_zero_point", "I8", (1,))]


def _role(name: str, codes: str) -> str:
    """What a stored tensor is, by its suffix."""
    if name == codes:
        return "codes"
    if name.startswith(".input"):
        return "tables"
    if "zero" in name:
        return "zeros"
    return "scales" if "scale" in name or "absmax" in name else "tables"


def _plain(each: StoredLinear, dtype: str) -> StoredLinear:
    """As numbers of a dtype."""
    return replace(each, format=dtype, codes=float(WIDTHS[dtype] * each.matrix.N * each.matrix.K))


def _exact(each: StoredLinear) -> float:
    """Bytes of the codes alone, without what fills them up."""
    assert each.scheme is not None
    bits: int = load_format(each.scheme.format).bits
    return each.matrix.N * each.matrix.K * bits / 8


def _block(columns: int, scheme: WeightScheme) -> int:
    """The block of MatMulNBits, as `exporters/onnx/nbits.py` chooses it."""
    if scheme.granularity != "group" or not scheme.group:
        return next(block for block in (128, 64, 32, 16) if block <= columns or block == 16)
    return next((block for block in (256, 128, 64, 32, 16) if scheme.group % block == 0), scheme.group)
