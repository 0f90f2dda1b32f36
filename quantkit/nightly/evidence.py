"""Derive evidence for a decision from the rows of one cell or build.

    latency     times of both sides in the same ABBA blocks         `stats.slowdown`
                of requests under load: medians of stretches of the same requests, A B B A
    accuracy    items that only one side answers right              `stats.flips`, sequences as clusters
    kl          KL from the float model, and −log p                 `stats.flips`, sequences as clusters
    drift       latency and accuracy against the last release
    tasks       the lower bound of recovery against the least that is accepted, no test between nights
    size        bytes, counted

A comparison without data on both sides gets its answer at once, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.nightly.config import NightMargins
from quantkit.nightly.records import Answer, Item, NightCell, Result, Side, Time, What
from quantkit.report.kit import words
from quantkit.runtimes import load_runtime
from quantkit.stats.clustered import clusters_of
from quantkit.stats.evidence import KNOWN, Evidence, Interval, MeasuredValue, difference
from quantkit.stats.flips import flips, increase
from quantkit.stats.slowdown import slowdown

Array = NDArray[Any]
Thing = Literal["latency", "accuracy", "kl", "perplexity", "tasks", "size"]

# flags of a result, each followed by `: ` and the reason: a missing side makes the cell inconclusive. `UNSCORED`
# concerns the candidate, or the side at the start of the reason: `accuracy-unscored: baseline: ...`
UNLOADABLE: dict[Side, str] = {"baseline": "baseline-unloadable", "release": "release-unloadable"}
UNSCORED, UNASKED = "accuracy-unscored", "tasks-unasked"
FIRST = "no baseline yet: this night becomes the baseline"


@dataclass(frozen=True)
class NightComparison:
    """One comparison.

    Args:
        cells: keys of the cells; those of one build share some measurements.
        what: column of its decision.
        evidence: None if the answer needs none; `because` then has the reason, otherwise a note for the reader.
        n: items, or timed steps of the candidate.
        lost: (effect, its interval, the most that is accepted) of an answer without evidence.
    """

    cells: tuple[str, ...]
    what: What
    thing: Thing
    evidence: Evidence | None = None
    n: int | None = None
    answer: Answer = "inconclusive"
    because: str = ""
    lost: tuple[float, Interval, float] | None = None


def is_first(result: Result) -> bool:
    """Tell whether a cell had no baseline yet, and so becomes the next night's baseline."""
    return result.state == "done" and result.baseline_sha256 is None and not _flag(result, UNLOADABLE["baseline"])


def of_times(result: Result, times: Sequence[Time], margins: NightMargins) -> list[NightComparison]:
    """Compare latency and, with a release, its drift; `times` belong to the result's attempt."""
    sides: list[Side] = ["baseline", *(["release"] if _has_release(result) else [])]  # type: ignore[list-item]
    return [_timed(result, times, side, margins) for side in sides]


def of_items(results: Sequence[Result], items: Sequence[Item], margins: NightMargins) -> list[NightComparison]:
    """Compare accuracy and KL of one build's cells with equal margins and, with a release, the drift."""
    compared = _scored(results, items, "baseline", margins)
    if _has_release(results[0]) and any(item.side == "release" for item in items):
        compared += _scored(results, items, "release", margins)
    return compared


def of_size(result: Result, margins: NightMargins) -> NightComparison:
    """Compare the bytes of the weights, which are exact."""
    cells = (result.cell,)
    if not result.bytes or not result.baseline_bytes:
        answer, why = _nothing(result, "baseline", there=bool(result.bytes))
        return NightComparison(cells, "size", "size", answer=answer, because=why)
    larger = log(result.bytes / result.baseline_bytes)
    known = MeasuredValue(larger, (larger, larger))
    evidence = difference(known, KNOWN, margin=margins.size, alarm=margins.size, logarithm=True)
    return NightComparison(cells, "size", "size", evidence, 1)


