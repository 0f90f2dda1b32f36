"""Load a finished bundle again, every export in its library, and compare a network with the float model by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import Bundle, Check
from quantkit.errors import InputError, MissingDependency, QuantkitError, install
from quantkit.exporters import load_exporter
from quantkit.measurement.accuracy import layerwise
from quantkit.measurement.accuracy.layerwise import LayerError
from quantkit.measurement.timing import speed
from quantkit.pipeline.graphs.bundles import holds_graph, reload_graph
from quantkit.pipeline.served import check as served_check
from quantkit.pipeline.served import shipped_ids
from quantkit.runtimes import child, load_runtime, of_one_file
from quantkit.runtimes.tensorrt import library as tensorrt_library
from quantkit.runtimes.tensorrt.file import FOLDER, NETWORK

Array = NDArray[Any]
# of the shipped text; pictures of no set: standard normal values
_TOKENS, _BATCH = 64, 2


def compare_layers(
    bundle: Bundle, floats: Bundle, *, inputs: Path | None = None, runtime: str | None = None
) -> tuple[list[LayerError], list[str]]:
    """Compare a network with the float model's, layer by layer.

    Args:
        bundle: with `engine/network.onnx`.
        floats: the same of the float model.
        inputs: `.npz` with an array for each input of a graph; language models and encoders read shipped text.
        runtime: `tensorrt_rtx` or `tensorrt`: the network as an engine on this machine's GPU, too.

    Returns:
        (layers in the order of the network, what is to be said).

    Raises InputError: `engine-missing`, `models-differ`, `networks-differ`, `inputs-differ`, `gpu-absent`,
    `hash-mismatch`, `network-unrunnable`; MissingDependency: polygraphy, onnx-ir, onnxruntime.
    """
    before, after = _network(floats), _network(bundle)
    mine, other = bundle.manifest.model, floats.manifest.model
    if mine.source.sha256 != other.source.sha256:
        value, rule = (
            f"compiled from {other.name}",
            f"both sides come from one model; {bundle.path} is of {mine.name}",
        )
        raise InputError("models-differ", where=str(floats.path), value=value, rule=rule)
    library = None
    if runtime is not None:
        why = load_runtime(runtime).why_not_here()
        if why is not None:
            rule = "an engine runs on the GPU that it was built for"
            remedy = "without --runtime both networks are compared on the CPU"
            raise InputError("gpu-absent", where=runtime, value=why, rule=rule, remedy=remedy)
        library = tensorrt_library.load("tensorrt" if runtime == "tensorrt" else "tensorrt_rtx")
    feed, notes = fed(after, inputs)
    for name, (shape, _) in _inputs(before).items():
        if name not in feed or not _fits(feed[name], shape):
            value, rule = f"{name} {_words(shape)}", "both networks take the same inputs"
            remedy = "compile both for one target, with the same settings of the export"
            raise InputError("networks-differ", where=str(before), value=value, rule=rule, remedy=remedy)
    if library is None:
        return layerwise.compared(before, after, feed), notes
    return layerwise.with_engine(before, after, feed, library), notes


def _network(bundle: Bundle) -> Path:
    path = bundle.path / FOLDER / NETWORK
    if not path.is_file():
        rule = "layers are compared in the networks that engines are built from"
        remedy = "compile with --set 'export=[{tensorrt: {engine: false}}]', the float side with --recipe float"
        raise InputError("engine-missing", str(bundle.path), f"no {FOLDER}/{NETWORK}", rule, remedy)
    bundle.demand_intact(f"{FOLDER}/network")
    return path


def _inputs(network: Path) -> dict[str, tuple[list[int | None], Any]]:
    """Input -> its shape, None where a size is free, and its type."""
    import onnx_ir as ir

    return {
        str(value.name): (
            [size if isinstance(size, int) else None for size in value.shape or ()],
            None if value.dtype is None else value.dtype.numpy(),
        )
        for value in ir.load(network).graph.inputs
    }


def _fits(array: Array, shape: Sequence[int | None]) -> bool:
    sizes = zip(array.shape, shape, strict=False)
    return len(array.shape) == len(shape) and all(size in (None, own) for own, size in sizes)


def _words(shape: Sequence[int | None]) -> str:
    return f"{['?' if size is None else size for size in shape]}"


def fed(network: Path, inputs: Path | None = None) -> tuple[dict[str, Array], list[str]]:
    """Return (input -> values, notes on them)."""
    entries = _inputs(network)
    if inputs is not None:
        return _of_file(inputs, entries), []
    notes: list[str] = []
    values: dict[str, Array] = {}
    if "input_ids" in entries:
        room = entries.get("attention_mask", ([None, None], None))[0][1]
        ids, notes = _tokens(network.parent, _TOKENS if room is None else min(_TOKENS, room))
        mask = np.zeros((1, room or ids.shape[1]), np.int64)
        mask[:, : ids.shape[1]] = 1
        values = {
            "input_ids": ids,
            "position_ids": np.arange(ids.shape[1])[None],
            "attention_mask": mask,
            "write_indices": np.zeros(1, np.int64),
            "logits_to_keep": np.zeros(1, np.int64),
            "token_type_ids": np.zeros_like(ids),
        }
        for name, (shape, _) in entries.items():  # a cache: of the one sequence, empty
            values.setdefault(name, np.zeros([1, *(size or 0 for size in shape[1:])]))
    else:
        notes, generator = ["fed with standard normal values; --inputs FILE.npz feeds yours"], np.random.default_rng(0)
        for name, (shape, _) in entries.items():
            values[name] = generator.standard_normal([size or _BATCH for size in shape])
    return {name: values[name].astype(kind) for name, (_, kind) in entries.items()}, notes


def _tokens(folder: Path, count: int) -> tuple[Array, list[str]]:
    if not (folder / "tokenizer.json").is_file():
        return np.arange(count)[None], ["fed with the first tokens of the vocabulary: the bundle has no tokenizer"]
    return np.array([shipped_ids(folder, count)]), []


def _of_file(path: Path, entries: Mapping[str, tuple[list[int | None], Any]]) -> dict[str, Array]:
    try:
        arrays = dict(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as problem:
        raise InputError("inputs-unreadable", where=str(path), value=str(problem)[:200], rule="an .npz file") from None
    values = {}
    for name, (shape, kind) in entries.items():
        array = arrays.get(name)
        if array is None or not _fits(array, shape):
            value = f"{name}: {'absent' if array is None else list(array.shape)}"
            raise InputError("inputs-differ", where=str(path), value=value, rule=f"an array {_words(shape)}")
        values[name] = (array[:_BATCH] if shape and shape[0] is None else array).astype(kind)
    return values


def reload(bundle: Bundle, *, served: bool = True) -> tuple[list[Check], list[str]]:
    """Run each export's own checks; what could not be run is a note. `served`: also in vLLM, where it is installed."""
    checks = loaded(bundle)
    if not all(check.ok for check in checks):
        return checks, []
    needs = f"({install('compile')})"
    if holds_graph(bundle):
        try:
            return [*checks, *reload_graph(bundle)], []
        except (ImportError, MissingDependency) as problem:
            return checks, [f"not loaded: {problem} {needs}; files and hashes hold"]
    try:
        import torch  # noqa: F401
    except ImportError as problem:
        return checks, [f"not loaded: {problem.name} is not installed {needs}; files and hashes hold"]
    notes = []
    for name in (next(iter(step)) for step in bundle.manifest.recipe.get("export", [])):
        try:
            checks += load_exporter(name).check(bundle.path)
        except (ImportError, MissingDependency) as problem:
            missing = problem.where if isinstance(problem, MissingDependency) else problem.name
            why = f"{missing} is not installed" if missing else str(problem)
            notes.append(f"{name} not loaded: {why} {needs}")
    if served and bundle.manifest.model.kind == "decoder" and (bundle.model_folder / "config.json").is_file():
        there, why = served_check(bundle.model_folder)
        checks, notes = [*checks, *there], [*notes, *([why] if why else [])]
    return checks, notes


