"""Harm section of a bundle's report: layers, depth, outliers, words, mixed precision; also weights and sizes.

Every sentence is derived from the numbers by a rule in its function, so it changes with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

from quantkit.bundle import Manifest
from quantkit.measurement.accuracy.harm import BlockHarm, Harm, InputHarm, LayerHarm, MixedSearch, Position
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.report.kit import charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, Curve, Mark, Plot
from quantkit.report.kit.tree import Exhibit, Part, Remark, Section, Sheet, Styled

# harm is concentrated if at most this share of the blocks has half of it
_CONCENTRATED = 1 / 3
# an input has outliers if its largest channel is this many times its median channel
_OUTLIER = 20.0
# worst positions outside the folded table; layers in the chart of mixed precision
_SHOWN, _DRAWN = 3, 6
# left margin, with room for ticks such as 0.0001
_LEFT = 76
_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def parts(manifest: Manifest, harm: Harm | None) -> list[Part]:
    """Build the sources of the loss, the harm by layer and depth, outliers, weights, and the worst positions."""
    shown: list[Part] = []
    if harm is not None:
        sentences = [text for text in (by_kind(harm.layers), by_depth(harm.blocks)) if text]
        if sentences:
            shown.append(
                Remark((Styled(f"Where the loss comes from: {sentences[0]}", "strong"), " ", " ".join(sentences[1:])))
            )
        shown += mixed(harm.mixed)
        shown += [_layers(harm.layers)] if harm.layers else []
        shown += [_depth(harm.blocks)] if harm.blocks else []
        shown += [_inputs(harm.inputs)] if harm.inputs else []
    return [*shown, *weights(manifest), *_worst(harm)]


def by_kind(layers: Sequence[LayerHarm]) -> str:
    """Name the kind of layer with the largest share of the squared relative output error, and the second."""
    sums: dict[str, float] = {}
    kinds = [figures.place(layer.name)[1] for layer in layers]
    for kind, layer in zip(kinds, layers, strict=True):
        sums[kind] = sums.get(kind, 0.0) + layer.error**2
    total = sum(sums.values())
    if len(sums) < 2 or total <= 0:
        return ""
    (first, most), (second, next_) = sorted(sums.items(), key=lambda pair: -pair[1])[:2]
    part = words.whole(kinds.count(first) / len(layers))
    return (
        f"{first} ({part} of the layers) has {words.whole(most / total)} of the squared output error of all layers, "
        f"{second} has {words.whole(next_ / total)}."
    )


def by_depth(blocks: Sequence[BlockHarm]) -> str:
    """Name the fewest blocks with half of the squared error, if they are at most a third of all blocks."""
    total = sum(block.own**2 for block in blocks)
    if len(blocks) < 2 or total <= 0:
        return ""
    half, chosen = 0.0, []
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index].own):
        if half >= total / 2:
            break
        chosen.append(index)
        half += blocks[index].own ** 2
    many = f"{len(chosen)} of {len(blocks)} blocks"
    if len(chosen) > _CONCENTRATED * len(blocks):
        return f"By depth the error is spread: half of it comes from {many}."
    numbers = words.listed(sorted(int(_number(blocks[index].name, index)) for index in chosen))
    return f"By depth, half of the error comes from {many}: {numbers}."


def _worst(harm: Harm | None) -> list[Part]:
    if harm is None or not harm.worst:
        return []
    contents: list[Part] = []
    if harm.worst_share is not None:
        share = words.whole(harm.worst_share)
        contents.append(Remark(f"{share} of the total KL comes from the worst 1 % of the positions; the worst are:"))
    head, rows = ("text", "next word", "original", "this model", "KL, nats"), list(map(_line, harm.worst))
    contents.append(Sheet(head, rows[:_SHOWN], words=4, title="Positions with the largest KL divergence", stacked=True))
    if len(rows) > _SHOWN:
        more = words.plural(len(rows) - _SHOWN, "more position")
        contents.append(Sheet(head, rows[_SHOWN:], words=4, title=more, folded=True, stacked=True))
    about = "Each model's most likely token, with its probability; · is a space at an end, ⏎ a new line."
    return [Section("Worst positions", [*contents, Remark(about, "caption")])]


def _line(position: Position) -> list[str]:
    guesses = ((position.original, position.original_chance), (position.candidate, position.candidate_chance))
    guessed = [f"{words.visible(text)} ({words.whole(chance)})" for text, chance in guesses]
    before = f"… {words.visible(position.before)}"
    return [before, words.visible(position.follows), *guessed, words.short(position.kl)]


def _layers(layers: Sequence[LayerHarm]) -> Exhibit:
    largest = max(layers, key=lambda layer: layer.error)
    alt = "Relative output error of every quantized layer as colours: kinds of layers by blocks"
    panels = heat([(layer.name, layer.error) for layer in layers], "Relative error of the outputs", alt)
    middle = words.percent(median(layer.error for layer in layers))
    text = f"Median {middle}; largest in {largest.name}, {words.percent(largest.error)}."
    how = "‖ŷ − y‖ / ‖y‖ of each layer's output, with and without quantization, for the same inputs."
    body = [[layer.name, words.percent(layer.error, 2)] for layer in layers]
    return Exhibit([text], panels, [how], Sheet(["layer", "relative output error"], body), title="Layers")


def _depth(blocks: Sequence[BlockHarm]) -> Exhibit:
    names, xs = [block.name for block in blocks], range(len(blocks))
    sides = {"error": ("accumulated", QUANTIZED, "accumulated"), "own": ("own", "muted", "own")}
    drawn = []
    for side, (label, colour, suffix) in sides.items():
        values = [getattr(block, side) for block in blocks]
        hover = [f"{name}: {words.percent(value)} {suffix}" for name, value in zip(names, values, strict=True)]
        drawn.append(Curve(label, colour, xs, values, hover))
    up = charts.straight_axis("relative error", [0.0, *charts.heights(drawn)], form=words.whole_tick)
    across = charts.names_axis("after block", [_number(name, i) for i, name in enumerate(names)])
    alt = "Relative error of the hidden state after each block: accumulated, and of the block alone"
    panel = Plot("Error of the hidden state", alt, charts.lines(drawn, across, up, height=270), wide=True)
    text = f"After the last block the hidden state has a relative error of {words.percent(blocks[-1].error)}."
    how = "Root mean square over tokens of ‖ĥ − h‖ / ‖h‖; own: the error of one block with the original's input."
    body = [[block.name, words.percent(block.error, 2), words.percent(block.own, 2)] for block in blocks]
    table = Sheet(["block", "accumulated", "own"], body)
    # a single block needs no chart
    return Exhibit([text], [panel] if len(blocks) > 1 else [], [how], table, title="Through depth")


def _inputs(inputs: Sequence[InputHarm]) -> Exhibit:
    kinds: dict[str, dict[str, InputHarm]] = {}
    for shared in inputs:
        block, kind = figures.place(shared.name)
        row = kinds.setdefault(kind, {})
        # the expert with the largest value
        row[block] = max(shared, row.get(block, shared), key=lambda known: known.before)
    panels = []
    for kind, row in kinds.items():
        if len(row) > 1:
            alt = f"Largest over median channel of the input of {kind} by block, before and after"
            panels.append(Plot(f"Into {kind}", alt, _outliers(row)))
    before, after = (sum(value > _OUTLIER for value in side) for side in _sides(inputs))
    text = (
        f"{before} of {words.plural(len(inputs), 'shared input')} had a channel more than {_OUTLIER:g} times its "
        f"median channel; now {after} have one."
    )
    how = "The largest channel over the median one, each by its largest absolute value; folds and rotations change it."
    body = [[shared.name, f"{shared.before:.1f}×", f"{shared.after:.1f}×"] for shared in inputs]
    keys, table = [(ORIGINAL, "original"), (QUANTIZED, "this model")], Sheet(["input of", "before", "after"], body)
    return Exhibit([text], panels, [how], table, keys=keys, title="Outlier channels", folded=True)


def _sides(inputs: Sequence[InputHarm]) -> tuple[list[float], list[float]]:
    return [shared.before for shared in inputs], [shared.after for shared in inputs]


def _outliers(row: Mapping[str, InputHarm]) -> charts.Figure:
    drawn = []
    for colour, values in zip((ORIGINAL, QUANTIZED), _sides(list(row.values())), strict=True):
        hover = [f"block {block}: {value:.1f}×" for block, value in zip(row, values, strict=True)]
        drawn.append(Curve("", colour, range(len(values)), values, hover))
    up = charts.log_axis("largest over median", charts.heights(drawn), form=words.ratio)
    return charts.lines(drawn, charts.names_axis("block", list(row)), up, height=210, right=14)


def _number(name: str, index: int) -> str:
    number = figures.place(f"{name}.x")[0]
    return number if number.isdecimal() else str(index)


# --- mixed precision -------------------------------------------------------------------------------------------------


def mixed(search: MixedSearch | None) -> list[Exhibit]:
    """Build the chart of harm against bytes, and of the harm of each layer alone."""
    if search is None:
        return []
    panels = [_front(search), *([_alone(search)] if search.layers else [])]
    keys = [(QUANTIZED, "compiled and scored")]
    keys += [("ink", "the choice, and its layers in high precision")] if search.chosen is not None else []
    how = (
        "Each point keeps one more layer in high precision than the last, by harm per byte saved. "
        f"Scored on {search.scored}, the data of this choice; no other figure of this page uses it."
    )
    before: Sequence[str] = ()
    body = []
    for number, step in enumerate(search.steps):
        new = ", ".join(name for name in step.kept if name not in before)
        sure = words.between(step.ci95, words.short) or "–"
        kept = f"{len(step.kept)}{' (chosen)' if number == search.chosen else ''}"
        body.append([kept, words.size(step.bytes), words.short(step.harm), sure, new or "–"])
        before = step.kept
    table = Sheet(["kept high", "weights", search.what, "95 % interval", "layer"], body, remarks=1)
    exhibits = [Exhibit(mixed_sentences(search), panels, [how], table, keys=keys, title="Mixed precision")]
    if len(search.layers) > _DRAWN:
        rows = [[layer.name, words.short(layer.harm), words.size(layer.bytes)] for layer in search.layers]
        exhibits.append(Exhibit([], [], [], Sheet(["layer", f"alone: {search.alone or search.what}", "saves"], rows)))
    return exhibits


def mixed_sentences(search: MixedSearch) -> list[str]:
    """Describe the choice, its cost, and the harm without any layer in high precision."""
    first = search.steps[0]
    low = f"With no layer in high precision, {search.what}: {words.short(first.harm)} at {words.size(first.bytes)}."
    if search.chosen is None:
        limit = f" of {search.limit:g}" if search.limit is not None else ""
        return [low, f"No point of the curve meets the gate{limit}."]
    if search.chosen == 0:
        met = "That meets the gate, so no layer was kept in high precision."
        return [low, met if search.limit is not None else "That was chosen."]
    step = search.steps[search.chosen]
    more = words.percent(step.bytes / first.bytes - 1) if first.bytes else "–"
    what = words.plural(len(step.kept), "layer")
    return [low, f"Keeping {what} in high precision gives {words.short(step.harm)}, for {more} more bytes."]


def _front(search: MixedSearch) -> Plot:
    steps, sizes = search.steps, [step.bytes / 1e6 for step in search.steps]
    hover = [f"{len(step.kept)} kept high, {words.size(step.bytes)}, {words.short(step.harm)}" for step in steps]
    drawn = [Curve("", QUANTIZED, sizes, [step.harm for step in steps], hover, band=[step.ci95 for step in steps])]
    across, marks = charts.straight_axis("weights, MB", sizes), []
    if search.chosen is not None:
        at, step = sizes[search.chosen], steps[search.chosen]
        drawn.append(Curve("", "ink", [at], [step.harm], [hover[search.chosen]]))
        marks.append(Mark(at, f"chosen: {words.plural(len(step.kept), 'layer')} kept high"))
    if search.limit is not None:
        drawn.append(Curve(f"gate {search.limit:g}", "muted", list(across.range), [search.limit] * 2, bound=True))
    ends = charts.heights(drawn)
    # a logarithmic axis for a fall by orders of magnitude, unless it reaches 0
    log = min(ends) > 0 and max(ends) > 4 * min(ends)
    up = charts.log_axis(search.what, ends) if log else charts.straight_axis(search.what, [0.0, *ends])
    figure = charts.lines(drawn, across, up, marks=marks, left=_LEFT)
    return Plot("Harm against bytes", f"{search.what}, falling with more layers in high precision", figure)


def _alone(search: MixedSearch) -> Plot:
    kept = set(search.steps[search.chosen].kept) if search.chosen is not None else set()
    drawn, what, many = search.layers[:_DRAWN], search.alone or search.what, len(search.layers)
    bars = [
        BarPart("kept high", [layer.harm if layer.name in kept else 0.0 for layer in drawn], "ink"),
        BarPart("quantized", [0.0 if layer.name in kept else layer.harm for layer in drawn], QUANTIZED),
    ]
    names, totals = [layer.name for layer in drawn], [words.short(layer.harm) for layer in drawn]
    figure = charts.stacked(names, [bar for bar in bars if any(bar.values)], totals, what, form=words.short)
    title = f"The {len(drawn)} worst of {many} layers, each alone" if many > len(drawn) else "Each layer alone"
    return Plot(title, f"{what} with one layer quantized", figure)


# --- weights and sizes -----------------------------------------------------------------------------------------------


def weights(manifest: Manifest) -> list[Exhibit]:
    """Build the squared error of each layer's weights, as a share of their squares."""
    known = [(layer, layer.error) for layer in manifest.layers if layer.error is not None]
    if not known:
        return []
    worst, error = max(known, key=lambda pair: pair[1])
    body = []
    for layer, lost in known:
        shape, bits = " × ".join(map(str, layer.shape)), words.figure(layer.bits_per_weight, 4)
        body.append([layer.name, shape, figures.scheme_of(layer.scheme), bits, words.share(lost)])
    alt = "Relative squared error of the weights of every quantized layer as colours: kinds of layers by blocks"
    panels = heat([(layer.name, lost) for layer, lost in known], "Relative squared error of the weights", alt)
    middle = words.share(median(lost for _, lost in known))
    sentence = f"Median {middle}; largest in {worst.name}, {words.share(error)}."
    how = "‖W − Ŵ‖² / ‖W‖² of each layer's weights; their effect on the output is not included."
    head = ["layer", "shape [N, K]", "scheme", "bits per weight", "relative squared error"]
    return [Exhibit([sentence], panels, [how], Sheet(head, body), title="Weights", folded=True)]


