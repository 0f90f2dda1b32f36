"""Report of a comparison of two bundles, B against A: verdict, differences, changed next words, layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import expm1, floor, inf, log10

from quantkit.bundle import LayerEntry
from quantkit.measurement.compared import Compared, DecidedCell, LayerPair, NamedSide, WordFlip, WordFlips
from quantkit.report.bundle import figures, load, tasks
from quantkit.report.bundle.harm import heat
from quantkit.report.kit import charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, ChartPoint, Curve, Mark, Plot
from quantkit.report.kit.tree import Conclusion, Document, Exhibit, Line, On, Part, Remark, Section, Sheet, Styled

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
    "accuracy.wer": "word error rate",
    "latency.decode_step": "decode step",
    "latency.prefill": "prefill",
    "size.bytes": "weights",
}
_SHARES = tuple(f"accuracy.{x}" for x in ("next_word", "top1", "recall_at_1", "top1_agreement", "same"))
HOW = {
    "paired": "item by item",
    "apart": "each by its own interval",
    "interleaved": "timed in turns in one run",
    "ratio of ratios": "a ratio of ratios: each timed against a baseline, in its own run; --measure times both in one",
    "counted": "",
}
_GAINS = {"size": "smaller", "latency": "faster", "accuracy": "nearer"}
_TONES = {"B better": "good", "same": "good", "A better": "bad", "mixed": "bad", "inconclusive": "inconclusive"}
_ANSWERS = {"same": "the same within every margin", "mixed": "mixed: B is better in one thing and worse in another"}
_ANSWERS |= {"A better": "A is better", "B better": "B is better", "inconclusive": "not decided"}
_CELLS = {"better": "good", "worse": "bad", "same": "", "inconclusive": "inconclusive"}
# most cells that one reason names
_NAMED = 3
# colours of the lines of a figure
_LINES = (QUANTIZED, ORIGINAL, "good", "bad", "muted")
# layers in the short table; next words outside the folded one
_LAYERS, _WORDS = 5, 4


def because(cells: Sequence[DecidedCell], kind: str) -> list[str]:
    """Give the reasons of the verdict, one sentence each: worse, better, undecided, then the same."""
    title, reasons = _titles(cells, kind), []

    def named(answer: str, sentence: Callable[[DecidedCell], str], more: str) -> list[str]:
        those = [cell for cell in cells if cell.answer == answer]
        rest = [more.format(len(those) - _NAMED)] if len(those) > _NAMED else []
        return [*map(sentence, those[:_NAMED]), *rest]

    def sure(cell: DecidedCell) -> str:
        return f"B is {cell.answer} in {title(cell)}: {difference(cell)}{_within(cell)}"

    def unknown(cell: DecidedCell) -> str:
        return f"not decided, {title(cell)}: {difference(cell)}; {_seen(cell)}"

    for answer in ("worse", "better"):
        reasons += named(answer, sure, "and in {} more")
    reasons += named("inconclusive", unknown, "nor {} more")
    same = "; ".join(named("same", title, "and {} more"))
    return [*reasons, *([f"the same within the margin: {same}"] if same else [])]


def headline(data: Compared) -> str:
    """Give the verdict; if B is worse only within its recipe's limits, name its gains and losses instead."""
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
    if cell.answer == "worse" and cell.shipped:
        return f"; {cell.shipped}"
    if cell.answer != "worse" or cell.allowed is None:
        return ""
    if cell.allowed == inf:
        return "; its recipe sets no gate on it"
    return f"; its recipe allows {_amount(cell, cell.allowed)} {_unit(cell)}".rstrip()


def _seen(cell: DecidedCell) -> str:
    if cell.doubt == "ceiling":
        return "the speed-up is more than bytes and operations allow: a time or a ceiling is wrong, measure it again"
    if cell.what == "latency":
        return f"a slowdown to {words.short(1 + cell.detectable)} times as long would have been seen"
    lost = words.percent(cell.detectable) if cell.what == "size" else f"{_amount(cell, cell.detectable)} {_unit(cell)}"
    return f"a loss of {lost.rstrip()} would have been seen"


