"""Opening of a float ONNX file: a checked graph in memory, or an error of one line.

The file is not trusted. External weights are read only from the file's own folder, by a name without `..`, never
through
a link, and only up to the end of their file. Operators must be among those that ONNX Runtime ships.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.bundle.disk import sha256
from quantkit.errors import InputError, MissingDependency, absent, reading
from quantkit.graph.protobuf import demand_attributes
from quantkit.kinds import Kind
from quantkit.model.source.files import source_changed

if TYPE_CHECKING:
    import onnx_ir as ir

# first opset with a per-channel DequantizeLinear
OPSET = 13
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "pkg.torch")
_QUANTIZED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "MatMulNBits",
)
# operators that keep every number
_SAME_NUMBERS = ("Cast", "Identity")
_IDS, _WHOLE = "input_ids", ("INT64", "INT32")
_SUFFIX = ".onnx"
# most nodes after functions are inlined: a few functions that call each other twice make billions
_NODES = 1_000_000


@dataclass(frozen=True)
class FloatGraphInput:
    """One input of a graph.

    Args:
        name: name of the input.
        dtype: numpy's name of the type.
        shape: sizes; None is a free size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class FloatGraph:
    """An opened graph with its weights in memory.

    Args:
        model: the graph.
        path: file that it was read from.
        name: name for a bundle.
        inputs: inputs that are no weights.
        sha256: hash over the file and its external weights.
        files: the file, and the files of its external weights.
        kind: `encoder` if inputs are token ids, else `network`.
        notes: sentences for the reader of its measurements.
    """

    model: ir.Model
    path: Path
    name: str
    inputs: tuple[FloatGraphInput, ...]
    sha256: str
    files: tuple[Path, ...]
    kind: Kind
    notes: tuple[str, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in self.files)

    def demand_unchanged(self) -> None:
        """Raise InputError `source-changed` if a file has changed since it was opened."""
        try:
            same = _identity(self.files) == self.sha256
        except OSError:
            same = False
        if not same:
            raise source_changed(self.path.name)


def is_graph(reference: str) -> bool:
    """Tell whether a model reference is the path of an ONNX file."""
    return reference.lower().endswith(_SUFFIX)


def open_graph(path: Path, name: str = "") -> FloatGraph:
    """Read and check a file.

    Args:
        path: the file.
        name: name for a bundle; by default the file's.

    Raises:
        InputError: `file-missing`; `onnx-` followed by `unreadable`, `external`, `quantized`, `operator`, `opset`,
            `shape`, `dtype`, `weights`, `outputs`.
        MissingDependency: without onnx-ir.
    """
    with MissingDependency.unless_found("onnx-ir", extra="compile", purpose="reading an ONNX file"):
        import onnx_ir  # noqa: F401
    where = path.name
    if not path.is_file():
        raise absent(path)
    with reading(lambda reason: _refused(where, "unreadable", reason)):
        demand_attributes(path)
        return _opened(path, name, where)


def _opened(path: Path, name: str, where: str) -> FloatGraph:
    import onnx_ir as ir

    from quantkit.graph.values import name_of

    model, notes = _loaded(path)
    if not len(model.graph):
        raise _refused(where, "unreadable", "the graph is empty")
    files = (path, *sorted(_external(model, path.parent.resolve(), where)))
    digest = _identity(files)
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    _inline(model, version, where)
    _check_operators(model, where)
    if version < OPSET:
        rule = f"scales per channel exist from opset {OPSET} on"
        remedy = f"onnx.version_converter.convert_version(model, {OPSET + 4}), or export it again"
        raise _refused(where, "opset", f"opset {version}", rule, remedy)
    _check_weights(model, where, sum(file.stat().st_size for file in files))
    for node in model.graph.all_nodes():
        node.name = name_of(node)  # before another pass numbers them: the user does not know `node_3`
    for value in list(model.graph.inputs):
        if value.name in model.graph.initializers:  # old exporters list weights as inputs too
            model.graph.inputs.remove(value)
    inputs = tuple(inputs_of(model, where))
    if not list(model.graph.outputs):
        raise _refused(where, "unreadable", "no outputs")
    for value in model.graph.outputs:
        if not isinstance(value.type, ir.TensorType | None) or value.dtype == ir.DataType.BFLOAT16:
            rule = "outputs are tensors of a numpy type, so that the quantized graph can be compared"
            remedy = "cast it to float32 in the graph, or make each tensor of a sequence an output"
            raise _refused(where, "outputs", f"{value.name} is {value.type}", rule, remedy)
    return FloatGraph(model, path, name or path.stem, inputs, digest, files, kind_of(model), notes)


