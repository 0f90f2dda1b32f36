"""The report: `report.html` of a bundle, one file that needs no network.

It is made from the manifest and the measurements alone, so the same two give the same page. What comes from a model is
untrusted: Jinja escapes it in the text, JSON in a script element is escaped besides, and the page's own policy lets no
script run but its own three and no request leave. Plotly is embedded once, gzipped; the data of every figure is
also there as a table, for those who cannot see the figures or run no scripts.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit.bundle import Manifest
from quantkit.errors import MissingDependency
from quantkit.measure.rows import Row
from quantkit.report import card, charts, figures, words
from quantkit.report.charts import ORIGINAL, QUANTIZED, Curve, Figure, Interval, Mark, Part, Point

_FOLDER = Path(__file__).parent
_GENAI = """import onnxruntime_genai as og

model = og.Model("./onnx")
tokenizer = og.Tokenizer(model)
settings = og.GeneratorParams(model)
settings.set_search_options(max_length=64)
generator = og.Generator(model, settings)
generator.append_tokens(tokenizer.encode("The capital of France is"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))"""


@dataclass(frozen=True)
class Sheet:
    """The data behind a figure: a head, rows of text, and how many of the last columns are words, not numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: int = 0


@dataclass(frozen=True)
class Panel:
    """One figure with its title and what it shows, said in words."""

    title: str
    alt: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Figures that belong together.

    Args:
        said: what they show, one sentence each.
        panels: the figures.
        captions: how it was measured.
        sheet: the data.
        keys: (shade, what it stands for).
        title: over them; empty where the page has said it.
    """

    said: Sequence[str]
    panels: Sequence[Panel]
    captions: Sequence[str]
    sheet: Sheet
    keys: Sequence[tuple[str, str]] = ()
    title: str = ""


@dataclass(frozen=True)
class Tile:
    """A number that a reader remembers, what it is, and how sure it is."""

    value: str
    label: str
    detail: str


def page(
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str],
    *,
    build_up: Sequence[tuple[str, float]] | None = None,
) -> str:
    """The page as HTML.

    Args:
        manifest: of the bundle.
        rows: its measurements.
        notes: what a reader must know about the figures; stands beside them.
        build_up: (block, relative error of the hidden state behind it) in the order of the model.

    Raises:
        MissingDependency: plotly, extra `report`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    library = _library()
    script = _read("page.js")
    answer, because = figures.verdict(manifest)
    speed, prefill = _decode(manifest, rows), _prefill(manifest, rows)
    timed = any(row.name.startswith("latency.") and row.value is not None for row in rows)
    accuracy, layers, sizes = _accuracy(manifest, rows), _layers(manifest, build_up), _sizes(manifest, rows)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"change": figures.change, "relation": figures.relation, "short": figures.short}
    environment.filters |= {"size": words.size, "plural": words.plural}
    text = environment.get_template("page.html.j2").render(
        manifest=manifest,
        origin=card._origin(manifest),
        schemes=card._schemes(manifest),
        tone=_tone(manifest),
        answer=answer[:1].upper() + answer[1:],
        because=[reason.rstrip(". ") for reason in because],
        timed=timed,
        tiles=_tiles(rows),
        speed=speed,
        prefill=prefill,
        accuracy=accuracy,
        tables=_accuracy_tables(rows),
        scored=figures.scored(rows),
        notes=[note.rstrip(".") for note in [*notes, *_traps(rows, notes)]],
        layers=layers,
        sizes=sizes,
        groups=figures.grouped(manifest.decisions),
        gates=figures.gates(manifest.checks),
        checks=figures.other_checks(manifest.checks),
        commands=_commands(manifest),
        again=card._command(manifest),
        facts=_facts(manifest, rows),
        recipe=card._yaml({key: value for key, value in manifest.recipe.items() if key != "name"}),
        policy=_policy(script, library),
        # these three are this package's own and plotly's; everything else is escaped
        style=Markup(_read("page.css")),  # noqa: S704
        script=Markup(script),  # noqa: S704
        library=Markup(_packed(library)),  # noqa: S704
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise MissingDependency("plotly", extra="report", purpose="the report page") from None
    return str(get_plotlyjs())


def _packed(library: str) -> str:
    # a third of its size; browsers unpack it themselves (DecompressionStream)
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()


def _policy(*scripts: str) -> str:
    """What the page may do: draw, and run these scripts. Plotly sets styles on elements: hence one `unsafe-inline`."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


# --- verdict ---------------------------------------------------------------------------------------------------------


def _tone(manifest: Manifest) -> str:
    if manifest.state == "gate_failed":
        return "bad"
    if manifest.verdict is None:
        return "open"
    return {"ship_it": "good", "ship_up_to": "good"}.get(manifest.verdict.answer, "bad")


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    """Speed, size and accuracy, as far as they were measured."""
    found = []
    for name, label in (("latency.decode_step", "decode"), ("latency.prefill", "prefill")):
        ranked = sorted((r for r in rows if r.name == name and _ratio(r) is not None), key=_place)
        if ranked:
            row, ratio = ranked[0], _ratio(ranked[0]) or 0.0
            where = _where(row)
            sure = _between(row.baseline.ratio_ci95 if row.baseline else None, _times)
            found.append(Tile(_times(ratio), f"the speed in {label}", f"{where}{f', 95 % {sure}' if sure else ''}"))
            break
    sizes = [r for r in rows if r.name == "size.bytes" and r.value and r.baseline and r.baseline.ratio]
    if sizes:
        row = sizes[-1]
        assert row.baseline and row.baseline.ratio and row.value
        detail = f"{words.size(row.baseline.value)} to {words.size(row.value)}"
        found.append(Tile(_times(row.baseline.ratio), "smaller on disk", detail))
    for name, label in (("accuracy.perplexity", "the perplexity"), ("accuracy.cosine", "cosine to the original")):
        scored = [r for r in rows if r.name == name and r.value is not None]
        if not scored:
            continue
        row = scored[-1]
        value = row.value or 0.0
        if name == "accuracy.perplexity" and row.baseline is not None and row.baseline.value > 0:
            detail = f"{words.figure(row.baseline.value)} to {words.figure(value)}, lower is better"
            found.append(Tile(f"{value / row.baseline.value:.3f}×", label, f"{detail}, {_variant(row)}"))
        else:
            found.append(Tile(words.figure(value), label, _variant(row)))
        break
    return found


# --- speed -----------------------------------------------------------------------------------------------------------


def _decode(manifest: Manifest, rows: Sequence[Row]) -> list[Section]:
    """A section for each runtime and context: time and speed-up against batch."""
    found = []
    groups = _groups(
        _valued(rows, "latency.decode_step", lambda r: r.batch), lambda r: (_variant(r), _size(r, "context"))
    )
    for (_, context), group in groups.items():
        group.sort(key=lambda row: row.batch or 0)
        title = f"Decode, context {context:,} tokens" if context is not None else "Decode"
        found.append(_timed(manifest, rows, group, lambda r: r.batch or 0, "batch (sequences at once)", title, "step"))
    return found


def _prefill(manifest: Manifest, rows: Sequence[Row]) -> list[Section]:
    """A section for each runtime and batch: tokens a second and speed-up against prompt length."""
    found = []
    measured = _valued(rows, "latency.prefill", _tokens)
    for (_, batch), group in _groups(measured, lambda r: (_variant(r), r.batch)).items():
        group.sort(key=_tokens)
        title = f"Prefill, batch {batch}" if batch else "Prefill"
        found.append(_timed(manifest, rows, group, _tokens, "prompt (tokens)", title, "prompt"))
    return found


def _timed(
    manifest: Manifest,
    rows: Sequence[Row],
    group: Sequence[Row],
    at: Callable[[Row], int],
    axis: str,
    title: str,
    unit: str,
) -> Section:
    """Both sides of one series of times: as measured, as a ratio, as a table, and how it was done."""
    this, other = _names(manifest)
    xs = [at(row) for row in group]
    bounds = [_bound(rows, row) for row in group]
    across = charts.points_axis(axis, xs)
    series = _Series(group, xs, [b[0] for b in bounds], [b[1] for b in bounds])
    ends, broken = _break_even(rows, group[0])
    wins = _wins(group, xs, ends)
    panels = [series.rates(this, other, across) if unit == "prompt" else series.times(this, other, across)]
    ratio = series.ratios(this, other, across, wins, broken)
    panels += [ratio] if ratio is not None else []
    noise = max((row.aa_spread for row in group if row.aa_spread is not None), default=None)
    captions = [_how(group, unit)]
    if any(b[0] is not None for b in bounds):
        captions.append(f"Dotted: no faster than this, by the bytes and operations of a {unit}{_ceilings(rows)}.")
    if noise is not None:
        share = words.percent(noise)
        captions.append(f"Grey band: two measurements of the same thing differed by up to {share} (A/A).")
    return Section(_said(group, xs, unit, broken), panels, captions, series.sheet(this, other, axis), title=title)


@dataclass(frozen=True)
class _Series:
    """Times of one thing at several sizes, with what bounds them."""

    rows: Sequence[Row]
    xs: Sequence[int]
    bound: Sequence[float | None]
    original_bound: Sequence[float | None]

    def _curves(self, this: str, other: str, form: Callable[[float], str], scale: Callable[[int, float], float]) -> Any:
        """Curves of both sides and their bounds; `scale(x, seconds)` makes the figure's value, `form` shows it."""
        curves: list[Curve] = []
        mine = [(x, row) for x, row in zip(self.xs, self.rows, strict=True) if row.value]
        values = [scale(x, row.value or 0.0) for x, row in mine]
        bands = [_scaled(row.ci95, x, scale) for x, row in mine]
        hover = [f"{this}: {form(v)}" + _in_brackets(_between(b, form)) for v, b in zip(values, bands, strict=True)]
        curves.append(Curve(this, QUANTIZED, [x for x, _ in mine], values, hover, bands))
        theirs = [(x, row.baseline.value) for x, row in mine if row.baseline is not None and row.baseline.value > 0]
        values = [scale(x, value) for x, value in theirs]
        if theirs:
            curves.append(
                Curve(other, ORIGINAL, [x for x, _ in theirs], values, [f"{other}: {form(v)}" for v in values])
            )
        for label, colour, bounds in ((this, QUANTIZED, self.bound), (other, ORIGINAL, self.original_bound)):
            known = [(x, scale(x, bound)) for x, bound in zip(self.xs, bounds, strict=True) if bound]
            if known:
                name = f"{label} limit"
                hover = [f"{name}: {form(value)}" for _, value in known]
                curves.append(Curve(name, colour, [x for x, _ in known], [y for _, y in known], hover, bound=True))
        return curves

    def times(self, this: str, other: str, across: charts.Axis) -> Panel:
        curves = self._curves(this, other, charts.moment, lambda _, seconds: seconds)
        factor, unit = charts.time_unit(min(y for curve in curves for y in curve.y))
        values = [y for curve in curves for y in curve.y]
        axis = charts.log_axis(f"time of a step, p50, {unit}", values, form=lambda v: f"{v * factor:,g}")
        alt = f"Time of one decode step against batch, {this} and {other}, both axes logarithmic"
        return Panel("Time of a step", alt, charts.lines(curves, across, axis))

    def rates(self, this: str, other: str, across: charts.Axis) -> Panel:
        batch = [row.batch or 1 for row in self.rows]
        per = dict(zip(self.xs, batch, strict=True))
        curves = self._curves(this, other, lambda v: f"{words.figure(v, 3)} tokens/s", lambda x, s: x * per[x] / s)
        axis = charts.log_axis("prompt tokens a second, p50", [y for curve in curves for y in curve.y])
        alt = f"Prompt tokens a second against prompt length, {this} and {other}, both axes logarithmic"
        return Panel("Prompt tokens a second", alt, charts.lines(curves, across, axis))

    def ratios(
        self, this: str, other: str, across: charts.Axis, wins: Sequence[Interval], broken: Row | None
    ) -> Panel | None:
        known = [(x, row, ratio) for x, row in zip(self.xs, self.rows, strict=True) if (ratio := _ratio(row))]
        if not known:
            return None
        bands = [row.baseline.ratio_ci95 if row.baseline else None for _, row, _ in known]
        bands = [band if band and band[0] > 0 else None for band in bands]
        hover = [_times(r) + _in_brackets(_between(b, _times)) for (_, _, r), b in zip(known, bands, strict=True)]
        curves = [Curve("measured", QUANTIZED, [x for x, _, _ in known], [r for _, _, r in known], hover, bands)]
        promised = [
            (x, hp / own) for x, own, hp in zip(self.xs, self.bound, self.original_bound, strict=True) if own and hp
        ]
        if promised:
            hover = [f"promised: {_times(ratio)}" for _, ratio in promised]
            curves.append(
                Curve("promised", ORIGINAL, [x for x, _ in promised], [r for _, r in promised], hover, bound=True)
            )
        spread = max((row.aa_spread for _, row, _ in known if row.aa_spread is not None), default=None)
        noise = (1 / (1 + spread), 1 + spread) if spread is not None else None
        values = [y for curve in curves for y in curve.y] + [end for band in bands if band for end in band]
        axis = charts.log_axis(f"{other} time / {this} time", [*values, 0.95, 1.05, *(noise or ())], form=_times)
        marks = []
        low, high = across.range
        for value, label, dotted in _evens(broken):
            if low <= value <= high:
                marks.append(Mark(value, f"{label} {words.figure(value, 2)}", dotted))
        alt = f"How many times faster {this} is than {other}, with 95 % intervals, both axes logarithmic"
        figure = charts.lines(curves, across, axis, noise=noise, even=1.0, wins=wins, marks=marks)
        return Panel(f"Speed-up over {other}", alt, figure)

    def sheet(self, this: str, other: str, axis: str) -> Sheet:
        head = [
            axis,
            this,
            "p90",
            "p99",
            other,
            "speed-up",
            "95 % interval",
            f"{this} limit",
            f"{other} limit",
            "n",
            "",
        ]
        body = []
        for x, row, own, hp in zip(self.xs, self.rows, self.bound, self.original_bound, strict=True):
            quantiles, base = row.quantiles or {}, row.baseline
            ratio = _ratio(row)
            body.append(
                [
                    f"{x:,}",
                    _or_dash(row.value, charts.moment),
                    _or_dash(quantiles.get("p90"), charts.moment),
                    _or_dash(quantiles.get("p99"), charts.moment),
                    _or_dash(base.value if base else None, charts.moment),
                    _or_dash(ratio, _times),
                    _between(base.ratio_ci95 if base else None, _times) or "–",
                    _or_dash(own, charts.moment),
                    _or_dash(hp, charts.moment),
                    f"{row.n:,}" if row.n else "–",
                    _flags(row),
                ]
            )
        return Sheet(head, body, remarks=1)


def _said(group: Sequence[Row], xs: Sequence[int], unit: str, broken: Row | None) -> list[str]:
    """Where the quantized side wins, loses, and where nothing can be said."""
    what = "batch" if unit == "step" else "prompts of"
    wins: list[int] = []
    losses: list[int] = []
    open_: list[int] = []
    for x, row in zip(xs, group, strict=True):
        interval = row.baseline.ratio_ci95 if row.baseline else None
        if interval is None:
            continue
        (wins if interval[0] > 1 else losses if interval[1] < 1 else open_).append(x)
    tail = "" if unit == "step" else " tokens"
    found = []
    if wins:
        found.append(f"Faster at {what} {_enumerated(wins)}{tail}.")
    if losses:
        found.append(f"Slower at {what} {_enumerated(losses)}{tail}.")
    if open_:
        found.append(f"At {what} {_enumerated(open_)}{tail} the noise hides any difference.")
    if broken is not None and broken.value is not None:
        sure = _between(broken.ci95, lambda v: words.figure(v, 2))
        found.append(f"Break-even at {words.figure(broken.value, 2)}{_in_brackets(f'95 % {sure}' if sure else '')}.")
    return found


def _bound(rows: Sequence[Row], of: Row) -> tuple[float | None, float | None]:
    """(seconds that the quantized side cannot beat, the same of the original) of a timed row, from its tax row."""
    for row in rows:
        if row.name == "tax.total" and row.op is not None and row.op.layer is None and _same(row, of):
            return row.op.bound_s, row.op.hp_bound_s
    return None, None


def _same(tax: Row, of: Row) -> bool:
    return (tax.batch, tax.shape, _variant(tax)) == (of.batch, of.shape, _variant(of))


def _break_even(rows: Sequence[Row], of: Row) -> tuple[list[Interval], Row | None]:
    """(win intervals, the row) of the break-even that belongs to a series."""
    for row in rows:
        if row.name == "tax.break_even" and _variant(row) == _variant(of):
            shape, wanted = row.shape or {}, of.shape or {}
            if all(wanted.get(key) == value for key, value in shape.items()):
                return _intervals(row), row
    return [], None


def _intervals(row: Row) -> list[Interval]:
    """Win intervals as `settings` has them: text like `1 to 8.2`, several divided by `, `."""
    text = next((str(v) for k, v in row.settings.items() if k.startswith("win") and isinstance(v, str)), "")
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)]
    return [(low, high) for low, high in zip(numbers[::2], numbers[1::2], strict=False) if low <= high]


