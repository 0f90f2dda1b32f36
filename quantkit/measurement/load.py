"""Turn the answers of loaded servers into rows: latencies, rates and goodput of a bundle beside its original.

Requests arrive as a Poisson process at each rate. Of a request with n output tokens,

    ttft    time from its start to its first token
    tpot    (e2el − ttft) / (n − 1) ,    itl  each gap between two tokens,    e2el  time to its last token

and of all N requests at a rate, in D seconds from the first start to the last end,

    goodput    share of the requests within every limit · N / D     (a failed request is not within)

Each side is visited twice, in the order A B B A, with the same prompts and arrivals for both. Neighbouring requests
share a queue, so a bootstrap draws stretches of ten to a visit, the same ones for both sides. The A/A spread is the
difference between the two visits of one side; it widens every interval that decides (`stats.evidence`). The interval
of a goodput is that of its share (Wilson, stretches as clusters), times N / D.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, unknown_name
from quantkit.measurement.rows import Baseline, Interval, Row
from quantkit.measurement.timing.schedule import Timing
from quantkit.measurement.verdict import speed_up
from quantkit.stats.abba import NOISY, P99_FROM, tail_of
from quantkit.stats.evidence import MeasuredValue, difference
from quantkit.stats.shares import clustered_share

Array = NDArray[Any]
Better = Literal["lower", "higher"]
LATENCIES = ("ttft", "tpot", "itl", "e2el")
LIMITS = ("ttft", "tpot", "e2el")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ORDER = ("original", "bundle", "bundle", "original")
ALONE = ("bundle", "bundle")
# seconds of arrivals at a rate, and requests at least
_SECONDS, _LEAST = 30.0, 30
_STRETCHES, _RESAMPLES = 10, 499
# spread of two visits of which one delivers nothing
_UNLIKE = 100.0
# share of the requests within the limit from which a rate counts as served whole
_WHOLE = 0.95
_RATE = re.compile(r"rate=(.+)")
_ONE = re.compile(r"[0-9]*\.?[0-9]+")
_TIME = re.compile(rf"({_ONE.pattern})(ms|s)")


@dataclass(frozen=True)
class ServerLoad:
    """ServerLoad of a server.

    Args:
        rates: requests a second, ascending.
        prompt, output: tokens of a request.
        slo: limits of a request in seconds, by `LIMITS`.
        requests: requests at each rate in each visit; 0 for those of 30 s, at least 30.
    """

    rates: Sequence[float]
    prompt: int = 256
    output: int = 128
    slo: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0

    @classmethod
    def parse(cls, load: str, slo: str | None = None, **sizes: int) -> ServerLoad:
        """Read `rate=1,2,4` and `ttft=500ms,tpot=50ms`. Raises InputError `usage`, `unknown-limit`."""
        stated = _RATE.fullmatch(load.replace(" ", ""))
        parts = stated[1].split(",") if stated else []
        wrong = [part for part in parts if not _ONE.fullmatch(part) or not 0 < float(part) < inf]
        if wrong or not parts:
            value = repr(wrong[0]) if wrong else load
            raise InputError("usage", "--load", value, "rates are requests a second, above zero", "rate=1,2,4")
        rates = sorted({float(part) for part in parts})
        limits = {}
        for part in filter(None, (slo or "").replace(" ", "").split(",")):
            name, _, text = part.partition("=")
            if name not in LIMITS:
                raise unknown_name("limit", name, LIMITS, where="--slo")
            time = _TIME.fullmatch(text)
            most = float(time[1]) * (1e-3 if time[2] == "ms" else 1.0) if time else 0.0
            if most <= 0:
                raise InputError("usage", "--slo", part, "a time with its unit", "ttft=500ms,tpot=50ms")
            limits[name] = most
        return cls(rates, slo=limits, **sizes)

    def runs(self) -> list[dict[str, Any]]:
        """List the rates with the number of requests at each, in one visit."""
        return [{"rate": rate, "requests": self.requests or max(_LEAST, round(_SECONDS * rate))} for rate in self.rates]


@dataclass(frozen=True)
class Run:
    """Answers of one side at one rate in one visit; `values`: latency -> times of each answered request, in order."""

    duration: float
    tokens: int
    values: Mapping[str, Sequence[Array]]
    good: Array

    @classmethod
    def of(cls, answer: Mapping[str, Any], slo: Mapping[str, float]) -> Run:
        """Read an answer of the job `load` (`runtimes/vllm/inside.py`)."""
        values: dict[str, list[Array]] = {name: [] for name in LATENCIES}
        good = []
        for at in np.argsort(answer["start_times"], kind="stable"):
            if not (one := _of_request(answer, at)):
                good.append(False)
                continue
            good.append(all(one.get(name, 0.0) <= most for name, most in slo.items()))
            for name, value in {**one, "itl": answer["itls"][at]}.items():
                values[name].append(np.atleast_1d(np.asarray(value, dtype=np.float64)))
        tokens = int(sum(answer["output_lens"]))
        return cls(answer["duration"], tokens, values, np.array(good))

    @property
    def served(self) -> int:
        """Number of answered requests."""
        return len(self.values["e2el"])


def rows(load: ServerLoad, answers: Iterable[Mapping[str, Any]], *, against: str | None, **about: Any) -> list[Row]:
    """Return the rows of a load.

    Args:
        answers: answers of the job `load`: one for each visit and rate, and one for each visit.
        against: identity of the original; None if the bundle was loaded alone.
        about: fields of every row: subject, runtime, settings, device, versions.
    """
    answers, listed = list(answers), list[Row]()
    settings = {**about.get("settings", {}), **{f"slo_{name}": most for name, most in load.slo.items()}}
    about |= {"shape": {"prompt": load.prompt, "output": load.output}, "settings": settings}
    for rate in load.rates:
        own, other = (
            [Run.of(one, load.slo) for one in answers if one["side"] == side and one.get("rate") == rate]
            for side in ("bundle", "original")
        )
        failed = sum(len(run.good) - run.served for run in (*own, *other))
        told = {**about, "settings": {**settings, "rate": rate, **({"failed": failed} if failed else {})}}
        both = [*_latencies(own, other, against, told), *_rates(own, other, against, told)]
        both += _goodput(own, other, against, told) if load.slo else []
        flags = ["failed-requests"] if failed else []
        listed += [row.model_copy(update={"flags": [*row.flags, *flags]}) for row in both]
    return listed + _whole(load, answers, against, about)


def paired(answers: Iterable[Mapping[str, Any]], latency: str) -> Timing:
    """Pair the requests of sides that were visited twice at one rate, for a comparison by blocks (`stats.slowdown`).

    A block holds neighbouring requests, the same ones in both visits of every side, in up to ten blocks. Requests that
    failed anywhere are left out.

    Raises InputError: `load-failed`, fewer than two requests were answered everywhere.
    """
    visits: dict[str, list[tuple[Array, Array]]] = {}
    order: list[str] = []
    for answer in answers:
        if "rate" not in answer:
            continue
        at = np.argsort(answer["start_times"], kind="stable")
        starts = np.asarray(answer["start_times"], np.float64)[at]
        values = [_of_request(answer, i).get(latency, np.nan) for i in at]
        visits.setdefault(answer["side"], []).append((np.array(values), answer["began"] + starts - starts[0]))
        order += [] if answer["side"] in order else [answer["side"]]
    whole = np.all([np.isfinite(values) for side in visits.values() for values, _ in side], axis=0)
    blocks = min(_STRETCHES, int(whole.sum()))
    if blocks < 2:
        raise InputError("load-failed", "load", "fewer than two requests", "every side answers them", "more requests")
    burst = int(whole.sum()) // blocks

    def shaped(of: int) -> dict[str, Array]:
        return {
            side: np.stack([visit[of][whole][: blocks * burst].reshape(blocks, burst) for visit in both], axis=1)
            for side, both in visits.items()
        }

    return Timing(shaped(0), shaped(1), [order] * blocks, (blocks,))


def _of_request(answer: Mapping[str, Any], at: int) -> dict[str, float]:
    """Return the latencies of a request but its gaps; none if it failed."""
    if answer["failed"][at]:
        return {}
    ttft, whole, count = answer["ttfts"][at], answer["latencies"][at], answer["output_lens"][at]
    return {"ttft": ttft, "e2el": whole} | ({"tpot": (whole - ttft) / (count - 1)} if count > 1 else {})


def _latencies(own: Sequence[Run], other: Sequence[Run], against: str | None, about: dict[str, Any]) -> Iterator[Row]:
    for name in LATENCIES:
        ours, theirs = _quantiles(own, name), _quantiles(other, name)
        for label, (value, draws, own_spread, groups) in ours.items():
            told, flags, spread = {**about["settings"], "quantile": label}, list[str](), own_spread
            beside: dict[str, Any] = {}
            if label in theirs and against is not None and value > 0:
                base, base_draws, base_spread, base_groups = theirs[label]
                ends = _ends(base_draws / draws, base / value, min(groups, base_groups))
                beside = {"baseline": Baseline(subject=against, value=base, ratio=base / value, ratio_ci95=ends)}
                told["baseline_low"], told["baseline_high"] = _ends(base_draws, base, base_groups)
                spread = max(spread, base_spread)
                flags += ["noisy"] if ends[1] / ends[0] - 1 > NOISY or spread > NOISY else []
            count = sum(run.served for run in own)
            flags += ["p99-from-few"] if label == "p99" and count < P99_FROM else []
            beside |= {"stat": {"p50": "median"}.get(label, label), "ci95": _ends(draws, value, groups), "n": count}
            more = {**about, **beside, "settings": told, "flags": flags, "aa_spread": spread if len(own) > 1 else None}
            yield Row.seconds(f"load.{name}", value, **more)


def _quantiles(runs: Sequence[Run], name: str) -> dict[str, tuple[float, Array, float, int]]:
    """Return (value, its draws, A/A spread, stretches) of each quantile; empty without an answered request."""
    parts = [part for run in runs for part in _stretches(run.values[name]) if part.size]
    if not parts:
        return {}
    index = np.random.default_rng(0).integers(0, len(parts), (_RESAMPLES, len(parts)))
    shares = list(QUANTILES.values())
    drawn = np.array([np.quantile(np.concatenate([parts[i] for i in row]), shares) for row in index])
    point = np.quantile(np.concatenate(parts), shares)
    visits = np.array([np.quantile(np.concatenate(run.values[name]), shares) for run in runs if run.values[name]])
    spread = [_spread(visits[:, i]) or 0.0 for i in range(len(shares))]
    return {label: (float(point[i]), drawn[:, i], spread[i], len(parts)) for i, label in enumerate(QUANTILES)}


def _stretches(values: Sequence[Array]) -> list[Array]:
    """Join the times of neighbouring requests, in up to ten stretches."""
    parts = np.array_split(np.arange(len(values)), min(_STRETCHES, len(values)) or 1)
    return [np.concatenate([values[i] for i in part]) if len(part) else np.empty(0) for part in parts]


def _ends(draws: Array, point: float, groups: int) -> Interval:
    if groups < 2:
        return point, point
    tail = tail_of(groups)
    low, high = (float(end) for end in np.quantile(draws, (tail, 1 - tail)))
    return min(low, point), max(high, point)


def _spread(visits: Iterable[float]) -> float | None:
    """Return the relative difference of the visits of a side; 100 if one alone is 0, None if all are."""
    known = [float(value) for value in visits]
    if not known or max(known) <= 0:
        return None
    return min(max(known) / min(known) - 1, _UNLIKE) if min(known) > 0 else _UNLIKE


def _rates(own: Sequence[Run], other: Sequence[Run], against: str | None, about: dict[str, Any]) -> list[Row]:
    return [
        _rate_row("load.requests", "request/s", lambda run: run.served, own, other, against, about),
        _rate_row("load.tokens", "token/s", lambda run: run.tokens, own, other, against, about),
    ]


def _rate_row(
    name: str,
    unit: str,
    count: Callable[[Run], float],
    own: Sequence[Run],
    other: Sequence[Run],
    against: str | None,
    about: dict[str, Any],
) -> Row:
    """Return a row of a count a second, over both visits."""
    sides = [side for side in (own, other) if side]
    mine, *base = (sum(map(count, side)) / sum(run.duration for run in side) for side in sides)
    spreads = [_spread(count(run) / run.duration for run in side) or 0.0 for side in sides if len(side) > 1]
    about = {**about, "stat": "mean", "better": "higher", "n": sum(len(run.good) for run in own)}
    about |= {"aa_spread": max(spreads, default=None), **_beside(against, mine, base, "higher")}
    return Row(name=name, value=mine, unit=unit, **about)


def _goodput(own: Sequence[Run], other: Sequence[Run], against: str | None, about: dict[str, Any]) -> list[Row]:
    row = _rate_row("load.goodput", "request/s", lambda run: run.good.sum(), own, other, against, about)
    told = dict(row.settings)
    for runs, prefix in ((own, ""), (other, "baseline_")):
        if runs:
            parts = [len(part) for run in runs for part in _stretches([np.empty(1)] * len(run.good))]
            good = np.concatenate([run.good for run in runs])
            ends = clustered_share(good, np.repeat(np.arange(len(parts)), parts))
            rate = len(good) / sum(run.duration for run in runs)
            low, high = (float(end) * rate for end in ends)
            told |= {f"{prefix}low": low, f"{prefix}high": high, f"{prefix}share": float(good.mean())}
    ci95 = told.pop("low"), told.pop("high")
    return [row.model_copy(update={"ci95": ci95, "settings": told})]


def _beside(against: str | None, value: float, base: Sequence[float], better: Better) -> dict[str, Any]:
    if against is None or not base:
        return {}
    above, below = (base[0], value) if better == "lower" else (value, base[0])
    return {"baseline": Baseline(subject=against, value=base[0], ratio=above / below if below else None)}


def _whole(
    load: ServerLoad, answers: Sequence[Mapping[str, Any]], against: str | None, about: dict[str, Any]
) -> list[Row]:
    """Return the rows of whole visits: requests in flight, blocks of the KV cache, memory of the server's processes."""
    listed = []
    kinds: list[tuple[str, str, str, Better]] = [
        ("in_flight", "load.in_flight", "1", "higher"),
        ("kv_blocks", "load.kv_blocks", "1", "higher"),
        ("peak_bytes", "load.memory", "B", "lower"),
    ]
    for key, name, unit, better in kinds:
        own, other = ([one for one in answers if one["side"] == side and key in one] for side in ("bundle", "original"))
        if not own:
            continue
        told = dict(about["settings"])
        mine, *base = (float(max(one[key] for one in side)) for side in (own, other) if side)
        if "block_size" in own[0]:
            size = own[0]["block_size"]
            whole = ceil((load.prompt + load.output) / size)  # blocks of a request
            told |= {"block_size": size, "fits": int(mine // whole)} if "kv" in key else {}
        fields = {**about, "settings": told, "stat": "max", "better": better, **_beside(against, mine, base, better)}
        listed.append(Row(name=name, value=mine, unit=unit, **fields))
    return listed


# --- the verdict -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadVerdict:
    """Conclusion of a load in words; `better`: True for the bundle, False for the original, None if not decided."""

    text: str
    better: bool | None
    remedy: str = ""


@dataclass(frozen=True)
class _Served:
    """The largest goodput of a side over the rates."""

    value: float
    ci95: Interval
    spread: float
    most: bool

    def told(self) -> str:
        return f"{'at least ' if self.most else ''}{self.value:.3g} requests/s" if self.value else "none"


def served_words(load: ServerLoad, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """State the goodput of every side in words; nothing without limits."""
    sides: dict[str, list[Run]] = {}
    for answer in answers if load.slo else ():
        if "rate" in answer:
            sides.setdefault(answer["side"], []).append(Run.of(answer, load.slo))
    good = {
        side: sum(run.good.sum() for run in runs) / sum(run.duration for run in runs) for side, runs in sides.items()
    }
    told = ", ".join(f"{side} {rate:.3g}" for side, rate in sorted(good.items()))
    return [f"goodput: requests/s within the limits at {load.rates[0]:g} requests/s: {told}"] if told else []


def beside(a: Sequence[Row], b: Sequence[Row], subject: str) -> list[Row]:
    """Set the rows of one load against those of another of the same requests: B's rows, with A's as their baseline.

    Args:
        subject: identity of A. Both were measured against a third, at different times, so that ratios have no interval.
    """

    def key(row: Row) -> tuple[Any, ...]:
        same = {name: row.settings.get(name) for name in ("rate", "quantile", "eager", *(f"slo_{x}" for x in LIMITS))}
        where = row.device.id if row.device else None
        return row.name, row.runtime, where, str(row.shape), *same.values()

    known = {key(row): row for row in a if row.name.startswith("load.")}
    listed = []
    for row in b:
        other = known.get(key(row)) if row.name.startswith("load.") else None
        if other is None or other.value is None or row.value is None:
            continue
        above, below = (other.value, row.value) if row.better == "lower" else (row.value, other.value)
        baseline = Baseline(subject=subject, value=other.value, ratio=above / below if below else None)
        ends = dict(zip(("baseline_low", "baseline_high"), other.ci95 or (), strict=False))
        share = {"baseline_share": other.settings["share"]} if "share" in other.settings else {}
        spread = max(one.aa_spread or 0.0 for one in (row, other))
        flags = list(dict.fromkeys([*row.flags, *other.flags]))
        told = {**row.settings, **ends, **share}
        listed.append(
            row.model_copy(update={"baseline": baseline, "settings": told, "aa_spread": spread, "flags": flags})
        )
    return listed


def outcome(rows: Sequence[Row], this: str = "", other: str = "the original") -> LoadVerdict | None:
    """Judge the rows of a load: by the largest goodput, else by the median request; None without a baseline.

    `this`, `other`: words for the bundle and the baseline.

    A side serves its largest goodput over the rates. It is `at least` that if 95 % of the requests at the largest rate
    are within the limits.
    """
    good = [row for row in rows if row.name == "load.goodput" and row.value is not None and row.baseline is not None]
    if good:
        return _by_goodput(good, this, other)
    whole = [row for row in rows if row.name == "load.e2el" and row.settings.get("quantile") == "p50"]
    row = max(whole, key=_rate, default=None)
    speed = speed_up(row) if row is not None else None
    if row is None or speed is None or row.baseline is None:
        return None
    low, high = speed.interval
    text = f"at {_rate(row):g} requests/s a request takes {_moment(row.value or 0.0)}, of {other}"
    text += f" {_moment(row.baseline.value)}: {speed.ratio:.3g} times as fast ({low:.3g} to {high:.3g})"
    if speed.doubt or low <= 1 <= high:
        return LoadVerdict(f"not decided: {text}", None, "more requests: --requests, or a quieter machine")
    return LoadVerdict(text, low > 1)


def _by_goodput(good: Sequence[Row], this: str, other: str) -> LoadVerdict:
    def side(of: Any) -> _Served:
        best = max(good, key=lambda row: of(row)[0])
        value, ci95, share = of(best)
        last = best is max(good, key=_rate)
        return _Served(value, ci95, best.aa_spread or 0.0, last and share >= _WHOLE)

    def original(row: Row) -> tuple[float, Interval, float]:
        assert row.baseline is not None
        low, high, share = (_number(row, f"baseline_{name}") for name in ("low", "high", "share"))
        return row.baseline.value, (low, high), share

    ours = side(lambda row: (row.value, row.ci95, _number(row, "share")))
    theirs = side(original)
    text = f"{this} serves {ours.told()} within the limit, {other} {theirs.told()}".strip()
    if ours.most and theirs.most:
        why = f"both serve the largest rate within the limit, {max(map(_rate, good)):g} requests/s"
        return LoadVerdict(f"not decided: {why}", None, "higher rates: --load rate=")
    low, high = _ratio(ours, theirs)
    sure = f" ({low:.3g} to {high:.3g} times as many)" if low > 0 and high < inf else ""
    if low <= 1 <= high:
        remedy = "more requests: --requests, or a quieter machine"
        return LoadVerdict(f"not decided: {text}{sure}; the intervals overlap", None, remedy)
    return LoadVerdict(f"{text}{sure}", low > 1)


def _ratio(ours: _Served, theirs: _Served) -> Interval:
    """Bound the ratio of two goodputs; one of zero is below every other whose interval is above its own."""
    if min(ours.value, theirs.value, ours.ci95[0], theirs.ci95[0]) <= 0:
        if max(ours.spread, theirs.spread) >= 1:
            return 0.0, inf
        low = inf if ours.ci95[0] > theirs.ci95[1] else 0.0
        return (low, inf) if ours.value > theirs.value else (0.0, 0.0 if theirs.ci95[0] > ours.ci95[1] else inf)
    values = [MeasuredValue.ratio(one.value, one.ci95, spread=one.spread) for one in (ours, theirs)]
    worse = difference(*values, margin=0.0, lower_is_better=False, logarithm=True)
    low, high = worse.interval(0.95)
    return exp(-high), exp(-low)


def _rate(row: Row) -> float:
    return _number(row, "rate")


def _number(row: Row, name: str) -> float:
    value = row.settings.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _moment(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
