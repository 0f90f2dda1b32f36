"""Export the unquantized model: the baseline of every speed.

The exporter of the quantized model writes it once, with the same fusions. The user's cache keeps it by the source's
hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content, machine
from quantkit._version import __version__
from quantkit.bundle import cached
from quantkit.bundle.disk import alone, fsync_tree, is_disk_full
from quantkit.errors import InputError, Stopped
from quantkit.exporters import load_exporter
from quantkit.pipeline.gates import demand
from quantkit.recipe import ExportStep
from quantkit.report.kit import words

if TYPE_CHECKING:
    from quantkit.model.source.open import Source

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "gguf", "openvino")


def place(source: Source, exporter: str, options: Mapping[str, Any]) -> Path:
    """Return where the float model's bundle is kept, whether it is there or not; see `float_export`."""
    versions = machine.versions()
    key = {
        "quantkit": __version__,
        "source": source.sha256,
        "options": _options(exporter, options).model_dump(mode="json", exclude_unset=True),
        "versions": {name: versions.get(name) for name in _PACKAGES},
        # a cached graph of older code would not have the same fusions
        "exporter": hashlib.sha256(b"".join(path.read_bytes() for path in _files(exporter))).hexdigest(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "float" / name


def _files(exporter: str) -> list[Path]:
    """List the code with a say in the bytes of a float graph or file, and a little more."""
    folder, patterns = Path(__file__).parent.parent / "exporters", (f"{exporter}.py", f"{exporter}/**/*.py")
    return sorted(path for pattern in ("values.py", *patterns, "trace/*.py") for path in folder.glob(pattern))


def float_export(source: Source, exporter: str, options: Mapping[str, Any]) -> Path:
    """Return the folder with the float model's file, made if it is not there; one process makes it, others wait.

    Args:
        exporter: that makes it: one that stores a graph, or a file.
        options: of the quantized one's export; what changes the file has to be the same.

    Raises InputError: the exporter's; `disk-space`, `cache-not-writable`; GateError: `check-failed`, it does not
    compute what the model does.
    """
    folder = place(source, exporter, options)
    if not cached.is_intact(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with alone(folder.parent / "lock"):
                if not cached.is_intact(folder):
                    _make(folder, source, exporter, options)
        except (OSError, Stopped) as problem:
            # a full cache is no reason to stop and resume: nothing of the bundle is in it
            full = is_disk_full(problem) or getattr(problem, "code", "") == "disk-full"
            if isinstance(problem, Stopped) and not full:
                raise
            where = str(folder.parent)
            value = problem.value if isinstance(problem, Stopped) else problem.strerror or str(problem)
            rule = "the float model is kept there, as the baseline"
            remedy = "free some space, or set QUANTKIT_CACHE to another disk" if full else "set QUANTKIT_CACHE"
            raise InputError("disk-space" if full else "cache-not-writable", where, value, rule, remedy) from None
    return folder / load_exporter(exporter).place


def float_format(exporter: str, options: Mapping[str, Any]) -> str:
    """Return the format of the float model's weights, as an exporter makes it to be timed against."""
    return str(getattr(_options(exporter, options), "floats", "float32"))


def _make(folder: Path, source: Source, exporter: str, options: Mapping[str, Any]) -> None:
    from quantkit.exporters.values import Values
    from quantkit.model.finished import Finished
    from quantkit.model.streaming.stream import StreamedModel

    home = folder.parent
    for left in home.glob("*-*"):  # by a process that was killed: nobody else makes anything now
        shutil.rmtree(left, ignore_errors=True)
    width = {"float16": 2, "bfloat16": 2}.get(source.dtype, 4)
    need = 4 * sum(entry.bytes for entry in source.weights.entries.values()) // width
    if shutil.disk_usage(home).free < 1.1 * need:
        raise OSError(errno.ENOSPC, f"it takes {words.size(need)}, which are not free")
    writer, chosen = load_exporter(exporter), _options(exporter, options)
    with tempfile.TemporaryDirectory(dir=home, prefix=f"{folder.name}-") as temporary:
        build = Path(temporary) / "bundle"
        build.mkdir()
        values = Values.of_results(source, StreamedModel(source), Finished([], {}))
        writer.export(build / writer.place, values, chosen)
        # where all of a model need not be in memory to be checked, it is not
        checks = writer.check(build, values, chosen, blocks=1)
        demand(checks, "please report it", of="float baseline")
        fsync_tree(build)
        cached.put(build, folder)


def _options(exporter: str, options: Mapping[str, Any]) -> Any:
    """Return those of a quantized model's export, as the float model's has them."""
    step = ExportStep(name=exporter, options=dict(options))
    return load_exporter(exporter).for_floats(step.settings)
