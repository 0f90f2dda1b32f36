"""A finished bundle loaded again, every export in its library; a network beside the float model's, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import content
from quantkit.bundle import Bundle, Check
from quantkit.errors import InputError, MissingDependency, QuantkitError
from quantkit.exporters import load_exporter
from quantkit.measurement.accuracy import layerwise
from quantkit.measurement.accuracy.layerwise import LayerError
from quantkit.measurement.timing import speed
from quantkit.pipeline.graphs.bundles import holds_graph, reload_graph
from quantkit.runtimes import child, load_runtime, of_one_file
from quantkit.runtimes.tensorrt import library as tensorrt_library
from quantkit.runtimes.tensorrt.file import FOLDER, NETWORK

Array = NDArray[Any]
# of the shipped text; pictures of no set: standard normal values
_TOKENS, _BATCH = 64, 2


def compare_layers(
    bundle: Bundle, floats: Bundle, *, inputs: Path | None = None, runtime: str | None = None
) -> tuple[list[LayerError], list[str]]:
    """Compare.

    Args:
        bundle: with `engine/network.onnx`.
        floats: the same of the float model.
        inputs: `.npz` with an array for each input of a graph; language models and encoders read shipped text.
        runtime: `tensorrt_rtx` or `tensorrt`: the network as an engine on this machine's GPU, too.

    Returns:
        (layers in the order of the network, what is to be said).

    Raises:
        InputError: `engine-missing`, `models-differ`, `networks-differ`, `inputs-differ`, `gpu-absent`,
            `hash-mismatch`, `network-unrunnable`.
        MissingDependency: polygraphy, onnx-ir, onnxruntime.
    """
    before, after = (_network(each) for each in (floats, bundle))
    if bundle.manifest.model.source.sha256 != floats.manifest.model.source.sha256:
        raise InputError(
            "models-differ",
            where=str(floats.path),
            value=f"compiled from {floats.manifest.model.name}",
            rule=f"both sides are made of one model; {bundle.path} is of {bundle.manifest.model.name}",
        )
    library = None
    if runtime is not None:
        why = load_runtime(runtime).why_not_here()
        if why is not None:
            rule = "an engine runs on the GPU that it was built for"
            remedy = "without --runtime both networks are compared on the CPU"
            raise InputError("gpu-absent", where=runtime, value=why, rule=rule, remedy=remedy)
        library = tensorrt_library.load("tensorrt" if runtime == "tensorrt" else "tensorrt_rtx")
    feed, notes = fed(after, inputs)
    _demand_same_inputs(before, feed)
    if library is None:
        return layerwise.compared(before, after, feed), notes
    return layerwise.with_engine(before, after, feed, library), notes


def _network(bundle: Bundle) -> Path:
    path = bundle.path / FOLDER / NETWORK
    if not path.is_file():
        raise InputError(
            "engine-missing",
            where=str(bundle.path),
            value=f"no {FOLDER}/{NETWORK}",
            rule="layers are compared in the networks that engines are built from",
            remedy="compile with --set 'export=[{tensorrt: {engine: false}}]', the float side with --recipe float",
        )
    bundle.demand_intact(f"{FOLDER}/network")
    return path


def fed(network: Path, inputs: Path | None = None) -> tuple[dict[str, Array], list[str]]:
    """(input -> values, what is to be said of them)."""
    import onnx_ir as ir

    values = {str(value.name): value for value in ir.load(network).graph.inputs}
    types = {name: value.dtype.numpy() for name, value in values.items() if value.dtype is not None}
    shapes = {
        name: [each if isinstance(each, int) else None for each in value.shape or ()] for name, value in values.items()
    }
    if inputs is not None:
        return _of_file(inputs, shapes, types), []
    if "input_ids" not in values:
        generator = np.random.default_rng(0)
        made = {name: generator.standard_normal([size or _BATCH for size in shape]) for name, shape in shapes.items()}
        said = "fed with standard normal values; --inputs FILE.npz feeds yours"
        return {name: array.astype(types[name]) for name, array in made.items()}, [said]
    room = shapes.get("attention_mask", [None, None])[1]
    ids, notes = _tokens(network.parent, _TOKENS if room is None else min(_TOKENS, room))
    mask = np.zeros((1, room or ids.shape[1]), np.int64)
    mask[:, : ids.shape[1]] = 1
    known: Mapping[str, Array] = {
        "input_ids": ids,
        "position_ids": np.arange(ids.shape[1])[None],
        "attention_mask": mask,
        "write_indices": np.zeros(1, np.int64),
        "logits_to_keep": np.zeros(1, np.int64),
        "token_type_ids": np.zeros_like(ids),
    }
    found = {}
    for name, shape in shapes.items():
        # a cache: of the one sequence, empty
        empty = np.zeros([1, *(size or 0 for size in shape[1:])])
        found[name] = known.get(name, empty).astype(types[name])
    return found, notes


def _tokens(folder: Path, count: int) -> tuple[Array, list[str]]:
    from quantkit.runtimes.text import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        return np.arange(count)[None], ["fed with the first tokens of the vocabulary: the bundle has no tokenizer"]
    text = (content.folder("calibration") / "prose-en" / "tune.txt").read_text(encoding="utf-8")
    return np.array([Tokenizer(folder).encode(text[: 16 * count])[:count]]), []


def _of_file(path: Path, shapes: Mapping[str, list[int | None]], types: Mapping[str, Any]) -> dict[str, Array]:
    try:
        given = dict(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as problem:
        raise InputError("inputs-unreadable", where=str(path), value=str(problem)[:200], rule="an .npz file") from None
    found = {}
    for name, shape in shapes.items():
        array = given.get(name)
        fits = array is not None and len(array.shape) == len(shape)
        if array is None or not fits or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True)):
            raise InputError(
                "inputs-differ",
                where=str(path),
                value=f"{name}: {'absent' if array is None else list(array.shape)}",
                rule=f"an array {['?' if size is None else size for size in shape]}",
            )
        found[name] = array[:_BATCH].astype(types[name]) if shape and shape[0] is None else array.astype(types[name])
    return found


def _demand_same_inputs(floats: Path, feed: Mapping[str, Array]) -> None:
    import onnx_ir as ir

    for value in ir.load(floats).graph.inputs:
        shape = [each if isinstance(each, int) else None for each in value.shape or ()]
        array = feed.get(str(value.name))
        if array is None or any(size not in (None, given) for size, given in zip(shape, array.shape, strict=True)):
            raise InputError(
                "networks-differ",
                where=str(floats),
                value=f"{value.name} {['?' if size is None else size for size in shape]}",
                rule="both networks take the same inputs",
                remedy="compile both for one target, with the same settings of the export",
            )


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
        runtime = load_runtime(name)
        try:
            folder = runtime.folder(bundle)
        except InputError:
            continue
        if not graph or runtime.graph:
            found[name] = folder / runtime.graph if graph else folder
    return found


def loaded(bundle: Bundle) -> list[Check]:
    """Tell whether ONNX Runtime opens the graph and makes a step, alone and with quantkit's own operators.

    In a process of its own, which a graph may end. What does not run on this machine is not looked at.
    """
    places = exports_of(bundle, of_one_file(speed.RUNTIME))
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