def of_tasks(results: Sequence[Result], least: float) -> list[NightComparison]:
    """Hold the lower bound of recovery in each score of a build against the least that is accepted."""
    cells = tuple(row.cell for row in results)
    known = next((row.recovery for row in results if row.recovery), None)
    if not known:
        reasons = [reason for row in results for reason in _flags(row, UNASKED)]
        why = f"no recovery: {next(iter(reasons), 'the original has nothing right')}"
        return [NightComparison(cells, "tasks", "tasks", because=why)]
    compared = []
    for name, (ratio, low, high, count) in known.items():
        why = f"recovery of {name} {words.percent(ratio)} ({words.between((low, high), words.percent)})"
        why += f", {'at least' if low >= least else 'its lower bound is below'} {words.percent(least)}"
        lost = (1 - ratio, (1 - high, 1 - low), 1 - least)
        answer: Answer = "same" if low >= least else "worse"
        compared.append(NightComparison(cells, "tasks", "tasks", None, count, answer, why, lost))
    return compared


def _timed(result: Result, times: Sequence[Time], other: Side, margins: NightMargins) -> NightComparison:
    cells, what = (result.cell,), _what("latency", other)
    ours = [step for step in times if step.side == "candidate"]
    if not ours or not any(step.side == other for step in times):
        answer, why = _nothing(result, other, there=bool(ours))
        return NightComparison(cells, what, "latency", n=len(ours), answer=answer, because=why)

    def evidence() -> Evidence:
        candidate, baseline, rounds = paired(times, other, result.cell)
        # of requests under load the fastest is the one that met no other
        loaded = load_runtime(NightCell.of(result.cell).program).own is not None
        how: dict[str, Any] = {"quantile": 0.5 if loaded else 0.0, "margin": margins.latency}
        return slowdown(candidate, baseline, rounds=rounds, where=result.cell, **how)

    slowed = sum(bool(step.throttled) for step in times)
    notes = [f"the device lowered its clock in {slowed} of {len(times)} steps"] if slowed else []
    notes += ["both sides are the same bundle"] if result.content_sha256 == _sha256(result, other) else []
    return _asked(cells, what, "latency", len(ours), evidence, "; ".join(notes))


