"""ONNX Runtime with quantkit's own 4-bit products: the same file, other kernels (`kernels/cpu`). Needs a C compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.kernels.cpu.library import why_not
from quantkit.runtimes.onnxruntime.runtime import OnnxRuntime
from quantkit.runtimes.onnxruntime.session import FOLDER, OnnxModel


class QuantkitCpu(OnnxRuntime):
    """See the module."""

    name = "quantkit_cpu"

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """The processor, or no compiler."""
        return why_not() if machine.has("onnxruntime") else "onnxruntime is not installed"

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> OnnxModel:
        """As of `onnxruntime`."""
        return OnnxModel(path / FOLDER, threads=threads, own=True)

    def load(self, bundle: Bundle, **settings: Any) -> OnnxModel:
        """As of `onnxruntime`.

        Raises:
            InputError: besides, `compiler-missing`, `kernels-not-compiled`, `nothing-to-multiply`.
        """
        return OnnxModel(self.checked(bundle), own=True, **settings)


RUNTIME = QuantkitCpu()
