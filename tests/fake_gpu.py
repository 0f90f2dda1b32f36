"""Fake a GPU by `FakeTensorMode` with CUDA tensors, and count its work.

Tensors have the shapes, dtypes and devices of a GPU, but no values. A tensor on the wrong device raises. A read of a
value, for which a GPU would have to be waited for, is counted and gets a planted value.
"""

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import quantkit
from quantkit.model.streaming.calls import Calls, Given
from quantkit.model.streaming.stream import LoadedModel, set_tensor

CUDA = torch.device("cuda:0")
_PACKAGE = f"{Path(quantkit.__file__).parent}/"
aten = torch.ops.aten
# operators that launch nothing: they allocate memory, or make a view
_FREE = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::lift_fresh_copy",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "prim::device",
}


class Watch(TorchDispatchMode):
    """Counter of a device's work.

    Args:
        planted: dtype -> value that reads get; 0 for other dtypes.

    Attributes:
        launched: function of the package -> operators that it has launched.
        operators: operator -> number of its launches so far.
        waits: places that read a value.
    """

    def __init__(self, planted: Mapping[torch.dtype, object] | None = None) -> None:
        super().__init__()
        self.planted = planted or {}
        self.launched: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            self.waits.append(_asked())
            zero = False if (dtype := args[0].dtype) == torch.bool else 0.0 if dtype.is_floating_point else 0
            return self.planted.get(dtype, zero)
        found = func(*args, **(kwargs or {}))
        name = str(func._schema.name)
        on_gpu = any(isinstance(each, Tensor) and each.device.type == "cuda" for each in tree_leaves((found, args)))
        if on_gpu and not func.is_view and name not in _FREE:
            self.launched[_asked()] += 1
            self.operators[name.rpartition("::")[2]] += 1
        return found

    def taken(self) -> tuple[Counter[str], list[str]]:
        """Return the launches and waits since the last call."""
        launched, waits = self.launched, self.waits
        self.launched, self.waits = Counter(), []
        return launched, waits


def _asked() -> str:
    """Return the running function of the package: `passes/solvers/gptq.py:gptq_shared`."""
    frame = sys._getframe(2)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Bindings(TorchFunctionMode):
    """Mode that replaces the few hand-written methods whose Python bindings refuse CUDA tensors in a torch without
    CUDA.

    The operators behind them take such tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            value, indices = _picked(*args)
            return value if indices is None else aten.index(value, indices)
        if func is Tensor.__setitem__:
            value, indices = _picked(args[0], args[1])
            new = args[2] if isinstance(args[2], Tensor) else torch.full_like(value.new_empty(()), args[2])
            if indices is not None:
                aten.index_put_(value, indices, new)
            else:
                aten.copy_(value, new)
            return None
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as problem:
            if "not linked with support for cuda" not in str(problem):
                raise
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func.__name__ in ("__float__", "__int__", "__bool__", "item"):
            return aten._local_scalar_dense(args[0])
        name = {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__)
        return getattr(aten, name)(*args, **(kwargs or {}))


def _picked(value: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """Return the part of `value[index]` that is a view, and the indices left to gather by."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if any(part is Ellipsis for part in parts):
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (value.dim() - taken)
    indices: list[Tensor | None] = []
    for part in parts:
        dim = len(indices)
        if part is None:
            value = value.unsqueeze(dim)
            indices.append(None)
        elif isinstance(part, slice):
            if part != slice(None):
                value = aten.slice(value, dim, part.start, part.stop, part.step or 1)
            indices.append(None)
        elif isinstance(part, int):
            value = aten.select(value, dim, part)
        else:
            indices.append(part if isinstance(part, Tensor) else torch.tensor(part, device=value.device))
    return value, indices if any(each is not None for each in indices) else None


class _Mode(FakeTensorMode):
    def __deepcopy__(self, memo: Any) -> FakeTensorMode:
        return self  # a copied block stays on the same GPU


@contextmanager
def gpu(planted: Mapping[torch.dtype, object] | None = None, *, others: bool = False) -> Iterator[Watch]:
    """Put a counting GPU in the place of the real one; `others` lets tensors in main memory be read beside it."""
    with _Mode(allow_non_fake_inputs=others), _Bindings(), torch.no_grad(), Watch(planted) as watch:
        yield watch


def like(value: Any) -> Any:
    """Return a tensor of that shape on the GPU; only within `gpu`."""
    return torch.empty(value.shape, dtype=value.dtype, device=CUDA) if isinstance(value, Tensor) else value


class FakeStream:
    """A model's blocks on the GPU, called like those of a real stream.

    Args:
        model: model on the processor; its own forward on `ids` gives the calls of the blocks.
        ids: all batches [samples, tokens] of the test.
    """

    def __init__(self, model: nn.Module, *ids: Tensor) -> None:
        self._real = LoadedModel(model)
        self._calls = {len(each): self._real.begin(each, len(each)) for each in ids}
        self.block_names, self.visits = self._real.block_names, self._real.visits

    def load(self, index: int) -> nn.Module:
        with _disable_current_modes():
            block = copy.deepcopy(self._real.load(index))
            values = [*block.named_parameters(), *block.named_buffers()]
        for name, value in values:
            set_tensor(block, name, like(value))
        return block.eval()

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        calls = self._calls[len(ids)]
        given = [Given(tree_map(like, each.args), tree_map(like, each.kwargs), each.name) for each in calls._given[0]]
        return Calls(like(calls.hidden), calls.chunk, [given])
