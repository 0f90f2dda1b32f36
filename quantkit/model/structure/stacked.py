"""Merged parameters without values: a stand-in for [experts, N, K], and the trace of the forward that uses it.

A forward indexes a merged parameter and multiplies:

    linear(x, w[e])      x @ w[e]      x.matmul(w.view(E, -1, K)[e].T)      bmm(x, w)

`Stack` stands for w. It has its shape; a product with it becomes a call of the expert's linear. Any other use raises
`Unclear`. `trace_form` runs a forward on such stand-ins, whose products are fixed numbers, and reads off the layout:

    transposed     the right factor of the products is [K, N] rather than [N, K]
    halves         outputs i and N/2 + i of one parameter meet in input i of the next: gate first, then up
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]


class Unclear(Exception):
    """Use of a merged parameter that is no product of its slices."""


@dataclass(frozen=True)
class Cut:
    """Linears of one merged parameter.

    Args:
        shape: [experts, N, K], or [experts, K, N] if `transposed`.
        stored: shape of the parameter itself; may be [experts * N, K].
        names: names of each expert's linears; their rows are equal parts of N, in order.
        transposed: whether an expert's matrix is [K, N].
    """

    shape: Shape
    stored: tuple[int, ...]
    names: tuple[str, ...]
    transposed: bool

    @property
    def size(self) -> tuple[int, int]:
        """[N, K] of each linear."""
        rows, columns = self.shape[:0:-1] if self.transposed else self.shape[1:]
        return rows // len(self.names), columns

    def named(self, names: Sequence[str]) -> Cut:
        """Return the same with names."""
        return replace(self, names=tuple(names))

    def of(self, count: int) -> Cut:
        """Return the same for the first experts."""
        stored = (self.stored[0] // self.shape[0] * count, *self.stored[1:])
        return replace(self, shape=(count, *self.shape[1:]), stored=stored)

    def joined(self, weights: Sequence[Tensor]) -> Tensor:
        """Return one expert's matrix as the parameter holds it, from its linears' weights."""
        whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        return whole.T if self.transposed else whole

    def whole(self, read: Callable[[int, str], Tensor]) -> Tensor:
        """Make the parameter from its linears' weights; `read` takes an expert's number and a linear's name."""
        whole: Tensor | None = None
        for number in range(self.shape[0]):
            matrix = self.joined([read(number, name) for name in self.names])
            whole = matrix.new_empty(self.shape) if whole is None else whole
            whole[number] = matrix
        assert whole is not None
        return whole.reshape(self.stored)

    def part(self, matrix: Tensor, name: str) -> Tensor:
        """Return a linear's weight [N, K], in memory of its own, from one expert's matrix."""
        rows, at = self.size[0], self.names.index(name)
        whole = matrix.T if self.transposed else matrix
        return whole[at * rows : (at + 1) * rows].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Form:
    """Layout of a module's merged parameters, as traced.

    Args:
        call: call form of its forward, a key of `CALLS`.
        cuts: merged parameter -> one linear for each expert, without a name.
        halves: parameters whose outputs are used as two halves.
        least: least number of experts of a token that its forward takes; LongCat's takes no single one.
    """

    call: str
    cuts: Mapping[str, Cut]
    halves: frozenset[str]
    least: int = 1


def own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a class's own loop over the experts, not a faster replacement."""
    own: Callable[..., Any] = inspect.unwrap(kind.forward)
    return own


_SAME = frozenset(["to", "float", "double", "type", "type_as", "contiguous", "detach", "clone"])
_TURNS = frozenset(["transpose", "swapaxes", "swapdims", "t", "permute", "adjoint"])
_PRODUCTS = frozenset(["matmul", "mm", "bmm", "__matmul__", "__rmatmul__", "linear"])
_SIZES = frozenset(["size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point"])


