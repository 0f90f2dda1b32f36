"""Sections of the report page: figures that belong together, what they show in words, and their data as a table.

Here weights and sizes; `report.accuracy` has the scores, `report.speed` the times, `report.harm` what quantizing does
to layers, blocks and words. All are functions of manifest and rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.report.kit import charts, words
from quantkit.report.kit.charts import BarPart
from quantkit.report.kit.tree import Exhibit, Plot, Sheet

_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


# --- weights ---------------------------------------------------------------------------------------------------------


def weights(manifest: Manifest) -> list[Exhibit]:
    """The squared error of each layer's weights, as a share of their squares."""
    known = [(layer, layer.error) for layer in manifest.layers if layer.error is not None]
    if not known:
        return []
    worst, error = max(known, key=lambda pair: pair[1])
    middle = words.share(median(error for _, error in known))
    body = [
        [
            layer.name,
            " × ".join(map(str, layer.shape)),
            figures.scheme_of(layer.scheme),
            words.figure(layer.bits_per_weight, 4),
            words.share(error),
        ]
        for layer, error in known
    ]
    panels = heat(
        [(layer.name, error) for layer, error in known],
        "Relative squared error of the weights",
        "Relative squared error of the weights of every quantized layer as colours: kinds of layers by blocks",
    )
    said = f"Median {middle}; largest in {worst.name}, {words.share(error)}."
    how = "‖W − Ŵ‖² / ‖W‖² of each layer: of its weights alone, whatever they do to the output."
    head = ["layer", "shape [N, K]", "scheme", "bits per weight", "relative squared error"]
    return [Exhibit([said], panels, [how], Sheet(head, body), title="Weights", folded=True)]


def heat(errors: Sequence[tuple[str, float]], title: str, alt: str) -> list[Plot]:
    """Kinds of layers by blocks, the largest of those alike; where names have no number, all in one column.

    None where there is nothing to see: a single cell, or no error anywhere.
    """
    if len(errors) < 2 or not any(error > 0 for _, error in errors):
        return []
    cells: dict[str, dict[str, float]] = {}
    for name, error in errors:
        block, kind = figures.place(name)
        row = cells.setdefault(kind, {})
        row[block] = max(error, row.get(block, error))
    blocks = list(dict.fromkeys(block for row in cells.values() for block in row))
    blocks.sort(key=lambda block: int(block) if block.isdecimal() else -1)
    values = [[row.get(block) for block in blocks] for row in cells.values()]
    return [Plot(title, alt, charts.heat(blocks, list(cells), values), wide=True)]


# --- sizes -----------------------------------------------------------------------------------------------------------


def sizes(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """Bytes of each export beside the original, in parts where the manifest says what they are, and peak memory."""
    exports = [row for row in rows if row.name == "size.bytes" and row.value]
    memory = [row for row in rows if row.name == "memory.peak" and row.value]
    panels, body, said, keys = [], [], [], []
    names = ["quantized layers as floats", "codes", "scales and zero points", "kept as it was, and the rest"]
    shades = ["original", "quantized", "quantized-soft", "rest"]
    if exports:
        bars = _bars(manifest, exports)
        parts = [BarPart(names[i], [bar[2][i] for bar in bars], shades[i]) for i in range(len(names))]
        parts = [part for part in parts if any(part.values)]
        totals = [words.size(total) + (f", {ratio:.2f}× smaller" if ratio else "") for _, total, _, ratio in bars]
        figure = charts.stacked([name for name, *_ in bars], parts, totals, "weights on disk")
        panels.append(Plot("Weights on disk", "Bytes of each export in parts, beside the original", figure))
        body += [[n, words.size(total), *(words.size(v) if v else "–" for v in values)] for n, total, values, _ in bars]
        keys = [(part.shade, part.label) for part in parts]
    if memory:
        found = _memory(memory)
        parts = [
            BarPart("original", [value if old else 0.0 for _, value, old in found], "original"),
            BarPart("this model", [0.0 if old else value for _, value, old in found], "quantized"),
        ]
        totals = [words.size(value) for _, value, _ in found]
        figure = charts.stacked([name for name, *_ in found], parts, totals, "peak memory of the process")
        panels.append(Plot("Peak memory while it runs", "Peak memory of the process, beside the original's", figure))
        body += [[f"peak memory, {name}", words.size(value), *["–"] * len(names)] for name, value, _ in found]
    if not panels:
        return []
    bits = next((row.value for row in rows if row.name == "size.bits_per_weight" and row.value), None)
    read = [row for row in rows if row.name == "size.bytes_read" and row.value]
    if read:
        each = " and ".join(f"{row.settings.get('way')} read {words.size(row.value or 0.0)}" for row in reversed(read))
        said.append(f"The graph holds weights for two ways to multiply: {each} of them.")
    if bits is not None:
        many = words.plural(len(manifest.layers), "quantized layer")
        said.append(f"{words.figure(bits, 3)} bits a weight in {many}, scales and zero points counted.")
    return [Exhibit(said, panels, [], Sheet(["what", "total", *names], body), keys=keys)]


def _bars(manifest: Manifest, exports: Sequence[Row]) -> list[tuple[str, float, list[float], float | None]]:
    """(name, bytes, the four parts, how many times smaller than the original), the original first."""
    weights = sum(prod(layer.shape) for layer in manifest.layers)
    codes = sum(prod(layer.shape) * _bits(layer.scheme) for layer in manifest.layers) / 8
    extra = sum(prod(layer.shape) * layer.bits_per_weight for layer in manifest.layers) / 8 - codes
    found: list[tuple[str, float, list[float], float | None]] = []
    base = next((row.baseline.value for row in exports if row.baseline is not None), None)
    if base is not None:
        floats = min(float(weights * _FLOAT_BYTES.get(manifest.model.source.dtype, 0)), base)
        found.append(("original", base, [floats, 0.0, 0.0, base - floats], None))
    for row in exports:
        total = row.value or 0.0
        known = codes > 0 and codes + extra <= total
        ratio = row.baseline.ratio if row.baseline and (row.baseline.ratio or 0) > 1 else None
        parts = [0.0, codes, extra, total - codes - extra] if known else [0.0, 0.0, 0.0, total]
        found.append((figures.export(row), total, parts, ratio))
    return found


def _memory(rows: Sequence[Row]) -> list[tuple[str, float, bool]]:
    """(name, bytes, whether it is the original's)."""
    found = []
    for row in rows:
        label = ", ".join(part for part in (figures.variant(row), figures.where(row)) if part) or "this model"
        if row.baseline is not None:
            found.append((f"original, {row.runtime}" if row.runtime else "original", row.baseline.value, True))
        found.append((label, row.value or 0.0, False))
    return found


def _bits(scheme: Mapping[str, Any]) -> int:
    """Of one code: `int4` has 4."""
    match = re.search(r"\d+", str(scheme.get("format")))
    return int(match[0]) if match else 0
