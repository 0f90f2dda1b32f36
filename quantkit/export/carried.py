"""What goes along with a model unchanged, whatever becomes of its weights: tokenizer, chat template, licence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.errors import InputError
from quantkit.model.source.weights import INDEX, checked_file

# weights in any other form, code, and what describes the source rather than the result
_LEFT_BEHIND = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx", ".xml"),
    *(".gguf", ".tflite", ".npz", ".npy", ".mlmodel", ".tar", ".gz", ".zip", ".py", ".pyc", ".so"),
}
_REPLACED = {"config.json", "README.md", INDEX}


def carried(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, name in the new folder) of what goes along unchanged: tokenizer, generation config, template, licence.

    Links that lead out of the folder, hidden files, code and other weights stay behind.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            # `model.onnx_data` and the like: an ONNX file's own weights
            weights = name.endswith(".index.json") or ".onnx" in name.lower() or path.suffix.lower() in _LEFT_BEHIND
            if weights or relative in _REPLACED or name.startswith("."):
                continue
            try:
                yield checked_file(path.parent, name), relative
            except InputError:
                continue
