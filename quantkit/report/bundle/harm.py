"""Where a quantized model is hurt, as sections of the report: what `measurement.accuracy.harm` found, drawn and said.

Every sentence follows from the numbers by a rule that stands with its function, so that it changes when they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from quantkit.measurement.accuracy.harm import BlockHarm, Harm, InputHarm, LayerHarm, Position
from quantkit.report.bundle import figures, mixed
from quantkit.report.bundle.sections import heat
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve
from quantkit.report.kit.tree import Exhibit, Part, Plot, Remark, Section, Sheet

# half of the harm in at most this part of the blocks is called concentrated
_CONCENTRATED = 1 / 3
# an input with a channel this many times its median channel is said to have outliers
_OUTLIER = 20.0
# worst positions that a page shows at once
_SHOWN = 3


def said(harm: Harm | None) -> list[str]:
    """Where the loss comes from: by kind of layer, then by depth."""
    if harm is None:
        return []
    found = [text for text in (by_kind(harm.layers), by_depth(harm.blocks)) if text]
    return [f"Where the loss comes from: {found[0]}", *found[1:]] if found else []


def by_kind(layers: Sequence[LayerHarm]) -> str:
    """The kind that carries most of the squared relative output error of all layers, against its part of the layers."""
    shares = kinds(layers)
    if len(shares) < 2:
        return ""
    counts = {kind: sum(figures.place(layer.name)[1] == kind for layer in layers) for kind in shares}
    (first, most), (second, next_) = list(shares.items())[:2]
    part = words.percent(counts[first] / len(layers), 0)
    return (
        f"{first} carries {words.percent(most, 0)} of the squared output error of all layers, being {part} of them, "
        f"and {second} {words.percent(next_, 0)}."
    )


def kinds(layers: Sequence[LayerHarm]) -> dict[str, float]:
    """Kind -> its part of the sum of squared relative output errors, the largest first."""
    sums: dict[str, float] = {}
    for layer in layers:
        kind = figures.place(layer.name)[1]
        sums[kind] = sums.get(kind, 0.0) + layer.error**2
    total = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda pair: -pair[1])
    return {kind: value / total for kind, value in ordered} if total > 0 else {}


def by_depth(blocks: Sequence[BlockHarm]) -> str:
    """The fewest blocks that make half of the sum of squared own errors; a third of all or fewer is concentrated."""
    total = sum(block.own**2 for block in blocks)
    if len(blocks) < 2 or total <= 0:
        return ""
    order = sorted(range(len(blocks)), key=lambda index: -blocks[index].own)
    half, chosen = 0.0, []
    for index in order:
        chosen.append(index)
        half += blocks[index].own ** 2
        if half >= total / 2:
            break
    many = f"{len(chosen)} of {len(blocks)} blocks"
    if len(chosen) > _CONCENTRATED * len(blocks):
        return f"By depth it is spread: half of what the blocks add takes {many}."
    numbers = words.listed(sorted(int(_number(blocks[index].name, index)) for index in chosen))
    return f"Half of what the blocks add comes from {many}: {numbers}."


def sections(harm: Harm | None) -> list[Exhibit]:
    """Layers, depth and outliers, as far as they are known."""
    if harm is None:
        return []
    found = mixed.sections(harm.mixed)
    found += [_layers(harm.layers)] if harm.layers else []
    found += [_depth(harm.blocks)] if harm.blocks else []
    return found + ([_inputs(harm.inputs)] if harm.inputs else [])


def worst(harm: Harm | None) -> list[Part]:
    """Build the worst positions, and how much they weigh."""
    if harm is None or not harm.worst:
        return []
    said: list[Part] = []
    if harm.worst_share is not None:
        share = words.percent(harm.worst_share, 0)
        said.append(Remark(f"{share} of all KL lies in the worst 1 % of the positions; the first of them:"))
    head, rows = ("text", "goes on", "original says", "this model says", "KL, nats"), list(map(_line, harm.worst))
    tables = [Sheet(head, rows[:_SHOWN], words=4, title="Positions with the largest KL divergence", stacked=True)]
    if len(rows) > _SHOWN:
        more = words.plural(len(rows) - _SHOWN, "more position")
        tables.append(Sheet(head, rows[_SHOWN:], words=4, title=more, folded=True, stacked=True))
    about = "Beside each most likely token stands how likely it is held; · is a space at an end, ⏎ a new line."
    return [Section("Worst positions", [*said, *tables, Remark(about, "caption")])]


def _line(position: Position) -> list[str]:
    return [
        "… " + words.visible(position.before),
        words.visible(position.follows),
        f"{words.visible(position.original)} ({words.percent(position.original_chance, 0)})",
        f"{words.visible(position.candidate)} ({words.percent(position.candidate_chance, 0)})",
        words.figure(position.kl, 3),
    ]


def _layers(layers: Sequence[LayerHarm]) -> Exhibit:
    largest = max(layers, key=lambda layer: layer.error)
    panels = heat(
        [(layer.name, layer.error) for layer in layers],
        "Relative error of the outputs",
        "Relative output error of every quantized layer as colours: kinds of layers by blocks",
    )
    middle = words.percent(median(layer.error for layer in layers))
    text = f"Median {middle}; largest in {largest.name}, {words.percent(largest.error)}."
    how = "‖ŷ − y‖ / ‖y‖ of what each layer returns, given the same inputs as the layer before it was rounded."
    body = [[layer.name, words.percent(layer.error, 2)] for layer in layers]
    return Exhibit([text], panels, [how], Sheet(["layer", "relative output error"], body), title="Layers")


def _depth(blocks: Sequence[BlockHarm]) -> Exhibit:
    names = [_number(block.name, i) for i, block in enumerate(blocks)]
    across = _blocks_axis("behind block", names)
    values = [value for block in blocks for value in (block.error, block.own)]
    axis = axes.straight_axis("relative error", [0.0, *values], form=lambda v: f"{100 * v:g} %")
    curves = [
        Curve(
            "built up",
            QUANTIZED,
            range(len(blocks)),
            [block.error for block in blocks],
            [f"{block.name}: {words.percent(block.error)} built up" for block in blocks],
        ),
        Curve(
            "its own",
            "muted",
            range(len(blocks)),
            [block.own for block in blocks],
            [f"{block.name}: {words.percent(block.own)} of its own" for block in blocks],
        ),
    ]
    panel = Plot(
        "Error of the hidden state",
        "Relative error of the hidden state behind each block, built up and added by the block itself",
        charts.lines(curves, across, axis, height=270),
        wide=True,
    )
    text = f"Behind the last block the hidden state is off by {words.percent(blocks[-1].error)}."
    how = "Root mean square over tokens of ‖ĥ − h‖ / ‖h‖; a block's own is what it adds when fed the original's input."
    body = [[block.name, words.percent(block.error, 2), words.percent(block.own, 2)] for block in blocks]
    head = ["block", "built up", "its own"]
    # one block is a point: the sentence says it
    return Exhibit([text], [panel] if len(blocks) > 1 else [], [how], Sheet(head, body), title="Through depth")


def _inputs(inputs: Sequence[InputHarm]) -> Exhibit:
    by_kind: dict[str, dict[str, InputHarm]] = {}
    for found in inputs:
        block, kind = figures.place(found.name)
        row = by_kind.setdefault(kind, {})
        # of experts, the one with the largest
        row[block] = max(found, row.get(block, found), key=lambda each: each.before)
    panels = [
        Plot(
            f"Into {kind}",
            f"Largest over median channel of the input of {kind} by block, before and after",
            _outliers(row),
        )
        for kind, row in by_kind.items()
        if len(row) > 1
    ]
    before, after = (sum(value > _OUTLIER for value in side) for side in _sides(inputs))
    text = (
        f"{before} of {words.plural(len(inputs), 'shared input')} had a channel more than {_OUTLIER:g} times its "
        f"median channel, {after} have one now."
    )
    how = "The largest channel over the median one, each by its largest absolute value; folds and rotations change it."
    body = [[each.name, f"{each.before:.1f}×", f"{each.after:.1f}×"] for each in inputs]
    sheet = Sheet(["input of", "before", "after"], body)
    keys = [(ORIGINAL, "original"), (QUANTIZED, "this model")]
    return Exhibit([text], panels, [how], sheet, keys=keys, title="Outlier channels", folded=True)


def _sides(inputs: Sequence[InputHarm]) -> tuple[list[float], list[float]]:
    return [each.before for each in inputs], [each.after for each in inputs]


def _outliers(row: Mapping[str, InputHarm]) -> charts.Figure:
    found = list(row.values())
    sides = _sides(found)
    axis = axes.log_axis("largest over median", [*sides[0], *sides[1]], form=lambda v: f"{v:g}×")
    curves = [
        Curve(
            "",
            colour,
            range(len(found)),
            values,
            [f"block {block}: {value:.1f}×" for block, value in zip(row, values, strict=True)],
        )
        for colour, values in ((ORIGINAL, sides[0]), (QUANTIZED, sides[1]))
    ]
    return charts.lines(curves, _blocks_axis("block", list(row)), axis, height=210, right=14)


def _blocks_axis(title: str, names: Sequence[str]) -> axes.Axis:
    step = max(1, -(-len(names) // 10))
    shown = list(range(0, len(names), step))
    return axes.Axis(title, shown, [names[i] for i in shown], (-0.5, len(names) - 0.5), log=False)


def _number(name: str, index: int) -> str:
    number = figures.place(f"{name}.x")[0]
    return number if number.isdecimal() else str(index)
