"""The unquantized model as ONNX: what every speed is set against.

Made once by the exporter that makes the quantized one, with the same fusions, and kept in the user's cache by the
source's hash.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quantkit
from quantkit import content, registry
from quantkit.bundle import stopping_when_full
from quantkit.errors import GateError, InputError
from quantkit.plan import machine

if TYPE_CHECKING:
    from quantkit.model.open import Source

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def float_onnx(source: Source, options: dict[str, Any]) -> Path:
    """The folder with the float model's `model.onnx`, made if it is not there.

    Args:
        source: the unquantized model.
        options: of the quantized one's export; what changes the graph has to be the same.

    Raises:
        InputError: the exporter's; `disk-space`.
        GateError: `check-failed`, the graph does not compute what the model does.
    """
    from quantkit.model.finished import Finished
    from quantkit.model.stream import StreamedModel

    versions = machine.versions()
    key = {
        "quantkit": quantkit.__version__,
        "source": source.sha256,
        "options": {name: value for name, value in options.items() if name != "accuracy_level"},
        "versions": {name: versions.get(name) for name in _PACKAGES},
        "exporter": _code(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    home = content.cache_dir() / "float"
    folder = home / name
    if (folder / "onnx" / "model.onnx").is_file():
        return folder / "onnx"
    home.mkdir(parents=True, exist_ok=True)
    need = 4 * sum(entry.bytes for entry in source.weights.entries.values()) // _width(source.dtype)
    if shutil.disk_usage(home).free < 1.1 * need:
        raise InputError(
            "disk-space",
            where=str(home),
            value=f"the float baseline takes {need / 1e9:.1f} GB",
            rule="it is kept to be measured against",
            remedy="free some space, or set QUANTKIT_CACHE to another disk",
        )
    exporter = registry.load("export", "onnx")
    with tempfile.TemporaryDirectory(dir=home, prefix=f"{name}-") as temporary, stopping_when_full(home):
        build = Path(temporary) / "bundle"
        build.mkdir()
        stream, nothing = StreamedModel(source), Finished([], {})
        exporter.write(build, source, stream, nothing, options)
        for check in exporter.check(build, source, stream, nothing, options):
            if not check.ok:
                raise GateError(
                    "check-failed",
                    where=f"float baseline: {check.where or check.name}",
                    value=f"{check.name} is {check.value}",
                    rule=f"at most {check.limit}",
                    remedy="please report it",
                )
        try:
            build.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder / "onnx"


def _width(dtype: str) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 4)


def _code() -> str:
    """The hash of the exporter's own code: a cached graph of an older one would not have the same fusions."""
    folder = Path(__file__).parent.parent / "export"
    files = sorted(folder.glob("*onnx*.py")) + [folder / f"_{name}.py" for name in ("trace", "repeat", "dialect_ort")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
