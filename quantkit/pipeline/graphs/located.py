"""Which models are compiled as float ONNX graphs, and where the file of one lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.graph.open import is_graph
from quantkit.model.source.alias import ALIASES, Alias, materialize
from quantkit.pipeline.graphs.exported_module import REF
from quantkit.pipeline.request import Request


@dataclass(frozen=True)
class Located:
    """The file of a graph.

    Args:
        path: of the ONNX file.
        ref: what a manifest calls it.
        name: what the bundle is named after.
        alias: of a shipped model, which has a calibration set of its own, and says what becomes of images before it.
    """

    path: Path
    ref: str
    name: str
    alias: Alias | None = None


def takes_graph(model: str) -> bool:
    """Whether a model is compiled as a float ONNX graph: a file of one, or a shipped network."""
    alias = ALIASES.get(model)
    return is_graph(model) or (alias is not None and alias.kind == "network")


def located(request: Request) -> Located:
    """Where the graph of a request lies; a shipped one is materialized."""
    alias = ALIASES.get(request.model)
    if alias is not None:
        return Located(materialize(alias) / "model.onnx", f"alias:{alias.name}", alias.name, alias)
    path = Path(request.model).expanduser()
    ref = f"{REF}{request.module}" if request.module else f"path:{path.name}"
    return Located(path, ref, request.module or path.stem)
