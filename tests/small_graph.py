"""Build tiny ONNX graphs node by node."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]


class Small:
    """A growing graph: `op("Conv", x, W)` adds a node; arrays become initializers, names are v0, v1, ...

    Args:
        opset: version of ONNX's own operators.
        seed: seed of `normal`.
    """

    def __init__(self, opset: int = 21, seed: int = 0) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="small")
        self.random = np.random.default_rng(seed)

    def input(self, name: str, *shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def constant(self, values: Any, name: str = "") -> ir.Value:
        tensor = ir.tensor(np.asarray(values))
        value = ir.Value(
            name=name or f"c{len(self.graph.initializers)}",
            shape=tensor.shape,
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def op(self, kind: str, *inputs: Any, outputs: int = 1, name: str = "", **attributes: Any) -> ir.Value:
        values = [each if each is None or isinstance(each, ir.Value) else self.constant(each) for each in inputs]
        number = len(self.graph)
        node = ir.node(kind, values, attributes=attributes, num_outputs=outputs, name=name or f"{kind}_{number}")
        for place, value in enumerate(node.outputs):
            value.name = f"v{number}" + (f".{place}" if place else "")
        self.graph.append(node)
        return node.outputs[0]

    def batch_norm(self, x: ir.Value, channels: int, **attributes: Any) -> ir.Value:
        parameters = [self.normal(channels) for _ in range(3)]
        return self.op("BatchNormalization", x, *parameters, np.abs(self.normal(channels)) + 0.1, **attributes)

    def model(self, *outputs: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
        for value in outputs:
            value.dtype = value.dtype or dtype
        self.graph.outputs.extend(outputs)
        return ir.Model(self.graph, ir_version=10)

    def feeds(self, count: int = 3, **shapes: Sequence[int]) -> list[Mapping[str, Array]]:
        return [{name: self.normal(*shape) for name, shape in shapes.items()} for _ in range(count)]


def operators(model: ir.Model) -> list[str]:
    """List the operators in order, including those of subgraphs."""
    return [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]


def chain(path: Path, samples: Path, links: int = 4, seed: int = 0) -> None:
    """Write a graph of so many linears with activations between them, and 60 samples for it."""
    small = Small(seed=seed)
    x = small.input("x", "n", 16)
    for _ in range(links - 1):
        x = small.op("Relu", small.op("Gemm", x, small.normal(16, 16) / 4, small.normal(16)))
    ir.save(small.model(small.op("Gemm", x, small.normal(16, 6), small.normal(6))), path)
    np.savez(samples, x=np.random.default_rng(seed).standard_normal((60, 16)).astype(np.float32))
