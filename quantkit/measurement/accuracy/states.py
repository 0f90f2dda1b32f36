"""What an original puts out, kept in the user's cache: computed once for all candidates that are scored against it.

The key is all that it depends on: source, token ids, how blocks are called, versions, instruction set and threads.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import content, machine

if TYPE_CHECKING:
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