def _wins(group: Sequence[Row], xs: Sequence[int], given: Sequence[Interval]) -> list[Interval]:
    """What to shade: the intervals given, else runs of measured sizes that win."""
    if given:
        return list(given)
    found: list[Interval] = []
    running = False
    for x, row in zip(xs, group, strict=True):
        interval = row.baseline.ratio_ci95 if row.baseline else None
        if interval is None or interval[0] <= 1:
            running = False
        elif running:
            found[-1] = (found[-1][0], x)
        else:
            found.append((x, x))
            running = True
    return [(low, high) for low, high in found if low < high]


def _evens(broken: Row | None) -> list[tuple[float, str, bool]]:
    if broken is None:
        return []
    found = [(broken.value, "break-even", False)] if broken.value else []
    ideal = next((v for k, v in broken.settings.items() if k.startswith("ideal") and isinstance(v, int | float)), None)
    return [*found, (float(ideal), "ideal", True)] if ideal else found


def _how(group: Sequence[Row], unit: str) -> str:
    """How a series was measured, for its caption."""
    row = group[0]
    counts = sorted({r.n for r in group if r.n})
    parts = []
    if counts:
        several = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        parts.append(f"p50 of {several} {unit}s a side, the two sides interleaved (ABBA); bands are 95 % intervals")
    if threads := row.settings.get("threads"):
        parts.append(words.plural(int(threads), "thread") if isinstance(threads, int | float) else f"{threads} threads")
    version = row.versions.get(row.runtime or "", "")
    parts.append(f"{_variant(row)}{f' {version}' if version else ''}")
    if row.device is not None:
        parts.append(row.device.name)
    return "; ".join(parts) + "."


