"""Import torch at first use: it takes seconds, and listing, validating and planning do without it."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["torch"]


class _Lazy:
    """A module's attributes; asking for the first one imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch
else:
    torch = _Lazy("torch")
