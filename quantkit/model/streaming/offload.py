"""A model that does not fit into memory, as plain transformers runs it: its blocks stay on disk until they are called.

That is `device_map` of `from_pretrained`: accelerate reads each module of a block when its forward begins, and drops it
when that ends. What has to be converted first (merged experts) is written into a folder. So memory is what lies outside
the blocks, and a part of one block, at the cost of reading all weights once for each forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quantkit import content

# what `from_pretrained` takes besides
Options = dict[str, object]


@contextmanager
def on_disk(model: nn.Module, path: str) -> Iterator[Options]:
    """Options of `from_pretrained` that leave the blocks on disk; the folder is gone behind it.

    Args:
        model: of the class, with or without weights.
        path: of its `ModuleList` of blocks.
    """
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="offloaded-") as place:
        yield {"device_map": places(model, path), "offload_folder": place}


def places(model: nn.Module, path: str) -> dict[str, str]:
    """Module or parameter -> `cpu` or `disk`: the blocks on disk, everything else in memory."""
    found: dict[str, str] = {}

    def look(module: nn.Module, prefix: str) -> None:
        kept = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set  # others are in no file
        found.update({f"{prefix}{name}": "cpu" for name in sorted(kept)})
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if full == path:
                found.update({f"{full}.{block}": "disk" for block, _ in child.named_children()})
            elif path.startswith(f"{full}."):
                look(child, f"{full}.")
            else:
                found[full] = "cpu"

    look(model, "")
    return found