def _ceilings(rows: Sequence[Row]) -> str:
    """The ceilings behind the bounds, in brackets."""
    parts = []
    for row in rows:
        if row.name in {"ceiling.read", "ceiling.compute"} and row.value is not None:
            kind = row.settings.get("compute_type")
            parts.append(f"{words.rate(row.value, row.unit)} {kind or row.name.removeprefix('ceiling.')}")
    return f" at the ceilings measured in the same run ({', '.join(dict.fromkeys(parts))})" if parts else ""


# --- accuracy --------------------------------------------------------------------------------------------------------

_Measure = tuple[str, str, Callable[[Row], tuple[float, Interval | None] | None], Callable[[float], str], str | None]


def _perplexity(row: Row) -> tuple[float, Interval | None] | None:
    base = row.baseline
    if base is None or not base.ratio or base.ratio <= 0:
        return None
    sure = base.ratio_ci95
    return 1 / base.ratio, (1 / sure[1], 1 / sure[0]) if sure and sure[0] > 0 else None


def _itself(row: Row) -> tuple[float, Interval | None] | None:
    return None if row.value is None else (row.value, row.ci95)


_MEASURES: dict[str, _Measure] = {
    "accuracy.perplexity": (
        "Perplexity, times the original's",
        "1 is no change; lower is better",
        _perplexity,
        lambda v: f"{v:.3f}×",
        "perplexity_ratio_max",
    ),
    "accuracy.kl": (
        "KL divergence from the original, nats",
        "0 is no change; lower is better",
        _itself,
        lambda v: words.figure(v, 3),
        "kl_max",
    ),
    "accuracy.top1_agreement": (
        "Same most likely word",
        "100 % is no change; higher is better",
        _itself,
        words.percent,
        "top1_agreement_min",
    ),
    "accuracy.cosine": (
        "Cosine to the original",
        "1 is no change; higher is better",
        _itself,
        lambda v: words.figure(v, 5),
        "cosine_min",
    ),
}
_NO_CHANGE = {"accuracy.perplexity": 1.0, "accuracy.kl": 0.0, "accuracy.top1_agreement": 1.0, "accuracy.cosine": 1.0}