class Stack(Tensor):
    """Stand-in for a merged parameter or one expert's matrix of it; `product` of its source computes with it."""

    source: Any
    parameter: str
    number: int | None
    flipped: bool

    @staticmethod
    def of(source: Any, name: str, shape: Sequence[int], number: int | None = None, flipped: bool = False) -> Stack:
        """Make a stand-in of this shape; `flipped` if it stands for the transposed matrices."""
        weight = next(iter(source.parameters()), None) if isinstance(source, nn.Module) else None
        dtype = torch.float32 if weight is None else weight.dtype
        stack = Tensor._make_subclass(Stack, torch.empty(tuple(shape), device="meta", dtype=dtype))
        stack.source, stack.parameter, stack.number, stack.flipped = source, name, number, flipped
        return stack

    def turned(self) -> Stack:
        """Return the stand-in for the transposed matrices."""
        *before, rows, columns = tuple(self.shape)
        return Stack.of(self.source, self.parameter, (*before, columns, rows), self.number, not self.flipped)

    def at(self, number: int) -> Stack:
        """Return the stand-in for one expert's matrix."""
        if self.number is not None or self.dim() != 3:
            raise Unclear("an index into a matrix")
        return Stack.of(self.source, self.parameter, tuple(self.shape)[1:], range(self.shape[0])[number], self.flipped)

    def times(self, x: Tensor, rows: bool) -> Tensor:
        """Multiply x [..., K] by [N, K] if `rows`, else by [K, N]; by all experts' for x [experts, T, K]."""
        transposed = rows is self.flipped
        if x.shape[-1] != self.shape[-1 if rows else -2]:
            raise Unclear(f"inputs of {x.shape[-1]} for a matrix {list(self.shape)}")
        if self.number is not None:
            return self.source.product(self.parameter, self.number, x, transposed)  # type: ignore[no-any-return]
        if self.dim() != 3 or x.dim() != 3 or x.shape[0] != self.shape[0]:
            raise Unclear("a product with all experts at once")
        return torch.stack([self.source.product(self.parameter, e, part, transposed) for e, part in enumerate(x)])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute products by the source; hold to shapes otherwise."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # a property
            name = func.__self__.__name__
            if name in ("T", "mT", "H", "mH"):
                return args[0].turned()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _SIZES or name == "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _PRODUCTS:
            return _product(name, *args, **kwargs)
        here = args[0]
        if not isinstance(here, Stack):
            raise Unclear(name)
        if name in _SAME:
            return here
        if name in _TURNS:
            return _turned(here, name, args[1:], kwargs)
        if name == "__getitem__":
            if isinstance(args[1], int) or (isinstance(args[1], Tensor) and args[1].numel() == 1):
                return here.at(int(args[1]))
            raise Unclear("a slice")
        if name in ("unbind", "__iter__"):
            parts = [here.at(number) for number in range(here.shape[0])]
            return iter(parts) if name == "__iter__" else tuple(parts)
        if name in ("view", "reshape") and here.number is None and not here.flipped:
            wanted = args[1:] if len(args) > 2 or isinstance(args[1], int) else tuple(args[1])
            shape = tuple(torch.empty(tuple(here.shape), device="meta").view(wanted).shape)
            if shape == here.source.cuts[here.parameter].shape:
                return Stack.of(here.source, here.parameter, shape)
        raise Unclear(name)


def _product(name: str, first: Any, second: Any, bias: Any = None, **more: Any) -> Tensor:
    x, stack = (second, first) if name == "__rmatmul__" else (first, second)
    stack, bias = more.pop("weight", stack), more.pop("bias", bias)
    if more or not isinstance(stack, Stack) or isinstance(x, Stack):
        raise Unclear(f"{name} of other operands")
    output = stack.times(x, rows=name == "linear")
    return output if bias is None else output + bias


def _turned(here: Stack, name: str, args: Any, kwargs: Any) -> Stack:
    size = here.dim()
    dims = [*args, *kwargs.values()]
    dims = [int(dim) % size for dim in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    order = list(range(size))
    if name == "permute":
        order = dims
    else:
        one, other = dims or (size - 2, size - 1)
        order[one], order[other] = other, one
    if order != [*range(size - 2), size - 1, size - 2]:
        raise Unclear(name)
    return here.turned()


# --- call forms of forwards: arguments for experts with inputs of some width ------------------------------------------


def _inputs(rows: int, width: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, generator=generator, dtype=dtype)


def _routed(
    width: int, count: int, tokens: int, chosen: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Any, ...]:
    x = _inputs(tokens, width, generator, dtype)
    index = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)])
    return x, index, torch.rand(tokens, chosen, generator=generator, dtype=dtype)


