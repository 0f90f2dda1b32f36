"""What the engine of a bundle really does, found out on the GPU that it is for, and kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import limits
from quantkit.bundle import Decision, LayerEntry
from quantkit.exporters import reader
from quantkit.exporters.tensorrt import timings
from quantkit.measurement.engine_layers import FALLBACK, NAME, SUFFIX, Inspected, inspected
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.runtimes.tensorrt.decode import EngineModel

# a step of decoding after so many tokens, where as many fit; an encoder's pass over as many
_CONTEXT, _BATCH = 512, 1


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
    from quantkit.pipeline.gates import refuse
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


__all__ = ["NAME", "data", "look", "of_exports", "place", "without"]