def _accuracy(manifest: Manifest, rows: Sequence[Row]) -> list[Section]:
    """Forest plots, one a measure, each with every export and its gate."""
    panels, body = [], []
    gates = manifest.recipe.get("gates") or {}
    for name, (title, better, read, form, gate) in _MEASURES.items():
        known = [(row, found) for row in rows if row.name == name and (found := read(row)) is not None]
        if not known:
            continue
        points = []
        for row, (value, interval) in known:
            points.append(Point(_variant(row), value, interval, form(value) + _in_brackets(_between(interval, form))))
            body.append([title, _variant(row), form(value), _between(interval, form) or "–", _flags(row)])
        limit = gates.get(gate)
        same = _NO_CHANGE[name]
        marks = [Mark(same, "no change")] + ([Mark(float(limit), f"gate {limit:g}", True)] if limit is not None else [])
        ends = [end for _, (value, interval) in known for end in (interval or (value, value))]
        ends += [mark.x for mark in marks]
        axis = _straight(better, ends, form)
        panels.append(
            Panel(title, f"{title}, by export, with 95 % intervals", charts.forest(points, axis, marks=marks))
        )
    if not panels:
        return []
    return [Section([], panels, [], Sheet(["measure", "export", "value", "95 % interval", ""], body, remarks=1))]


