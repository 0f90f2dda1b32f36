"""Storage of a model's weights under a recipe, in bytes: by part, and for each linear.

The scheme of each linear is decided as in a compile (`assigned.py`); embeddings, norms, headers and graphs are added
here. The bytes of an engine are those of its weights alone, without its kernels.

checkpoint    tensors of the recipe's layout (`model/layouts`: their headers are torch-free); without a layout
              dequantized values
onnx          codes in the blocks of MatMulNBits with float32 scales (`exporters/onnx/nbits.py`), or one scale per
channel
              for quantized inputs (`exporters/onnx/integers.py`)
tensorrt      codes, with scales in 16 bits (`exporters/tensorrt/dialect.py`)
gguf          blocks of codes with their scales, in the format's bits (`exporters/gguf/blocks.py`)

Mixtures of types have the names of GGUF files. A file's own type is that of most matrices; values, the outputs of a
layer, and the head get more bits, some of them only in some layers. If 256 does not divide K, a type with blocks of 32
and more bits replaces it. Source: `llama_tensor_get_type` and `tensor_type_fallback` of llama.cpp
(`src/llama-quant.cpp` in llama-cpp-python 0.3.36), with an importance matrix, since codes depend on inputs here too.
Its
exceptions for Falcon and mixtures of experts are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, NamedTuple

from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.layout import scale_shape
from quantkit.model.layouts import Header, Layout, Shapes, load_layout
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.scheme import MIXTURES, ActivationScheme, CacheScheme, WeightScheme

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
# bytes of a token in a file with the vocabulary: text, kind, score or merge; of an entry for a tensor
_WORD, _TENSOR = 35, 64
# bytes of an ONNX graph, per block and for the rest, by the model's kind: from exports (benchmarks/plan_storage.py)
_GRAPH = {"decoder": (6_200, 3_000), "encoder": (5_000, 6_500), "network": (5_000, 6_500)}
# type in a safetensors header -> bytes of an element
_ELEMENTS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}
# bytes of a tensor in a safetensors header, without its name, type, shape and two offsets
_ENTRY = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
_TRACED = "the graph is traced once, but the choice of experts depends on the data"


@dataclass(frozen=True)
class StoredLinear:
    """A stored linear; all bytes are those of one of its `count`.

    Args:
        matrix: its sizes; experts stored in several ways have an entry for each way.
        scheme: scheme of its weight; None if it is not quantized.
        activations: scheme of its input.
        format: format of its weight: `int4`, or its dtype.
        codes: bytes of its codes, without padding.
        scales: bytes of its scales.
        zeros: bytes of its zero points.
        padding: bytes that fill up blocks and words.
        tables: bytes of shapes, codebooks, orders, sums, fixed scales of its input.
        bias: bytes of its bias.
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
        """Bytes of one linear."""
        return self.codes + self.scales + self.zeros + self.padding + self.tables + self.bias

    @property
    def exact(self) -> float:
        """Bytes of its codes without padding."""
        assert self.scheme is not None
        bits: int = load_format(self.scheme.format).bits
        return self.matrix.N * self.matrix.K * bits / 8

    def plain(self, dtype: str, bias: float) -> StoredLinear:
        """Return it stored as numbers of a dtype."""
        return replace(self, format=dtype, codes=float(WIDTHS[dtype] * self.matrix.N * self.matrix.K), bias=bias)

    def coded(self, codes: float, scales: float, bias: float) -> StoredLinear:
        """Return it stored in its scheme's format."""
        assert self.scheme is not None
        return replace(self, format=self.scheme.format, codes=codes, scales=scales, bias=bias)


