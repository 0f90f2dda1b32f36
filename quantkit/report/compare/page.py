"""The page of `quantkit compare`: one offline file with accuracy, flipped words, times by batch, size and layers."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.compared import Compared, DecidedCell, LayerPair, WordFlip
from quantkit.report.bundle import sections
from quantkit.report.compare import words as say
from quantkit.report.kit import axes, charts, shell, words
from quantkit.report.kit.axes import Axis
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, ChartPoint, Curve, Mark
from quantkit.report.kit.parts import Panel, Section, Sheet

_TONES = {"B better": "good", "same": "good", "A better": "bad", "mixed": "bad", "inconclusive": "inconclusive"}
_ANSWERS = {"same": "the same within every margin", "mixed": "mixed: B is better in one thing and worse in another"}
_ANSWERS |= {"A better": "A is better", "B better": "B is better", "inconclusive": "not decided"}
# lines of one figure, a colour each
_LINES = (QUANTIZED, ORIGINAL, "good", "bad", "muted")


def page(data: Compared, version: str = "") -> str:
    """The page as HTML. Raises MissingDependency: plotly, extra `report`."""
    found = [
        ("accuracy", "Accuracy", _accuracy(data)),
        ("time", "Time, by batch", _times(data)),
        ("size", "Size", _size(data)),
        ("layers", "Layer by layer", _layers(data.layers)),
    ]
    headline = say.headline(data)
    return shell.rendered(
        "compare.html.j2",
        title=f"{data.model}: B against A",
        sides=[("A", data.a.name, say.about(data.a)), ("B", data.b.name, say.about(data.b))],
        tone=_TONES[data.verdict] if headline == data.verdict else "good",
        answer=words.sentence(_ANSWERS.get(headline, headline)),
        because=[words.sentence(reason) for reason in data.because],
        notes=[words.sentence(note) for note in data.notes],
        sections=[(place, title, section) for place, title, section in found if section is not None],
        flipped=None if data.flips is None else say.flipped(data.flips),
        flips=[] if data.flips is None else [_flip(flip) for flip in data.flips.examples],
        facts=_facts(data),
        version=version,
    )


def _accuracy(data: Compared) -> Section | None:
    """Every difference in its margins: what matters is whether an interval reaches beyond one."""
    cells, about = say.group(data, ("accuracy",))
    if not cells:
        return None
    title = say.titles(cells, data.kind)
    points = []
    for cell in cells:
        low, high = (end / cell.margin for end in cell.ci95)
        text = f"{say.difference(cell, margin=False)}, {say.answered(cell)}"
        points.append(ChartPoint(title(cell), cell.effect / cell.margin, (low, high), text))
    ends = [end for point in points for end in (point.value, *(point.interval or ()))]
    axis = axes.straight_axis("how much worse B is, in margins", [*ends, -1.2, 1.2])
    marks = [Mark(-1.0, "a margin better", dotted=True), Mark(1.0, "a margin worse", dotted=True)]
    panel = Panel(
        "B against A, in margins",
        "Each measure's difference from A to B with its 95 % interval, divided by its margin; worse is to the right",
        charts.forest(points, axis, marks=marks),
        wide=True,
    )
    return Section([f"{words.sentence(about)}."], [panel], [], say.sheet(cells, data.kind))


def _times(data: Compared) -> Section | None:
    """How many times as long B takes: against the batch, and alone where there is one batch."""
    cells, about = say.group(data, ("latency",))
    if not cells:
        return None
    lines: dict[str, list[DecidedCell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch or 0):
        lines.setdefault(_line(cell, data.kind), []).append(cell)
    several = {label: those for label, those in lines.items() if len(those) > 1}
    alone = [cell for label, those in lines.items() if label not in several for cell in those]
    panels = ([_by_batch(several, cells[0].margin)] if several else []) + ([_alone(alone, data)] if alone else [])
    said = [f"{words.sentence(about)}."] if about else []
    captions = [f"Below 1 B is faster. The margin is {words.percent(cells[0].margin, 0)} either way."]
    return Section(said, panels, captions, say.sheet(cells, data.kind))


def _line(cell: DecidedCell, kind: str) -> str:
    """Cells of one line differ in their batch alone."""
    shape = cell.shape or {}
    if cell.name == "latency.decode_step":
        return f"step, context {shape.get('context', 0):,}"
    tokens = shape.get("new_tokens", 1)
    return ("prefill" if kind == "decoder" else "pass") + (f", {tokens:,} tokens" if tokens > 1 else "")


def _by_batch(lines: dict[str, list[DecidedCell]], margin: float) -> Panel:
    curves = []
    for i, (label, cells) in enumerate(lines.items()):
        band = [(1 + cell.ci95[0], 1 + cell.ci95[1]) for cell in cells]
        hover = [f"{label}, batch {cell.batch}: {say.difference(cell, margin=False)}, {cell.answer}" for cell in cells]
        batches = [float(cell.batch or 1) for cell in cells]
        ratios = [1 + cell.effect for cell in cells]
        curves.append(Curve(label, _LINES[min(i, len(_LINES) - 1)], batches, ratios, hover, band))
    figure = charts.lines(
        curves,
        axes.points_axis("batch", [x for curve in curves for x in curve.x]),
        _ratios([cell for cells in lines.values() for cell in cells]),
        even=1.0,
        noise=(1 / (1 + margin), 1 + margin),
        hover="closest",
    )
    alt = "How many times as long B takes as A, by batch, with 95 % intervals; both axes logarithmic"
    return Panel("B's time over A's, by batch", alt, figure, wide=True)


def _alone(cells: Sequence[DecidedCell], data: Compared) -> Panel:
    title, points = say.titles(cells, data.kind), []
    for cell in cells:
        interval = (1 + cell.ci95[0], 1 + cell.ci95[1])
        text = f"{say.difference(cell, margin=False)}, {say.answered(cell)}"
        points.append(ChartPoint(title(cell), 1 + cell.effect, interval, text))
    figure = charts.forest(points, _ratios(cells), marks=[Mark(1.0, "as long")])
    return Panel("B's time over A's", "How many times as long B takes as A, with 95 % intervals", figure, wide=True)


def _ratios(cells: Sequence[DecidedCell]) -> Axis:
    ends = [1 + end for cell in cells for end in (cell.effect, *cell.ci95)]
    return axes.log_axis("B's time / A's", [*ends, 1.0], form=lambda value: f"{value:g}×")


def _size(data: Compared) -> Section | None:
    cells, _ = say.group(data, ("size",))
    known = [cell for cell in cells if cell.a is not None and cell.b is not None]
    if not known:
        return None
    sizes = [float(known[0].a or 0), float(known[0].b or 0)]
    totals = [words.size(each) for each in sizes]
    figure = charts.stacked(["A", "B"], [BarPart("weights", sizes, QUANTIZED)], totals, "weights")
    panel = Panel("Weights that the runtime loads", f"A {totals[0]}, B {totals[1]}", figure, wide=True)
    return Section([f"B is {say.difference(known[0])}."], [panel], [], say.sheet(cells, data.kind))


def _layers(pairs: Sequence[LayerPair]) -> Section | None:
    if not pairs:
        return None
    outputs = say.by_output(pairs)
    found = [(pair, pair.outputs if outputs else pair.errors) for pair in pairs]
    known = [(pair.name, errors) for pair, errors in found if errors is not None]
    what = "relative output error" if outputs else "relative squared weight error"
    panels = []
    largest = max((error for _, errors in known for error in errors), default=0.0)
    for side, letter in enumerate("AB" if known else ""):
        alt = f"{what} of every layer of {letter} as colours: kinds of layers by blocks"
        drawn = sections.heat([(name, errors[side]) for name, errors in known], f"{letter}'s {what}", alt)
        for panel in drawn:  # one scale, or the two could not be compared
            panel.figure["data"][0] |= {"zmin": 0.0, "zmax": largest}
        panels += drawn
    worst = say.worst(pairs)
    said = [f"{words.sentence(line)}." for line in say.layer_sentences(pairs)]
    said += [f"The largest rise is in {worst[0].name}."] if worst else []
    body = [
        [
            pair.name,
            *(["–", "–"] if errors is None else map(words.share, errors)),
            say.stored(pair.a),
            say.stored(pair.b),
        ]
        for pair, errors in found
    ]
    return Section(said, panels, [], Sheet(["layer", f"A's {what}", "B's", "A is stored as", "B"], body, 2))


def _flip(flip: WordFlip) -> dict[str, str]:
    """One row of the table; the text of a model is made visible here and escaped by the page."""
    known = flip.before is not None and flip.follows is not None
    return {
        "right": flip.right,
        "before": words.visible(flip.before or "") if known else f"sequence {flip.sequence}, position {flip.position}",
        "follows": words.visible(flip.follows or "") if known else "",
        "a": f"{words.visible(flip.a)} {words.percent(flip.a_chance, 0)}",
        "b": f"{words.visible(flip.b)} {words.percent(flip.b_chance, 0)}",
    }


def _facts(data: Compared) -> list[tuple[str, str]]:
    found = [(f"{letter}'s content", side.content_sha256) for letter, side in (("A", data.a), ("B", data.b))]
    found += [("scored", data.data)] if data.data else []
    devices = dict.fromkeys(cell.device for cell in data.cells if cell.what == "latency" and cell.device)
    return found + [("timed on", device) for device in devices]
