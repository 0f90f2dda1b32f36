"""Write an importance matrix of a model, computed on a calibration set, in llama.cpp's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import plugins
from quantkit.bundle import Decision
from quantkit.bundle.disk import check_place
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters.gguf.exporter import EXPORT as GGUF
from quantkit.passes import NOTE, decision
from quantkit.passes.rtn import Rtn
from quantkit.pipeline.request import demand_model
from quantkit.recipe import Recipe

if TYPE_CHECKING:
    from quantkit.calibrate.statistics.imatrix import ImportanceMatrix


def weighed_by(file: Path, recipe: str, changes: Sequence[str] = ()) -> tuple[list[str], tuple[Decision, ...]]:
    """Change a recipe so as to weigh errors by a file; return the changes, and decisions for deviations from the
    recipe.

    Rounding to nearest weighs by it. For a GGUF export it replaces a solver too: users with such a file want the result
    of llama-quantize.

    Raises InputError: `imatrix-unused`, if no pass can weigh by it; those of `Recipe.load`.
    """
    asked, path = Recipe.load(recipe, changes), json.dumps(str(file.expanduser().resolve()))
    if any(step.name == Rtn.name for step in asked.passes):
        return [f"{Rtn.name}.imatrix={path}", f"{Rtn.name}.range=importance"], ()
    solving = [step.reference for step in asked.passes if "codes" in plugins.PASSES.of(step).ensures]
    if not solving or all(step.name != GGUF.name for step in asked.export):
        value = f"{recipe} has no pass `{Rtn.name}`"
        rule = "it weighs the errors of rounding to nearest; a solver weighs by the Hessian of its own calibration"
        remedy = "leave --imatrix out, or use --recipe rtn-int4"
        raise InputError("imatrix-unused", where="--imatrix", value=value, rule=rule, remedy=remedy)
    rounding = f"{{{Rtn.name}: {{range: importance, imatrix: {path}}}}}"
    kept = [json.dumps(step) for step in asked.as_dict()["passes"] if next(iter(step)) not in solving]
    reason = f"--imatrix {file.name} weighs the errors of rounding to nearest, as llama-quantize does"
    taken = decision(Rtn.name, NOTE, "passes", reason, ", ".join(solving), Rtn.name)
    return [f"passes=[{', '.join([*kept, rounding])}]"], (taken,)


def importance_of(
    model: str,
    out: Path,
    *,
    calibration: str = "prose-en",
    samples: int = 64,
    tokens: int = 512,
    generated: float = 0.0,
    trust_remote_code: bool = False,
    adapters: Sequence[str] = (),
) -> ImportanceMatrix:
    """Run a model on its calibration set, one block in memory, and write the statistics of its linears' inputs.

    Args:
        out: the file; `.dat` is the format of before.
        calibration: a set's name or a user's file.
        samples, tokens: sequences, and the length of each.
        generated: share of them that the model writes itself.
        adapters: adapters to merge first, in their order.

    Raises InputError: of `demand_model`, `open_merged` and of the calibration set; `file-unwritable`, `not-writable`.
    Stopped: `disk-full`; MissingDependency: gguf.
    """
    from quantkit.calibrate.statistics import imatrix
    from quantkit.model.source.merged import open_merged
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks import tokens as texts

    check_place(out)
    with MissingDependency.unless_found("gguf", extra="compile", purpose="an importance matrix"):
        import gguf  # noqa: F401
    demand_model(model, adapters)
    source = open_merged(model, adapters, trust_remote_code=trust_remote_code)
    asked = {"set": calibration, "samples": samples, "tokens": tokens, "generated": generated}
    changes = [f"calibration.{name}={value}" for name, value in asked.items()]
    seen, _ = texts.load(Recipe.load("float", changes), source, calibrate=True, decisions=[])
    assert seen is not None
    matrix = imatrix.collected(StreamedModel(source), seen.ids, [texts.public(calibration)])
    imatrix.write(matrix, out)
    return matrix
