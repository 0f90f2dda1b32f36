"""Two versions of one model as a tree and in words: verdict, differences, flipped words, layers; B against A."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import expm1, floor, inf, log10

from quantkit.bundle import LayerEntry
from quantkit.measurement.compared import Compared, DecidedCell, LayerPair, NamedSide, WordFlip, WordFlips
from quantkit.report.bundle import figures, sections
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.axes import Axis
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, ChartPoint, Curve, Mark
from quantkit.report.kit.tree import Conclusion, Document, Exhibit, Line, On, Part, Plot, Remark, Section, Sheet, Styled

_NAMES = {
    "accuracy.next_word": "next word right",
    "accuracy.kl": "KL divergence",
    "accuracy.perplexity": "perplexity",
    "accuracy.top1": "top-1",
    "accuracy.recall_at_1": "recall at 1",
    "accuracy.top1_agreement": "agreement",
    "accuracy.cosine": "cosine",
    "accuracy.same": "the same",
    "accuracy.relative_error": "relative error",
    "latency.decode_step": "decode step",
    "latency.prefill": "prefill",
    "size.bytes": "weights",
}
_SHARES = tuple(f"accuracy.{x}" for x in ("next_word", "top1", "recall_at_1", "top1_agreement", "same"))
HOW = {
    "paired": "item by item",
    "apart": "each by its own interval",
    "interleaved": "timed in turns in one run",
    "ratio of ratios": "a ratio of ratios: each to one baseline, in runs of their own; --measure times both in one",
    "counted": "",
}
_GAINS = {"size": "smaller", "latency": "faster", "accuracy": "nearer"}
# cells of one answer that the reasons name
_NAMED = 3


def because(cells: Sequence[DecidedCell], kind: str) -> list[str]:
    """The reasons of the verdict: what is worse, what is better, what is not known; a sentence each."""
    found = []
    title = titles(cells, kind)
    for answer in ("worse", "better"):
        those = [cell for cell in cells if cell.answer == answer]
        found += [f"B is {answer} in {title(cell)}: {difference(cell)}{_within(cell)}" for cell in those[:_NAMED]]
        found += [f"and in {len(those) - _NAMED} more"] if len(those) > _NAMED else []
    open_ = [cell for cell in cells if cell.answer == "inconclusive"]
    for cell in open_[:_NAMED]:
        found.append(f"not decided, {title(cell)}: {difference(cell)}; {_seen(cell)}")
    found += [f"nor {len(open_) - _NAMED} more"] if len(open_) > _NAMED else []
    if same := [cell for cell in cells if cell.answer == "same"]:
        listed = "; ".join(title(cell) for cell in same[:_NAMED])
        more = f"; and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
        found.append(f"the same within the margin: {listed}{more}")
    return found


def headline(data: Compared) -> str:
    """The verdict; where B is worse by no more than its recipe allows, in words."""
    worse = [cell for cell in data.cells if cell.answer == "worse"]
    if data.exit != 0 or not worse:
        return data.verdict
    better = {cell.what for cell in data.cells if cell.answer == "better"}
    parts = [gain for what, gain in _GAINS.items() if what in better]
    parts += ["worse within what its recipe allows"] if any(cell.what == "accuracy" for cell in worse) else []
    slower = dict.fromkeys(_NAMES.get(cell.name, cell.name) for cell in worse if cell.what == "latency")
    parts += [f"slower in {' and '.join(slower)} where its verdict ships"] if slower else []
    return f"B is {words.listed(parts)}"


def _within(cell: DecidedCell) -> str:
    """`; its recipe allows 0.25 nats`."""
    if cell.answer == "worse" and cell.shipped:
        return f"; {cell.shipped}"
    if cell.answer != "worse" or cell.allowed is None:
        return ""
    if cell.allowed == inf:
        return "; its recipe sets no gate on it"
    most = _effect(cell, cell.allowed, _places(cell, cell.allowed)).lstrip("+−")
    return f"; its recipe allows {most} {_unit(cell)}".rstrip()


def _seen(cell: DecidedCell) -> str:
    """The smallest loss that would have been called."""
    if cell.doubt == "ceiling":
        return "it is more than bytes and operations allow: a time or a ceiling is wrong, measure it again"
    if cell.what == "latency":
        return f"it would have been seen from {words.figure(1 + cell.detectable, 3)} times as long on"
    if cell.what == "size":
        return f"a loss of {words.percent(cell.detectable)} would have been seen"
    lost = _effect(cell, cell.detectable, _places(cell, cell.detectable)).lstrip("+−")
    return f"a loss of {lost} {_unit(cell)}".rstrip() + " would have been seen"


def titles(cells: Sequence[DecidedCell], kind: str) -> Callable[[DecidedCell], str]:
    """`decode step, batch 1, context 128`, with the device and runtime of times where they have several.

    A prefill of a model of another kind than a decoder is a pass.
    """
    timed = [cell for cell in cells if cell.what == "latency"]
    places = {(cell.device, cell.runtime) for cell in timed}

    def title(cell: DecidedCell) -> str:
        where = (cell.device, cell.runtime) if cell.what == "latency" and len(places) > 1 else ()
        return ", ".join([_title(cell, kind), *(part for part in where if part)])

    return title


def _title(cell: DecidedCell, kind: str) -> str:
    shape = cell.shape or {}
    parts = [_NAMES.get(cell.name, cell.name)]
    if cell.name == "latency.prefill" and kind != "decoder":
        parts = ["pass"]
    parts += [f"output {words.visible(cell.output)}"] if cell.output else []
    parts += [f"batch {cell.batch}"] if cell.batch else []
    parts += [f"context {shape['context']:,}"] if shape.get("context") else []
    parts += [f"{shape['new_tokens']:,} tokens"] if shape.get("new_tokens", 1) > 1 else []
    return ", ".join(parts)


def value(cell: DecidedCell, value: float) -> str:
    """A side's own value, with its unit."""
    if cell.what == "latency":
        return words.moment(value)
    if cell.what == "size":
        return words.size(value)
    return words.percent(value) if cell.name in _SHARES else words.figure(value, 4)


