"""Trace equal blocks once, and copy them in the graph.

Tracing takes seconds for each block, and most blocks of a transformer differ only in their weights. The first block of
each kind is traced between two marks. Each later one is a single node of the domain `quantkit`, which `expand` replaces
by a copy of the first block's nodes, with the names of its own weights and cache.

    Enter {index}              input of a traced block
    Leave {index}              output of a traced block
    Block {index, like}        hidden states -> hidden states; the copy adds a decoder's cache
"""

from __future__ import annotations

import functools
import re
from collections.abc import MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from quantkit.errors import InputError
from quantkit.exporters.trace import CHECKPOINT
from quantkit.exporters.trace.rewrite import DOMAIN

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype)


class CalledOtherwise(Exception):
    """Error for a block that equals others, but is called with other arguments."""

    def __init__(self, index: int) -> None:
        super().__init__(f"block {index}")
        self.index = index


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two modules differ only in their weights and their layer index."""
    return [(name, type(module), _state(module)) for name, module in one.named_modules()] == [
        (name, type(module), _state(module)) for name, module in other.named_modules()
    ]


def _state(module: nn.Module) -> dict[str, Any]:
    """Return everything readable by a module's forward, in a form for comparing."""
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("layer_idx", "_modules") or name.endswith("_hooks"):
            continue
        if name in ("_parameters", "_buffers"):
            state[name] = {key: None if x is None else (tuple(x.shape), x.dtype) for key, x in value.items()}
        else:
            state[name] = _comparable(value)
    return state


def _comparable(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_comparable(part) for part in value]
    if isinstance(value, dict):
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, functools.partial):
        return [_comparable(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, PreTrainedConfig | GenerationConfig):  # each model has its own
        return _comparable(vars(value))
    # functions are compared by identity: two of one name may have different settings
    return id(value)


def kinds(blocks: nn.ModuleList) -> list[int]:
    """Return, for every block, the number of the first equal one."""
    firsts: list[int] = []
    for index, block in enumerate(blocks):
        earlier = sorted(set(firsts))
        firsts.append(next((first for first in earlier if alike(blocks[first], block)), index))
    return firsts


def share(blocks: nn.ModuleList, like: list[int], apart: Set[int]) -> list[int]:
    """Replace blocks in place by stand-ins that trace each kind once, and list the traced blocks.

    Args:
        blocks: blocks of the model.
        like: result of `kinds`.
        apart: blocks with other call arguments than their equals, which are traced too.
    """
    firsts: dict[int, list[_First]] = {}
    for index, block in enumerate(list(blocks)):
        same = firsts.setdefault(like[index], [])
        if like[index] == index or index in apart:
            same.append(_First(block, index))
            blocks[index] = same[-1]
        else:
            blocks[index] = _Like(block, index, same)
    return sorted(first.index for same in firsts.values() for first in same)


def plain_name(name: str, path: str) -> str:
    """Return a parameter's name without the stand-ins: `model.layers.0.block.x` is `model.layers.0.x`."""
    return re.sub(rf"^({re.escape(path)}\.\d+)\.block\.", r"\1.", name)


class _Standing(nn.Module):
    """Stand-in for a block, with the block's attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the hidden states, and the other arguments."""
    if "hidden_states" in kwargs:
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return kwargs["hidden_states"], args, others
    return args[0], args[1:], kwargs


def _mark(kind: str, hidden: Tensor, index: int) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{kind}", (hidden,), {"index": index}, dtype=hidden.dtype, shape=tuple(hidden.shape)
    )


class _First(_Standing):
    """A block that is traced; it records its arguments."""

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__(block)
        self.index = index
        self.call: _Call | None = None
        self.as_tuple = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block between marks."""
        if self.call is not None:
            where = f"{type(self.block).__name__} {self.index}"
            value, rule = "a block that is used more than once", "every block of the stack runs once"
            raise InputError("export-untraceable", where=where, value=value, rule=rule, remedy=CHECKPOINT)
        hidden, args, kwargs = _split(args, kwargs)
        self.call = _Call.of(args, kwargs)
        output = self.block(_mark("Enter", hidden, self.index), *args, **kwargs)
        self.as_tuple = isinstance(output, tuple)
        after = _mark("Leave", output[0] if self.as_tuple else output, self.index)
        return (after, *output[1:]) if self.as_tuple else after


class _Like(_Standing):
    """A block that equals traced ones."""

    def __init__(self, block: nn.Module, index: int, firsts: Sequence[_First]) -> None:
        super().__init__(block)
        self.index = index
        self.__dict__["firsts"] = firsts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Become one node. Raises CalledOtherwise if no equal block has these arguments."""
        hidden, others, named = _split(args, kwargs)
        call = _Call.of(others, named)
        firsts: Sequence[_First] = self.__dict__["firsts"]
        same = next((first for first in firsts if first.call is not None and first.call.same(call)), None)
        if same is None:
            raise CalledOtherwise(self.index)
        attributes: dict[str, Any] = {"index": self.index, "like": same.index}
        shape = tuple(hidden.shape)
        after = torch.onnx.ops.symbolic(f"{DOMAIN}::Block", (hidden,), attributes, dtype=hidden.dtype, shape=shape)
        return (after,) if same.as_tuple else after