def _titles(cells: Sequence[DecidedCell], kind: str) -> Callable[[DecidedCell], str]:
    """Return a function to name a cell: `decode step, batch 1, context 128`.

    Times also name their device and runtime if there are several. Only a decoder's `prefill` is called so; else it is a
    `pass`.
    """
    places = {(cell.device, cell.runtime) for cell in cells if cell.what == "latency"}

    def title(cell: DecidedCell) -> str:
        shape, name = cell.shape or {}, _NAMES.get(cell.name, cell.name)
        return words.joined(
            "pass" if cell.name == "latency.prefill" and kind != "decoder" else name,
            f"output {words.visible(cell.output)}" if cell.output else "",
            f"batch {cell.batch}" if cell.batch else "",
            f"context {shape['context']:,}" if shape.get("context") else "",
            f"{shape['new_tokens']:,} tokens" if shape.get("new_tokens", 1) > 1 else "",
            *((cell.device or "", cell.runtime or "") if cell.what == "latency" and len(places) > 1 else ()),
        )

    return title


def _value(cell: DecidedCell, value: float | None) -> str:
    if value is None:
        return "–"
    if cell.what in ("latency", "size"):
        return words.moment(value) if cell.what == "latency" else words.size(value)
    return words.percent(value) if cell.name in _SHARES else words.figure(value, 4)


def difference(cell: DecidedCell, *, margin: bool = True) -> str:
    """Format the difference of a cell: `1.2 points lost (0.8 to 1.6), margin 1`."""
    low, high = cell.ci95
    if cell.what in ("latency", "size"):
        text = f"{1 + cell.effect:.3f} times as {'long' if cell.what == 'latency' else 'large'}"
        text += f" ({1 + low:.3f} to {1 + high:.3f})" if cell.what == "latency" else ""
        return f"{text}, margin {words.whole(cell.margin)}" if margin else text
    # for a measure that is better when larger, a loss is shown as a decrease
    ends = sorted((low, high), reverse=cell.name in (*_SHARES, "accuracy.cosine"))
    places = _places(cell, max(abs(cell.effect), abs(low), abs(high)))
    middle, first, last = (_effect(cell, end, places) for end in (cell.effect, *ends))
    text = words.joined(middle, _unit(cell), f"({first} to {last})", by=" ")
    return f"{text}, margin {_amount(cell, cell.margin)}" if margin else text


def _effect(cell: DecidedCell, effect: float, places: int) -> str:
    """Format a difference without its unit. A positive effect means worse, so the sign of a share is turned around."""
    if cell.name in _SHARES:
        return words.points(-effect, places)
    if cell.name == "accuracy.perplexity":
        effect = 100 * expm1(min(effect, 700.0))
    return words.signed(-effect if cell.name == "accuracy.cosine" else effect, places)


def _amount(cell: DecidedCell, effect: float) -> str:
    return _effect(cell, effect, _places(cell, effect)).lstrip("+−")


def _places(cell: DecidedCell, largest: float) -> int:
    if cell.name in _SHARES:
        return 2
    if cell.name == "accuracy.perplexity":
        return 1
    return 4 if largest >= 1e-3 or largest == 0 else min(1 - floor(log10(largest)), 9)


def _unit(cell: DecidedCell) -> str:
    if cell.name in _SHARES:
        return "points"
    return {"accuracy.perplexity": "%", "accuracy.kl": "nats"}.get(cell.name, "")


def _answered(cell: DecidedCell) -> str:
    """Format the answer: `worse, twice` if a second run confirmed it, `worse, once` if it did not."""
    return f"{cell.answer}{ {None: '', True: ', twice', False: ', once'}[cell.confirmed] }"


