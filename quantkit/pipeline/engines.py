"""Engines in a bundle that has their network: built for the GPU of this machine or a named one, and looked into.

An engine is tied to a GPU and to the version that built it, so a bundle may have several, and one is made anew where it
no longer loads. The network is content and stays as it is; engines are not, and `content_sha256` is what it was.
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
from quantkit.measurement.engine_layers import FALLBACK, SUFFIX, Inspected, inspected
from quantkit.measurement.size import folder_of
from quantkit.passes import NOTE, decision
from quantkit.pipeline.gates import refuse
from quantkit.pipeline.progress import Progress
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import NETWORK

if TYPE_CHECKING:
    from quantkit.runtimes.tensorrt.decode import EngineModel

# a step of decoding after so many tokens, where as many fit; an encoder's pass over as many
_CONTEXT, _BATCH = 512, 1


def has_network(bundle: Bundle, to: str) -> bool:
    """Whether engines of a bundle are built from a network that it holds."""
    return any(entry.path == f"{folder_of(to)}/{NETWORK}" for entry in bundle.manifest.files)


def here(
    options: Mapping[str, Any],
    asked: Mapping[str, Any],
    known: list[str],
    gpus: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The options with this machine's GPU in place of the target's, where nobody asked for one.

    Args:
        known: compute capabilities that the library builds for ahead of time; empty where it builds for the GPU here.
        gpus: of another machine, which builds it.
    """
    gpus = machine.gpus()[0] if gpus is None else gpus
    if "sm" in asked or not gpus or (known and str(gpus[0]["sm"]) not in known):
        return dict(options)
    return {**options, "sm": str(gpus[0]["sm"])}


def notes(bundle: Path, built: Iterable[str]) -> list[Decision]:
    """What a reader has to know of builds: what the timing cache has saved."""
    found = []
    for path in sorted(path for path in built if path.endswith(".json")):
        said = timings.said(json.loads(limits.read(bundle / path)))
        if said:
            found.append(decision(TENSORRT.name, NOTE, path.removesuffix(".json") + ".engine", said))
    return found


def add_engine(bundle: Bundle, exporter: Any, options: Any, progress: Progress) -> tuple[Bundle, str, list[Decision]]:
    """Build and put in.

    Returns:
        (the bundle with it, the engine's path inside, what is to be known of its build).

    Raises:
        InputError: the build's own; `engine-missing`, it was told to build none.
    """
    place = folder_of(exporter.name)
    progress.plan({"build": 60.0})
    home = bundle.path.resolve()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}-{place}-") as temporary:
        beside = Path(temporary)
        shutil.copytree(
            home / place, beside / place, copy_function=_linked, ignore=shutil.ignore_patterns("*.engine", "sm*.json")
        )
        built = exporter.build(beside, options, lambda share, words: progress.at("build", share, words))
        made = next((name for name in built if name.endswith(".engine")), None)
        if made is None:
            raise InputError(
                "engine-missing",
                where="engine",
                value=options.engine,
                rule="the bundle has the network; what can be added is an engine",
                remedy="leave out engine=false",
            )
        said = notes(beside, built)
        return put(bundle, beside, made, built, said), made, said


def put(bundle: Bundle, beside: Path, made: str, built: Iterable[str], said: Iterable[Decision]) -> Bundle:
    """The bundle with an engine that was built.

    Args:
        beside: a folder that is laid out as the bundle is.
        made: the engine's path in both.
        built: that, and the path of what describes it.
        said: of its build; what was said of an earlier one goes.
    """
    whole: dict[str, bytes | None] = {name: (beside / name).read_bytes() for name in built}
    # what was found out about an engine of that name was found out about another one
    layers = made.removesuffix(".engine") + SUFFIX
    if any(entry.path == layers for entry in bundle.manifest.files):
        whole[layers] = None
    kept = [each for each in bundle.manifest.decisions if each.where != made]
    return bundle.put_all(whole, decisions=[*kept, *said])


def _linked(source: str, target: str) -> str:
    """A hard link where the file system has them: weights are large, and nothing writes to them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def look(model: EngineModel, layers: Sequence[LayerEntry]) -> Inspected:
    """Ask an engine for its layers, and time each of them.

    Raises:
        InputError: `engine-opaque`, `shape-unsupported`.
    """
    file, library = model.engine.file, model.engine.library
    context = min(_CONTEXT, model.capacity - 1) if model.decoder else model.longest(_BATCH, _CONTEXT)
    record = json.loads(limits.read(file.path.with_suffix(".json")))
    tried = {each.layer: [(one.name, one.seconds) for one in each.tried] for each in timings.of(record.get("tactics"))}
    return inspected(
        model.engine.information(),
        layers,
        engine=f"{file.path.parent.name}/{file.path.name}",
        library=f"{library.name} {library.version}",
        gpu=file.gpu,
        times=model.layer_times(_BATCH, context),
        tried=tried,
    )


def place(found: Inspected) -> str:
    """Where it stands in a bundle."""
    return found.engine.removesuffix(".engine") + SUFFIX


def data(found: Inspected) -> bytes:
    """As it is kept."""
    return (found.model_dump_json(indent=1) + "\n").encode()


def of_exports(
    exports: Sequence[ExportStep],
    bundle: Path,
    layers: Sequence[LayerEntry],
    built: Mapping[str, str],
    *,
    strict: bool,
) -> list[Inspected]:
    """Look into every engine of a bundle that is being built, where this machine can open it; write what was found.

    Raises:
        GateError: `strict`, a layer is multiplied in more bits than asked.
    """
    from quantkit.runtimes.tensorrt.decode import EngineModel

    found = []
    for step in exports:
        runtime = load_runtime(reader(step.name, step.options))
        if not runtime.engines or runtime.why_not_here(bundle) is not None:
            continue
        opened = runtime.open(bundle, built=built)
        assert isinstance(opened, EngineModel)
        each = look(opened, layers)
        (bundle / place(each)).write_bytes(data(each))
        found.append(each)
    if strict:
        refuse([taken for each in found for taken in each.decisions()])
    return found


def without(decisions: Sequence[Decision]) -> list[Decision]:
    """Decisions without those of an earlier look."""
    return [each for each in decisions if each.code != FALLBACK]
