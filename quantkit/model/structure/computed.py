"""What a block computes, whatever its values: the operators that it runs, each with its numbers and with where its
tensors come from.

Two blocks that compute the same are one function of their weights and inputs. What was proved of that function at
random weights, as where scales can be folded, holds for both; nothing has to be run for the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Computed(TorchDispatchMode):
    """Notes the operators that run within it.

    Args:
        named: the tensors that are there before, by a name that says what they are.
        given: what the run is given, in order; of these the tensors.

    Attributes:
        steps: equal to those of another run only if that computes the same. A tensor that comes from elsewhere equals
            no other: its values are not looked at.
    """

    def __init__(self, named: Mapping[str, Tensor], given: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Any] = []
        # kept alive, so that no two have one id
        self._seen: dict[int, tuple[Tensor, str]] = {id(value): (value, name) for name, value in named.items()}
        for number, value in enumerate(given):
            if isinstance(value, Tensor):
                self._seen[id(value)] = value, f"given {number}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operator."""
        given = tree_map(self._origin, (args, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        for number, value in enumerate(tree_leaves(found)):
            if isinstance(value, Tensor):
                self._seen[id(value)] = value, f"{number} of {len(self.steps)}"
        self.steps.append((str(func), given))
        return found

    def gives(self, output: Tensor) -> None:
        """Note what is taken as the result."""
        self.steps.append(self._origin(output))

    def _origin(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = self._seen.get(id(value))
        return object() if known is None else (known[1], value.dtype, tuple(value.shape), value.stride())
