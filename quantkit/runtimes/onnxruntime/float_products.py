"""Change an ONNX graph so that its products are in float32: weights as stored, inputs not rounded.

A comparison with it, or with its numbers, is then exact except for the order of sums: no rounding hides a wrong nibble.

    MatMulNBits                                       accuracy level 0
    QuantizeLinear, DequantizeLinear of an input      left out
    an integer product with a quantized input, and the multiplication by scales after it
                                                      DequantizeLinear of the weight, MatMul, Add of its bias

A graph may multiply in two ways, chosen by the number of rows (`exporters/onnx/integers.py`): below a limit that of
`steps`, else that of `prompts`. Each can be taken alone. Head, embedding and norms exist once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import onnx

INTEGER = ("MatMulInteger", "MatMulIntegerToFloat")
# scale of 1 in the place of the input's scales, if these are multiplied after the product
LATER = "one.0"
# position of the bias among the inputs of MatMulIntegerToFloat
BIAS = 6
Way = Literal["steps", "prompts"]
WAYS: tuple[Way, ...] = ("prompts", "steps")
_BRANCHES: dict[Way, str] = {"steps": "then_branch", "prompts": "else_branch"}
# keys of a graph's metadata: rows from which on prompts' way is taken; bytes of weights that either way reads
ROWS, STEP_BYTES, PROMPT_BYTES = "quantkit.prompt_rows", "quantkit.step_bytes", "quantkit.prompt_bytes"
_QUANTIZES = ("QuantizeLinear", "DynamicQuantizeLinear")
# operators that may be between an input and its product, or between a product and its result
_BETWEEN = ("Reshape", "DequantizeLinear", "Cast")


class Links:
    """Producers and consumers of every value of a graph, by name."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.maker = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)
        self.constants = {tensor.name for tensor in graph.initializer}

    def source(self, product: Any) -> str:
        """Return the float value from which a product's input was quantized."""
        name: str = product.input[0]
        while (node := self.maker.get(name)) is not None and node.op_type in _BETWEEN:
            name = node.input[0]
        if node is None or node.op_type not in _QUANTIZES:
            return name
        name = node.input[0]
        flat = self.maker.get(name)
        return str(flat.input[0]) if flat is not None and flat.op_type == "Reshape" else name

    def weight(self, product: Any) -> str:
        """Return the initializer of a product's weight."""
        name: str = product.input[1]
        while name not in self.constants:
            name = self.maker[name].input[0]
        return name

    def chain(self, product: Any) -> Iterator[Any]:
        """Yield an integer product and the nodes up to the multiplication by its scales; a float product alone."""
        yield product
        if product.op_type == "MatMulIntegerToFloat" and product.input[2] != LATER:
            return
        while product.op_type in (*INTEGER, "Cast", "Sub"):
            (product,) = self.readers[product.output[0]]
            yield product


def float_products(model: onnx.ModelProto) -> None:
    """Change a graph with its weights to products in float32."""
    from onnx import helper

    graph = model.graph
    links = Links(graph)
    nodes: list[Any] = []
    dropped: set[int] = set()
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
        if id(node) in dropped:
            continue
        if node.op_type not in INTEGER:
            for place, name in enumerate(node.input):
                maker = links.maker.get(name)
                if maker is not None and maker.op_type == "DequantizeLinear" and name not in links.constants:
                    quantizes = links.maker.get(maker.input[0])
                    if quantizes is not None and quantizes.op_type == "QuantizeLinear":
                        node.input[place] = quantizes.input[0]
            nodes.append(node)
            continue
        *_, last = chain = list(links.chain(node))
        dropped |= {id(part) for part in chain}
        scales, zeros = _scales(links, node, last)
        dense = f"{node.output[0]}/weight"
        inputs = [node.input[1], scales, *([zeros] if zeros else [])]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [dense], axis=1))
        output, biases = last.output[0], node.input[BIAS:] if node.op_type == "MatMulIntegerToFloat" else []
        product = f"{output}/product" if biases else output
        nodes.append(helper.make_node("MatMul", [links.source(node), dense], [product]))
        nodes.extend(helper.make_node("Add", [product, bias], [output]) for bias in biases)
    del graph.node[:]
    graph.node.extend(nodes)


def _scales(links: Links, product: Any, last: Any) -> tuple[str, str]:
    """Return the scales of a product's weight, and its zero points if it has any."""
    if product.op_type == "MatMulIntegerToFloat":
        return product.input[3], product.input[5] if len(product.input) > 5 else ""
    both = links.maker[last.input[1]]
    scales = next(name for name in both.input if name in links.constants)
    return scales, product.input[3] if len(product.input) > 3 else ""


def one_way(model: onnx.ModelProto, way: Way) -> None:
    """Keep one way and remove the condition; a graph with one way is not changed."""
    graph, node = model.graph, _by_rows(model)
    if node is None:
        return
    left = next(attribute.g for attribute in node.attribute if attribute.name == _BRANCHES[way])
    names = {inner.name: outer for inner, outer in zip(left.output, node.output, strict=True)}
    for node in left.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = names.get(name, name)
    del graph.node[:]
    graph.node.extend(left.node)


def nodes_of(model: onnx.ModelProto, way: Way) -> list[onnx.NodeProto]:
    """Return the nodes of one way; none for a graph with one way."""
    node = _by_rows(model)
    branches = node.attribute if node is not None else ()
    return [inner for attribute in branches if attribute.name == _BRANCHES[way] for inner in attribute.g.node]


def every_node(graph: onnx.GraphProto) -> Iterator[Any]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g)


def _by_rows(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """Return the If node between both ways."""
    return next((node for node in model.graph.node if node.op_type == "If" and list(node.input) == ["rows/few"]), None)
