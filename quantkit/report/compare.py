"""Two versions of one model on one screen: the verdict, accuracy, flipped words, times, layers. B is set against A."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import expm1

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantkit.bundle import LayerEntry
from quantkit.measure.compared import Cell, Compared, Flip, Flips, LayerPair, Named
from quantkit.report import figures, words

_DIM = "dim"
_STYLES = {"better": "green", "worse": "bold red", "same": "", "inconclusive": "yellow"}
_VERDICTS = {
    "A better": "bold red",
    "B better": "green",
    "same": "green",
    "mixed": "bold red",
    "inconclusive": "yellow",
}
_NAMES = {
    "accuracy.next_word": "next word right",
    "accuracy.kl": "KL divergence",
    "accuracy.perplexity": "perplexity",
    "accuracy.top1": "top-1",
    "accuracy.recall_at_1": "recall at 1",
    "accuracy.top1_agreement": "agreement",
    "accuracy.cosine": "cosine",
    "latency.decode_step": "decode step",
    "latency.prefill": "prefill",
    "size.bytes": "weights",
}
_SHARES = ("accuracy.next_word", "accuracy.top1", "accuracy.recall_at_1", "accuracy.top1_agreement")
_HOW = {
    "paired": "item by item",
    "apart": "each by its own interval",
    "interleaved": "timed in turns in one run",
    "ratio of ratios": "a ratio of ratios: each to one baseline, in runs of their own; --measure times both in one",
    "counted": "",
}
# cells of one answer that the reasons name, and layers that a screen has
_NAMED, _LAYERS = 3, 5


def because(cells: Sequence[Cell]) -> list[str]:
    """The reasons of the verdict: what is worse, what is better, what is not known; a sentence each."""
    found = []
    title = titles(cells)
    for answer in ("worse", "better"):
        those = [cell for cell in cells if cell.answer == answer]
        found += [f"B is {answer} in {title(cell)}: {_difference(cell)}" for cell in those[:_NAMED]]
        found += [f"and in {len(those) - _NAMED} more"] if len(those) > _NAMED else []
    open_ = [cell for cell in cells if cell.answer == "inconclusive"]
    for cell in open_[:_NAMED]:
        found.append(f"not decided, {title(cell)}: {_difference(cell)}; {_seen(cell)}")
    found += [f"nor {len(open_) - _NAMED} more"] if len(open_) > _NAMED else []
    if same := [cell for cell in cells if cell.answer == "same"]:
        listed = "; ".join(title(cell) for cell in same[:_NAMED])
        more = f"; and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
        found.append(f"the same within the margin: {listed}{more}")
    return found


def _seen(cell: Cell) -> str:
    """The smallest loss that would have been called."""
    if cell.what == "latency":
        return f"it would have been seen from {words.figure(1 + cell.detectable, 3)} times as long on"
    return f"a loss of {_effect(cell, cell.detectable)} would have been seen"


def titles(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """`decode step, batch 1, context 128`, with the device and runtime of times where they have several."""
    timed = [cell for cell in cells if cell.what == "latency"]
    places = {(cell.device, cell.runtime) for cell in timed}

    def title(cell: Cell) -> str:
        where = (cell.device, cell.runtime) if cell.what == "latency" and len(places) > 1 else ()
        return ", ".join([_title(cell), *(part for part in where if part)])

    return title


def _title(cell: Cell) -> str:
    shape = cell.shape or {}
    parts = [_NAMES.get(cell.name, cell.name)]
    parts += [f"output {words.visible(cell.output)}"] if cell.output else []
    parts += [f"batch {cell.batch}"] if cell.batch else []
    parts += [f"context {shape['context']:,}"] if shape.get("context") else []
    parts += [f"{shape['new_tokens']:,} tokens"] if shape.get("new_tokens", 1) > 1 else []
    return ", ".join(parts)


def terminal(data: Compared) -> list[RenderableType]:
    """All of it on one screen."""
    answer = Text.assemble(("verdict: ", _DIM), (data.verdict, _VERDICTS[data.verdict]))
    found: list[RenderableType] = [Text(data.model, "bold"), Padding(_sides(data.a, data.b), (0, 0, 0, 2))]
    found += [Text(), Padding(answer, (0, 0, 0, 2))]
    found += [Padding(_marked("·", _DIM, reason), (0, 0, 0, 4)) for reason in data.because]
    found += [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in data.notes]
    for heading, what in (("accuracy", ("accuracy",)), ("time and size", ("latency", "size"))):
        cells = [cell for cell in data.cells if cell.what in what]
        if cells:
            how = "; ".join(dict.fromkeys(_HOW[cell.how] for cell in cells if _HOW[cell.how]))
            about = ", ".join(part for part in (data.data if heading == "accuracy" else "", how) if part)
            found += [Text(), Padding(Text.assemble((heading, "bold"), (f"  {about}", _DIM)), (0, 0, 0, 2))]
            found.append(Padding(_table(cells), (0, 0, 0, 4)))
    found += _flips(data.flips) if data.flips is not None else []
    return [*found, *_layers(data.layers)]


def _sides(a: Named, b: Named) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for letter, side in (("A", a), ("B", b)):
        parts = [side.recipe] + ([f"{words.figure(side.bits, 3)} bits a weight"] if side.bits is not None else [])
        parts += [f"scored in {side.runtime}"] if side.runtime else []
        table.add_row(Text(letter, "bold"), Text(side.name), Text(", ".join(parts), _DIM))
    return table


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("")
    for name in ("A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("B against A")
    table.add_column("")
    title = titles(cells)
    for cell in cells:
        answer = {None: "", True: ", twice", False: ", once"}[cell.confirmed]
        table.add_row(
            title(cell),
            *("–" if value is None else _value(cell, value) for value in (cell.a, cell.b)),
            _difference(cell, margin=False),
            Text(f"{cell.answer}{answer}", _STYLES[cell.answer]),
        )
    return table


def _value(cell: Cell, value: float) -> str:
    if cell.what == "latency":
        return words.moment(value)
    if cell.what == "size":
        return words.size(value)
    return words.percent(value) if cell.name in _SHARES else words.figure(value, 4)


def _difference(cell: Cell, *, margin: bool = True) -> str:
    """`1.2 points lost (0.8 to 1.6), margin 1`."""
    low, high = cell.ci95
    if cell.what in ("latency", "size"):
        what = "as long" if cell.what == "latency" else "as large"
        text = f"{1 + cell.effect:.3f} times {what}"
        text += f" ({1 + low:.3f} to {1 + high:.3f})" if cell.what == "latency" else ""
        return f"{text}, margin {words.percent(cell.margin, 0)}" if margin else text
    # of what is better when it is more, a loss is shown as less
    ends = sorted((low, high), reverse=cell.name in (*_SHARES, "accuracy.cosine"))
    first, last = (_effect(cell, end, bare=True) for end in ends)
    text = f"{_effect(cell, cell.effect, bare=True)} {_unit(cell)} ({first} to {last})"
    return f"{text}, margin {_effect(cell, cell.margin, bare=True).lstrip('+−')}" if margin else text


def _effect(cell: Cell, effect: float, *, bare: bool = False) -> str:
    """A difference as it is told; above zero is for the worse, which of a share is fewer."""
    if cell.what in ("latency", "size"):
        return words.percent(effect)
    if cell.name in _SHARES:
        text = words.points(-effect, 2)
    elif cell.name == "accuracy.perplexity":
        text = _signed(100 * expm1(min(effect, 700.0)), 1)
    else:
        text = _signed(-effect if cell.name == "accuracy.cosine" else effect, 4)
    return text if bare else f"{text.lstrip('+−')} {_unit(cell)}".rstrip()


def _unit(cell: Cell) -> str:
    if cell.name in _SHARES:
        return "points"
    return {"accuracy.perplexity": "%", "accuracy.kl": "nats"}.get(cell.name, "")


def _signed(value: float, places: int) -> str:
    text = f"{value:+.{places}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def _flips(flips: Flips) -> list[RenderableType]:
    head = (
        f"{flips.lost:,} next words that A alone has right, {flips.gained:,} that B alone has; of {flips.n:,}, "
        f"{words.percent(flips.agree)} the same guess; McNemar p {words.chance(flips.p)}"
    )
    found: list[RenderableType] = [Text(), Text("  flipped", "bold"), Padding(Text(head), (0, 0, 0, 4))]
    for side in ("A", "B"):
        those = [flip for flip in flips.examples if flip.right == side]
        if those:
            found.append(Padding(Text(f"{side} alone is right", _DIM), (0, 0, 0, 4)))
            found += [Padding(_flip(flip), (0, 0, 0, 6)) for flip in those]
    return found


def _flip(flip: Flip) -> Text:
    """`… tasks of the [war]  A ·war 61 %, B ·day 22 %`; the text of a model never reaches the terminal as it is."""
    text = Text()
    if flip.before is not None and flip.follows is not None:
        text.append(f"… {words.visible(flip.before)}")
        text.append(f" [{words.visible(flip.follows)}]", "bold")
    else:
        text.append(f"sequence {flip.sequence}, position {flip.position}")
    for side, guess, chance in (("A", flip.a, flip.a_chance), ("B", flip.b, flip.b_chance)):
        text.append(f"  {side}: {words.visible(guess)} {words.percent(chance, 0)}", _DIM)
    return text


def _layers(pairs: Sequence[LayerPair]) -> list[RenderableType]:
    if not pairs:
        return []
    found: list[RenderableType] = [Text(), Text("  layers", "bold")]
    found += [Padding(Text(line), (0, 0, 0, 4)) for line in layer_sentences(pairs)]
    moved = worst(pairs)[:_LAYERS]
    if not moved:
        return found
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    by_output = _by_output(pairs)
    table.add_column(f"largest rises, {'outputs' if by_output else 'weights'}", overflow="fold")
    for name in ("A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for pair in moved:
        shown = [words.percent(error, 2) for error in (pair.outputs if by_output else pair.errors) or ()]
        table.add_row(Text(pair.name), *shown, f"{_format(pair.a)} → {_format(pair.b)}" if pair.differs else "")
    return [*found, Padding(table, (0, 0, 0, 4))]


def layer_sentences(pairs: Sequence[LayerPair]) -> list[str]:
    """How many layers there are, how many are stored in another way, and the mean errors of each side."""
    other = [pair for pair in pairs if pair.differs]
    found = [f"{words.plural(len(pairs), 'quantized layer')}, {len(other) or 'none'} stored in another way"]
    if other:
        first = other[0]
        found[0] += f"; first {first.name}: A {stored(first.a)}; B {stored(first.b)}"
    weights = [pair.errors for pair in pairs if pair.errors is not None]
    outputs = [pair.outputs for pair in pairs if pair.outputs is not None]
    for what, known in (("weight error, ‖W − Ŵ‖² / ‖W‖²", weights), ("output error, ‖ŷ − y‖ / ‖y‖", outputs)):
        if known:
            means = [words.percent(sum(errors[side] for errors in known) / len(known), 2) for side in (0, 1)]
            found.append(f"mean relative {what}: A {means[0]}, B {means[1]}")
    return found


def worst(pairs: Sequence[LayerPair]) -> list[LayerPair]:
    """The layers whose error rises from A to B, the most first: of their outputs if all are known, else of weights."""
    by_output = _by_output(pairs)
    risen = [(_rise(pair.outputs if by_output else pair.errors), pair) for pair in pairs]
    return [pair for rise, pair in sorted(risen, key=lambda each: -each[0]) if rise > 0]


def _by_output(pairs: Sequence[LayerPair]) -> bool:
    return all(pair.outputs is not None for pair in pairs)


def _rise(errors: tuple[float, float] | None) -> float:
    return 0.0 if errors is None else errors[1] - errors[0]


def _format(layer: LayerEntry | None) -> str:
    return "floats" if layer is None else str(layer.scheme.get("format"))


def stored(layer: LayerEntry | None) -> str:
    """How a layer is stored, in words."""
    return "floats" if layer is None else figures.scheme_of(layer.scheme)


def _marked(mark: str, style: str, text: str) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text(mark, style), Text(text))
    return table
