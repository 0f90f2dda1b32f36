"""Open a graph's finished bundle again, with its float graph and the samples that measure it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import content
from quantkit.bundle import Bundle, Check
from quantkit.bundle.manifest import MANIFEST, SourceEntry
from quantkit.errors import InputError
from quantkit.graph.open import is_graph, open_graph
from quantkit.model.source.alias import ALIASES, Alias, materialize
from quantkit.model.source.files import file_sha256, remembered
from quantkit.pipeline.request import REF, place
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import FOLDER as ENGINE
from quantkit.runtimes.tensorrt.file import NETWORK

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import GraphInput, InputSet
    from quantkit.graph.open import FloatGraph

MODEL = "model.onnx"
_ONNXRUNTIME = "onnxruntime"
_CODES = ".weight.codes"


def holds_graph(bundle: Bundle) -> bool:
    """Tell whether a bundle was compiled from a float ONNX graph: every network was, and an encoder that came as a file
    of one or as a module."""
    model = bundle.manifest.model
    if model.kind == "encoder":
        return is_graph(model.source.ref) or model.source.ref.startswith(REF)
    return model.kind == "network" and not (bundle.model_folder / "config.json").is_file()


def file_of(bundle: Bundle, runtime: str = _ONNXRUNTIME) -> Path:
    """Return a bundle's graph for a runtime; for ONNX Runtime, the network of an engine where it has that."""
    if runtime != _ONNXRUNTIME:
        own = load_runtime(runtime)
        return own.folder(bundle) / own.graph
    network = bundle.path / ENGINE / NETWORK
    return network if network.is_file() else bundle.path / "onnx" / MODEL


def is_network(bundle: Bundle) -> bool:
    """Tell whether a bundle of a graph holds the network of an engine: scored on a CPU, but not timed."""
    return holds_graph(bundle) and file_of(bundle).parent.name == ENGINE


def runner(bundle: Bundle, runtime: str) -> Any:
    """Open a runner for a bundle's answers in a runtime."""
    from quantkit.graph.run import Runner

    path = file_of(bundle, runtime)
    if runtime != _ONNXRUNTIME:
        return load_runtime(runtime).opens_graph(path)
    return Runner(path, literal=path.parent.name == ENGINE)


def reload_graph(bundle: Bundle) -> list[Check]:
    """Check for numbers in the file's floats, and for ONNX Runtime's integer products of all its codes.

    Raises InputError: `onnx-unreadable`; MissingDependency: onnx-ir, onnxruntime.
    """
    import onnx_ir as ir

    from quantkit.graph import integer
    from quantkit.runtimes.onnxruntime.open import write_optimized

    path, multiplied = file_of(bundle), list[Check]()
    with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as folder:
        if path.parent.name != ENGINE:
            optimized = Path(folder) / MODEL
            write_optimized(path, optimized)
        stored = ir.load(path).graph.initializers
        # a float graph may have tensors of such names
        kinds = [(name, value.dtype) for name, value in stored.items() if name.endswith(_CODES)]
        codes = [name for name, dtype in kinds if dtype is not None and dtype.bitwidth <= 8]
        if path.parent.name != ENGINE:
            sites = [integer.QuantizedSite(name.removesuffix(_CODES), name, 1.0) for name in codes]
            multiplied_in = integer.found(ir.load(optimized), sites)
            runs = "; ".join(f"{name} runs as {kind}" for name, kind in list(multiplied_in.floating.items())[:3])
            ok = multiplied_in.share == 1.0
            multiplied = [Check(name="integer.layers", value=multiplied_in.share, limit=1.0, ok=ok, where=runs)]
    floats = {
        name: value.const_value.numpy().astype(np.float32)
        for name, value in stored.items()
        if value.dtype is not None and value.dtype.is_floating_point() and value.const_value is not None
    }
    bad = [name for name, values in floats.items() if not np.isfinite(values).all()]
    missing = len(bundle.manifest.layers) - len(codes)
    return [
        Check(name="scales.finite", value=float(len(bad)), limit=0.0, ok=not bad, where=", ".join(bad[:3])),
        Check(name="layers.stored", value=float(abs(missing)), limit=0.0, ok=not missing),
        *multiplied,
    ]


