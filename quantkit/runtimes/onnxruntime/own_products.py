"""Replace 4-bit products and attention, with the operators around them, by quantkit's own operators.

    SkipSimplifiedLayerNormalization, MatMulNBits, Add of a bias                          one Product
    the same, Split into gate and up, SiLU or GELU, Mul, MatMulNBits                      one GatedMlp
    GroupQueryAttention                                                                   one Attention

The weights stay in the file. Other patterns stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnx import TensorProto, numpy_helper

from quantkit.runtimes.onnxruntime.float_products import every_node, one_way

if TYPE_CHECKING:
    import onnx

DOMAIN = "quantkit"
PRODUCT, GATED_MLP, ATTENTION = "Product", "GatedMlp", "Attention"
SILU, GELU = 0, 1
# rows of a weight in one tile of a kernel: gate and up must begin at a tile
_PAIR = 32
# features of a head that are multiplied at once: 512 bits
_LANES = 16
# largest sizes that the operators take: heads, features of a head; rows, columns and tokens
_MOST_HEADS, _MOST_ROWS = 1 << 16, (1 << 31) - 1
# attributes and inputs of GroupQueryAttention that the operator supports, without `seqlens_k`
_ATTENTION = {"num_heads", "kv_num_heads", "scale", "do_rotary", "local_window_size"}
_ATTENTION_INPUTS = (0, 1, 2, 3, 4, 6, 7, 8, 10)


@dataclass
class _Replaced:
    """One operator in the place of some nodes."""

    skip: str = ""
    gamma: str = ""
    bias: str = ""
    epsilon: float = 0.0
    total: str = ""
    weights: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


class _Graph:
    """Producers and consumers of every value of a graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.made = {name: node for node in graph.node for name in node.output if name}
        self.read: dict[str, list[Any]] = defaultdict(list)
        for node in every_node(graph):
            for name in node.input:
                self.read[name].append(node)
        for output in graph.output:
            self.read[output.name].append(None)
        self.sizes = {value.name: tuple(value.dims) for value in graph.initializer}
        self.kinds = {value.name: value.data_type for value in graph.initializer}
        self.numbers = {
            value.name: tuple(numpy_helper.to_array(value).tolist())
            for value in graph.initializer
            if value.data_type == TensorProto.INT64 and value.dims == [2] and not value.external_data
        }
        # shapes of caches [B, H, T, D]
        last = ((value.name, value.type.tensor_type.shape.dim) for value in graph.input)
        self.widths = {name: sizes[-1].dim_value for name, sizes in last if len(sizes) == 4}

    def after(self, name: str, *kinds: str) -> Any:
        """Return the only consumer of a value if it is of one of these kinds."""
        readers = self.read[name]
        return readers[0] if len(readers) == 1 and readers[0] is not None and readers[0].op_type in kinds else None

    def same_lengths(self, name: str) -> bool:
        """Tell whether all sequences have one length: a sum of single numbers, broadcast."""
        node = self.made.get(name)
        while node is not None and node.op_type in ("Expand", "Cast"):
            node = self.made.get(node.input[0])
        if node is None or node.op_type != "Sub" or self.sizes.get(node.input[1]) != (1,):
            return False
        columns = self.made.get(node.input[0])  # the mask's shape
        return columns is not None and columns.op_type == "Shape"

    def constant(self, name: str, kind: int) -> bool:
        """Tell whether a value of this type is stored, as a whole or as some of its rows."""
        node = self.made.get(name)
        if node is not None and node.op_type == "Slice" and all(name in self.sizes for name in node.input):
            name = node.input[0]
        return self.kinds.get(name) == kind

    def takes(self, node: Any) -> bool:
        """Tell whether a node is a 4-bit product with rounded inputs, without a bias or a column order."""
        whole = _attribute(node, "bits", 4) == 4 and _attribute(node, "accuracy_level", 0) == 4
        if node.op_type != "MatMulNBits" or not whole or len(node.input) not in (3, 4):
            return False
        if not all(0 < _attribute(node, name, 0) <= _MOST_ROWS for name in ("N", "K", "block_size")):
            return False
        kinds = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
        return all(self.constant(name, kind) for name, kind in zip(node.input[1:], kinds, strict=False) if name)

    def bias(self, node: Any, size: int) -> tuple[Any, str]:
        """Return the addition of a constant [size] after a node, and the constant."""
        added = self.after(node.output[0], "Add")
        names = [name for name in added.input if name != node.output[0]] if added is not None else []
        return (added, names[0]) if names and self.sizes.get(names[0]) == (size,) else (None, "")

    def gated(self, node: Any) -> list[Any]:
        """Return Split, the activation, the product of its halves and the product [down] that follow a node."""
        split = self.after(node.output[0], "Split")
        if split is None or len(split.output) != 2 or _attribute(split, "axis", 0) != -1:
            return []
        gate, up = split.output
        readers = self.read[gate]
        if None in readers:
            return []
        if [reader.op_type for reader in readers] == ["Gelu"] and _attribute(readers[0], "approximate") == b"tanh":
            activation = [readers[0]]
        elif sorted(reader.op_type for reader in readers) == ["Mul", "Sigmoid"]:
            sigmoid, silu = sorted(readers, key=lambda reader: str(reader.op_type), reverse=True)
            if self.after(sigmoid.output[0], "Mul") is not silu:
                return []
            activation = [sigmoid, silu]
        else:
            return []
        product = self.after(activation[-1].output[0], "Mul")
        if product is None or set(product.input) != {activation[-1].output[0], up} or len(self.read[up]) != 1:
            return []
        down = self.after(product.output[0], "MatMulNBits")
        # gate and up are halves of the rows: the product after them has as many columns as one half
        fits = down is not None and self.takes(down) and 2 * _attribute(down, "K") == _attribute(node, "N")
        even = len(split.input) < 2 or not split.input[1] or self.halves(split.input[1], _attribute(node, "N"))
        return [split, *activation, product, down] if fits and even else []

    def halves(self, name: str, whole: int) -> bool:
        """Tell whether a stored constant holds two equal halves of `whole`."""
        return self.numbers.get(name) == (whole // 2, whole // 2)


def _attribute(node: Any, name: str, otherwise: Any = None) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), otherwise)