def document(data: Compared, version: str = "") -> Document:
    """Build the tree of a comparison."""
    verdict = headline(data)
    tone = _TONES[data.verdict] if verdict == data.verdict else "good"
    reasons = [words.sentence(reason) for reason in data.because]
    answer = Conclusion(_ANSWERS.get(verdict, verdict), tone, reasons, label="verdict")
    chapters = [
        ("accuracy", "Accuracy", _accuracy(data)),
        ("time", "Time, by batch", _times(data)),
        ("load", "Under load", load.against(data.load) if data.load else []),
        ("tasks", "Tasks", tasks.parts(data.tasks, "A", "B")),
        ("size", "Size", _size(data)),
        ("layers", "Layer by layer", _layers(data.layers)),
        ("words", "Changed next words", _flips(data.flips)),
    ]
    sides = (("A", data.a), ("B", data.b))
    facts = [(f"{letter}'s content", side.content_sha256) for letter, side in sides]
    facts += [("scored", data.data)] if data.data else []
    devices = dict.fromkeys(cell.device for cell in data.cells if cell.what == "latency" and cell.device)
    return Document(
        f"{data.model}: B against A",
        [(Styled(letter, "strong"), f" {side.name}: {_about(side)}") for letter, side in sides],
        [answer, *(Remark(words.sentence(note), "note") for note in data.notes)],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        [*facts, *(("timed on", device) for device in devices)],
        footer=f"Made by quantkit {version} from the manifests and measurements of both bundles.".replace("  ", " "),
    )


def _about(side: NamedSide) -> str:
    bits = f"{words.short(side.bits)} bits a weight" if side.bits is not None else ""
    return words.joined(side.recipe, bits, f"scored in {side.runtime}" if side.runtime else "")


def _cells(data: Compared, what: str) -> tuple[list[DecidedCell], list[Part]]:
    cells = [cell for cell in data.cells if cell.what == what]
    how = "; ".join(dict.fromkeys(HOW[cell.how] for cell in cells if HOW[cell.how]))
    about = words.joined(data.data if what == "accuracy" else "", how) if what != "size" else ""
    title, rows = _titles(cells, data.kind), []
    for cell in cells:
        answer = Styled(_answered(cell), _CELLS[cell.answer])
        rows.append([title(cell), _value(cell, cell.a), _value(cell, cell.b), difference(cell), answer])
    table = Sheet(["", "A", "B", "B against A", "answer"], rows, 2)
    return cells, [*([Remark(f"{words.sentence(about)}.", "caption")] if about else []), table]


def _charts(panels: Sequence[Plot], captions: Sequence[str] = ()) -> Exhibit:
    return Exhibit(captions, panels, [], Sheet([], []))


def _accuracy(data: Compared) -> list[Part]:
    """Build the table, and a chart of every difference divided by its margin: beyond 1 a difference matters."""
    cells, parts = _cells(data, "accuracy")
    if not cells:
        return []
    title, points = _titles(cells, data.kind), []
    for cell in cells:
        low, high = (end / cell.margin for end in cell.ci95)
        text = f"{difference(cell, margin=False)}, {_answered(cell)}"
        points.append(ChartPoint(title(cell), cell.effect / cell.margin, (low, high), text))
    ends = [end for point in points for end in (point.value, *(point.interval or ()))]
    axis = charts.straight_axis("how much worse B is, in margins", [*ends, -1.2, 1.2])
    marks = [Mark(-1.0, "a margin better", dotted=True), Mark(1.0, "a margin worse", dotted=True)]
    alt = "Each measure's difference from A to B with its 95 % interval, divided by its margin; worse is to the right"
    chart = Plot("B against A, in margins", alt, charts.forest(points, axis, marks=marks), wide=True)
    return [*parts, _charts([chart])]


def _times(data: Compared) -> list[Part]:
    cells, parts = _cells(data, "latency")
    if not cells:
        return []
    lines = words.by(sorted(cells, key=lambda cell: cell.batch or 0), lambda cell: _line(cell, data.kind))
    several = {label: those for label, those in lines.items() if len(those) > 1}
    alone = [cell for label, those in lines.items() if label not in several for cell in those]
    panels = ([_by_batch(several, cells[0].margin)] if several else []) + ([_alone(alone, data)] if alone else [])
    below = f"Below 1 B is faster. The margin is {words.whole(cells[0].margin)} either way."
    return [*parts, _charts(panels, [below])]