def float_file(bundle: Bundle, baseline: str | None) -> tuple[Path, Alias | None]:
    """Find the float graph to compare with. Raises InputError `baseline-needed`, `baseline-kind`."""
    source = bundle.manifest.model.source
    ref, sha256 = source.ref, source.sha256
    own = ALIASES.get(ref.removeprefix("alias:"))
    if baseline is None:
        if own is not None:
            return materialize(own) / MODEL, own
        if ref.startswith(REF) and place(sha256).is_file() and file_sha256(place(sha256)) == sha256:
            return place(sha256), None
        for path in remembered(sha256):
            with suppress(InputError):
                if open_graph(path).sha256 == sha256:
                    return path, None
        raise baseline_needed(source)
    alias = ALIASES.get(baseline)
    if alias is not None and alias.kind == "network":
        return materialize(alias) / MODEL, alias
    path = Path(baseline).expanduser()
    if path.suffix.lower() != ".onnx" or (path / MANIFEST).exists():
        where, rule = f"--baseline {baseline}", "a graph is measured against a float graph"
        remedy = "--baseline ./model.onnx"
        raise InputError("baseline-kind", where=where, value="no .onnx file", rule=rule, remedy=remedy)
    return path, own


def baseline_needed(source: SourceEntry) -> InputError:
    """Make the error `baseline-needed`, for an original that has moved or was never opened here."""
    if source.adapters:
        model, parts = source.ref.removeprefix("path:"), [adapter.ref.partition(":")[2] for adapter in source.adapters]
        value = f"the bundle was made from {model!r} with the adapter {' and '.join(parts)}; one is gone or has changed"
        rule = "a bundle does not hold its original"
        remedy = "compile both again with --recipe float, and give that bundle"
        return InputError("baseline-needed", where="--baseline", value=value, rule=rule, remedy=remedy)
    name, path = source.ref.removeprefix("path:"), next(iter(remembered(source.sha256)), None)
    value = f"the bundle was made from {name!r}, which {'has changed' if path else 'is at no known place'}"
    rule = "a bundle holds neither its original nor the path of it"
    typed = shlex.quote(f"./{name}" if path is None else content.near(path))
    remedy = f"--baseline {typed}, with its path" if source.ref.startswith("path:") else "--baseline ./model.onnx"
    return InputError("baseline-needed", where="--baseline", value=value, rule=rule, remedy=remedy)


def demand_inputs(bundle: Bundle, graph: FloatGraph) -> None:
    """Refuse a float graph with other inputs. Raises InputError `baseline-inputs`."""
    import onnx_ir as ir

    mine = [str(value.name) for value in ir.load(file_of(bundle)).graph.inputs]
    theirs = [entry.name for entry in graph.inputs]
    if mine != theirs:
        value, rule = f"it takes {', '.join(theirs)}", f"the bundle's graph takes {', '.join(mine)}"
        remedy = "--baseline with the graph that the bundle was made from"
        raise InputError("baseline-inputs", where=graph.path.name, value=value, rule=rule, remedy=remedy)


def samples_of(bundle: Bundle, calibration: str | None) -> InputSet:
    """Load samples for scoring and timing a bundle's graph: the `eval` split of its calibration set.

    Args:
        calibration: another set, or the place of its own, if that was a file.

    Raises InputError: `calibration-needed`, those of `load_inputs`; MissingDependency: onnx-ir.
    """
    import onnx_ir as ir

    from quantkit.graph.open import inputs_of

    file, alias = file_of(bundle), ALIASES.get(bundle.manifest.model.source.ref.removeprefix("alias:"))
    return scoring(bundle, tuple(inputs_of(ir.load(file), file.name)), calibration, alias)


def scoring(bundle: Bundle, inputs: Sequence[GraphInput], calibration: str | None, alias: Alias | None) -> InputSet:
    """Load the scoring samples for a graph with such inputs; see `samples_of`."""
    from quantkit.calibrate.sets.inputs import load_inputs

    recipe, seen = Recipe.done(bundle.manifest.recipe), bundle.manifest.calibration
    name = calibration or (seen.set if seen else recipe.calibration.set)
    if calibration is None and name not in content.names("calibration"):
        value, remedy = f"the bundle was calibrated on a file called {name!r}", f"--calibration ./{name}"
        rule = "a bundle holds no path of the machine it was made on"
        raise InputError("calibration-needed", where="--calibration", value=value, rule=rule, remedy=remedy)
    how = alias.preprocess if alias is not None else None
    return load_inputs(name, "eval", inputs, samples=None, seed=recipe.seed, preprocess=how)
