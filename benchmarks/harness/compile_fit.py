"""What `quantkit/planning/compiling_memory.json` holds, fitted to compiles that were taken part by part: how often a
thing that a part holds is there at once, within bounds that what the code does sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from quantkit.model.sizes import configs
from quantkit.pipeline.blocks.score import CONFIRMING
from quantkit.planning.compiling import WHOLE, CompileSpec, described, held
from quantkit.recipe import Recipe

Row = Mapping[str, Any]

_RUNTIMES = {"torch": "checkpoint", "onnxruntime": "onnx"}
# what a compile begins with is counted, and its libraries are those that were there when the model was opened
_BEGIN = {"ends": 1.0, "hidden": 1.0}
# libraries, whose bytes are what is fitted
_BASES = ("one", "graph", "engine")
# what is held in bytes that `planning/compiling.py` states
STATED_BYTES = {"library", "beside"}
# of what a part holds: from a little less than once to what temporaries and two models side by side can make of it
_BOUNDS = {
    "one": (3e8, 9e8),
    # parts of it are only read when text is
    "tokenizer": (0.0, 1.0),
    "graph": (0.0, 2e8),
    "engine": (0.0, 3e8),
    "largest": (0.95, 1.05),
    "ends": (0.95, 1.05),
    # a file that is read is resident as well; a packed checkpoint is expanded
    "whole": (1.0, 2.0),
    "file": (0.95, 1.05),
    "gradients": (0.95, 1.05),
    "states": (1.0, 4.0),
    "logits": (1.0, 6.0),
    "floats": (0.8, 2.2),
    "packed": (1.0, 2.2),
    "block": (0.5, 2.0),
    "compared": (0.95, 1.05),
    "weights": (0.95, 1.05),
    "solve": (0.95, 1.05),
    "hidden": (0.0, 4.0),
    "activations": (0.0, 4.0),
    "originals": (0.0, 2.0),
    "forward": (0.0, 4.0),
}
# a peak of the solve is that much above what the ends alone would make
_WELL = 1.05
# of what an earlier part held, a share stays with the process
_LEFT = (0.0, 0.5)
# of a session's tables all may, and what they were read from
_LEFT_FLOATS = (0.0, 1.5)


def spec(row: Row) -> CompileSpec:
    """What a recorded compile was."""
    recipe = Recipe.load(row["recipe"], row["changes"])
    model = configs.from_config(row["config"], row["model"])
    return described(model, recipe, speed=row["speed"], positions=row["scored"] or None)


def parts(row: Row) -> list[tuple[str, float, int]]:
    """(part, processor seconds, peak bytes); what lies between the parts that are known is `finish`."""
    found: list[tuple[str, float, int]] = []
    for part in row["parts"]:
        stage, detail = part["stage"], part["detail"]
        name = stage
        if detail == "end":
            name = "finish"
        elif stage == "export":
            name = f"export {detail}"
        elif stage == "check":
            name = f"check {detail.split()[-1]}"
        elif stage == "score" and detail == CONFIRMING:
            name = "confirm"
        elif stage == "score":
            name = f"score {_RUNTIMES.get(detail, 'checkpoint')}"
        found.append((name, part["cpu_seconds"], part["peak_bytes"]))
    return found


def spent(row: Row) -> dict[str, float]:
    """Part -> processor seconds."""
    found: dict[str, float] = {}
    for name, seconds, _ in parts(row):
        found[name] = found.get(name, 0.0) + seconds
    return found


def peaks(row: Row) -> dict[str, int]:
    """Part -> peak bytes."""
    found: dict[str, int] = {}
    for name, _, peak in parts(row):
        found[name] = max(found.get(name, 0), peak)
    return found


def _bounds(name: str) -> tuple[float, float]:
    if name == "left floats":
        return _LEFT_FLOATS
    return _LEFT if name.startswith("left ") else _BOUNDS[name]


def fitted(rows: Sequence[Row], real: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`memory` of the table.

    Args:
        rows: compiles of random models.
        real: compiles of real models.
    """
    seen: dict[str, list[tuple[Mapping[str, float], int]]] = {}
    for number, row in enumerate((*rows, *real)):
        terms, found = held(spec(row)), peaks(row)
        if number < len(rows):  # a random model's tokenizer has a token a byte: nothing to speak of
            terms = {part: {**each, "tokenizer": 0.0} for part, each in terms.items()}
        for part in terms.keys() & found.keys():
            if part == "prove" and terms[part]["whole"] >= WHOLE:
                continue  # as much of a large model is proved as fits into what its other parts take
            # where the ends are more than a block's solve takes, they are the peak, and tell nothing of the solve
            if part != "quantize" or found[part] > _WELL * (
                found["open"] - terms["open"]["largest"] + terms["begin"]["ends"]
            ):
                seen.setdefault(part, []).append((terms[part], found[part]))
    table: dict[str, dict[str, float]] = {}
    for part, samples in sorted(seen.items()):
        names = sorted({name for terms, _ in samples for name in terms} - STATED_BYTES)
        amounts = np.array([[terms.get(name, 0.0) for name in names] for terms, _ in samples])
        peak = np.array([value for _, value in samples], float)
        low, high = np.array([_bounds(name) for name in names]).T
        size = np.array([1e9 if name in _BASES else 1.0 for name in names])
        result = lsq_linear(amounts * size / peak[:, None], np.ones(len(peak)), bounds=(low / size, high / size))
        table[part] = {name: float(f"{each:.4g}") for name, each in zip(names, result.x * size, strict=True)}
        table[part] |= dict.fromkeys(sorted(STATED_BYTES), 1.0)
    opened = {name: each for name, each in table["open"].items() if name in (*_BASES, *STATED_BYTES)}
    return {**table, "begin": {**opened, **_BEGIN}}