def own_products(model: onnx.ModelProto) -> int:
    """Insert the operators; of a graph that multiplies in two ways, only the way of steps is kept.

    Returns:
        number of products that were replaced.
    """
    from onnx import helper

    one_way(model, "steps")
    graph = _Graph(model.graph)
    gone: set[int] = set()
    replaced: dict[int, Any] = {}
    for node in model.graph.node:
        if id(node) in gone or not graph.takes(node):
            continue
        operator, nodes = _Replaced(), [node]
        _weight(operator, node, "")
        before = graph.made.get(node.input[0])
        if before is not None and graph.after(node.input[0], "MatMulNBits") is node and _is_norm(before):
            nodes.append(before)
            x, operator.skip, operator.gamma = before.input
            operator.epsilon = float(_attribute(before, "epsilon"))
            operator.total = before.output[3] if len(before.output) > 3 else ""
        else:
            x = node.input[0]
        behind = graph.gated(node) if operator.sizes["rows"] % (2 * _PAIR) == 0 else []
        if behind:
            _weight(operator, behind[-1], "_after")
            operator.sizes["activation"] = GELU if behind[1].op_type == "Gelu" else SILU
            nodes += behind
        last = behind[-1] if behind else node
        added, operator.bias = graph.bias(last, operator.sizes["rows_after" if behind else "rows"])
        if added is not None:
            nodes.append(added)
            last = added
        replaced[id(node)] = helper.make_node(
            GATED_MLP if behind else PRODUCT,
            [x, operator.skip, operator.gamma, operator.bias, *operator.weights],
            [last.output[0], *([operator.total] if operator.total else [])],
            name=f"{last.output[0]}/own",
            domain=DOMAIN,
            epsilon=operator.epsilon,
            **operator.sizes,
        )
        gone |= {id(part) for part in nodes}
    if replaced:
        replaced |= {id(node): _attention(node) for node in model.graph.node if _attends(node, graph)}
    # put it where its first product was: all its inputs are computed by then
    kept = [replaced.get(id(node), node) for node in model.graph.node if id(node) in replaced or id(node) not in gone]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return sum(node.op_type != ATTENTION for node in replaced.values())


def _attends(node: Any, graph: _Graph) -> bool:
    """Tell whether a node is attention as our exporter writes it: sequences of equal length, padding in the bias."""
    if node.op_type != "GroupQueryAttention" or not {attribute.name for attribute in node.attribute} <= _ATTENTION:
        return False
    filled = [place for place, name in enumerate(node.input) if name]
    width = graph.widths.get(node.input[3])
    heads, kv_heads = _attribute(node, "num_heads", 0), _attribute(node, "kv_num_heads", 0)
    window = _attribute(node, "local_window_size", -1)
    # ONNX Runtime takes only the lower 32 bits of larger numbers
    if not 0 < kv_heads <= heads <= _MOST_HEADS or not (window == -1 or 0 < window <= _MOST_ROWS):
        return False
    turned = _attribute(node, "do_rotary", 0) == 1
    apart = (1 in filled) == (2 in filled) and bool(_attribute(node, "scale"))
    whole = {0, 3, 4, 6} <= set(filled) <= {*_ATTENTION_INPUTS, 5} and turned == (7 in filled) == (8 in filled)
    even = graph.same_lengths(node.input[5])
    fits = width is not None and 0 < width <= _MOST_HEADS and width % _LANES == 0
    return bool(whole and apart and even and fits and len([o for o in node.output if o]) == 3)


def _attention(node: Any) -> Any:
    from onnx import helper

    names = [node.input[place] if place < len(node.input) else "" for place in _ATTENTION_INPUTS]
    return helper.make_node(
        ATTENTION,
        names,
        list(node.output),
        name=f"{node.name}/own",
        domain=DOMAIN,
        heads=int(_attribute(node, "num_heads")),
        kv_heads=int(_attribute(node, "kv_num_heads")),
        window=max(int(_attribute(node, "local_window_size", -1)), 0),
        scale=float(_attribute(node, "scale")),
    )


def _is_norm(node: Any) -> bool:
    """Tell whether a node is the norm of a sum, of which at most the sum is read too."""
    return (
        node.op_type == "SkipSimplifiedLayerNormalization"
        and len(node.input) == 3
        and all(node.input)
        and _attribute(node, "epsilon") is not None
        and not any(node.output[1:3])
    )


def _weight(operator: _Replaced, node: Any, which: str) -> None:
    operator.weights += [*node.input[1:], *[""] * (4 - len(node.input))]
    for name, theirs in (("rows", "N"), ("columns", "K"), ("group", "block_size")):
        operator.sizes[name + which] = int(_attribute(node, theirs))
