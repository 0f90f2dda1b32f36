"""Load a finished bundle again, every export in the library that reads it."""

from __future__ import annotations

from quantkit.bundle import Bundle, Check
from quantkit.errors import MissingDependency
from quantkit.exporters import load_exporter
from quantkit.pipeline.graphs.remeasure import holds_graph, reload_graph


def reload(bundle: Bundle) -> tuple[list[Check], list[str]]:
    """Each export's own checks; what could not be run is a note."""
    found: list[Check] = []
    if holds_graph(bundle):
        try:
            return reload_graph(bundle), []
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
