"""Running of a graph in ONNX Runtime, batch by batch or part by part, with chosen inner tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, MissingDependency

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]
Feed = Mapping[str, Array]
# larger weights do not fit a protobuf and go through the session options
_LARGE = 1 << 30


class Runner:
    """A graph loaded in ONNX Runtime.

    Args:
        model: the graph, or its file.
        inner: names of tensors to return beside the outputs.
        threads: threads of one run; 0 for all cores.
        optimised: False to run the graph as it is written, without the runtime's fusions.
        literal: True to compute Q/DQ patterns as written, without integer kernels.

    Raises:
        InputError: `onnx-unrunnable`, with ONNX Runtime's reason.
        MissingDependency: without onnxruntime.
    """

    def __init__(
        self,
        model: ir.Model | Path,
        inner: Sequence[str] = (),
        *,
        threads: int = 0,
        optimised: bool = True,
        literal: bool = False,
    ) -> None:
        with MissingDependency.unless_found("onnxruntime", extra="compile", purpose="running a graph"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        if literal:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            if isinstance(model, Path):
                data: bytes | str = str(model)
            else:
                own = [str(value.name) for value in model.graph.outputs]
                data, self._held = serialized(showing(model, list(dict.fromkeys([*own, *inner]))), options)
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            self.names = [value.name for value in self._session.get_outputs()]
        except Exception as error:  # ONNX Runtime has an error type for each status
            node, reason = told(error)
            rule, remedy = "the graph runs in ONNX Runtime", "check it with onnx.checker, or export it again"
            raise InputError("onnx-unrunnable", node or "ONNX Runtime", reason, rule, remedy) from None

    def __call__(self, feed: Feed) -> dict[str, Array]:
        """Return the outputs and inner tensors by name. Raises InputError `onnx-unrunnable`."""
        try:
            values = self._session.run(self.names, dict(feed))
        except Exception as error:
            node, reason = told(error)
            rule, remedy = "the graph runs on its calibration inputs", "check the shape of the calibration set"
            raise InputError("onnx-unrunnable", node or "calibration", reason, rule, remedy) from None
        named = zip(self.names, values, strict=True)
        return {name: value.astype(str) if value.dtype == object else value for name, value in named}


def showing(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a copy of a model whose outputs are the named values."""
    import onnx_ir as ir

    shown = model.clone()
    values = {value.name: value for node in shown.graph for value in node.outputs}
    values |= {value.name: value for value in shown.graph.inputs}
    del shown.graph.outputs[:]
    shown.graph.outputs.extend(values[name] for name in names)
    for value in shown.graph.outputs:
        if value.type is None:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    return shown


def serialized(model: ir.Model, options: Any) -> tuple[bytes, Any]:
    """Return the graph as bytes, and the objects that must live as long as its session.

    Large weights go through the session options.
    """
    import onnx_ir as ir
    import onnxruntime

    stored = {name: value.const_value for name, value in model.graph.initializers.items() if value.const_value}
    if sum(tensor.nbytes for tensor in stored.values()) < _LARGE:
        return ir.to_proto(model).SerializeToString(), None
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in stored.items()}
    large = {n: array for n, array in arrays.items() if array.nbytes > 1024 and array.dtype == np.float32}
    held = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in large.values()]
    options.add_external_initializers(list(large), held)
    for name, array in large.items():
        stub = ir.ExternalTensor("weights", 0, array.nbytes, ir.DataType.FLOAT, shape=ir.Shape(array.shape), name=name)
        model.graph.initializers[name].const_value = stub
    return ir.to_proto(model).SerializeToString(), held


class Stepwise:
    """Values of a graph for some feeds, requested in graph order while later parts of the graph change.

    Values that a later request needs are kept, so nothing is computed twice: products are solved one after the other,
    each
    on the calibration set as the quantized products before it leave it, for the price of one run.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._held: list[dict[str, Array]] = [dict(feed) for feed in feeds]

    def value(self, model: ir.Model, name: str, later: Iterable[str]) -> list[Array]:
        """Return one value for each feed.

        Args:
            model: the graph in its present state; parts in front of earlier requests must not have changed.
            name: name of the value.
            later: names of the values of later requests.

        Raises:
            InputError: `onnx-unrunnable`.
        """
        import onnx_ir as ir

        values = ir.convenience.create_value_mapping(model.graph)
        if name not in self._held[0]:
            needed = sorted(_reached(values, [name], self._held[0]))
            part = ir.convenience.extract(model.graph, needed, [name])
            for value in (*part.inputs, *part.outputs):
                value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
            runner = Runner(ir.Model(part, ir_version=model.ir_version, functions=list(model.functions.values())))
            for held in self._held:
                held.update(runner({key: held[key] for key in needed}))
        wanted = _reached(values, [name, *later], self._held[0])
        self._held = [{key: array for key, array in held.items() if key in wanted} for held in self._held]
        return [held[name] for held in self._held]


def _reached(values: Mapping[str, ir.Value], names: Iterable[str], held: Collection[str]) -> set[str]:
    """Return the held values from which the named ones can be computed."""
    reached: set[str] = set()
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in held:
            reached.add(name)
            continue
        producer = values[name].producer()
        if producer is None:
            continue
        if any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in producer.attributes.values()):
            return set(held)  # subgraphs read what they like
        waiting += [value.name for value in producer.inputs if value is not None and value.name]
    return reached


_LONGEST = 200
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODES = (
    re.compile(r"Node \((?P<name>[^)]*)\) Op \((?P<kind>[^)]*)\)\s*(?:\[\w+\])?\s*"),
    re.compile(r"Non-zero status code returned while running (?P<kind>\w+) node\. Name:'(?P<name>[^']*)'\s*"),
    re.compile(r"for (?P<kind>\w+)\(\d+\) node with name '(?P<name>[^']*)'"),
    re.compile(r"of Optype \((?P<kind>\w+)\)(?=.* in node \((?P<name>[^)]*)\))"),
    re.compile(r"(?P<kind>) of node \((?P<name>[^)]*)\)"),
)
# place in its source: everything up to a failed condition, or a file and a function
_PLACE = re.compile(r"^Status Message: (?:\S*onnxruntime_src/.* was false\. |\S+\.(?:h|cc|cpp):\d+ \w+ )?")


def told(problem: BaseException) -> tuple[str, str]:
    """Parse an error of ONNX Runtime into the node (`MatMul a/product`, or "") and the reason.

    A message is a status, a place in the source, the failed call, and then the reason:

        [ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMul node. Name:'a/product' Status
            Message: matmul_helper.h:59 Compute MatMul dimension mismatch
        [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Add(14) node with name 'a/sum'
        [ONNXRuntimeError] : 1 : FAIL : Type Error: ... of Optype (MatMul) bound to different types (... node (a/b).

    >>> told(ValueError("[ONNXRuntimeError] : 1 : FAIL : Node (a/b) Op (MatMul) [ShapeInferenceError] Wrong sizes"))
    ('MatMul a/b', 'Wrong sizes')
    """
    text = _STATUS.sub("", " ".join((str(problem) or type(problem).__name__).split()))
    for pattern in _NODES:
        if match := pattern.search(text):
            # a match inside of a sentence stays in the reason
            reason = text[match.end() :] if match.start() == 0 else text
            return f"{match['kind']} {match['name']}".strip(), _PLACE.sub("", reason)[:_LONGEST]
    return "", text[:_LONGEST]
