"""An importance matrix of a model, made on a calibration set and written as llama.cpp reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError, MissingDependency
from quantkit.passes.rtn import Rtn
from quantkit.recipe import Recipe

if TYPE_CHECKING:
    from quantkit.calibrate.statistics.imatrix import ImportanceMatrix


def weighed_by(file: Path, recipe: str, changes: Sequence[str] = ()) -> list[str]:
    """The changes that make a recipe weigh errors by a file.

    Args:
        recipe: its name or path. changes: to it, besides.

    Raises:
        InputError: `imatrix-unused`, it has no pass that does; those of `Recipe.load`.
    """
    if all(step.name != Rtn.name for step in Recipe.load(recipe, changes).passes):
        raise InputError(
            "imatrix-unused",
            where="--imatrix",
            value=f"{recipe} has no pass `{Rtn.name}`",
            rule="it weighs the errors of rounding to nearest; a solver weighs by the Hessian of its own calibration",
            remedy="leave --imatrix out, or use --recipe rtn-int4",
        )
    return [f"{Rtn.name}.imatrix={json.dumps(str(file.expanduser().resolve()))}", f"{Rtn.name}.range=importance"]


def importance_of(
    model: str,
    out: Path,
    *,
    calibration: str = "prose-en",
    samples: int = 64,
    tokens: int = 512,
    generated: float = 0.0,
    trust_remote_code: bool = False,
) -> ImportanceMatrix:
    """Run a model on its calibration set, one block in memory, and write what its linears are given.

    Args:
        model: as for a compile.
        out: the file; `.dat` is the format of before.
        calibration: a set's name or a user's file.
        samples, tokens: sequences, and the length of each.
        generated: share of them that the model writes itself.

    Raises:
        InputError: of `open_model` and of the calibration set; `not-writable`. Stopped: `disk-full`.
        MissingDependency: gguf.
    """
    from quantkit.calibrate.statistics import imatrix
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks import tokens as texts

    with MissingDependency.unless_found("gguf", extra="compile", purpose="an importance matrix"):
        import gguf  # noqa: F401
    source = open_model(model, trust_remote_code=trust_remote_code)
    asked = {"set": calibration, "samples": samples, "tokens": tokens, "generated": generated}
    changes = [f"calibration.{name}={value}" for name, value in asked.items()]
    seen, _ = texts.load(Recipe.load("float", changes), source, calibrate=True, decisions=[])
    assert seen is not None
    found = imatrix.collected(StreamedModel(source), seen.ids, [texts.public(calibration)])
    imatrix.write(found, out)
    return found