def exports_of(bundle: Bundle, runtimes: Sequence[str]) -> dict[str, Path]:
    """Map runtimes to their files in a bundle: a folder, or a graph's file."""
    places: dict[str, Path] = {}
    graph = holds_graph(bundle)
    for name in runtimes:
        runtime = load_runtime(name)
        try:
            folder = runtime.folder(bundle)
        except InputError:
            continue
        if not graph or runtime.graph:
            places[name] = folder / runtime.graph if graph else folder
    return places


def loaded(bundle: Bundle) -> list[Check]:
    """Check for ONNX Runtime to open the graph and make a step, alone and with quantkit's own operators.

    The check has a process of its own, because a graph may end it. Operators for other machines are not checked.
    """
    places = exports_of(bundle, of_one_file(speed.RUNTIME))
    work = {name: str(path) for name, path in places.items() if load_runtime(name).why_not_here() is None}
    met: dict[str, str] = {}
    job = {"loads": work, "graph": holds_graph(bundle)}
    try:
        if work:
            child.run(_steps, job, remedy="export it again", row=met.update, where="onnx")
    except InputError as problem:
        late = next((name for name in work if name not in met), None)
        if late and problem.value:
            met[late] = problem.value
    return [
        Check(name=f"{name}.loads", value=float(bool(why)), limit=0.0, ok=not why, where=why)
        for name, why in met.items()
        if why is not None
    ]


def _steps(job: Mapping[str, Any], caller: child.Caller) -> None:
    """Report for each runtime the reason why it makes no step: "" if it makes one, None if it has no export."""
    for runtime, path in job["loads"].items():
        met: str | None = ""
        try:
            speed.stepped(Path(path), runtime, graph=job["graph"])
        except QuantkitError as problem:
            met = None if problem.code == "nothing-to-multiply" else problem.line()
        caller.row({runtime: met})
        if met:  # of the others it would be the same
            return
