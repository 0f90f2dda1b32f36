"""A GPU that is not there: fake tensors on `cuda`, with what would be launched on it counted.

A wrong device and a wait that depends on data raise in `FakeTensorMode`. A build of torch without CUDA cannot index
such tensors from Python, nor make them contiguous, so that both are turned into operators here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# what changes how a tensor is seen, and what reserves memory: nothing is launched
_SILENT = ("view", "reshape", "alias", "detach", "expand", "permute", "transpose", "t", "slice", "select", "split")
_SILENT += ("split_with_sizes", "unbind", "unsqueeze", "squeeze", "as_strided", "diagonal", "unfold", "lift_fresh")
_SILENT += ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "_reshape_alias", "narrow")


class Launches(TorchDispatchMode):
    """Counts operations that launch something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        touched = [each for each in tree_leaves((made, args)) if isinstance(each, Tensor)]
        if space != "prim" and name not in _SILENT and any(each.device.type == "cuda" for each in touched):
            self.names.append(name)
        return made


class _Indexed(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _taken(*args)
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__setitem__:
            tensor, index, value = args
            if any(isinstance(each, Tensor) for each in (index if isinstance(index, tuple) else (index,))):
                places = [each if isinstance(each, Tensor) else None for each in _whole(tensor, index)]
                given = value if isinstance(value, Tensor) else torch.full((), value, device=tensor.device)
                return tensor.index_put_(places, given)
            place = _taken(tensor, index)
            if isinstance(value, Tensor):
                return torch.ops.aten.copy_.default(place, value)
            return place.fill_(value)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _whole(tensor: Tensor, index: Any) -> list[Any]:
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [each for each in index if not isinstance(each, Tensor)]:
        at = next(i for i, each in enumerate(index) if each is Ellipsis)
        missing = tensor.dim() - sum(each is not None for each in index) + 1
        index[at : at + 1] = [slice(None)] * missing
    return index


def _taken(tensor: Tensor, index: Any) -> Tensor:
    axis, places = 0, []
    for each in _whole(tensor, index):
        if each is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, each.start, each.stop, each.step or 1)
        elif isinstance(each, Tensor):
            places += [None] * (axis - len(places)) + [each]
        else:
            tensor = tensor.select(axis, int(each))
            continue
        axis += 1
    return torch.ops.aten.index.Tensor(tensor, places) if places else tensor


@contextmanager
def fake_gpu() -> Iterator[Launches]:
    """Within it `device="cuda"` holds fake tensors; the operations that would be launched are noted."""
    with FakeTensorMode(), _Indexed(), Launches() as launches:
        yield launches
