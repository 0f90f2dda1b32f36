"""A GPU's memory: what is taken, and a full one in words that a sweep understands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantkit.errors import InputError


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turns "out of memory" in the body into InputError `out-of-memory`."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        torch.cuda.empty_cache()
        value = str(problem).splitlines()[0]
        raise InputError("out-of-memory", where=where, value=value, remedy="smaller batches") from None


def allocated() -> int:
    """Bytes that this process's tensors take; 0 where there is no GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
