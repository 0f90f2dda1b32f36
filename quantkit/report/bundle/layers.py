"""Layers of a quantized network beside those of the float one, as a table: the worst, and the whole at its end."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.accuracy.layerwise import LayerError
from quantkit.report.kit.tree import Line, Part, Remark, Sheet, Styled

SHOWN = 24


def layers(errors: Sequence[LayerError], notes: Sequence[str] = ()) -> list[Part]:
    """Build the layers with the lowest cosine in the order of the network, and what the network gives out."""
    worst = sorted(range(len(errors)), key=lambda place: _cosine(errors[place]))[:SHOWN]
    shown = sorted({*worst, *(place for place, error in enumerate(errors) if error.kind == "output")})
    engines = any(error.engine is not None for error in errors)
    rows: list[list[Line]] = []
    for error in (errors[place] for place in shown):
        row: list[Line] = [error.layer, Styled(error.kind, "dim"), f"{error.max_error:.2%}", f"{error.mean_error:.2%}"]
        row += [_figure(error.cosine, ".5f"), _figure(error.snr, ".1f")]
        rows.append([*row, *([_figure(error.engine, ".5f")] if engines else [])])
    head = ["layer", "", "max error", "mean error", "cosine", "SNR, dB", *(["engine"] if engines else [])]
    about = f"{len(errors)} layers; {len(shown)} are shown: the lowest cosines, and what comes out"
    return [Remark(about), Sheet(head, rows, words=2), *(Remark(note, "note") for note in notes)]


def _cosine(each: LayerError) -> float:
    return -1.0 if each.cosine is None else each.cosine


def _figure(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)