def _loaded(path: Path) -> tuple[ir.Model, tuple[str, ...]]:
    """Return the graph of a file, and notes; a ZipMap of scikit-learn is replaced by the matrix that it reads."""
    import onnx
    import onnx_ir as ir

    try:
        return ir.load(path), ()
    except ir.serde.SerdeError as problem:
        proto = onnx.load(path, load_external_data=False)
        maps = {node.output[0]: node for node in proto.graph.node if node.op_type == "ZipMap"}
        mapped = [output for output in proto.graph.output if output.name in maps]
        if not mapped:
            raise problem
    for output in mapped:
        output.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [None, None]))
        node = maps[output.name]
        node.CopyFrom(onnx.helper.make_node("Identity", list(node.input), list(node.output), node.name))
    notes = [f"{output.name} is [samples, classes] here, not one map per sample (ZipMap)" for output in mapped]
    return ir.from_proto(proto), tuple(notes)


def _identity(files: Sequence[Path]) -> str:
    """Hash the bytes of the first file and the digests of the others, without loading them."""
    with files[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    for file in files[1:]:
        digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest()


def _external(model: ir.Model, folder: Path, where: str) -> Iterator[Path]:
    """Yield the files of external weights. Raises InputError `onnx-external` for one outside of the graph's folder."""
    import onnx_ir as ir

    seen: dict[str, int] = {}
    for _, tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            place = str(tensor.location)
            seen[place] = max(seen.get(place, 0), int(tensor.offset or 0) + max(int(tensor.length or 0), tensor.nbytes))
    rule = "weights lie beside the graph, in its own folder"
    for name, reach in seen.items():
        inside = PurePosixPath(name)
        if not name or inside.is_absolute() or ".." in inside.parts or "\\" in name or ":" in name:
            raise _refused(where, "external", name, rule, "export it again, with the weights in the same folder")
        file = folder / name
        links = [part for part in (file, *file.parents) if part.is_relative_to(folder) and part.is_symlink()]
        if links or not file.resolve().is_relative_to(folder):
            raise _refused(where, "external", f"{name} is a link", rule, "copy the file to that place")
        if not file.is_file():
            raise _refused(where, "external", f"{name} is missing", rule, "copy it there")
        if file.stat().st_size < reach:
            short = f"{name} has {file.stat().st_size} bytes, and a weight ends at {reach}"
            raise _refused(where, "external", short, "the file is whole", "fetch it again")
        yield file


def _tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield all weights, including those of subgraphs."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value


def _inline(model: ir.Model, version: int, where: str) -> None:
    """Replace calls of functions by their bodies.

    The opset of a body is that of the graph around it, whatever the body declares: ONNX Runtime does the same.
    """
    from onnx_ir.passes.common import InlinePass

    sizes: dict[tuple[str, str, str], int] = {}
    calling: set[tuple[str, str, str]] = set()

    def size(nodes: Iterable[ir.Node]) -> int:
        total = 0
        for node in nodes:
            called = node.op_identifier()
            function = model.functions.get(called)
            total += 1
            if function is None:
                continue
            if called in calling:
                raise _refused(where, "unreadable", f"the function {node.op_type} calls itself")
            if called not in sizes:
                calling.add(called)
                sizes[called] = size(function.all_nodes())
                calling.discard(called)
            total += sizes[called]
        return total

    if (nodes := size(model.graph.all_nodes())) > _NODES:
        raise _refused(where, "unreadable", f"its functions make {nodes:,} nodes", f"a graph has at most {_NODES:,}")
    for function in model.functions.values():
        function.opset_imports[""] = version
    InlinePass()(model)
    model.functions.clear()


def _check_operators(model: ir.Model, where: str) -> None:
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        called = f"{node.name or node.op_type} ({node.op_type})"
        for attribute in node.attributes.values():
            held = attribute.value if attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS) else ()
            parts = held if isinstance(held, list | tuple) else (held,)
            if any(isinstance(part, ir.ExternalTensor) for part in parts):
                holding = f"{node.name or node.op_type} has a constant in another file"
                rule = "constants are stored in the graph itself"
                raise _refused(where, "external", holding, rule, "export it again")
        for value in filter(None, node.inputs):
            if not (value.producer() is not None or value.is_graph_input() or value.is_initializer()):
                raise _refused(where, "unreadable", f"{called} reads {value.name}, which nothing computes")
        if node.op_type in _QUANTIZED or node.op_type.startswith("QLinear"):
            rule, remedy = "the graph to compile is a float graph", "name the graph from before it was quantized"
            raise _refused(where, "quantized", called, rule, remedy)
        if node.domain not in _DOMAINS:
            rule, remedy = "operators are those of ONNX and ONNX Runtime", "export the model without it"
            raise _refused(where, "operator", f"{called} of {node.domain!r}", rule, remedy)