def difference(cell: DecidedCell, *, margin: bool = True) -> str:
    """`1.2 points lost (0.8 to 1.6), margin 1`."""
    low, high = cell.ci95
    if cell.what in ("latency", "size"):
        what = "as long" if cell.what == "latency" else "as large"
        text = f"{1 + cell.effect:.3f} times {what}"
        text += f" ({1 + low:.3f} to {1 + high:.3f})" if cell.what == "latency" else ""
        return f"{text}, margin {words.percent(cell.margin, 0)}" if margin else text
    # of what is better when it is more, a loss is shown as less
    ends = sorted((low, high), reverse=cell.name in (*_SHARES, "accuracy.cosine"))
    places = _places(cell, max(abs(cell.effect), abs(low), abs(high)))
    middle, first, last = (_effect(cell, end, places) for end in (cell.effect, *ends))
    text = " ".join(part for part in (middle, _unit(cell), f"({first} to {last})") if part)
    return f"{text}, margin {_effect(cell, cell.margin, _places(cell, cell.margin)).lstrip('+−')}" if margin else text


def sheet(cells: Sequence[DecidedCell], kind: str, *, margin: bool = True) -> Sheet:
    """A line for each thing that was compared."""
    title = titles(cells, kind)
    sides = [["–" if each is None else value(cell, each) for each in (cell.a, cell.b)] for cell in cells]
    body = [
        [title(cell), *both, difference(cell, margin=margin), answered(cell)]
        for cell, both in zip(cells, sides, strict=True)
    ]
    return Sheet(["", "A", "B", "B against A", "answer"], body, 2)


def _effect(cell: DecidedCell, effect: float, places: int) -> str:
    """A difference as it is told, without its unit; above zero is for the worse, which of a share is fewer."""
    if cell.name in _SHARES:
        return words.points(-effect, places)
    if cell.name == "accuracy.perplexity":
        effect = 100 * expm1(min(effect, 700.0))
    return words.signed(-effect if cell.name == "accuracy.cosine" else effect, places)


def _places(cell: DecidedCell, largest: float) -> int:
    """Decimal places: those of its unit, more where that would say nothing of the largest of what stands together."""
    if cell.name in _SHARES:
        return 2
    if cell.name == "accuracy.perplexity":
        return 1
    return 4 if largest >= 1e-3 or largest == 0 else min(1 - floor(log10(largest)), 9)


def answered(cell: DecidedCell) -> str:
    """`worse`, `worse, twice` where a second run said the same, `same, once` where it did not."""
    return f"{cell.answer}{ {None: '', True: ', twice', False: ', once'}[cell.confirmed] }"