def _line(cell: DecidedCell, kind: str) -> str:
    shape = cell.shape or {}
    if cell.name == "latency.decode_step":
        return f"step, context {shape.get('context', 0):,}"
    tokens = shape.get("new_tokens", 1)
    return ("prefill" if kind == "decoder" else "pass") + (f", {tokens:,} tokens" if tokens > 1 else "")


def _by_batch(lines: dict[str, list[DecidedCell]], margin: float) -> Plot:
    drawn = []
    for i, (label, cells) in enumerate(lines.items()):
        band = [(1 + cell.ci95[0], 1 + cell.ci95[1]) for cell in cells]
        hover = [f"{label}, batch {cell.batch}: {difference(cell, margin=False)}, {cell.answer}" for cell in cells]
        batches, ratios = [float(cell.batch or 1) for cell in cells], [1 + cell.effect for cell in cells]
        drawn.append(Curve(label, _LINES[min(i, len(_LINES) - 1)], batches, ratios, hover, band))
    look = {"even": 1.0, "noise": (1 / (1 + margin), 1 + margin), "hover": "closest"}
    alt, up = "How many times as long B takes as A, by batch, with 95 % intervals", "B's time / A's"
    title = "B's time over A's, by batch"
    return charts.over(title, alt, drawn, "batch", up, form=words.ratio, also=[1.0], wide=True, **look)


def _alone(cells: Sequence[DecidedCell], data: Compared) -> Plot:
    title, points = _titles(cells, data.kind), []
    for cell in cells:
        interval = (1 + cell.ci95[0], 1 + cell.ci95[1])
        text = f"{difference(cell, margin=False)}, {_answered(cell)}"
        points.append(ChartPoint(title(cell), 1 + cell.effect, interval, text))
    ends = [1 + end for cell in cells for end in (cell.effect, *cell.ci95)]
    up = charts.log_axis("B's time / A's", [*ends, 1.0], form=words.ratio)
    figure = charts.forest(points, up, marks=[Mark(1.0, "as long")])
    return Plot("B's time over A's", "How many times as long B takes as A, with 95 % intervals", figure, wide=True)


def _size(data: Compared) -> list[Part]:
    cells, parts = _cells(data, "size")
    known = [cell for cell in cells if cell.a is not None and cell.b is not None]
    if not known:
        return []
    sizes = [float(known[0].a or 0), float(known[0].b or 0)]
    totals = [words.size(size) for size in sizes]
    figure = charts.stacked(["A", "B"], [BarPart("weights", sizes, QUANTIZED)], totals, "weights")
    chart = Plot("Weights that the runtime loads", f"A {totals[0]}, B {totals[1]}", figure, wide=True)
    return [*parts, _charts([chart])]


# --- layers and words ------------------------------------------------------------------------------------------------


def _layers(pairs: Sequence[LayerPair]) -> list[Part]:
    """Compare the layers by the errors of their outputs if all are known, else of their weights."""
    if not pairs:
        return []
    outputs = all(pair.outputs is not None for pair in pairs)
    errors = [(pair, pair.outputs if outputs else pair.errors) for pair in pairs]
    known = [(pair, both) for pair, both in errors if both is not None]
    what = "relative output error" if outputs else "relative squared weight error"
    panels: list[Plot] = []
    largest = max((error for _, both in known for error in both), default=0.0)
    for side, letter in enumerate("AB" if known else ""):
        alt = f"{what} of every layer of {letter} as colours: kinds of layers by blocks"
        panels += heat([(pair.name, both[side]) for pair, both in known], f"{letter}'s {what}", alt)
    for chart in panels:  # one colour scale makes the two comparable
        chart.figure["data"][0] |= {"zmin": 0.0, "zmax": largest}
    risen = sorted((entry for entry in known if entry[1][1] > entry[1][0]), key=lambda entry: entry[1][0] - entry[1][1])
    brief: list[list[Line]] = []
    for pair, both in risen[:_LAYERS]:
        formats = (str(layer.scheme.get("format")) if layer else "floats" for layer in (pair.a, pair.b))
        brief.append([pair.name, *map(words.share, both), " → ".join(formats) if pair.differs else ""])
    body = [
        [pair.name, *(["–", "–"] if both is None else map(words.share, both)), _stored(pair.a), _stored(pair.b)]
        for pair, both in errors
    ]
    full = Sheet(["layer", f"A's {what}", "B's", "A is stored as", "B"], body, 2)
    rises = f"largest rises, {'outputs' if outputs else 'weights'}"
    return [
        *(Remark(f"{words.sentence(line)}.") for line in layer_sentences(pairs)),
        *([Sheet([rises, "A", "B", ""], brief, 1)] if brief else []),
        Exhibit([], panels, [], full),
    ]