@dataclass(frozen=True)
class Storage:
    """Bytes of one export of a bundle.

    Args:
        dtype: dtype of unquantized parts.
        linears: linears inside the blocks.
        head: the head.
        embeddings: bytes of the tables of tokens, positions and so on.
        others: bytes of norms, and of other parameters.
        files: bytes of headers and graph.
        decisions: deviations from the recipe's scheme.
        least: True if more is stored than is counted: an engine's kernels.
        shared: True if the head reads the table of tokens, and has no bytes of its own.
    """

    dtype: str
    linears: Sequence[StoredLinear]
    head: StoredLinear | None
    embeddings: float
    others: float
    files: float
    decisions: Sequence[Decision] = ()
    least: bool = False
    shared: bool = False

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of quantized linears: `codes`, `scales`, `zeros`, `padding`, `tables`; of the rest: `unquantized`
        linears and
        biases, `embeddings`, `head`, `others`, `files`.
        """
        names = ("codes", "scales", "zeros", "padding", "tables")
        parts = dict.fromkeys((*names, "unquantized"), 0.0)
        for linear in self.linears:
            count = linear.matrix.count
            for name in names if linear.scheme is not None else ():
                parts[name] += getattr(linear, name) * count
            parts["unquantized"] += (linear.bias if linear.scheme is not None else linear.bytes) * count
        head = 0.0 if self.head is None or self.shared else self.head.bytes
        return {**parts, "embeddings": self.embeddings, "head": head, "others": self.others, "files": self.files}

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def bits(self) -> float | None:
        """Mean bits of a weight of the quantized linears, with scales and zero points; None without any."""
        every = [*self.linears, *([self.head] if self.head is not None else [])]
        quantized = [linear for linear in every if linear.scheme is not None]
        weights = sum(linear.matrix.count * linear.matrix.N * linear.matrix.K for linear in quantized)
        stored = sum(linear.matrix.count * (linear.bytes - linear.bias) for linear in quantized)
        return 8 * stored / weights if weights else None


@dataclass(frozen=True)
class LaidOver:
    """A recipe applied to a model, from which an exporter predicts its storage; `moved` means that channels of inputs
    are.
    """

    architecture: Architecture
    linears: Sequence[StoredLinear]
    head: StoredLinear | None
    cache: CacheScheme | None
    moved: bool

    def tensors(self, layout: str | None) -> Storage:
        """Return the storage of a checkpoint in a layout; None for values. Raises InputError `layout-unsupported`."""
        architecture, head = self.architecture, self.head
        if head is not None and head.scheme is not None and architecture.tied:
            value = "is quantized and shares its weight with the embedding, which is not"
            rule = "transformers stores tied weights once, as one or the other"
            remedy = "--set 'keep=[embeddings, lm_head]', or leave `checkpoint` out of `export`"
            raise InputError("layout-unsupported", head.matrix.name, value, rule, remedy)
        chosen = None if layout is None else load_layout(layout.replace("-", "_"))
        dtype, width = architecture.dtype, WIDTHS[architecture.dtype]
        filled = [_in_layout(linear, dtype, chosen) for linear in self.linears]
        last = _in_layout(head, dtype, chosen) if head is not None else None
        listed = [*filled, *([last] if last is not None and not architecture.tied else [])]
        elements = architecture.embeddings + self._elsewhere
        # an offset has about as many digits as the total size
        digits = len(str(int(sum(linear.bytes * linear.matrix.count for linear in listed) + width * elements)))
        vectors = 2 + sum(-(-layer.others // architecture.hidden) for layer in architecture.layers)
        entry = _ENTRY + 2 * digits + 50
        files = sum(_header_bytes(linear, chosen, digits) for linear in listed) + vectors * entry
        if self.cache is not None and not self.cache.dynamic:  # float32 scales of keys and values
            for attention in (layer.attention for layer in architecture.layers if layer.attention is not None):
                if attention.kind == "linear":
                    continue
                heads = attention.kv_heads
                numbers = {"tensor": 1, "head": heads}.get(self.cache.granularity, heads * attention.head_dim)
                files += 2 * (4 * numbers + entry)
        embeddings, others = float(width * architecture.embeddings), float(width * self._elsewhere)
        return Storage(dtype, filled, last, embeddings, others, float(files))

    def graph(self, options: Any) -> Storage:
        """Return the storage of an ONNX graph, with `OnnxOptions` or similar options. Raises InputError
        `layout-unsupported`.
        """
        self._refuse_experts(_TRACED)
        architecture = self.architecture
        filled = [_in_graph(linear, options) for linear in self.linears]
        # the graph of an encoder ends with the last hidden states
        head = None if architecture.kind == "encoder" else self.head
        coded = head is not None and head.scheme is not None
        others = 4.0 * (self._elsewhere - architecture.ends) + _rotary(architecture)
        if self.moved:
            others += sum(8.0 * columns for columns in _shared_inputs(filled))  # a shift and a scale a channel
        if head is not None and head.scheme is not None and load_format(head.scheme.format).bits < 8:
            others += min(options.head_rows, head.matrix.N - 1) * head.matrix.K * (1 + 4.0 / 64)
        if options.prefill == "int8" and architecture.kind == "decoder":  # the same weights once more, in 8 bits
            again = (linear.matrix for linear in filled if linear.scheme is not None and linear.activations is None)
            others += sum(matrix.count * matrix.N * (matrix.K + 4.0) for matrix in again)
        block, rest = _GRAPH[architecture.kind]
        table = table_bytes(architecture, options.embedding, coded=coded)
        if architecture.has_encoder:  # each of two graphs holds the tokens
            table = 8.0 * architecture.embeddings
        last = _in_graph(head, options) if head is not None else None
        return Storage("float32", filled, last, table, others, float(block * len(architecture.layers) + rest))

    def engine(self) -> Storage:
        """Return the storage of an engine's weights. Raises InputError `layout-unsupported`."""
        self._refuse_experts(_TRACED)
        last = _in_engine(self.head) if self.head is not None else None
        filled, embeddings = [_in_engine(linear) for linear in self.linears], 2.0 * self.architecture.embeddings
        return Storage("float16", filled, last, embeddings, 2.0 * self._elsewhere, 0.0, least=True)

    def file(self, dtype: str, embedding: WeightScheme | None) -> Storage:
        """Return the storage of a single file: vectors in float32, a tied head's codes as the embeddings.

        `dtype` is that of weights without codes; `embedding` the scheme of the table of tokens, None for that dtype.
        Raises
        InputError (`layout-unsupported`).
        """
        architecture = self.architecture
        last = _in_file(self.head, dtype) if self.head is not None else None
        width = float(WIDTHS[dtype])
        decisions: Sequence[Decision] = ()
        if architecture.tied and last is not None and last.scheme is not None:
            width = 0.0
        elif embedding is not None:
            stored, decisions = of_table(embedding, architecture.hidden, dtype, "embeddings")
            if stored is not None:
                shape = (architecture.vocabulary or 1, architecture.hidden)
                width = load_format(stored.format).bits_per_weight(shape, stored) / 8
        layers = architecture.layers
        tensors = 2 + sum(len(layer.matrices) + -(-layer.others // architecture.hidden) for layer in layers)
        files = float(_TENSOR * tensors + _WORD * (architecture.vocabulary or 0))
        filled, embeddings = [_in_file(linear, dtype) for linear in self.linears], width * architecture.embeddings
        return Storage(dtype, filled, last, embeddings, 4.0 * self._elsewhere, files, decisions)

    @property
    def _elsewhere(self) -> int:
        """Elements of norms and other parameters."""
        return self.architecture.others + sum(layer.others for layer in self.architecture.layers)

    def _refuse_experts(self, rule: str) -> None:
        for matrix in self.architecture.inside():
            if matrix.count > 1:
                value, remedy = "belongs to a mixture of experts", "leave `onnx`, `tensorrt` and `gguf` out of `export`"
                raise InputError("layout-unsupported", matrix.name, value, rule, remedy)


def table_bytes(architecture: Architecture, stored: str, *, coded: bool) -> float:
    """Return the bytes of a graph's token embeddings for the export's `embedding`; `coded`: the head is quantized."""
    tied = architecture.tied and architecture.head is not None
    if stored == "float" or (tied and not coded):
        return 4.0 * architecture.embeddings
    own = 1.0 if stored == "int8" or not tied else {"shared": 0.0, "refined": 0.25}[stored]
    return architecture.embeddings * (own + (4.0 / 64 if own else 0.0))


def _rotary(architecture: Architecture) -> float:
    """Return the bytes of cosines and sines of every position, float32, once for all layers with equal rotation."""
    if architecture.kind != "decoder" or architecture.max_context is None or architecture.has_encoder:
        return 0.0
    apart = architecture.model_type in ("gemma3_text", "olmo3")  # layers with a window have angles of their own
    kinds = {
        (layer.attention.kind if apart else "", layer.attention.rope_dim or layer.attention.head_dim)
        for layer in architecture.layers
        if layer.attention is not None and layer.attention.kind != "linear"
    }
    return sum(4.0 * architecture.max_context * size for _, size in kinds)


def _shared_inputs(linears: Sequence[StoredLinear]) -> Iterator[int]:
    """Yield K of each quantized input; linears of one module share it."""
    seen = set()
    for linear in linears:
        key = (linear.matrix.name.rpartition(".")[0], linear.matrix.K)
        if linear.activations is not None and key not in seen:
            seen.add(key)
            yield linear.matrix.K


# --- one linear -------------------------------------------------------------------------------------------------------


def _in_layout(linear: StoredLinear, dtype: str, layout: Layout | None) -> StoredLinear:
    """Return its storage in a checkpoint; without a layout, as values."""
    matrix, scheme = linear.matrix, linear.scheme
    bias = float(WIDTHS[dtype] * matrix.N * matrix.bias)
    if scheme is None or layout is None:
        return linear.plain(dtype, bias)
    if scheme.padding(matrix.K):
        raise padded(matrix.name, scheme, matrix.K)
    sizes = dict.fromkeys(("codes", "scales", "zeros", "tables"), 0.0)
    for name, kind, shape in _headers(linear, layout):
        sizes[_role(name.removeprefix(matrix.name), layout.codes)] += _ELEMENTS[kind] * prod(shape)
    padding, scales, zeros, tables = sizes["codes"] - linear.exact, sizes["scales"], sizes["zeros"], sizes["tables"]
    return replace(linear.coded(linear.exact, scales, bias), zeros=zeros, padding=padding, tables=tables)


def _in_graph(linear: StoredLinear, options: Any) -> StoredLinear:
    """Return its storage in an ONNX graph for ONNX Runtime."""
    scheme, rows, columns = linear.scheme, linear.matrix.N, linear.matrix.K
    bias = 4.0 * rows * linear.matrix.bias
    if scheme is None:
        return linear.plain("float32", bias)
    if linear.activations is not None:
        signed = scheme.format == "int7" or options.weight_codes == "int8"
        zeros = 0.0 if scheme.symmetric and signed else float(rows)
        centred = linear.activations.granularity == "token" and not linear.activations.symmetric
        return replace(linear.coded(float(rows * columns), 4.0 * rows, bias), zeros=zeros, tables=4.0 * rows * centred)
    bits, block, exact = load_format(scheme.format).bits, _block(columns, scheme), linear.exact
    count = ceil(columns / block)
    zeros = 0.0 if scheme.symmetric else float(rows * ceil(count * bits / 8))
    padding = rows * count * block * bits / 8 - exact
    return replace(linear.coded(exact, 4.0 * rows * count, bias), zeros=zeros, padding=padding)


def _in_engine(linear: StoredLinear) -> StoredLinear:
    """Return its storage in a TensorRT engine, at least."""
    matrix, scheme, bias = linear.matrix, linear.scheme, 2.0 * linear.matrix.N * linear.matrix.bias
    if scheme is None:
        return linear.plain("float16", bias)
    rows, columns = scale_shape((matrix.N, matrix.K + scheme.padding(matrix.K)), scheme)
    scales = float(rows * columns * (1 if scheme.scale == "fp8_e4m3" else 2))
    codes = float(matrix.N * matrix.K) if scheme.format == "int7" else linear.exact
    return linear.coded(codes, scales, bias)


def _in_file(linear: StoredLinear, dtype: str) -> StoredLinear:
    """Return its storage in a file of blocks; `dtype` is that of weights without codes."""
    matrix, scheme, bias = linear.matrix, linear.scheme, 4.0 * linear.matrix.N * linear.matrix.bias
    if scheme is None:
        return linear.plain(dtype, bias)
    whole = load_format(scheme.format).bits_per_weight((matrix.N, matrix.K), scheme) * matrix.N * matrix.K / 8
    # points of several weights have fewer bits than the indices of their values
    exact = min(linear.exact, whole)
    return linear.coded(exact, whole - exact, bias)


def _header_bytes(linear: StoredLinear, layout: Layout | None, digits: int) -> int:
    """Return the bytes of all `count` of a linear in the header of a safetensors file; `digits` of an offset."""
    matrix = linear.matrix
    headers: list[Header] = [(f"{matrix.name}.weight", "BF16", (matrix.N, matrix.K))]
    if linear.scheme is not None and layout is not None:
        headers = _headers(linear, layout)
    if matrix.bias:
        headers = [*headers, (f"{matrix.name}.bias", "BF16", (matrix.N,))]
    return matrix.count * sum(
        _ENTRY + len(name) + len(kind) + len(",".join(map(str, shape))) + 2 * digits for name, kind, shape in headers
    )


def _headers(linear: StoredLinear, layout: Layout) -> list[Header]:
    """Return the layout's headers of a linear, and those of the fixed scale and zero point of its input."""
    matrix = linear.matrix
    assert linear.scheme is not None
    headers = layout.headers(matrix.name, (matrix.N, matrix.K), linear.scheme)
    if linear.activations is not None and not linear.activations.dynamic:
        headers = [*headers, (f"{matrix.name}.input_scale", "F32", (1,))]
        if not linear.activations.symmetric:
            headers.append((f"{matrix.name}.input_zero_point", "I8", (1,)))
    return headers


def _role(name: str, codes: str) -> str:
    """Return the kind of a stored tensor from its suffix."""
    if name == codes:
        return "codes"
    if name.startswith(".input"):
        return "tables"
    if "zero" in name:
        return "zeros"
    return "scales" if "scale" in name or "absmax" in name else "tables"


def _block(columns: int, scheme: WeightScheme) -> int:
    """Return the block of MatMulNBits that `exporters/onnx/nbits.py` chooses."""
    if scheme.granularity != "group" or not scheme.group:
        return next(block for block in (128, 64, 32, 16) if block <= columns or block == 16)
    return next((block for block in (256, 128, 64, 32, 16) if scheme.group % block == 0), scheme.group)


# --- mixtures, and groups that do not divide K ----------------------------------------------------------------------

_POWERS = (256, 128, 64, 32, 16)

_FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"} | dict.fromkeys(
    ("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s"), "iq4_nl"
)
# mixtures of fewer bits than three: their head has fewer too, but only in super-blocks
_SMALL = ("iq3_xxs", "iq2_m")
_VALUES = ("v_proj", "qkv_proj")
_OTHERS = {("q3_k_m", "o_proj"): "q4_k", ("iq2_m", "o_proj"): "iq3_s", ("iq3_xxs", "o_proj"): "iq3_s"} | dict.fromkeys(
    (("iq3_xxs", "q_proj"), ("iq3_xxs", "k_proj")), "iq2_s"
)


class _Place(NamedTuple):
    """Layer of a matrix, number of layers, and queries per value."""

    layer: int
    layers: int
    shared: int


def mixed(mixture: str, shapes: Shapes, head: str | None = None) -> dict[str, WeightScheme]:
    """Return the scheme of each matrix in a mixture (one of `MIXTURES`), without regard to the divisors of K."""
    leaves = {name: name.rpartition(".")[2] for name in shapes if name != head}
    numbers = {name: int(blocks[0]) for name in leaves if (blocks := re.findall(r"\.(\d+)\.", f".{name}."))}
    layers = max(numbers.values(), default=-1) + 1
    values = [name for name, leaf in leaves.items() if leaf in _VALUES]
    rows = {leaf: shapes[name][0] for name, leaf in leaves.items() if leaf in ("q_proj", "k_proj")}
    shared = rows.get("q_proj", 1) // rows.get("k_proj", 1)
    schemes: dict[str, WeightScheme] = {}
    for name in shapes:
        if name == head:
            small = mixture in _SMALL and shapes[name][1] % 256 == 0
            kind = "q8_0" if mixture == "q8_0" else "q5_k" if small else "q6_k"
        elif leaves[name] in _VALUES:
            kind = _of_values(mixture, _Place(values.index(name), len(values), shared), layers)
        elif leaves[name] == "down_proj":
            kind = _of_down(mixture, _Place(numbers.get(name, 0), layers, shared))
        else:
            kind = _OTHERS.get((mixture, leaves[name]), MIXTURES[mixture])
        schemes[name] = WeightScheme(format=kind)
    return schemes


def instead(scheme: WeightScheme, columns: int) -> WeightScheme:
    """Return the replacement of a scheme if its super-blocks do not divide K = `columns`; else the scheme."""
    kind = _FALLBACKS.get(scheme.format)
    return WeightScheme(format=kind) if kind is not None and scheme.padding(columns) else scheme


def of_table(scheme: WeightScheme, columns: int, floats: str, name: str) -> tuple[WeightScheme | None, list[Decision]]:
    """Return the scheme of a table of embeddings, None if 32 does not divide its width, and the decision."""
    stored = instead(scheme, columns)
    if stored == scheme and not stored.padding(columns):
        return scheme, []
    whole = not stored.padding(columns)
    before, after = (load_format(way.format).bits_per_weight((1, 256), way) for way in (scheme, stored))
    bits = after if whole else 32.0 if floats == "float32" else 16.0
    reason = f"{256 if whole else 32} does not divide its width {columns}: {bits:.4g} bits a weight, not {before:.4g}"
    to = stored.format if whole else floats
    return stored if whole else None, [decision("recipe", "type-fallback", name, reason, scheme.format, to)]


def _of_values(mixture: str, at: _Place, layers: int) -> str:
    kind = MIXTURES[mixture]
    if mixture == "q3_k_m":
        kind = "q5_k" if at.layer < 2 else "q4_k"
    elif mixture in ("iq4_nl", "iq4_xs") and at.shared >= 4:
        kind = "q5_k"
    elif mixture == "iq2_m":
        return "q4_k" if at.shared >= 4 else "iq3_s"
    elif mixture in ("iq3_s", "iq3_xxs") and at.shared >= 4:
        kind = "q4_k"
    elif mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        kind = "q6_k"
    # models of 80 layers with grouped queries: values are an eighth of the queries' matrix
    return "q5_k" if layers == 80 and at.shared > 1 and kind in ("q3_k", "q4_k") else kind


def _of_down(mixture: str, at: _Place) -> str:
    if mixture == "q3_k_m":
        return "q5_k" if at.layer < at.layers // 16 else "q4_k"
    if mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        return "q6_k"
    if mixture in ("q4_0", "iq2_m") and at.layer < at.layers // 8:
        return "q4_1" if mixture == "q4_0" else "iq3_s"
    return MIXTURES[mixture]


def _more_bits(at: _Place) -> bool:
    """Tell whether a layer is in the first or the last eighth, or every third between them."""
    eighth = at.layers // 8
    return at.layer < eighth or at.layer >= 7 * at.layers // 8 or (at.layer - eighth) % 3 == 2


def power(name: str, group: int, columns: int) -> int | None:
    """Return the largest power of two up to `group` that divides K and that the format supports."""
    rules = load_format(name).rules
    allowed = () if rules.multiple else rules.groups or _POWERS
    return next((size for size in _POWERS if size <= group and columns % size == 0 and size in allowed), None)


def padded(linear: str, scheme: WeightScheme, columns: int | None) -> InputError:
    """Make the error for a layer with a padded last group, in an export of whole groups only."""
    size = None if columns is None or scheme.group is None else power(scheme.format, scheme.group, columns)
    remedy = "--set on_indivisible=keep"
    if size:
        remedy = f"--set scheme.weights.group={size}, or --set on_indivisible=shrink"
    value = f"{f'K {columns} in groups' if columns else 'its last group'} of {scheme.group}, padded"
    rule = "this export takes only whole groups; `onnx` and `checkpoint: {layout: dense}` take padding"
    return InputError("layout-unsupported", linear, value, rule, remedy)