def about(side: NamedSide) -> str:
    """`awq-int4, 4.31 bits a weight, scored in torch`."""
    parts = [side.recipe] + ([f"{words.figure(side.bits, 3)} bits a weight"] if side.bits is not None else [])
    return ", ".join(parts + ([f"scored in {side.runtime}"] if side.runtime else []))


def group(data: Compared, what: Sequence[str]) -> tuple[list[DecidedCell], str]:
    """The cells of some kinds, and what they rest on."""
    cells = [cell for cell in data.cells if cell.what in what]
    how = "; ".join(dict.fromkeys(HOW[cell.how] for cell in cells if HOW[cell.how]))
    return cells, ", ".join(part for part in (data.data if "accuracy" in what else "", how) if part)


def flipped(flips: WordFlips) -> str:
    """How many next words flipped, in a sentence."""
    return (
        f"{flips.lost:,} next words that A alone has right, {flips.gained:,} that B alone has; of {flips.n:,}, "
        f"{words.percent(flips.agree)} the same guess; McNemar p {words.chance(flips.p)}"
    )


def _unit(cell: DecidedCell) -> str:
    if cell.name in _SHARES:
        return "points"
    return {"accuracy.perplexity": "%", "accuracy.kl": "nats"}.get(cell.name, "")


def layer_sentences(pairs: Sequence[LayerPair]) -> list[str]:
    """How many layers there are, how many are stored in another way, and the mean errors of each side."""
    other = [pair for pair in pairs if pair.differs]
    found = [f"{words.plural(len(pairs), 'quantized layer')}, {len(other) or 'none'} stored in another way"]
    if other:
        first = other[0]
        found[0] += f"; first {first.name}: A {stored(first.a)}; B {stored(first.b)}"
    weights = [pair.errors for pair in pairs if pair.errors is not None]
    outputs = [pair.outputs for pair in pairs if pair.outputs is not None]
    for what, known in (("squared weight error, ‖W − Ŵ‖² / ‖W‖²", weights), ("output error, ‖ŷ − y‖ / ‖y‖", outputs)):
        if known:
            means = [words.share(sum(errors[side] for errors in known) / len(known)) for side in (0, 1)]
            found.append(f"mean relative {what}: A {means[0]}, B {means[1]}")
    return found


def worst(pairs: Sequence[LayerPair]) -> list[LayerPair]:
    """The layers whose error rises from A to B, the most first: of their outputs if all are known, else of weights."""
    outputs = by_output(pairs)
    risen = [(_rise(pair.outputs if outputs else pair.errors), pair) for pair in pairs]
    return [pair for rise, pair in sorted(risen, key=lambda each: -each[0]) if rise > 0]


def by_output(pairs: Sequence[LayerPair]) -> bool:
    """Whether layers are set against each other by their outputs; else by their weights."""
    return all(pair.outputs is not None for pair in pairs)


def _rise(errors: tuple[float, float] | None) -> float:
    return 0.0 if errors is None else errors[1] - errors[0]


def format_of(layer: LayerEntry | None) -> str:
    """The format of a layer's weights."""
    return "floats" if layer is None else str(layer.scheme.get("format"))


def stored(layer: LayerEntry | None) -> str:
    """How a layer is stored, in words."""
    if layer is None:
        return "floats"
    weights, inputs = figures.scheme_of(layer.scheme), layer.activations
    if inputs is None:
        return weights
    how = "as the model runs" if inputs.get("dynamic") else "fixed"
    return f"{weights}; inputs {inputs.get('format')} per {inputs.get('granularity')}, {how}"


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
    answer_ = headline(data)
    answer = Conclusion(
        _ANSWERS.get(answer_, answer_),
        _TONES[data.verdict] if answer_ == data.verdict else "good",
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
        [(Styled(letter, "strong"), f" {side.name}: {about(side)}") for letter, side in (("A", data.a), ("B", data.b))],
        [answer, *(Remark(words.sentence(note), "note") for note in data.notes)],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        [*facts, *(("timed on", device) for device in devices)],
        made=f"Made by quantkit {version} from what both bundles hold.".replace("  ", " "),
    )


def _cells(data: Compared, cells: Sequence[DecidedCell], about: str = "") -> list[Part]:
    """Build a line for each thing that was compared, and what they rest on."""
    table = sheet(cells, data.kind)
    rows = [[*row[:-1], Styled(row[-1], _CELLS[cell.answer])] for row, cell in zip(table.rows, cells, strict=True)]
    return [*([Remark(f"{words.sentence(about)}.", "caption")] if about else []), replace(table, rows=rows)]