def layer_sentences(pairs: Sequence[LayerPair]) -> list[str]:
    """Count the layers, and those stored in another way; give the mean errors of both sides."""
    other = [pair for pair in pairs if pair.differs]
    sentences = [f"{words.plural(len(pairs), 'quantized layer')}, {len(other) or 'none'} stored differently"]
    if other:
        sentences[0] += f"; first {other[0].name}: A {_stored(other[0].a)}; B {_stored(other[0].b)}"
    weights = [pair.errors for pair in pairs if pair.errors is not None]
    outputs = [pair.outputs for pair in pairs if pair.outputs is not None]
    for what, known in (("squared weight error, ‖W − Ŵ‖² / ‖W‖²", weights), ("output error, ‖ŷ − y‖ / ‖y‖", outputs)):
        if known:
            means = [words.share(sum(errors[side] for errors in known) / len(known)) for side in (0, 1)]
            sentences.append(f"mean relative {what}: A {means[0]}, B {means[1]}")
    return sentences


def _stored(layer: LayerEntry | None) -> str:
    if layer is None:
        return "floats"
    weights, inputs = figures.scheme_of(layer.scheme), layer.activations
    if inputs is None:
        return weights
    how = "scaled as the model runs" if inputs.get("dynamic") else "with fixed scales"
    return f"{weights}; inputs {inputs.get('format')} per {inputs.get('granularity')}, {how}"


def _flips(flips: WordFlips | None) -> list[Part]:
    if flips is None:
        return []
    parts: list[Part] = [
        Remark(
            f"Of {flips.n:,} next words, {flips.lost:,} are right in A only and {flips.gained:,} in B only; "
            f"{words.percent(flips.agree)} of the predictions agree; McNemar p {words.chance(flips.p)}."
        )
    ]
    head, rows = ("text [next word]", "right", "A predicts", "B predicts"), [_flip(flip) for flip in flips.examples]
    if rows:
        title = "Next words that only one side predicts right"
        parts.append(Sheet(head, rows[:_WORDS], words=4, title=title, stacked=True))
    if len(rows) > _WORDS:
        more = words.plural(len(rows) - _WORDS, "more word")
        parts.append(Sheet(head, rows[_WORDS:], words=4, title=more, folded=True, stacked=True))
    about = "A dot is a space at either end of a word. The largest changes come first."
    return [*parts, Remark(about, "caption", On.PAGE)]


def _flip(flip: WordFlip) -> list[Line]:
    """Build one row. Model text is made visible here; control characters never reach a terminal."""
    text: Line = f"sequence {flip.sequence}, position {flip.position}"
    if flip.before is not None and flip.follows is not None:
        text = (f"… {words.visible(flip.before)} ", Styled(f"[{words.visible(flip.follows)}]", "strong"))
    guesses = ((flip.a, flip.a_chance), (flip.b, flip.b_chance))
    return [
        text,
        f"{flip.right} only",
        *(f"{words.visible(guess)} {words.whole(chance)}" for guess, chance in guesses),
    ]