@dataclass(frozen=True)
class _Call:
    """Arguments of a call, kept alive: a freed tensor's address could be used again."""

    shape: str
    leaves: list[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        leaves, shape = torch.utils._pytree.tree_flatten((args, kwargs))
        return cls(str(shape), leaves)

    def same(self, other: _Call) -> bool:
        """Return True if another call has the same tensors and equal numbers."""
        return self.shape == other.shape and all(
            one is two or (isinstance(one, _SIMPLE) and type(one) is type(two) and one == two)
            for one, two in zip(self.leaves, other.leaves, strict=True)
        )


def expand(graph: ir.Graph, parameters: MutableMapping[str, str], path: str) -> None:
    """Replace every Block node by a copy of the equal block's nodes, and remove the marks.

    Args:
        graph: graph of a decoder or encoder, changed in place.
        parameters: parameter of the skeleton by name of value; the copies' parameters are added.
        path: path of the blocks in the skeleton, such as `model.layers`.
    """
    nodes = list(graph)
    marks = {kind: {_index(node): node for node in nodes if _is(node, kind)} for kind in ("Enter", "Leave")}
    regions: dict[int, _Region] = {}
    for block in [node for node in nodes if _is(node, "Block")]:
        first = block.attributes["like"].as_int()
        if first not in regions:
            enter, leave = marks["Enter"][first], marks["Leave"][first]
            own = {name for name, parameter in parameters.items() if parameter.startswith(f"{path}.{first}.")}
            regions[first] = _Region(first, enter, leave, _between(nodes, enter, leave, own))
        _copy(graph, block, regions[first], parameters, path)
    for node in (*marks["Enter"].values(), *marks["Leave"].values()):
        assert node.inputs[0] is not None
        _stand_for(node.outputs[0], node.inputs[0])
        graph.remove(node, safe=True)


@dataclass(frozen=True)
class _Region:
    """Nodes of a traced block, and its marks."""

    index: int
    enter: ir.Node
    leave: ir.Node
    nodes: list[ir.Node]


def _is(node: ir.Node, kind: str) -> bool:
    return node.domain == DOMAIN and node.op_type == kind


def _index(node: ir.Node) -> int:
    return node.attributes["index"].as_int()


def _stand_for(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` everywhere; an output of the graph keeps its name and axes."""
    name, is_output = old.name, old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name, new.shape = None, name, old.shape


def _between(nodes: list[ir.Node], enter: ir.Node, leave: ir.Node, own: set[str]) -> list[ir.Node]:
    """List the nodes between the marks that depend on the block's input or its `own` parameters, in order."""
    reached = {enter.outputs[0]}
    inside = []
    for node in nodes:
        if node is not leave and any(x in reached or (x is not None and x.name in own) for x in node.inputs):
            reached.update(node.outputs)
            inside.append(node)
    return inside


def _copy(graph: ir.Graph, block: ir.Node, region: _Region, parameters: MutableMapping[str, str], path: str) -> None:
    old_prefix, new_prefix = f"{path}.{region.index}.", f"{path}.{_index(block)}."
    caches = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    mapping: dict[ir.Value, ir.Value] = {region.enter.outputs[0]: block.inputs[0]}  # type: ignore[dict-item]
    parts = ("key", "value") if f"present.{region.index}.key" in caches else ()
    for part in parts:
        old = caches[f"past_key_values.{region.index}.{part}"]
        mapping[old] = ir.Value(name=f"past_key_values.{_index(block)}.{part}", shape=old.shape, type=old.type)
        graph.inputs.append(mapping[old])

    def inside(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in mapping:
            return None if value is None else mapping[value]
        name = parameters.get(value.name or "")
        if name is None or not name.startswith(old_prefix):
            return value
        own = new_prefix + name.removeprefix(old_prefix)
        parameters[own] = own
        mapping[value] = ir.Value(name=own, shape=value.shape, type=value.type)
        return mapping[value]

    copies = []
    for node in region.nodes:
        attributes = dict(node.attributes)
        if node.domain == DOMAIN and "name" in attributes:
            leaf = attributes["name"].as_string().removeprefix(old_prefix)
            attributes["name"] = ir.AttrString("name", new_prefix + leaf)
        outputs = [
            ir.Value(name=f"{value.name}.{_index(block)}", shape=value.shape, type=value.type) for value in node.outputs
        ]
        inputs = [inside(value) for value in node.inputs]
        copies.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, version=node.version))
        mapping.update(zip(node.outputs, outputs, strict=True))
    graph.insert_before(block, copies)
    for part in parts:
        present = mapping[caches[f"present.{region.index}.{part}"]]
        present.name = f"present.{_index(block)}.{part}"
        graph.outputs.append(present)
    _stand_for(block.outputs[0], mapping[region.leave.inputs[0]])  # type: ignore[index]
    graph.remove(block, safe=True)
