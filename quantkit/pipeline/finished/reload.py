"""Load a finished bundle again, every export in the library that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle, Check
from quantkit.errors import InputError, MissingDependency, QuantkitError
from quantkit.exporters import load_exporter
from quantkit.measurement.timing import speed
from quantkit.pipeline.graphs.bundles import MODEL, holds_graph, reload_graph
from quantkit.pipeline.verdict import ONE_FILE
from quantkit.runtimes import child, load_runtime
from quantkit.runtimes.openvino.open import MODEL as XML

# of a graph that is no transformer
_GRAPHS = {speed.RUNTIME: MODEL, speed.OPENVINO: XML}


def reload(bundle: Bundle) -> tuple[list[Check], list[str]]:
    """Each export's own checks; what could not be run is a note."""
    found = loaded(bundle)
    if not all(check.ok for check in found):
        return found, []
    if holds_graph(bundle):
        try:
            return [*found, *reload_graph(bundle)], []
        except (ImportError, MissingDependency) as problem:
            return found, [f"not loaded: {problem} (pip install 'quantkit[compile]'); files and hashes hold"]
    try:
        import torch  # noqa: F401

    except ImportError as problem:
        note = f"not loaded: {problem.name} is not installed (pip install 'quantkit[compile]'); files and hashes hold"
        return found, [note]
    notes = []
    for name in (next(iter(step)) for step in bundle.manifest.recipe.get("export", [])):
        try:
            found += load_exporter(name).check(bundle.path)
        except (ImportError, MissingDependency) as problem:
            missing = problem.where if isinstance(problem, MissingDependency) else problem.name
            why = f"{missing} is not installed" if missing else str(problem)
            notes.append(f"{name} not loaded: {why} (pip install 'quantkit[compile]')")
    return found, notes


def exports_of(bundle: Bundle, runtimes: Sequence[str]) -> dict[str, Path]:
    """Runtime -> what it opens of a bundle: a folder, or a graph's file."""
    found: dict[str, Path] = {}
    graph = holds_graph(bundle)
    for name in runtimes:
        try:
            folder = load_runtime(name).folder(bundle)
        except InputError:
            continue
        if not graph or name in _GRAPHS:
            found[name] = folder / _GRAPHS[name] if graph else folder
    return found


def loaded(bundle: Bundle) -> list[Check]:
    """Tell whether ONNX Runtime opens the graph and makes a step, alone and with quantkit's own operators.

    In a process of its own, which a graph may end. What does not run on this machine is not looked at.
    """
    places = exports_of(bundle, ONE_FILE)
    work = {name: str(path) for name, path in places.items() if load_runtime(name).why_not_here() is None}
    met: dict[str, str] = {}
    ended = ""
    try:
        if work:
            child.run(
                _steps,
                {"loads": work, "graph": holds_graph(bundle)},
                remedy="export it again",
                row=met.update,
                where="onnx",
            )
    except InputError as problem:
        ended = problem.value
    late = next((name for name in work if name not in met), None)
    if ended and late:
        met[late] = ended
    return [
        Check(name=f"{name}.loads", value=float(bool(why)), limit=0.0, ok=not why, where=why)
        for name, why in met.items()
        if why is not None
    ]


def _steps(job: Mapping[str, Any], caller: child.Caller) -> None:
    """One row a runtime: why it does not make a step, "" where it does, None where it has nothing to do."""
    for runtime, path in job["loads"].items():
        met: str | None = ""
        try:
            speed.stepped(Path(path), runtime, graph=job["graph"])
        except QuantkitError as problem:
            met = None if problem.code == "nothing-to-multiply" else problem.line()
        caller.row({runtime: met})
        if met:  # of the others it would be the same
            return
