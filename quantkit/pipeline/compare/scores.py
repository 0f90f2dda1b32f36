"""How good B is against A: item by item where both keep their items, else by the intervals of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items, against
from quantkit.measurement.compared import Quantity
from quantkit.measurement.rows import Data, Row
from quantkit.pipeline.compare.sides import BundleSide
from quantkit.stats.deciding.apart import MeasuredValue, difference

_NEXT_WORD, _KL, _PERPLEXITY = "accuracy.next_word", "accuracy.kl", "accuracy.perplexity"
# of models that have no next word, what counts, as far as it was scored; others say the same again
_LABELLED = (
    *("accuracy.top1", "accuracy.recall_at_1", "accuracy.top1_agreement", "accuracy.same"),
    *("accuracy.cosine", "accuracy.relative_error", _KL),
)


def common_runtime(a: BundleSide, b: BundleSide, asked: str | None) -> tuple[str, str, list[str]]:
    """The runtimes in which A and B were scored, the same where there is one, and what a reader must know.

    Raises:
        InputError: `items-missing`; `runtime-unsupported`, none of the one that was asked for.
    """
    found = []
    for side in (a, b):
        runtimes = list(side.items())
        if not runtimes:
            raise InputError(
                "items-missing",
                where=str(side.bundle.path),
                value="the bundle does not hold what was found at each position",
                rule="next words are compared one by one",
                remedy=side.measure("--no-speed"),
            )
        if asked is not None and asked not in runtimes:
            raise InputError(
                "runtime-unsupported",
                where="--runtime",
                value=f"{side.name} was not scored in {asked}",
                rule=f"it was in {', '.join(runtimes)}",
                remedy=side.measure(f"--runtime {asked}", "--no-speed"),
            )
        found.append(runtimes)
    both = [runtime for runtime in found[0] if runtime in found[1] and asked in (None, runtime)]
    if both:
        return both[0], both[0], []
    first, second = found[0][0], found[1][0]
    return first, second, [f"A was scored in {first} and B in {second}: what differs may be the runtimes"]


def demand_one_text(a: BundleSide, b: BundleSide, first: Data | None, second: Data | None) -> Data:
    """What both were scored on.

    Raises:
        InputError: `items-differ`.
    """
    for side, data in ((a, first), (b, second)):
        if data is None:
            raise InputError(
                "items-differ",
                where=str(side.bundle.path),
                value="no row says what was scored",
                rule="both sides were scored on the same items",
                remedy=side.measure("--no-speed"),
            )
    assert first is not None and second is not None
    if first.sha256 != second.sha256:
        what = (f"{data.set} ({data.split}, {data.items:,} items, {data.sha256[:12]})" for data in (first, second))
        raise InputError(
            "items-differ",
            where=f"{a.name} and {b.name}",
            value=" and ".join(what),
            rule="both sides are scored on the same items, which are paired",
            remedy=_remedy(a, b, first, second),
        )
    return first


def _remedy(a: BundleSide, b: BundleSide, first: Data, second: Data) -> str:
    if first.set != second.set:
        option = (f"--calibration {first.set}", "--no-speed")
        if a.floating or b.floating:
            return (b if a.floating else a).measure(*option)
        return f"{a.measure(*option)} and {b.measure(*option)}"
    for key, how in (("tokens", "cut it into {} and {} tokens"), ("template", "write it by template {} and {}")):
        mine, other = (side.manifest.recipe.get("calibration", {}).get(key) for side in (a, b))
        if mine != other:
            words = how.format(mine or "none", other or "none")
            return f"their recipes {words}: compile B with --set calibration.{key}={mine or 'null'}"
    return f"one of them is older than the text: {a.measure('--no-speed')} and {b.measure('--no-speed')}"


def by_item(a: Items, b: Items, margin: float, runtime: str, where: str) -> list[Quantity]:
    """Next words, KL and log-perplexity, position by position.

    Raises:
        InputError: `items-differ`, `values-invalid`, `nothing-scored`.
    """
    found = against(a, b, dict.fromkeys((_NEXT_WORD, _KL, _PERPLEXITY), margin), where=where)
    values: Mapping[str, tuple[Any, Any, str]] = {
        _NEXT_WORD: (a.right_candidate, b.right_candidate, "1"),
        _KL: (a.kl, b.kl, "nat"),
        _PERPLEXITY: (a.nll_candidate, b.nll_candidate, "1"),
    }
    asked = []
    for name, evidence in found.items():
        before, after, unit = values[name]
        means = [float(np.mean(side)) for side in (before, after)]
        if name == _PERPLEXITY:
            means = [float(np.exp(min(mean, 700.0))) for mean in means]
        asked.append(Quantity("accuracy", name, means[0], means[1], unit, "paired", evidence, n=a.n, runtime=runtime))
    return asked


def by_row(a: BundleSide, b: BundleSide, margin: float, asked: str | None) -> tuple[list[Quantity], Data, list[str]]:
    """What the rows of models without next words say: labels, pairs, cosines, each side by its own interval.

    Raises:
        InputError: `items-missing`, nothing that both were scored by; `items-differ`.
    """
    rows = [{_same(row): row for row in side.accuracy(asked) if row.name in _LABELLED} for side in (a, b)]
    shared = [place for place in rows[0] if place in rows[1] and not _said_by_cosine(place, rows[0])]
    if not shared:
        side = a if not rows[0] else b
        raise InputError(
            "items-missing",
            where=str(side.bundle.path),
            value="nothing that both were scored by, in one runtime",
            rule="both sides were scored",
            remedy=side.measure("--no-speed", *([f"--runtime {asked}"] if asked else [])),
        )
    data = demand_one_text(a, b, rows[0][shared[0]].data, rows[1][shared[0]].data)
    found, without = [], []
    for place in sorted(shared, key=lambda each: _LABELLED.index(each[0])):
        one, other = rows[0][place], rows[1][place]
        first, second = _measured(one, floating=a.floating), _measured(other, floating=b.floating)
        if first is None or second is None:
            without.append(one.name)
            continue
        evidence = difference(second, first, margin=margin, lower_is_better=one.better != "higher")
        shown = [_value(row, floating=side.floating) for row, side in ((one, a), (other, b))]
        output = one.settings.get("output")
        found.append(
            Quantity(
                *("accuracy", one.name, shown[0], shown[1], one.unit, "apart", evidence),
                n=one.n,
                runtime=one.runtime,
                output=None if output is None else str(output),
            )
        )
    notes = [
        "no items are kept of this kind of model: each side is known by its own interval, which is wider than a pair's"
    ]
    if without:
        notes.append(f"not decided, for want of an interval: {', '.join(sorted(set(without)))}")
    return found, data, notes


def _same(row: Row) -> tuple[Any, ...]:
    return row.name, row.runtime, row.settings.get("output")


def _said_by_cosine(place: tuple[Any, ...], rows: Mapping[tuple[Any, ...], Row]) -> bool:
    """Tell whether a relative error is of an output that has a cosine, which says the same."""
    return place[0] == "accuracy.relative_error" and ("accuracy.cosine", *place[1:]) in rows


def _measured(row: Row, *, floating: bool) -> MeasuredValue | None:
    """A row's value with its interval; of shares of the same items, against the original: those are pairs already."""
    base = row.baseline
    if base is not None and base.difference is not None and base.difference_ci95 is not None:
        return MeasuredValue(0.0, (0.0, 0.0)) if floating else MeasuredValue(base.difference, base.difference_ci95)
    if floating:
        return None if base is None else MeasuredValue(base.value, (base.value, base.value))
    if row.value is None or row.ci95 is None:
        return None
    return MeasuredValue(row.value, (min(row.ci95[0], row.value), max(row.ci95[1], row.value)))


def _value(row: Row, *, floating: bool) -> float | None:
    return (row.baseline.value if row.baseline else None) if floating else row.value