def _straight(title: str, ends: Sequence[float], form: Callable[[float], str]) -> charts.Axis:
    low, high = min(ends), max(ends)
    room = (high - low or abs(high) or 1.0) * 0.08
    step = (high - low or abs(high) or 1.0) / 3
    power = 10.0 ** _floor_log(step)
    step = next(s for s in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if s >= step * 0.999)
    first = -(-low // step)
    ticks = [round(step * (first + i), 12) for i in range(8) if step * (first + i) <= high + room / 2]
    # one label less than the digits of a value: ticks are round
    texts = [words.percent(t, 0) if form is words.percent else f"{t:g}" for t in ticks]
    return charts.Axis(title, ticks, texts, (low - room, high + room), log=False)


def _floor_log(value: float) -> int:
    import math

    return math.floor(math.log10(value))


def _accuracy_tables(rows: Sequence[Row]) -> list[tuple[str, list[figures.Line]]]:
    """(export, its lines): before and after, as the card and the terminal have them."""
    scored = [row for row in rows if row.name.startswith("accuracy.")]
    return [(variant, figures.lines(group)) for variant, group in _groups(scored, _variant).items()]


def _traps(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """What the flags of the rows say that no note does."""
    found = []
    for flag in dict.fromkeys(flag for row in rows for flag in row.flags):
        was = flag.removeprefix("source-was-")
        said = any(was.replace("-", " ") in note.lower() for note in notes)
        if was != flag and not said:
            found.append(
                f"The source was {was.replace('-', ' ')} before it was converted: its own rounding is in the original"
                " that everything here is held against"
            )
    return found


# --- layers and sizes ------------------------------------------------------------------------------------------------


def _layers(manifest: Manifest, build_up: Sequence[tuple[str, float]] | None) -> list[Section]:
    found = []
    known = [(layer, layer.error) for layer in manifest.layers if layer.error is not None]
    if known:
        worst = sorted(known, key=lambda pair: -pair[1])
        said = f"Largest in {worst[0][0].name}: {words.percent(worst[0][1])}; the middle one has {words.percent(worst[len(worst) // 2][1])}."
        body = [
            [
                layer.name,
                "×".join(map(str, layer.shape)),
                figures.scheme_of(layer.scheme),
                words.figure(layer.bits_per_weight, 4),
                words.figure(error, 3),
            ]
            for layer, error in known
        ]
        sheet = Sheet(["layer", "shape", "scheme", "bits per weight", "relative error"], body)
        panel = Panel(
            "Relative error of the weights",
            "Relative error of every quantized layer, as colours: kinds of layers by blocks",
            _error_figure([(layer.name, error) for layer, error in known]),
            wide=True,
        )
        how = "The error of a layer is ‖W − Ŵ‖ / ‖W‖, of its weights alone; what it does to the output is above."
        found.append(Section([said], [panel], [how], sheet, title="By layer"))
    if build_up:
        values = [value for _, value in build_up]
        names = [_number(name, i) for i, (name, _) in enumerate(build_up)]
        hover = [f"{name}: {words.percent(value)}" for name, value in build_up]
        curve = Curve("", QUANTIZED, list(range(len(values))), values, hover)
        step = max(1, -(-len(names) // 10))
        across = charts.Axis(
            "behind block", list(range(0, len(names), step)), names[::step], (-0.5, len(names) - 0.5), log=False
        )
        axis = charts.Axis("relative error", *_percent_ticks(max(values)), (0, max(values) * 1.1 or 1.0), log=False)
        panel = Panel(
            "Error of the hidden state",
            "Relative error of the hidden state behind each block",
            charts.lines([curve], across, axis, height=260),
            wide=True,
        )
        said = f"Behind the last block the hidden state is off by {words.percent(values[-1])}."
        sheet = Sheet(["block", "relative error"], [[name, words.figure(value, 3)] for name, value in build_up])
        found.append(Section([said], [panel], [], sheet, title="How it builds up"))
    return found


def _error_figure(errors: Sequence[tuple[str, float]]) -> Figure:
    """Kinds of layers by blocks; where names have no block number, one column."""
    cells: dict[str, dict[str, float]] = {}
    for name, error in errors:
        kind, block = _split(name)
        cells.setdefault(kind, {})[block] = error
    blocks = list(dict.fromkeys(_split(name)[1] for name, _ in errors))
    values = [[row.get(block) for block in blocks] for row in cells.values()]
    return charts.heat(blocks, list(cells), values, of="relative error")


def _split(name: str) -> tuple[str, str]:
    """(kind of layer, block): `model.layers.3.mlp.up_proj` is `up_proj` of block 3."""
    match = re.search(r"\.(\d+)\.(.+)$", f".{name}")
    if match is None:
        return name[-24:], "–"
    return match[2].removesuffix(".weight").split(".")[-1][-24:], match[1]


def _number(name: str, index: int) -> str:
    numbers = re.findall(r"\d+", name)
    return str(numbers[-1]) if numbers else str(index)


def _percent_ticks(high: float) -> tuple[list[float], list[str]]:
    step = next((s * 10.0**p for p in range(-6, 3) for s in (1, 2, 5) if high / (s * 10.0**p) <= 5), 1.0)
    ticks = [round(step * i, 12) for i in range(int(high / step) + 2)]
    return ticks, [f"{100 * tick:g} %" for tick in ticks]


def _sizes(manifest: Manifest, rows: Sequence[Row]) -> list[Section]:
    """Bytes of each export beside the original, in parts where the manifest says what they are."""
    exports = [row for row in rows if row.name == "size.bytes" and row.value]
    if not exports:
        return []
    weights = sum(prod(layer.shape) for layer in manifest.layers)
    codes = sum(prod(layer.shape) * _bits(layer.scheme) for layer in manifest.layers) / 8
    extra = sum(prod(layer.shape) * layer.bits_per_weight for layer in manifest.layers) / 8 - codes
    # names, totals, and [kept as it was, to be quantized, codes, scales and zero points]
    bars: list[tuple[str, float, list[float]]] = []
    base = next((row.baseline for row in exports if row.baseline is not None), None)
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(manifest.model.source.dtype)
    if base is not None:
        floats = min(weights * width, base.value) if width else 0.0
        bars.append(("original", base.value, [floats, 0.0, 0.0, base.value - floats]))
    for row in exports:
        value = row.value or 0.0
        part = [0.0, codes, extra, value - codes - extra]
        bars.append((_export(row), value, part if part[3] >= 0 and codes > 0 else [0.0, 0.0, 0.0, value]))
    names = ["linear layers as floats", "codes", "scales and zero points", "kept as it was, and the rest"]
    shades = ["original", "quantized", "quantized-soft", "rest"]
    parts = [
        Part(name, [bar[2][i] for bar in bars], shade)
        for i, (name, shade) in enumerate(zip(names, shades, strict=True))
    ]
    parts = [part for part in parts if any(part.values)]
    totals = [
        words.size(total) + (f", {_times(base.value / total)} smaller" if base and i and base.value > total else "")
        for i, (_, total, _) in enumerate(bars)
    ]
    figure = charts.stacked([name for name, _, _ in bars], parts, totals, "weights on disk")
    panels = [Panel("Weights on disk", "Bytes of the weights of each export, in parts, beside the original", figure)]
    body = [[name, words.size(total), *(words.size(v) if v else "–" for v in values)] for name, total, values in bars]
    memory = [row for row in rows if row.name == "memory.peak" and row.value]
    said = []
    if memory:
        panels.append(_memory(memory))
        body += [[f"peak memory, {_variant(row)}", words.size(row.value or 0), *["–"] * 4] for row in memory]
    bits = next((row.value for row in rows if row.name == "size.bits_per_weight" and row.value), None)
    if bits is not None:
        said.append(
            f"{words.figure(bits, 3)} bits a weight in {words.plural(len(manifest.layers), 'quantized layer')}, scales and zero points counted."
        )
    keys = [(part.shade, part.label) for part in parts]
    return [Section(said, panels, [], Sheet(["what", "total", *names], body), keys=keys)]


def _memory(rows: Sequence[Row]) -> Panel:
    bars: list[tuple[str, float]] = []
    for row in rows:
        label = ", ".join(part for part in (_variant(row), _where(row)) if part)
        if row.baseline is not None:
            bars.append((f"original, {label}", row.baseline.value))
        bars.append((label, row.value or 0.0))
    values = [value for _, value in bars]
    is_original = [name.startswith("original, ") for name, _ in bars]
    parts = [
        Part("original", [v if o else 0.0 for v, o in zip(values, is_original, strict=True)], "original"),
        Part("quantized", [0.0 if o else v for v, o in zip(values, is_original, strict=True)], "quantized"),
    ]
    figure = charts.stacked([name for name, _ in bars], parts, [words.size(v) for v in values], "peak memory")
    return Panel("Peak memory while it runs", "Peak memory of the process, beside the original's", figure)


# --- running it, and where it is from --------------------------------------------------------------------------------


def _commands(manifest: Manifest) -> list[tuple[str, str]]:
    """(what it does, the commands), to be run in the bundle's folder."""
    packed = bool(manifest.layers) and card._layout(manifest) == "pack-quantized"
    paths = {entry.path for entry in manifest.files}
    found = [("Check every byte, and load it again", "quantkit verify .")]
    if any(path.startswith("model/") for path in paths):
        found.append(("transformers", card._load(manifest, packed=packed)))
    if any(path.startswith("onnx/") for path in paths):
        lines = ["# pip install 'quantkit[onnx]'"]
        if manifest.model.kind == "decoder":
            lines.append('quantkit generate . --runtime onnxruntime --prompt "The capital of France is"')
        found.append(("ONNX Runtime", "\n".join([*lines, "quantkit measure . --runtime onnxruntime"])))
    if "onnx/genai_config.json" in paths:
        found.append(("onnxruntime-genai", f"# pip install onnxruntime-genai\n{_GENAI}"))
    if packed and manifest.model.kind == "decoder":
        found.append(("vLLM", "vllm serve ./model"))
    return found


def _facts(manifest: Manifest, rows: Sequence[Row]) -> list[tuple[str, str]]:
    source, seen = manifest.model.source, manifest.calibration
    found = [("source", f"{source.ref}, {source.dtype}{f', converted from {source.was}' if source.was else ''}")]
    found.append(("sha256 of the source", source.sha256))
    if seen is not None:
        found.append(("calibrated on", f"{seen.set} ({seen.split}), {seen.samples} sequences of {seen.tokens} tokens"))
        found.append(("sha256 of its token ids", seen.ids_sha256))
    else:
        found.append(("calibrated on", "nothing: no pass of the recipe looks at data"))
    data = next((row.data for row in rows if row.data is not None), None)
    if data is not None:
        found.append(("scored on", f"{data.set} ({data.split}), {data.items:,} items"))
        found.append(("sha256 of its token ids", data.sha256))
    found.append(("target", str((manifest.target or {}).get("name") or "none")))
    device = manifest.device.get("name") or "an unnamed machine"
    found.append(("made on", f"{device}, {manifest.isa}, {words.plural(manifest.threads, 'thread')}"))
    for row in rows:
        if row.device is not None and row.device.name != device:
            found.append(("measured on", row.device.name))
            break
    found += [("made at", manifest.created), ("seed", str(manifest.seed)), ("content_sha256", manifest.content_sha256)]
    versions = {"quantkit": manifest.quantkit, **manifest.versions}
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))))
    return found


