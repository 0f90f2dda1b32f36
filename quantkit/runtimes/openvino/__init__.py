"""OpenVINO on Intel's CPUs, GPUs and NPUs: runs a bundle's `openvino/model.xml`. Needs openvino; no torch."""

from __future__ import annotations

from pathlib import Path

from quantkit import machine
from quantkit.errors import install
from quantkit.runtimes import FileRuntime
from quantkit.runtimes.openvino.open import FOLDER, MODEL
from quantkit.runtimes.openvino.session import OpenvinoGraph, OpenvinoModel


class OpenvinoRuntime(FileRuntime):
    """Runtime `openvino`."""

    name = floats = "openvino"
    imports, extra, order = ("openvino",), "openvino", 3
    graph, file = MODEL, f"{FOLDER}/{MODEL}"
    absent = ("bundle-without-openvino", "this runtime runs the OpenVINO export")
    packages = ("openvino",)
    model = OpenvinoModel

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason as `Runtime.why_not_here` does."""
        return None if machine.has("openvino") else f"openvino is not installed; {install('openvino')}"

    def opens_graph(self, file: Path, threads: int | None = None) -> OpenvinoGraph:
        """Open as `Runtime.opens_graph` does. Raises as `OpenvinoGraph`."""
        return OpenvinoGraph(file, threads)


RUNTIME = OpenvinoRuntime()
