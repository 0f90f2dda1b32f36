"""ONNX Runtime with quantkit's own 4-bit products: the same file, other kernels (`kernels/cpu`). Needs a C compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.kernels.cpu.library import why_not
from quantkit.runtimes.onnxruntime import OnnxRuntime
from quantkit.runtimes.onnxruntime.encoder_decoder import ENCODER
from quantkit.runtimes.onnxruntime.session import OnnxModel


class QuantkitCpu(OnnxRuntime):
    """ONNX Runtime with our operators; loading also raises `kernels-not-compiled` and `nothing-to-multiply`."""

    name = "quantkit_cpu"
    packages, order = ("onnx",), 1
    graph = ""

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason: an unsuitable CPU, or no compiler."""
        missing = [name for name in ("onnxruntime", "onnx") if not machine.has(name)]
        return f"{missing[0]} is not installed" if missing else why_not()

    def folder(self, bundle: Bundle) -> Path:
        """Find the folder likewise. Raises InputError, of an encoder and a decoder too: `architecture-unsupported`."""
        folder = super().folder(bundle)
        if (folder / ENCODER).is_file():
            rule = "its products run in one graph"
            remedy = "take --runtime onnxruntime"
            raise InputError("architecture-unsupported", str(bundle.path), "two graphs", rule, remedy)
        return folder

    def open(self, path: Path, threads: int | None = None, **how: Any) -> OnnxModel:
        """Open as `Runtime.open` does."""
        self.demand()
        return self.opens((path / self.file).parent, threads)

    def opens(self, folder: Path, threads: int | None = None) -> OnnxModel:
        """Open as `Runtime.opens` does."""
        return OnnxModel(folder, threads=threads, own=True)

    def load(self, bundle: Bundle, **settings: Any) -> OnnxModel:
        """Load as `FileRuntime.load` does."""
        self.demand()
        return OnnxModel(self.checked(bundle), own=True, **settings)


RUNTIME = QuantkitCpu()
