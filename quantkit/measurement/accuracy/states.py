"""What an original puts out, kept in the user's cache: computed once for all candidates that are scored against it.

The key is all that it depends on: source, token ids, how blocks are called, versions, instruction set and threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import content, machine
from quantkit.bundle import cached

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.streaming.stream import StreamedModel

# of how models are run block by block: another number, and what was kept before is not read again. Until 2, classes
# that share a cache or arguments between chunks gave other states than their own forward
_STREAM = 2


def place(model: StreamedModel, digest: str) -> Path:
    """Where an original's states are kept, by all that they depend on; `digest` is of the ids."""
    import torch

    key = {
        "source": model.source.sha256,
        "ids": digest,
        "stream": _STREAM,
        "versions": machine.versions(),
        "isa": machine.isa(),
        "threads": torch.get_num_threads(),
    }
    if model.device.type != "cpu":
        key["device"] = [torch.cuda.get_device_name(model.device), torch.get_float32_matmul_precision()]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "states" / f"{name}.safetensors"


def read(path: Path) -> Tensor | None:
    """Cached states; None where there are none, or where the file is not what was kept."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not cached.is_intact(path):
        return None
    try:
        found: Tensor | None = load_file(path).get("hidden")
    except (OSError, SafetensorError):
        return None
    return found


def write(path: Path, hidden: Tensor) -> None:
    """Keep states; a cache that cannot be written costs time, not the result."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"hidden": hidden.contiguous()}, temporary)
            cached.put(temporary, path)
        except (OSError, SafetensorError):  # the library says so of a full disk
            temporary.unlink(missing_ok=True)