# --- rows ------------------------------------------------------------------------------------------------------------


def _valued(rows: Iterable[Row], name: str, at: Callable[[Row], int | None]) -> list[Row]:
    return [row for row in rows if row.name == name and row.value and at(row)]


def _groups(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _size(row: Row, name: str) -> int | None:
    return (row.shape or {}).get(name)


def _tokens(row: Row) -> int:
    """The prompt's length."""
    shape = row.shape or {}
    return next((shape[key] for key in ("new_tokens", "tokens", "context") if shape.get(key)), 0)


def _place(row: Row) -> tuple[int, int, int]:
    return _size(row, "context") or 0, row.batch or 0, _tokens(row)


def _where(row: Row) -> str:
    shape = row.shape or {}
    parts = [f"batch {row.batch}"] if row.batch else []
    parts += [f"context {shape['context']:,}"] if shape.get("context") else []
    parts += [f"{shape['new_tokens']:,} tokens"] if shape.get("new_tokens", 1) > 1 else []
    return ", ".join(parts)


def _variant(row: Row) -> str:
    """The export that a row is about, as a reader tells it from the others."""
    level = row.settings.get("accuracy_level")
    return (row.runtime or "") + (f", accuracy level {level}" if level is not None else "")


def _export(row: Row) -> str:
    folder = str(row.settings.get("export") or "this bundle")
    return {"model": "checkpoint", "onnx": "ONNX"}.get(folder, folder)


def _names(manifest: Manifest) -> tuple[str, str]:
    """Short names of the two sides; a bundle of several formats is `quantized`."""
    formats = {str(layer.scheme.get("format")) for layer in manifest.layers}
    this = formats.pop() if len(formats) == 1 else "quantized" if formats else "this"
    other = manifest.model.source.dtype
    return this, other if other != this else "original"


def _bits(scheme: Mapping[str, Any]) -> int:
    match = re.search(r"\d+", str(scheme.get("format")))
    return int(match[0]) if match else 0


def _ratio(row: Row) -> float | None:
    return row.baseline.ratio if row.baseline is not None and (row.baseline.ratio or 0) > 0 else None


def _flags(row: Row) -> str:
    return ", ".join(flag.replace("-", " ") for flag in row.flags)


def _scaled(band: Interval | None, x: int, scale: Callable[[int, float], float]) -> Interval | None:
    if band is None or band[0] <= 0:
        return None
    low, high = sorted((scale(x, band[0]), scale(x, band[1])))
    return low, high


def _times(ratio: float) -> str:
    return f"{words.figure(ratio, 3)}×"


def _between(interval: Interval | None, form: Callable[[float], str]) -> str:
    return f"{form(interval[0])} to {form(interval[1])}" if interval else ""


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def _enumerated(values: Sequence[int]) -> str:
    texts = [f"{value:,}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
