"""A graph that is run piece by piece: what is still to be read is held, and nothing is computed twice.

    held values -> the nodes between them and the value asked for -> that value, for every feed

What no later value needs is let go. So products can be solved one after the other, each on what those before it make of
the calibration set, for the price of one run of the graph instead of one for each product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from quantkit.graph.run import Feed, Runner

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]


class Stepwise:
    """The values of one graph, or of a graph that changes behind what was asked for, for some feeds.

    Args:
        feeds: of the graph's inputs.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._held: list[dict[str, Array]] = [dict(feed) for feed in feeds]

    def value(self, model: ir.Model, name: str, later: Iterable[str]) -> list[Array]:
        """One value for each feed.

        Args:
            model: the graph as it is now; what stands before values asked for is as it was.
            name: of the value.
            later: names of those that will be asked for after it.

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
                held.update(runner({each: held[each] for each in needed}))
        wanted = _reached(values, [name, *later], self._held[0])
        self._held = [{each: array for each, array in held.items() if each in wanted} for held in self._held]
        return [held[name] for held in self._held]


def _reached(values: Mapping[str, ir.Value], names: Iterable[str], held: Collection[str]) -> set[str]:
    """Which held values some others are computed from, or are themselves."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in held:
            found.add(name)
            continue
        producer = values[name].producer()
        if producer is None:
            continue
        if any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in producer.attributes.values()):
            return set(held)  # subgraphs read what they like
        waiting += [value.name for value in producer.inputs if value is not None and value.name]
    return found