def _check_weights(model: ir.Model, where: str, size: int) -> None:
    """Load the weights; refuse one that claims more bytes than all files have, before memory is allocated."""
    import onnx_ir as ir

    for value, tensor in _tensors(model):
        if tensor.dtype.name != "STRING" and tensor.nbytes > size:
            shape = f"{value.name} {tensor.shape} in {size:,} bytes"
            raise _refused(where, "unreadable", shape[:300], "a weight lies in its file", "fetch it again")
    ir.external_data.load_to_model(model)
    for value, tensor in _tensors(model):
        kind = str(tensor.dtype.name)
        if kind in ("FLOAT16", "BFLOAT16", "DOUBLE") and tensor.size > 1:
            wrong = f"{value.name} is {kind.lower()}"
            raise _refused(where, "dtype", wrong, "weights are float32", "export it in float32")
        if kind == "FLOAT" and not np.isfinite(tensor.numpy()).all():
            raise _refused(where, "weights", f"NaN or infinity in {value.name}", "weights are finite")


def kind_of(model: ir.Model) -> Kind:
    """Return `encoder` for a graph whose inputs are token ids and nothing with more dimensions (images, sound), else
    `network`.

    Token ids are integers [samples, tokens] that gather rows of a table in the graph; positions and sizes do not. An
    integer
    input named `input_ids` counts too, since the lookup is not always visible.
    """
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    if any(value.shape is None or len(value.shape) > 2 for value in inputs):
        return "network"
    whole = [value for value in inputs if len(value.shape or ()) == 2 and str(value.dtype) in _WHOLE]
    return "encoder" if any(value.name == _IDS or _looks_up(value) for value in whole) else "network"


def _looks_up(ids: ir.Value) -> bool:
    """Tell whether these numbers gather rows of a matrix of the graph, one row per number."""
    for node, index in ids.uses():
        if node.op_type in _SAME_NUMBERS and node.outputs and _looks_up(node.outputs[0]):
            return True
        table = node.inputs[0] if node.op_type == "Gather" and index == 1 else None
        axis = node.attributes.get("axis")
        rows = axis is None or axis.as_int() == 0
        if table is not None and rows and table.is_initializer() and table.shape is not None and len(table.shape) == 2:
            return True
    return False


def inputs_of(model: ir.Model, where: str) -> Iterator[FloatGraphInput]:
    """Yield the inputs of a graph that are no weights. Raises InputError: `onnx-dtype`, `onnx-shape`."""
    import onnx_ir as ir

    names: Mapping[str, Any] = model.graph.initializers
    for value in model.graph.inputs:
        if value.name in names:  # old exporters list weights as inputs too
            continue
        if not isinstance(value.type, ir.TensorType) or value.dtype is None:
            raise _refused(where, "dtype", f"{value.name} is {value.type}", "inputs are tensors")
        if value.shape is None:
            remedy = "export it with the shapes of its inputs"
            raise _refused(where, "shape", f"{value.name} has none", "every input has a shape", remedy)
        shape = tuple(size if isinstance(size, int) and size > 0 else None for size in value.shape)
        yield FloatGraphInput(str(value.name), np.dtype(value.dtype.numpy()).name, shape)


def _refused(where: str, what: str, value: str, rule: str = "an ONNX file, whole", remedy: str = "") -> InputError:
    return InputError(f"onnx-{what}", where, value, rule, remedy)