def paired(times: Sequence[Time], other: Side, where: str) -> tuple[Array, Array, list[int]]:
    """Pair (candidate, other side) [blocks, 2, burst] in seconds, and count the blocks of each round.

    Blocks without one of the two sides are skipped: they compare with another side.

    Raises InputError: `times-invalid`, a block that does not visit both sides twice and as often as the others.
    """
    blocks: dict[tuple[int, int], dict[str, list[float]]] = {}
    for step in sorted(times, key=lambda step: (step.round, step.block, step.position)):
        blocks.setdefault((step.round, step.block), {}).setdefault(step.side, []).append(step.seconds)
    chosen = {key: sides for key, sides in blocks.items() if "candidate" in sides and other in sides}
    counts = {len(sides[side]) for sides in chosen.values() for side in ("candidate", other)}
    if len(counts) != 1 or (count := counts.pop()) % 2:
        value = f"blocks of {', '.join(map(str, sorted(counts or {count})))} steps of a side"
        raise InputError(
            "times-invalid", where=where, value=value, rule="every block visits both sides twice, equally often"
        )
    ours, theirs = (
        np.array([sides[side] for sides in chosen.values()]).reshape(len(chosen), 2, count // 2)
        for side in ("candidate", other)
    )
    return ours, theirs, list(Counter(number for number, _ in chosen).values())


def _scored(
    results: Sequence[Result], items: Sequence[Item], other: Side, margins: NightMargins
) -> list[NightComparison]:
    cells, result = tuple(row.cell for row in results), results[0]
    sides = [[row for row in items if row.side == side] for side in (other, "candidate")]
    before, after = (sorted(side, key=lambda row: row.item) for side in sides)
    if not before or not after:
        answer, why = _nothing(result, other, there=bool(after))
        if reason := _unscored(results, other):
            answer, why = "inconclusive", f"not scored: {reason}"
        has_kl = any(row.kl is not None for row in after)
        things: tuple[Literal["accuracy", "kl"], ...] = ("accuracy", "kl") if has_kl else ("accuracy",)
        return [
            NightComparison(cells, _what(thing, other), thing, n=len(after), answer=answer, because=why)
            for thing in things
        ]

    numbers = np.array([row.item for row in before]), np.array([row.item for row in after])
    labels = [row.sequence for row in after]
    clusters = None if None in labels else np.array(labels)
    if clusters is not None and _all_have("logp", before, after):
        # distant words of a text are independent enough; crops of a photograph are not
        clusters, _ = clusters_of(clusters)

    def lost() -> Evidence:
        right = ([bool(row.correct) for row in side] for side in (before, after))
        return flips(
            *map(np.array, right), margin=margins.accuracy, clusters=clusters, items=numbers, where=result.build
        )

    def risen(name: str, sign: float) -> Callable[[], Evidence]:
        def evidence() -> Evidence:
            values = (sign * np.array([getattr(row, name) for row in side], float) for side in (before, after))
            return increase(*values, margin=margins.kl, clusters=clusters, items=numbers, where=result.build)

        return evidence

    kept = {name: _all_have(name, before, after) for name in ("correct", "kl", "logp")}
    comparisons: list[NightComparison] = []
    if kept["correct"]:
        comparisons.append(_asked(cells, _what("accuracy", other), "accuracy", len(after), lost))
    if other == "baseline":
        for thing, name, sign in (("kl", "kl", 1.0), ("perplexity", "logp", -1.0)):
            if kept[name]:
                comparisons.append(_asked(cells, "kl", thing, len(after), risen(name, sign)))  # type: ignore[arg-type]
        if not comparisons:
            why = "the items have neither answers nor likelihoods of both sides"
            comparisons.append(
                NightComparison(cells, "accuracy", "accuracy", n=len(after), answer="missing", because=why)
            )
    return comparisons


def _all_have(name: str, *sides: Sequence[Item]) -> bool:
    return all(getattr(item, name) is not None for side in sides for item in side)


def _asked(
    cells: tuple[str, ...], what: What, thing: Thing, n: int, evidence: Callable[[], Evidence], because: str = ""
) -> NightComparison:
    """Make a comparison; unusable measurements become a failure of this cell alone."""
    try:
        return NightComparison(cells, what, thing, evidence(), n, because=because)
    except InputError as error:
        return NightComparison(cells, what, thing, None, n, "failed", error.line())


def _nothing(result: Result, other: Side, *, there: bool) -> tuple[Answer, str]:
    """Return the answer and the reason if one side has no data."""
    if not there:
        return "missing", "the candidate was not measured"
    if reason := _flag(result, UNLOADABLE[other]):
        return "inconclusive", f"the {_named(other)} could not be loaded: {reason}"
    if other == "baseline" and is_first(result):
        return "inconclusive", FIRST
    return "inconclusive", f"the {_named(other)} was not measured"


def _named(other: Side) -> str:
    return "last release" if other == "release" else other


def _what(thing: What, other: Side) -> What:
    return "drift" if other == "release" else thing


def _has_release(result: Result) -> bool:
    return result.release_sha256 is not None or bool(_flag(result, UNLOADABLE["release"]))


def _sha256(result: Result, other: Side) -> str | None:
    return result.release_sha256 if other == "release" else result.baseline_sha256


def _unscored(results: Sequence[Result], other: Side) -> str:
    """Return the flagged reason for unscored items of the candidate or the other side; "" without one."""
    reasons = [reason for result in results for reason in _flags(result, UNSCORED)]
    others = [f"{side}:" for side in UNLOADABLE if side != other]
    return next((reason for reason in reasons if not reason.startswith(tuple(others))), "")


def _flag(result: Result, name: str) -> str:
    """Return the reason of a flag; "" without it."""
    return next(iter(_flags(result, name)), "")


def _flags(result: Result, name: str) -> list[str]:
    matching = (flag for flag in result.flags if flag == name or flag.startswith(f"{name}:"))
    return [flag.removeprefix(name).lstrip(": ") or "the reason is unknown" for flag in matching]
