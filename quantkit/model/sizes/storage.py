"""What a model's weights take as a recipe stores them: by part, and of each linear.

Which linear is stored how is decided as in a compile (`assigned.py`, `planning/stored.py`); embeddings,
norms, headers and graphs are added here. An engine's bytes are those of its weights alone: the kernels beside them are
not reckoned.

One linear as an export stores it.

checkpoint    what the recipe's layout lists of a linear (`model/layouts`: their headers are torch-free); without a
              layout the values that its codes stand for
onnx          codes in the blocks of MatMulNBits with float32 scales (`exporters/onnx/nbits.py`), or one scale a channel
              where its input is quantized too (`exporters/onnx/integers.py`)
tensorrt      codes, with scales in 16 bits (`exporters/tensorrt/network/weights.py`)
gguf          blocks of codes with their scales, as many bits as the format says (`exporters/gguf/blocks.py`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.layout import scale_shape
from quantkit.model.layouts import Layout, load_layout
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.model.sizes.mixtures import of_table, padded
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# bytes of a token in a file that holds the vocabulary: text, kind, score or merge; of an entry for a tensor
_WORD, _TENSOR = 35, 64
# bytes of an ONNX graph, of a block and of the rest, by the model's kind: read off exports (benchmarks/plan_storage.py)
_GRAPH = {"decoder": (6_200, 3_000), "encoder": (5_000, 6_500), "network": (5_000, 6_500)}


@dataclass(frozen=True)
class Storage:
    """What one export of a bundle stores.

    Args:
        dtype: of what is not quantized.
        linears: those inside the blocks.
        head: the matrix that gives the logits; None without one.
        shared: whether the head reads the table of tokens, so that its bytes are the embeddings'.
        embeddings: bytes of the tables of tokens, positions and so on.
        others: bytes of norms, and of what else belongs to no linear.
        files: bytes of headers and graph.
        decisions: what is stored otherwise than the recipe's scheme says.
        least: whether there is more that is not reckoned: an engine's kernels.
    """

    dtype: str
    linears: Sequence[StoredLinear]
    head: StoredLinear | None
    shared: bool
    embeddings: float
    others: float
    files: float
    decisions: Sequence[Decision] = ()
    least: bool = False

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of quantized linears: `codes`, `scales`, `zeros`, `padding`, `tables`; and of the rest: `unquantized`
        linears and biases, `embeddings`, `head`, `others`, `files`.
        """
        found = dict.fromkeys(("codes", "scales", "zeros", "padding", "tables", "unquantized"), 0.0)
        for each in self.linears:
            count = each.matrix.count
            if each.scheme is None:
                found["unquantized"] += each.bytes * count
                continue
            found["codes"] += each.codes * count
            found["scales"] += each.scales * count
            found["zeros"] += each.zeros * count
            found["padding"] += each.padding * count
            found["tables"] += each.tables * count
            found["unquantized"] += each.bias * count
        head = 0.0 if self.head is None or self.shared else self.head.bytes
        return {**found, "embeddings": self.embeddings, "head": head, "others": self.others, "files": self.files}

    @property
    def total(self) -> float:
        """Bytes of all."""
        return sum(self.parts.values())

    @property
    def bits(self) -> float | None:
        """Of a weight of the quantized linears, on average, with scales and zeros; None where there are none."""
        quantized = [each for each in [*self.linears, self.head] if each is not None and each.scheme is not None]
        weights = sum(each.matrix.count * each.matrix.N * each.matrix.K for each in quantized)
        stored = sum(each.matrix.count * (each.bytes - each.bias) for each in quantized)
        return 8 * stored / weights if weights else None


