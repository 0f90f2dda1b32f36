"""Two versions of one model as a tree: verdict, accuracy, flipped words, times, size, layers. B is set against A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.measurement.compared import Compared, DecidedCell, LayerPair, WordFlip, WordFlips
from quantkit.report.bundle import sections
from quantkit.report.compare import words as say
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.axes import Axis
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, ChartPoint, Curve, Mark
from quantkit.report.kit.tree import Conclusion, Document, Exhibit, Line, On, Part, Plot, Remark, Section, Sheet, Styled

_TONES = {"B better": "good", "same": "good", "A better": "bad", "mixed": "bad", "inconclusive": "inconclusive"}
_ANSWERS = {"same": "the same within every margin", "mixed": "mixed: B is better in one thing and worse in another"}
_ANSWERS |= {"A better": "A is better", "B better": "B is better", "inconclusive": "not decided"}
_CELLS = {"better": "good", "worse": "bad", "same": "", "inconclusive": "inconclusive"}
# lines of one figure, a colour each
_LINES = (QUANTIZED, ORIGINAL, "good", "bad", "muted")
# layers that a screen has, and flipped words that a page shows at once
_LAYERS, _WORDS = 5, 4


def document(data: Compared, version: str = "") -> Document:
    """Build the tree of a comparison."""
    headline = say.headline(data)
    answer = Conclusion(
        _ANSWERS.get(headline, headline),
        _TONES[data.verdict] if headline == data.verdict else "good",
        [words.sentence(reason) for reason in data.because],
        label="verdict",
    )
    chapters = [
        ("accuracy", "Accuracy", _accuracy(data)),
        ("time", "Time, by batch", _times(data)),
        ("size", "Size", _size(data)),
        ("layers", "Layer by layer", _layers(data.layers)),
        ("words", "Next words that flipped", _flips(data.flips)),
    ]
    facts = [(f"{letter}'s content", side.content_sha256) for letter, side in (("A", data.a), ("B", data.b))]
    facts += [("scored", data.data)] if data.data else []
    devices = dict.fromkeys(cell.device for cell in data.cells if cell.what == "latency" and cell.device)
    return Document(
        f"{data.model}: B against A",
        [
            (Styled(letter, "strong"), f" {side.name}: {say.about(side)}")
            for letter, side in (("A", data.a), ("B", data.b))
        ],
        [answer, *(Remark(words.sentence(note), "note") for note in data.notes)],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        [*facts, *(("timed on", device) for device in devices)],
        made=f"Made by quantkit {version} from what both bundles hold.".replace("  ", " "),
    )


def _cells(data: Compared, cells: Sequence[DecidedCell], about: str = "") -> list[Part]:
    """Build a line for each thing that was compared, and what they rest on."""
    table = say.sheet(cells, data.kind)
    rows = [[*row[:-1], Styled(row[-1], _CELLS[cell.answer])] for row, cell in zip(table.rows, cells, strict=True)]
    return [*([Remark(f"{words.sentence(about)}.", "caption")] if about else []), replace(table, rows=rows)]


def _charts(panels: Sequence[Plot], captions: Sequence[str] = ()) -> Exhibit:
    """Charts whose data stands in the table over them."""
    return Exhibit(captions, panels, [], Sheet([], []))


def _accuracy(data: Compared) -> list[Part]:
    """Build every difference in its margins: what matters is whether an interval reaches beyond one."""
    cells, about = say.group(data, ("accuracy",))
    if not cells:
        return []
    title = say.titles(cells, data.kind)
    points = []
    for cell in cells:
        low, high = (end / cell.margin for end in cell.ci95)
        text = f"{say.difference(cell, margin=False)}, {say.answered(cell)}"
        points.append(ChartPoint(title(cell), cell.effect / cell.margin, (low, high), text))
    ends = [end for point in points for end in (point.value, *(point.interval or ()))]
    axis = axes.straight_axis("how much worse B is, in margins", [*ends, -1.2, 1.2])
    marks = [Mark(-1.0, "a margin better", dotted=True), Mark(1.0, "a margin worse", dotted=True)]
    alt = "Each measure's difference from A to B with its 95 % interval, divided by its margin; worse is to the right"
    chart = Plot("B against A, in margins", alt, charts.forest(points, axis, marks=marks), wide=True)
    return [*_cells(data, cells, about), _charts([chart])]


def _times(data: Compared) -> list[Part]:
    """Build how many times as long B takes: against the batch, and alone where there is one batch."""
    cells, about = say.group(data, ("latency",))
    if not cells:
        return []
    lines: dict[str, list[DecidedCell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch or 0):
        lines.setdefault(_line(cell, data.kind), []).append(cell)
    several = {label: those for label, those in lines.items() if len(those) > 1}
    alone = [cell for label, those in lines.items() if label not in several for cell in those]
    panels = ([_by_batch(several, cells[0].margin)] if several else []) + ([_alone(alone, data)] if alone else [])
    below = f"Below 1 B is faster. The margin is {words.percent(cells[0].margin, 0)} either way."
    return [*_cells(data, cells, about), _charts(panels, [below])]


def _line(cell: DecidedCell, kind: str) -> str:
    """Name the line that cells which differ in their batch alone are on."""
    shape = cell.shape or {}
    if cell.name == "latency.decode_step":
        return f"step, context {shape.get('context', 0):,}"
    tokens = shape.get("new_tokens", 1)
    return ("prefill" if kind == "decoder" else "pass") + (f", {tokens:,} tokens" if tokens > 1 else "")


def _by_batch(lines: dict[str, list[DecidedCell]], margin: float) -> Plot:
    curves = []
    for i, (label, cells) in enumerate(lines.items()):
        band = [(1 + cell.ci95[0], 1 + cell.ci95[1]) for cell in cells]
        hover = [f"{label}, batch {cell.batch}: {say.difference(cell, margin=False)}, {cell.answer}" for cell in cells]
        batches = [float(cell.batch or 1) for cell in cells]
        ratios = [1 + cell.effect for cell in cells]
        curves.append(Curve(label, _LINES[min(i, len(_LINES) - 1)], batches, ratios, hover, band))
    across = axes.points_axis("batch", [x for curve in curves for x in curve.x])
    up, noise = _ratios([cell for cells in lines.values() for cell in cells]), (1 / (1 + margin), 1 + margin)
    figure = charts.lines(curves, across, up, even=1.0, noise=noise, hover="closest")
    alt = "How many times as long B takes as A, by batch, with 95 % intervals; both axes logarithmic"
    return Plot("B's time over A's, by batch", alt, figure, wide=True)


def _alone(cells: Sequence[DecidedCell], data: Compared) -> Plot:
    title, points = say.titles(cells, data.kind), []
    for cell in cells:
        interval = (1 + cell.ci95[0], 1 + cell.ci95[1])
        text = f"{say.difference(cell, margin=False)}, {say.answered(cell)}"
        points.append(ChartPoint(title(cell), 1 + cell.effect, interval, text))
    figure = charts.forest(points, _ratios(cells), marks=[Mark(1.0, "as long")])
    return Plot("B's time over A's", "How many times as long B takes as A, with 95 % intervals", figure, wide=True)


def _ratios(cells: Sequence[DecidedCell]) -> Axis:
    ends = [1 + end for cell in cells for end in (cell.effect, *cell.ci95)]
    return axes.log_axis("B's time / A's", [*ends, 1.0], form=lambda value: f"{value:g}×")


def _size(data: Compared) -> list[Part]:
    cells, _ = say.group(data, ("size",))
    known = [cell for cell in cells if cell.a is not None and cell.b is not None]
    if not known:
        return []
    sizes = [float(known[0].a or 0), float(known[0].b or 0)]
    totals = [words.size(size) for size in sizes]
    figure = charts.stacked(["A", "B"], [BarPart("weights", sizes, QUANTIZED)], totals, "weights")
    chart = Plot("Weights that the runtime loads", f"A {totals[0]}, B {totals[1]}", figure, wide=True)
    return [*_cells(data, cells), _charts([chart])]


def _layers(pairs: Sequence[LayerPair]) -> list[Part]:
    if not pairs:
        return []
    outputs, moved = say.by_output(pairs), say.worst(pairs)
    errors = [(pair, pair.outputs if outputs else pair.errors) for pair in pairs]
    known = [(pair.name, both) for pair, both in errors if both is not None]
    what = "relative output error" if outputs else "relative squared weight error"
    panels = []
    largest = max((error for _, both in known for error in both), default=0.0)
    for side, letter in enumerate("AB" if known else ""):
        alt = f"{what} of every layer of {letter} as colours: kinds of layers by blocks"
        drawn = sections.heat([(name, both[side]) for name, both in known], f"{letter}'s {what}", alt)
        for chart in drawn:  # one scale, or the two could not be compared
            chart.figure["data"][0] |= {"zmin": 0.0, "zmax": largest}
        panels += drawn
    brief: list[list[Line]] = []
    for pair in moved[:_LAYERS]:
        stored = f"{say.format_of(pair.a)} → {say.format_of(pair.b)}" if pair.differs else ""
        brief.append([pair.name, *map(words.share, (pair.outputs if outputs else pair.errors) or ()), stored])
    body = [
        [pair.name, *(["–", "–"] if both is None else map(words.share, both)), say.stored(pair.a), say.stored(pair.b)]
        for pair, both in errors
    ]
    full = Sheet(["layer", f"A's {what}", "B's", "A is stored as", "B"], body, 2)
    rises = f"largest rises, {'outputs' if outputs else 'weights'}"
    return [
        *(Remark(f"{words.sentence(line)}.") for line in say.layer_sentences(pairs)),
        *([Sheet([rises, "A", "B", ""], brief, 1)] if brief else []),
        Exhibit([], panels, [], full),
    ]


def _flips(flips: WordFlips | None) -> list[Part]:
    if flips is None:
        return []
    head = ("text, and what follows", "right", "A says", "B says")
    rows = [_flip(flip) for flip in flips.examples]
    parts: list[Part] = [Remark(f"{words.sentence(say.flipped(flips))}.")]
    if rows:
        parts.append(
            Sheet(head, rows[:_WORDS], words=4, title="Next words that one side alone has right", stacked=True)
        )
    if len(rows) > _WORDS:
        more = words.plural(len(rows) - _WORDS, "more word")
        parts.append(Sheet(head, rows[_WORDS:], words=4, title=more, folded=True, stacked=True))
    about = "A dot is a space at either end of a word. Those that moved most come first."
    return [*parts, Remark(about, "caption", On.PAGE)]


def _flip(flip: WordFlip) -> list[Line]:
    """Build one row; the text of a model is made visible here, and never reaches a terminal as it is."""
    text: Line = f"sequence {flip.sequence}, position {flip.position}"
    if flip.before is not None and flip.follows is not None:
        text = (f"… {words.visible(flip.before)} ", Styled(f"[{words.visible(flip.follows)}]", "strong"))
    guesses = ((flip.a, flip.a_chance), (flip.b, flip.b_chance))
    said = [f"{words.visible(guess)} {words.percent(chance, 0)}" for guess, chance in guesses]
    return [text, f"{flip.right} alone", *said]