def heat(errors: Sequence[tuple[str, float]], title: str, alt: str) -> list[Plot]:
    """Plot kinds of layers by blocks; a cell shows the largest of several errors, and names without a number share a
    column.

    Nothing is plotted for a single cell, or without any error.
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


def sizes(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """Build the bytes of each export beside the original, split into parts if known, and the peak memory."""
    exports = [row for row in rows if row.name == "size.bytes" and row.value]
    memory = _memory([row for row in rows if row.name == "memory.peak" and row.value])
    panels, body, sentences, keys = [], [], [], []
    names = ["quantized layers as floats", "codes", "scales and zero points", "everything else"]
    shades = ["original", "quantized", "quantized-soft", "rest"]
    if exports:
        bars = _bars(manifest, exports)
        drawn = [BarPart(names[i], [bar[2][i] for bar in bars], shades[i]) for i in range(len(names))]
        drawn = [part for part in drawn if any(part.values)]
        totals = [words.size(total) + (f", {ratio:.2f}× smaller" if ratio else "") for _, total, _, ratio in bars]
        figure = charts.stacked([name for name, *_ in bars], drawn, totals, "weights on disk")
        panels.append(Plot("Weights on disk", "Bytes of each export in parts, beside the original", figure))
        body += [[n, words.size(total), *(words.size(v) if v else "–" for v in values)] for n, total, values, _ in bars]
        keys = [(part.shade, part.label) for part in drawn]
    if memory:
        sides = {"original": True, "this model": False}
        drawn = [
            BarPart(label, [value if old == side else 0.0 for _, value, old in memory], shade)
            for (label, side), shade in zip(sides.items(), (ORIGINAL, QUANTIZED), strict=True)
        ]
        totals = [words.size(value) for _, value, _ in memory]
        figure = charts.stacked([name for name, *_ in memory], drawn, totals, "peak memory of the process")
        panels.append(Plot("Peak memory while it runs", "Peak memory of the process, beside the original's", figure))
        body += [[f"peak memory, {name}", words.size(value), *["–"] * len(names)] for name, value, _ in memory]
    if not panels:
        return []
    if read := [row for row in rows if row.name == "size.bytes_read" and row.value]:
        ways = (f"{row.settings.get('way')} read {words.size(row.value or 0.0)}" for row in reversed(read))
        sentences.append(f"The graph holds weights for two ways to multiply: {' and '.join(ways)}.")
    bits = next((row.value for row in rows if row.name == "size.bits_per_weight" and row.value), None)
    if bits is not None:
        many = words.plural(len(manifest.layers), "quantized layer")
        sentences.append(f"{words.short(bits)} bits a weight in {many}, including scales and zero points.")
    return [Exhibit(sentences, panels, [], Sheet(["what", "total", *names], body), keys=keys)]


def _bars(manifest: Manifest, exports: Sequence[Row]) -> list[tuple[str, float, list[float], float | None]]:
    """Return (name, bytes, four parts, times smaller than the original), the original first."""
    counts = [(prod(layer.shape), layer) for layer in manifest.layers]
    codes = sum(count * _bits(layer.scheme) for count, layer in counts) / 8
    extra = sum(count * layer.bits_per_weight for count, layer in counts) / 8 - codes
    bars: list[tuple[str, float, list[float], float | None]] = []
    base = next((row.baseline.value for row in exports if row.baseline is not None), None)
    if base is not None:
        floats = sum(count for count, _ in counts) * _FLOAT_BYTES.get(manifest.model.source.dtype, 0)
        floats_ = min(float(floats), base)
        bars.append(("original", base, [floats_, 0.0, 0.0, base - floats_], None))
    for row in exports:
        total = row.value or 0.0
        known = codes > 0 and codes + extra <= total
        ratio = row.baseline.ratio if row.baseline and (row.baseline.ratio or 0) > 1 else None
        split = [0.0, codes, extra, total - codes - extra] if known else [0.0, 0.0, 0.0, total]
        bars.append((figures.export(row), total, split, ratio))
    return bars


def _memory(rows: Sequence[Row]) -> list[tuple[str, float, bool]]:
    """Return (name, bytes, True for the original)."""
    bars = []
    for row in rows:
        if row.baseline is not None:
            bars.append((words.joined("original", row.runtime or ""), row.baseline.value, True))
        label = words.joined(figures.variant(row), figures.where(row)) or "this model"
        bars.append((label, row.value or 0.0, False))
    return bars


def _bits(scheme: Mapping[str, Any]) -> int:
    match = re.search(r"\d+", str(scheme.get("format")))
    return int(match[0]) if match else 0