def _in_order(
    width: int, count: int, tokens: int, chosen: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (_inputs(count * 2, width, generator, dtype),)


def _by_size(
    width: int, count: int, tokens: int, chosen: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Any, ...]:
    return _inputs(count * 2, width, generator, dtype), [2] * count


def _weighed(
    width: int, count: int, tokens: int, chosen: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Any, ...]:
    x = _inputs(tokens, width, generator, dtype)
    return x, torch.rand(tokens, count, generator=generator, dtype=dtype)


# routed: (tokens [n, K], experts of each [n, k], their weights [n, k]); ordered: (tokens [experts * t, K]), in equal
# parts; sized: (tokens, number of each expert's); weighed: (tokens [n, K], weights [n, experts])
CALLS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "routed": _routed,
    "ordered": _in_order,
    "sized": _by_size,
    "weighed": _weighed,
}
_TOKENS = 4


class _Recorder:
    """Source of products that are fixed numbers, and a record of their inputs.

    Attributes:
        uses: merged parameter -> whether its matrices were [K, N], for each use.
        inputs: merged parameter -> its first input.
        moved: merged parameter and column of an output that is changed.
    """

    def __init__(self, cuts: Mapping[str, Shape], moved: tuple[str, int] = ("", 0)) -> None:
        self.cuts: Any = cuts
        self.moved = moved
        self.uses: dict[str, set[bool]] = {}
        self.inputs: dict[str, Tensor] = {}

    def product(self, name: str, number: int, x: Tensor, transposed: bool) -> Tensor:
        """Return numbers around 1, fixed for each column; the moved one differs."""
        self.uses.setdefault(name, set()).add(transposed)
        if x.numel():
            self.inputs.setdefault(name, x.detach().reshape(-1, x.shape[-1])[0].clone())
        _, first, second = self.cuts[name].shape
        rows = second if transposed else first
        y = 1 + torch.arange(rows, dtype=x.dtype).mul(0.7).sin() / 2
        if self.moved[0] == name:
            y[self.moved[1]] += 0.3
        return y.expand(*x.shape[:-1], rows).clone()


def _tried(run: Callable[[], _Recorder]) -> _Recorder | None:
    try:
        return run()
    except Exception:  # a forward may raise anything on arguments of another form
        return None


@torch.no_grad()
def trace_form(
    recording: Callable[[Any], nn.Module], shapes: Mapping[str, Shape], stored: Mapping[str, tuple[int, ...]]
) -> Form | None:
    """Return the form of a module; None if its forward is not understood.

    Args:
        recording: function of a recorder to the module with its merged parameters as stand-ins.
        shapes: merged parameter -> [experts, ...].
        stored: merged parameter -> its own shape.
    """
    count, sides = max(shape[0] for shape in shapes.values()), next(iter(shapes.values()))[1:]
    tried = [(form, width) for form in CALLS for width in dict.fromkeys(sides)]
    for form, width in tried:

        def run(
            moved: tuple[str, int] = ("", 0), form: str = form, width: int = width, chosen: int = min(2, count)
        ) -> _Recorder:
            recorder = _Recorder(shapes, moved)
            module = recording(recorder)
            generator = torch.Generator().manual_seed(0)
            args = CALLS[form](width, count, _TOKENS, chosen, generator, torch.float32)
            output = own_forward(type(module))(module, *args)
            if not isinstance(output, Tensor):
                raise Unclear("an output that is no tensor")
            return recorder

        seen = _tried(run)
        if seen is None or seen.uses.keys() != shapes.keys() or any(len(uses) > 1 for uses in seen.uses.values()):
            continue
        cuts = {name: Cut(shape, stored[name], ("",), next(iter(seen.uses[name]))) for name, shape in shapes.items()}
        halves = frozenset(name for name in cuts if _in_halves(name, cuts, seen, run))
        return Form(form, cuts, halves, 1 if _tried(lambda run=run: run(chosen=1)) else 2)  # type: ignore[misc]
    return None


def _in_halves(name: str, cuts: Mapping[str, Cut], seen: _Recorder, run: Callable[..., _Recorder]) -> bool:
    """Tell whether columns 0 and N/2 of a parameter's output, and no others, act on input 0 of another."""
    rows = cuts[name].size[0]
    behind = [other for other in cuts if other != name and cuts[other].size[1] == rows // 2]
    if rows % 2 or not behind:
        return False

    def acts(column: int) -> list[int]:
        after = run((name, column)).inputs
        return (after[behind[0]] != seen.inputs[behind[0]]).nonzero().flatten().tolist()

    return acts(0) == acts(rows // 2) == [0]
