"""Is quantkit right about a model? Held against plain transformers, which knows nothing of quantkit.

Four verdicts: right, refused (by an `InputError`, whose code and line are kept), WRONG (figures that differ), CRASH
(anything else: an internal error, a failed check, a traceback).
"""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo import shrink

# of the truth's spread: far above float32's rounding, far below what a wrong mask or a lost bias does
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What came of one part of the campaign for one class."""

    table: str
    model_type: str
    name: str
    part: str
    verdict: str
    code: str = ""
    line: str = ""
    error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def streamed(folder: Path, tokens: Tensor, chunk: int = 2) -> Tensor:
    """What quantkit's stream makes of ids [samples, tokens], the last chunk smaller than the others."""
    from quantkit.model.open import open_model
    from quantkit.model.stream import Head, StreamedModel

    stream = StreamedModel(open_model(str(folder)))
    hidden = stream.run(tokens, chunk)
    return Head(stream.rest(), stream.path, stream.flow)(hidden, tokens)


def apart(found: Tensor, true: Tensor) -> float:
    """The largest difference, in standard deviations of the truth; infinite where shapes differ or a value is none."""
    if found.shape != true.shape or not found.isfinite().all():
        return float("inf")
    return float((found - true).abs().max() / true.std())


def float_stream(architecture: shrink.Architecture) -> Verdict:
    """The stream of a tiny model against the model's own forward."""

    def verdict(kind: str, **more: Any) -> Verdict:
        return Verdict(architecture.table, architecture.model_type, architecture.name, "stream", kind, **more)

    from quantkit.errors import InputError

    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        folder = Path(home) / architecture.name
        try:
            shrink.tiny(architecture, folder)
            tokens = shrink.ids()
            true = shrink.truth(folder, tokens)
        except Exception as problem:
            return verdict("not here", line=first_line(problem))
        try:
            error = apart(streamed(folder, tokens), true)
        except InputError as problem:
            return verdict("refused", code=problem.code, line=str(problem))
        except Exception as problem:
            return verdict("CRASH", code=type(problem).__name__, line=f"{first_line(problem)} {place(problem)}")
    return verdict("right" if error < TOLERANCE else "WRONG", error=error)


def first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]


def place(problem: BaseException) -> str:
    """Where it was raised, and the last line of quantkit on the way there."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if "/quantkit/" in frame.filename]
    shown = dict.fromkeys(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in [*ours[-1:], frames[-1]]
    )
    return f"({' <- '.join(reversed(shown))})"
