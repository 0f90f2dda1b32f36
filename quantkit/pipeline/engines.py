"""Engines of a bundle that holds their network: built for this machine's GPU or a named one, and inspected.

An engine is tied to a GPU and to the library version that built it. A bundle may hold several, and one that no longer
loads is built anew. The network counts toward `content_sha256`; engines do not.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle, Decision, LayerEntry
from quantkit.errors import InputError
from quantkit.exporters import reader
from quantkit.exporters.tensorrt import EXPORT as TENSORRT
from quantkit.exporters.tensorrt import timings
from quantkit.measurement.engine_layers import SUFFIX, Inspected, inspected
from quantkit.measurement.size import folder_of
from quantkit.passes import NOTE, decision
from quantkit.pipeline.progress import Progress
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import NETWORK

if TYPE_CHECKING:
    from quantkit.runtimes.tensorrt.decode import EngineModel

# a step of decoding after so many tokens, where as many fit; an encoder's pass over as many
_CONTEXT, _BATCH = 512, 1


def has_network(bundle: Bundle, to: str) -> bool:
    """Tell whether a bundle holds a network to build engines from."""
    return any(entry.path == f"{folder_of(to)}/{NETWORK}" for entry in bundle.manifest.files)


def here(
    options: Mapping[str, Any],
    asked: Iterable[str],
    known: list[str],
    gpus: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Replace the target's GPU by this machine's, unless the request names one.

    Args:
        known: compute capabilities that the library builds for ahead of time; empty where it builds for the GPU here.
        gpus: of another machine, which builds it.
    """
    gpus = machine.gpus()[0] if gpus is None else gpus
    if "sm" in asked or not gpus or (known and str(gpus[0]["sm"]) not in known):
        return dict(options)
    return {**options, "sm": str(gpus[0]["sm"])}


def notes(bundle: Path, built: Iterable[str]) -> list[Decision]:
    """Report the time saved by the timing cache."""
    texts = {path: timings.said(json.loads(limits.read(bundle / path))) for path in built if path.endswith(".json")}
    return [
        decision(TENSORRT.name, NOTE, path.removesuffix(".json") + ".engine", text)
        for path, text in sorted(texts.items())
        if text
    ]


def add_engine(bundle: Bundle, exporter: Any, options: Any, progress: Progress) -> tuple[Bundle, str, list[Decision]]:
    """Build an engine and add it to the bundle.

    Returns:
        (the bundle with it, the engine's path inside, what is to be known of its build).

    Raises InputError: the build's own; `engine-missing`, it was told to build none.
    """
    place = folder_of(exporter.name)
    progress.plan({"build": 60.0})
    home = bundle.path.resolve()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}-{place}-") as temporary:
        beside = Path(temporary)
        ignored = shutil.ignore_patterns("*.engine", "sm*.json")
        shutil.copytree(home / place, beside / place, copy_function=_linked, ignore=ignored)
        built = exporter.build(beside, options, lambda share, words: progress.at("build", share, words))
        engine = next((name for name in built if name.endswith(".engine")), None)
        if engine is None:
            rule = "the bundle has the network already; only an engine can be added"
            remedy = "leave out engine=false"
            raise InputError("engine-missing", where="engine", value=options.engine, rule=rule, remedy=remedy)
        texts = notes(beside, built)
        return put(bundle, beside, engine, built, texts), engine, texts


def put(bundle: Bundle, beside: Path, engine: str, built: Iterable[str], texts: Iterable[Decision]) -> Bundle:
    """Put a built engine into a bundle.

    Args:
        beside: folder with the layout of the bundle.
        engine: path of the engine in both.
        built: its description, and the path of that.
        texts: texts of its build; those of an earlier one are removed.
    """
    whole: dict[str, bytes | None] = {name: (beside / name).read_bytes() for name in built}
    # what was learnt of an engine of that name was learnt of another one
    layers = engine.removesuffix(".engine") + SUFFIX
    if any(entry.path == layers for entry in bundle.manifest.files):
        whole[layers] = None
    kept = [taken for taken in bundle.manifest.decisions if taken.where != engine]
    return bundle.put_all(whole, decisions=[*kept, *texts])


def _linked(source: str, target: str) -> str:
    """Link a file where the file system can: weights are large, and nothing writes to them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def look(model: EngineModel, layers: Sequence[LayerEntry]) -> Inspected:
    """Ask an engine for its layers, and time each of them. Raises InputError `engine-opaque`, `shape-unsupported`."""
    file, library = model.engine.file, model.engine.library
    context = min(_CONTEXT, model.capacity - 1) if model.decoder else model.longest(_BATCH, _CONTEXT)
    record = json.loads(limits.read(file.path.with_suffix(".json")))
    return inspected(
        model.engine.information(),
        layers,
        engine=f"{file.path.parent.name}/{file.path.name}",
        library=f"{library.name} {library.version}",
        gpu=file.gpu,
        times=model.layer_times(_BATCH, context),
        tried={
            layer.layer: [(tactic.name, tactic.seconds) for tactic in layer.tried]
            for layer in timings.of(record.get("tactics"))
        },
    )


def stored(inspection: Inspected) -> tuple[str, bytes]:
    """Return an inspection as it is kept in a bundle: its place, and its bytes."""
    path = inspection.engine.removesuffix(".engine") + SUFFIX
    return path, (inspection.model_dump_json(indent=1) + "\n").encode()


def of_exports(
    exports: Sequence[ExportStep], bundle: Path, layers: Sequence[LayerEntry], built: Mapping[str, str]
) -> list[Inspected]:
    """Look into every engine of a bundle that is being built, where this machine can open it, and write it down."""
    from quantkit.runtimes.tensorrt.decode import EngineModel

    inspections = []
    for step in exports:
        runtime = load_runtime(reader(step.name, step.options))
        if not runtime.engines or runtime.why_not_here(bundle) is not None:
            continue
        model = runtime.open(bundle, built=built)
        assert isinstance(model, EngineModel)
        inspections.append(look(model, layers))
        path, data = stored(inspections[-1])
        (bundle / path).write_bytes(data)
    return inspections