def _charts(panels: Sequence[Plot], captions: Sequence[str] = ()) -> Exhibit:
    """Charts whose data stands in the table over them."""
    return Exhibit(captions, panels, [], Sheet([], []))


def _accuracy(data: Compared) -> list[Part]:
    """Build every difference in its margins: what matters is whether an interval reaches beyond one."""
    cells, about = group(data, ("accuracy",))
    if not cells:
        return []
    title = titles(cells, data.kind)
    points = []
    for cell in cells:
        low, high = (end / cell.margin for end in cell.ci95)
        text = f"{difference(cell, margin=False)}, {answered(cell)}"
        points.append(ChartPoint(title(cell), cell.effect / cell.margin, (low, high), text))
    ends = [end for point in points for end in (point.value, *(point.interval or ()))]
    axis = axes.straight_axis("how much worse B is, in margins", [*ends, -1.2, 1.2])
    marks = [Mark(-1.0, "a margin better", dotted=True), Mark(1.0, "a margin worse", dotted=True)]
    alt = "Each measure's difference from A to B with its 95 % interval, divided by its margin; worse is to the right"
    chart = Plot("B against A, in margins", alt, charts.forest(points, axis, marks=marks), wide=True)
    return [*_cells(data, cells, about), _charts([chart])]


def _times(data: Compared) -> list[Part]:
    """Build how many times as long B takes: against the batch, and alone where there is one batch."""
    cells, about = group(data, ("latency",))
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
        hover = [f"{label}, batch {cell.batch}: {difference(cell, margin=False)}, {cell.answer}" for cell in cells]
        batches = [float(cell.batch or 1) for cell in cells]
        ratios = [1 + cell.effect for cell in cells]
        curves.append(Curve(label, _LINES[min(i, len(_LINES) - 1)], batches, ratios, hover, band))
    across = axes.points_axis("batch", [x for curve in curves for x in curve.x])
    up, noise = _ratios([cell for cells in lines.values() for cell in cells]), (1 / (1 + margin), 1 + margin)
    figure = charts.lines(curves, across, up, even=1.0, noise=noise, hover="closest")
    alt = "How many times as long B takes as A, by batch, with 95 % intervals; both axes logarithmic"
    return Plot("B's time over A's, by batch", alt, figure, wide=True)


def _alone(cells: Sequence[DecidedCell], data: Compared) -> Plot:
    title, points = titles(cells, data.kind), []
    for cell in cells:
        interval = (1 + cell.ci95[0], 1 + cell.ci95[1])
        text = f"{difference(cell, margin=False)}, {answered(cell)}"
        points.append(ChartPoint(title(cell), 1 + cell.effect, interval, text))
    figure = charts.forest(points, _ratios(cells), marks=[Mark(1.0, "as long")])
    return Plot("B's time over A's", "How many times as long B takes as A, with 95 % intervals", figure, wide=True)


def _ratios(cells: Sequence[DecidedCell]) -> Axis:
    ends = [1 + end for cell in cells for end in (cell.effect, *cell.ci95)]
    return axes.log_axis("B's time / A's", [*ends, 1.0], form=lambda value: f"{value:g}×")


def _size(data: Compared) -> list[Part]:
    cells, _ = group(data, ("size",))
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
    outputs, moved = by_output(pairs), worst(pairs)
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
        kept = f"{format_of(pair.a)} → {format_of(pair.b)}" if pair.differs else ""
        brief.append([pair.name, *map(words.share, (pair.outputs if outputs else pair.errors) or ()), kept])
    body = [
        [pair.name, *(["–", "–"] if both is None else map(words.share, both)), stored(pair.a), stored(pair.b)]
        for pair, both in errors
    ]
    full = Sheet(["layer", f"A's {what}", "B's", "A is stored as", "B"], body, 2)
    rises = f"largest rises, {'outputs' if outputs else 'weights'}"
    return [
        *(Remark(f"{words.sentence(line)}.") for line in layer_sentences(pairs)),
        *([Sheet([rises, "A", "B", ""], brief, 1)] if brief else []),
        Exhibit([], panels, [], full),
    ]


def _flips(flips: WordFlips | None) -> list[Part]:
    if flips is None:
        return []
    head = ("text, and what follows", "right", "A says", "B says")
    rows = [_flip(flip) for flip in flips.examples]
    parts: list[Part] = [Remark(f"{words.sentence(flipped(flips))}.")]
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
