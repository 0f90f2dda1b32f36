"""What a choice really costs: compiled through the pipeline, loaded again, and scored on text that may guide choices.

The compile scores itself on the set's `eval` split as always; that figure is shown and guides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.measurement.size import weight_bytes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.bundle import Bundle
    from quantkit.calibrate.tokens.ids import TokenSet


@dataclass(frozen=True)
class ScoredChoice:
    """A compiled and scored choice.

    Args:
        kl: nats a token on the guiding text.
        rows: of the compile: the held-out KL, size.
    """

    name: str
    bundle: Bundle
    kl: float
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For `front.json`."""
        rows = {row.name: row for row in reversed(self.rows)}
        held_out, bits = rows.get("accuracy.kl"), rows.get("size.bits_per_weight")
        return {
            "name": self.name,
            "measured": self.kl,
            "held_out": held_out.value if held_out else None,
            "held_out_ci95": list(held_out.ci95) if held_out and held_out.ci95 else None,
            "bits_quantized": bits.value if bits else None,
            "file_bytes": weight_bytes(self.bundle.manifest.files),
            "state": self.bundle.manifest.state,
            "content_sha256": self.bundle.manifest.content_sha256,
        }


def scored_in(runtimes: Sequence[str], where: str) -> str:
    """The runtime in which what is compiled is scored: the first that runs here.

    Args:
        runtimes: of the exports.

    Raises:
        InputError: `tune-unscored`, where none does.
    """
    from quantkit.pipeline.blocks.score import runs_here

    found = next((runtime for runtime in runtimes if runs_here(runtime)), None)
    if found is None:
        why = "; ".join(f"{runtime}: {load_runtime(runtime).why_not_here()}" for runtime in runtimes)
        raise InputError(
            "tune-unscored",
            where=where,
            value=why,
            rule="what is chosen is compiled and scored, so one of its exports runs here",
            remedy="--set 'export=[{checkpoint: {}}]', and export the engine from what is written; or --no-check",
        )
    return found


def compile_and_score(request: Request, recipe: Recipe, out: Path, text: TokenSet, progress: Progress) -> ScoredChoice:
    """Compile a recipe as the request has it, and score it on `text`.

    Raises:
        GateError, InputError, Stopped: of the compile.
    """
    from dataclasses import replace

    from quantkit.measurement.accuracy import score
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.score import torch_threads
    from quantkit.pipeline.compile import compile_model
    from quantkit.pipeline.verdict import runtimes_of

    asked = replace(request, recipe=recipe, out=out, resume=out.with_name(f"{out.name}.partial").exists(), speed=False)
    compiled = compile_model(asked, progress)
    runtime = scored_in(runtimes_of(compiled.bundle.manifest), recipe.name)
    original = StreamedModel(open_model(request.model, trust_remote_code=request.trust_remote_code))
    candidate = load_runtime(runtime).open(compiled.bundle.path, torch_threads())
    items = score.score(original, candidate, text)
    return ScoredChoice(recipe.name, compiled.bundle, float(items.kl.mean()), compiled.rows)