@dataclass(frozen=True)
class LaidOver:
    """A recipe laid over a model, for an exporter to say what it stores.

    Args:
        linears: of the blocks, with their schemes; sizes are still to be filled in.
        head: the matrix that gives the logits, likewise; None without one.
        cache: how keys and values are quantized.
        moved: whether channels of inputs are moved before they are quantized.
    """

    architecture: Architecture
    linears: Sequence[StoredLinear]
    head: StoredLinear | None
    cache: CacheScheme | None
    moved: bool

    def tensors(self, layout: str | None) -> Storage:
        """As a checkpoint in a layout; None: as values. Raises InputError `layout-unsupported`."""
        _refuse_tied(self.architecture, self.head)
        found = None if layout is None else load_layout(layout.replace("-", "_"))
        return _checkpoint(self.architecture, self.cache, self.linears, self.head, found)

    def graph(self, options: Any) -> Storage:
        """As an ONNX graph, by `OnnxOptions` or their like. Raises InputError `layout-unsupported`."""
        _refuse_experts(self.architecture)
        return _graph(self, options)

    def engine(self) -> Storage:
        """As the weights of an engine. Raises InputError `layout-unsupported`."""
        _refuse_experts(self.architecture)
        return _engine(self.architecture, self.linears, self.head)

    def file(self, dtype: str, embedding: WeightScheme | None) -> Storage:
        """As one file with everything. Raises InputError `layout-unsupported`.

        Args:
            dtype: of weights without codes.
            embedding: scheme of the table of tokens; None: in that dtype.
        """
        _refuse_experts(self.architecture, "experts are written into no file")
        return _file(self.architecture, self.linears, self.head, dtype, embedding)


def _refuse_tied(architecture: Architecture, head: StoredLinear | None) -> None:
    if head is not None and head.scheme is not None and architecture.tied:
        raise InputError(
            "layout-unsupported",
            where=head.matrix.name,
            value="is quantized and shares its weight with the embedding, which is not",
            rule="transformers stores tied weights once, as one or the other",
            remedy="--set 'keep=[embeddings, lm_head]', or leave `checkpoint` out of `export`",
        )


def _refuse_experts(
    architecture: Architecture, rule: str = "the graph is traced once, and which expert runs depends on the data"
) -> None:
    for each in architecture.inside():
        if each.count > 1:
            raise InputError(
                "layout-unsupported",
                where=each.name,
                value="belongs to a mixture of experts",
                rule=rule,
                remedy="leave `onnx`, `tensorrt` and `gguf` out of `export`",
            )


# --- the whole of an export -------------------------------------------------------------------------------------------


