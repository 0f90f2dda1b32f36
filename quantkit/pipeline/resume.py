"""Resuming: what is finished is given back only if it is what is asked for; an interrupt says what is kept.

Of transformers models and of graphs alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Build, Bundle, exists_already
from quantkit.errors import Stopped
from quantkit.measurement.rows import Row
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.gates import refuse, warnings
from quantkit.pipeline.subject import Subject
from quantkit.report.kit import words


def given_back(bundle: Bundle, subject: Subject) -> tuple[list[Row], list[str]]:
    """The measurements of a bundle that had been finished already, and what its decisions warn of.

    Raises:
        InputError: `out-exists`: it is another one; `hash-mismatch`: it was damaged since.
        GateError: `--strict`, and a decision was taken.
    """
    import torch

    manifest, request = bundle.manifest, subject.request
    model, calibration = subject.entries()
    found = {
        "model": manifest.model.source.sha256,
        "recipe": manifest.recipe,
        "code of the recipe": [entry.model_dump() for entry in manifest.code],
        "calibration": manifest.calibration.ids_sha256 if manifest.calibration else None,
        "target": _target(manifest.target),
        "number of threads": manifest.threads,
        "instruction set": manifest.isa,
        "device": _without_chunk(manifest.device.get("compiled_on", {})),
    }
    asked = {
        "model": model.source.sha256,
        "recipe": tokens.without_paths(request.recipe),
        "code of the recipe": request.recipe.outside(),
        "calibration": calibration.ids_sha256 if calibration else None,
        "target": _target(request.target.as_dict()),
        "number of threads": torch.get_num_threads(),
        "instruction set": machine.isa(),
        "device": _without_chunk(subject.device.as_dict()),
    }
    other = [what for what in found if found[what] != asked[what]]
    if other:
        raise exists_already(bundle.path, f"a finished bundle of another {' and '.join(other)}")
    bundle.demand_intact()
    if request.strict:
        refuse(manifest.decisions)
    return [Row.model_validate(row) for row in bundle.measurements], warnings(manifest.decisions)


def _without_chunk(device: Mapping[str, Any]) -> dict[str, Any]:
    """How many sequences fit at once depends on what else the card holds; a finished bundle is what it is."""
    return {key: value for key, value in device.items() if key != "sequences_at_once"}


def _target(target: dict[str, Any] | None) -> tuple[Any, Any] | None:
    """What of a target does not change when it is measured: its name and what its exports are built with."""
    return None if target is None else (target["name"], target["build"])


@contextmanager
def stopping_when_interrupted(build: Build, out: Path) -> Iterator[None]:
    """Turns an interrupt in the body into `Stopped("interrupted")`, which says how much is kept and what to do next."""
    try:
        yield
    except KeyboardInterrupt:
        kept = len(build.done())  # without any, the folder goes as well
        raise Stopped(
            "interrupted",
            where=str(out),
            value=f"{words.plural(kept, 'step')} kept" if kept else "nothing was done that could be kept",
            remedy="the same command with --resume goes on" if kept else "the same command begins anew",
        ) from None
