"""Make the products of one block as graphs that multiply in either way, for a trial on this machine.

Codes are random, because the time does not depend on them. Linears of equal width share one input, as in most blocks.
A weight is cut to a number of rows, since further rows scale both times alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from quantkit.exporters.onnx.dialect import OrtDialect, PromptDialect
from quantkit.exporters.onnx.integers import expandable, many_rows
from quantkit.exporters.onnx.nbits import Array, LinearSpec, WeightsByName
from quantkit.exporters.trace.rewrite import DOMAIN, Traced

if TYPE_CHECKING:
    from quantkit.exporters import LayerSpec
    from quantkit.runtimes.onnxruntime.float_products import Way

# largest number of rows of a weight
_MOST = 4096


def block_of(asked: LayerSpec) -> dict[str, LinearSpec]:
    """Pick the linears of the first block with codes for both ways; none if there is no such block."""
    blocks: dict[str, dict[str, LinearSpec]] = {}
    for name, scheme in asked.schemes.items():
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is None or name in asked.activations or not expandable(scheme.format) or name not in asked.shapes:
            continue
        rows, columns = asked.shapes[name]
        blocks.setdefault(".".join(parts[: number + 1]), {})[name] = LinearSpec(min(rows, _MOST), columns, scheme)
    return next(iter(blocks.values()), {})


def graphs(linears: Mapping[str, LinearSpec], accuracy_level: int) -> dict[Way, bytes]:
    """Make a model for each way, with inputs `x.K` of [B, S, K] float32 and an output for every linear."""
    weights = _random(linears)
    steps = OrtDialect(_placeholders(linears), weights, accuracy_level=accuracy_level)
    prompts = PromptDialect(_placeholders(linears), many_rows(weights, ""), accuracy_level=accuracy_level)
    models: dict[Way, ir.Model] = {"steps": steps.apply(), "prompts": prompts.apply()}
    return {way: ir.to_proto(model).SerializeToString() for way, model in models.items()}


def feeds(linears: Mapping[str, LinearSpec], rows: int) -> dict[str, Array]:
    """Draw values for the inputs of both, [1, rows, K]."""
    generator = np.random.default_rng(0)
    return {f"x.{width}": generator.standard_normal((1, rows, width), np.float32) for width in _widths(linears)}


def _widths(linears: Mapping[str, LinearSpec]) -> list[int]:
    return sorted({linear.columns for linear in linears.values()})


def _placeholders(linears: Mapping[str, LinearSpec]) -> Traced:
    floats = ir.TensorType(ir.DataType.FLOAT)

    def value(name: str, columns: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape([1, "rows", columns]), type=floats)

    inputs = {width: value(f"x.{width}", width) for width in _widths(linears)}
    nodes = []
    for name, linear in linears.items():
        noted = ir.convenience.convert_attributes({"name": name})
        nodes.append(ir.Node(DOMAIN, "Linear", [inputs[linear.columns]], noted, outputs=[value(name, linear.rows)]))
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(list(inputs.values()), outputs, nodes=nodes, name="block", opset_imports={"": 21, DOMAIN: 1})
    return Traced(ir.Model(graph, ir_version=10), {}, decoder=False, layers=0)


def _random(linears: Mapping[str, LinearSpec]) -> WeightsByName:
    def codes(name: str) -> Array:
        of, generator = linears[name], np.random.default_rng(list(name.encode()))  # asked for more than once
        columns = of.columns + (of.scheme.padding(of.columns) if of.scheme is not None else 0)
        return np.asarray(generator.integers(-8, 8, (of.rows, columns), dtype=np.int8))

    def grid(name: str) -> tuple[Array, Array | None]:
        of = linears[name]
        assert of.scheme is not None
        groups = -(-of.columns // of.scheme.group) if of.scheme.group else 1
        zero = None if of.scheme.symmetric else np.zeros((of.rows, groups), np.int8)
        return np.full((of.rows, groups), 0.01, np.float32), zero

    def none(name: str) -> Array:
        raise KeyError(name)

    return WeightsByName(dict(linears), {}, none, codes, grid)