def _checkpoint(
    architecture: Architecture,
    cache: CacheScheme | None,
    linears: Sequence[StoredLinear],
    head: StoredLinear | None,
    layout: Layout | None,
) -> Storage:
    dtype = architecture.dtype
    width = WIDTHS[dtype]
    filled = [in_layout(each, dtype, layout) for each in linears]
    last = in_layout(head, dtype, layout) if head is not None else None
    listed = [*filled, *([last] if last is not None and not architecture.tied else [])]
    elements = architecture.embeddings + _elsewhere(architecture)
    # an offset has about as many digits as the whole
    digits = len(str(int(sum(each.bytes * each.matrix.count for each in listed) + width * elements)))
    entries = sum(header_bytes(each, layout, digits) for each in listed)
    vectors = 2 + sum(-(-layer.others // architecture.hidden) for layer in architecture.layers)
    entries += vectors * (ENTRY + 2 * digits + 50)
    return Storage(
        dtype,
        filled,
        last,
        False,
        float(width * architecture.embeddings),
        float(width * _elsewhere(architecture)),
        entries + _cache_scales(architecture, cache, ENTRY + 2 * digits + 50),
    )


def _elsewhere(architecture: Architecture) -> int:
    """Elements of norms, and of what else belongs to no linear and no table."""
    return architecture.others + sum(layer.others for layer in architecture.layers)


def _cache_scales(architecture: Architecture, cache: CacheScheme | None, entry: int) -> float:
    """Fixed scales of keys and values: an entry in a header for each, and float32 numbers."""
    if cache is None or cache.dynamic:
        return 0.0
    found = 0.0
    for layer in architecture.layers:
        if layer.attention is not None:
            heads = layer.attention.kv_heads
            numbers = {"tensor": 1, "head": heads}.get(cache.granularity, heads * layer.attention.head_dim)
            found += 2 * (4 * numbers + entry)
    return found


def _graph(laid: LaidOver, options: Any) -> Storage:
    architecture = laid.architecture
    filled = [in_graph(each, options) for each in laid.linears]
    # of an encoder the graph gives the last hidden states
    head = None if architecture.kind == "encoder" else laid.head
    others = 4.0 * (_elsewhere(architecture) - architecture.ends) + _rotary(architecture)
    if laid.moved:
        others += sum(8.0 * columns for columns in _shared_inputs(filled))  # a shift and a scale a channel
    if head is not None and head.scheme is not None and load_format(head.scheme.format).bits < 8:
        others += min(options.head_rows, head.matrix.N - 1) * head.matrix.K * (1 + 4.0 / 64)
    if options.prefill == "int8" and architecture.kind == "decoder":  # the same weights once more, in 8 bits
        coded = (each.matrix for each in filled if each.scheme is not None and each.activations is None)
        others += sum(matrix.count * matrix.N * (matrix.K + 4.0) for matrix in coded)
    block, rest = _GRAPH[architecture.kind]
    return Storage(
        "float32",
        filled,
        in_graph(head, options) if head is not None else None,
        False,
        table_bytes(architecture, options.embedding, coded=head is not None and head.scheme is not None),
        others,
        float(block * len(architecture.layers) + rest),
    )


def table_bytes(architecture: Architecture, stored: str, *, coded: bool) -> float:
    """Bytes of the token embeddings of a graph.

    Args:
        stored: as the export's `embedding` says (`exporters/onnx/ends.py`).
        coded: whether the head is quantized.
    """
    tied = architecture.tied and architecture.head is not None
    if stored == "float" or (tied and not coded):
        return 4.0 * architecture.embeddings
    own = 1.0 if stored == "int8" or not tied else {"shared": 0.0, "refined": 0.25}[stored]
    return architecture.embeddings * (own + (4.0 / 64 if own else 0.0))


def _rotary(architecture: Architecture) -> float:
    """Cosines and sines of every position, float32, once for all layers that turn alike."""
    if architecture.kind != "decoder" or architecture.max_context is None:
        return 0.0
    apart = architecture.model_type in ("gemma3_text", "olmo3")  # windows turn by angles of their own
    kinds = {
        (layer.attention.kind if apart else "", layer.attention.rope_dim or layer.attention.head_dim)
        for layer in architecture.layers
        if layer.attention is not None
    }
    return sum(4.0 * architecture.max_context * size for _, size in kinds)


def _shared_inputs(linears: Sequence[StoredLinear]) -> Iterator[int]:
    """K of each input that is quantized: linears side by side in a module read one."""
    seen = set()
    for each in linears:
        key = (each.matrix.name.rpartition(".")[0], each.matrix.K)
        if each.activations is not None and key not in seen:
            seen.add(key)
            yield each.matrix.K


def _engine(architecture: Architecture, linears: Sequence[StoredLinear], head: StoredLinear | None) -> Storage:
    return Storage(
        "float16",
        [in_engine(each) for each in linears],
        in_engine(head) if head is not None else None,
        False,
        2.0 * architecture.embeddings,
        2.0 * _elsewhere(architecture),
        0.0,
        least=True,
    )


def _file(
    architecture: Architecture,
    linears: Sequence[StoredLinear],
    head: StoredLinear | None,
    dtype: str,
    embedding: WeightScheme | None,
) -> Storage:
    """Everything in one file: vectors in float32, and a tied head's codes are the embeddings'."""
    last = in_file(head, dtype) if head is not None else None
    width = float(WIDTHS[dtype])
    taken: Sequence[Decision] = ()
    if architecture.tied and last is not None and last.scheme is not None:
        width = 0.0
    elif embedding is not None:
        stored, taken = of_table(embedding, architecture.hidden, dtype, "embeddings")
        if stored is not None:
            shape = (architecture.vocabulary or 1, architecture.hidden)
            width = load_format(stored.format).bits_per_weight(shape, stored) / 8
    tensors = 2 + sum(len(layer.matrices) + -(-layer.others // architecture.hidden) for layer in architecture.layers)
    return Storage(
        dtype,
        [in_file(each, dtype) for each in linears],
        last,
        False,
        width * architecture.embeddings,
        4.0 * _elsewhere(architecture),
        float(_TENSOR * tensors + _WORD * (architecture.vocabulary or 0)),
        taken,
    )


# --- stored_ ------------------------------------------------------------------------------------------------------
# One linear as an export stores it.

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
# bytes of an element, by its type in a safetensors header
_ELEMENTS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}
# of a tensor in a safetensors header beside its name, type, shape and two offsets
ENTRY = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
# name, type, shape
_Header = tuple[str, str, tuple[int, ...]]


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


def in_layout(each: StoredLinear, dtype: str, layout: Layout | None) -> StoredLinear:
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


def header_bytes(each: StoredLinear, layout: Layout | None, digits: int) -> int:
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


def _headers(each: StoredLinear, layout: Layout) -> list[_Header]:
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
