"""Layers of a quantized network beside those of the float one, as a table: the worst, and the whole at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quantkit.measurement.accuracy.layerwise import LayerError
from quantkit.report.kit.screen import DIM, table

SHOWN = 24


def layers(found: Sequence[LayerError], notes: Sequence[str] = ()) -> list[RenderableType]:
    """The layers with the lowest cosine in the order of the network, and what the network gives out."""
    worst = sorted(range(len(found)), key=lambda place: _cosine(found[place]))[:SHOWN]
    shown = sorted({*worst, *(place for place, each in enumerate(found) if each.kind == "output")})
    engines = any(each.engine is not None for each in found)
    names = ("layer", "", "max error", "mean error", "cosine", "SNR, dB", *(["engine"] if engines else []))
    lines = table(names, left=2, whole=False, fold=True)
    for each in (found[place] for place in shown):
        row: list[Any] = [Text(each.layer), Text(each.kind, DIM), f"{each.max_error:.2%}", f"{each.mean_error:.2%}"]
        row += [_figure(each.cosine, ".5f"), _figure(each.snr, ".1f")]
        lines.add_row(*row, *([_figure(each.engine, ".5f")] if engines else []))
    head = f"{len(found)} layers; {len(shown)} are shown: the lowest cosines, and what comes out"
    return [Text(head), lines, *(Text(f"! {note}") for note in notes)]


def _cosine(each: LayerError) -> float:
    return -1.0 if each.cosine is None else each.cosine


def _figure(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)
