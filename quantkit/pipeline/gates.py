"""Judge a finished compile by its gates, its failed checks, and its decisions that the request did not ask for.

A shipped recipe names gates for several kinds of models; those of other kinds become a note. A user's own gate without
a row to judge it is a decision and a warning, and an error under `--strict`. The same holds for a recipe none of whose
gates can be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quantkit.bundle import Check, Decision, Manifest
from quantkit.errors import GateError
from quantkit.measurement.rows import Interval, Row
from quantkit.passes import NOTE, decision
from quantkit.planning.assigned import ASKED, EXPERTS, FLOATS, LEFT_OUT
from quantkit.planning.support import EMULATED
from quantkit.recipe import Gates
from quantkit.report.bundle import figures
from quantkit.report.kit import words

UNJUDGED, NEAR = "gate-not-judged", "gate-within-interval"
_WHERE = "gates."


def _itself(row: Row) -> float | None:
    return row.value


def _ratio(row: Row) -> float | None:
    return None if row.value is None or row.baseline is None else row.value / row.baseline.value


def _points_lost(row: Row) -> float | None:
    lost = row.baseline.difference if row.baseline is not None else None
    # rounded, so that 0.3 points of 5,000 images are 0.3
    return None if lost is None else round(-100 * lost, 9) + 0.0


def _own_interval(row: Row) -> Interval | None:
    return row.ci95


def _ratio_interval(row: Row) -> Interval | None:
    # a row's ratio says how many times better it is
    ends = row.baseline.ratio_ci95 if row.baseline is not None else None
    return (1 / ends[1], 1 / ends[0]) if ends and ends[0] > 0 else None


def _lost_interval(row: Row) -> Interval | None:
    ends = row.baseline.difference_ci95 if row.baseline is not None else None
    return (-100 * ends[1], -100 * ends[0]) if ends else None


@dataclass(frozen=True)
class _Subject:
    """Subject of a gate: name of its rows, models that have them (`takes`), bounded value (`read`) with its interval
    (`sure`); `classes`: rows of a classifier's answers, or of next words."""

    name: str
    takes: str
    read: Callable[[Row], float | None] = _itself
    classes: bool | None = None
    sure: Callable[[Row], Interval | None] = _own_interval

    def has(self, row: Row) -> bool:
        """Tell whether the gate judges a row; longer contexts, and answers the original is sure of, are only shown."""
        shape = row.shape or {}
        if row.name != self.name or "context" in shape or "surer_than" in row.settings:
            return False
        return self.classes in (None, "classes" in shape)


_WORDS, _CLASSES = (
    "a language model, and its original",
    "an output with a row of classes a sample (labels or its name say so)",
)
_SUBJECTS = {
    "kl_max": _Subject("accuracy.kl", "next words or classes"),
    "top1_agreement_min": _Subject("accuracy.top1_agreement", _WORDS, classes=False),
    "perplexity_ratio_max": _Subject("accuracy.perplexity", _WORDS, _ratio, sure=_ratio_interval),
    "top1_drop_max": _Subject("accuracy.top1", f"{_CLASSES}, and labels", _points_lost, sure=_lost_interval),
    "agreement_min": _Subject("accuracy.top1_agreement", _CLASSES, classes=True),
    "recall_drop_max": _Subject(
        "accuracy.recall_at_1", "an encoder, and pairs of texts", _points_lost, sure=_lost_interval
    ),
    "cosine_min": _Subject("accuracy.cosine", "a model that gives vectors"),
    "bits_per_weight_max": _Subject("size.bits_per_weight", "quantized layers"),
}


def _recovered(task: str) -> _Subject:
    """Return the subject of a task's gate: the lower bound of recovery, of all its scores or of the named one."""

    def bound(row: Row) -> float | None:
        base, told = row.baseline, row.settings
        named = task in (told.get("task"), f"{told.get('task')} {told.get('metric')}") and not told.get("floor")
        return base.ratio_ci95[0] if named and base is not None and base.ratio_ci95 else None

    takes = f"`quantkit measure BUNDLE --tasks {task.split(maxsplit=1)[0]}`"
    return _Subject("task.score", takes, bound, sure=lambda _: None)


def _limits(gates: Gates) -> Iterator[tuple[str, float, _Subject]]:
    """Yield the gates with a limit: `kl_max`; `piqa recovery_min` of a task."""
    for gate, limit in gates.model_dump().items():
        if isinstance(limit, dict):
            yield from ((f"{task} {gate}", least, _recovered(task)) for task, least in limit.items())
        elif limit is not None:
            yield gate, limit, _SUBJECTS[gate]


def judge(gates: Gates, rows: Sequence[Row], asked: Container[str] | None = None) -> tuple[list[Check], list[Decision]]:
    """Check each gate in each runtime with a measurement, on its worst row there; with a decision for each gate without
    one: a note, if nobody asked for it.

    The first runtime's checks are called `gate.kl_max`; others bear the runtime's name: `gate.onnxruntime.kl_max`.

    Args:
        asked: gates from the request; None is all.
    """
    checks: list[Check] = []
    unjudged: list[tuple[str, float, str]] = []
    for gate, limit, about in _limits(gates):
        worse = max if gate.endswith("_max") else min
        worst: dict[str | None, float] = {}
        for row in filter(about.has, rows):
            if (value := about.read(row)) is not None:
                worst[row.runtime] = worse(value, worst.get(row.runtime, value))
        if not worst:
            unjudged.append((gate, limit, f"not judged: {about.name} was not measured, which takes {about.takes}"))
        for number, (runtime, value) in enumerate(worst.items()):
            label = f"gate.{gate}" if number == 0 else f"gate.{runtime}.{gate}"
            checks.append(Check(name=label, value=value, limit=limit, ok=worse(value, limit) == limit))
    meant = {gate for gate, *_ in unjudged if asked is None or gate.split()[-1] in asked or not checks}
    return checks, [
        decision("gates", UNJUDGED if gate in meant else NOTE, f"{_WHERE}{gate}", reason, limit)
        for gate, limit, reason in unjudged
    ]


def near(gates: Gates, rows: Sequence[Row]) -> list[Decision]:
    """List the gates with a limit inside a row's 95 % interval: more items may change the decision."""
    decisions = []
    for gate, limit, about in _limits(gates):
        for row in filter(about.has, rows):
            ends = about.sure(row)
            if ends is not None and ends[0] < limit < ends[1]:
                low, high = map(words.short, ends)
                reason = f"the mean over {row.n:,} items decides; its 95 % interval in {row.runtime}, {low} to {high}, "
                decisions.append(decision("gates", NEAR, f"{_WHERE}{gate}", f"{reason}includes the limit", limit))
    return decisions


def allowed(gates: Gates, name: str, before: float | None) -> float | None:
    """Return the loss against another model that the gates allow; None if no gate limits it.

    What no gate names follows from one that does: who agrees on a share m of the words has lost at most 1 − m of them;
    KL bounds the chance that the guesses differ (Pinsker: TV ≤ √(KL / 2)); and of a model that knows how sure it may be
    the negative log-likelihood rises by the KL.

    Args:
        name: of the rows that it is about.
        before: the other model's value; the original's own is the best there is.

    Returns:
        In the unit of `DecidedCell.effect`: nats, or a share.
    """
    kl, agreement, ratio = gates.kl_max, gates.top1_agreement_min, gates.perplexity_ratio_max
    if name == "accuracy.kl":
        return None if kl is None else kl - (before or 0.0)
    if name == "accuracy.next_word":
        return 1 - agreement if agreement is not None else None if kl is None else math.sqrt(kl / 2)
    if name == "accuracy.perplexity":
        return kl if ratio is None else math.log(ratio)
    drops = {"accuracy.top1": gates.top1_drop_max, "accuracy.recall_at_1": gates.recall_drop_max}
    if (points := drops.get(name)) is not None:
        return points / 100
    least = {"accuracy.top1_agreement": gates.agreement_min, "accuracy.cosine": gates.cosine_min}.get(name)
    return None if least is None else (1.0 if before is None else before) - least


def warnings(decisions: Sequence[Decision]) -> list[str]:
    """Warn a reader of gates that were not judged or are close, of formats outside the computation, and of weights in
    floats.
    """
    texts = {
        UNJUDGED: "{0.where} {0.from_:g} is {0.reason}",
        NEAR: "{0.where} {0.from_:g}: {0.reason}",
        EMULATED: "{0.where}: {0.reason}",
        FLOATS: "{0.reason}",
    }
    return [texts[taken.code].format(taken) for taken in decisions if taken.code in texts]


def still_unjudged(decisions: Sequence[Decision], checks: Sequence[Check]) -> list[Decision]:
    """Leave out decisions on gates that have been judged since."""
    judged = {f"{_WHERE}{check.name.rpartition('.')[2]}" for check in figures.gates(checks)}
    return [taken for taken in decisions if taken.code not in (UNJUDGED, NEAR, NOTE) or taken.where not in judged]


def measured(gate: str, rows: Sequence[Row]) -> Row | None:
    """Return the first row for a gate."""
    return next(filter(_SUBJECTS[gate].has, rows), None)


def failed_gate(manifest: Manifest) -> GateError | None:
    """Return the error of a bundle whose gate failed."""
    failed = [check for check in figures.gates(manifest.checks) if not check.ok]
    if manifest.state == "complete" or not failed:
        return None
    first = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return GateError(
        "gate-failed",
        where=f"{first.name}{more}",
        value=f"{first.value:.6g}",
        rule=f"{'at least' if first.name.endswith('_min') else 'at most'} {first.limit:g}",
        remedy="the bundle is kept; use another recipe, or relax the gate",
    )


def demand(checks: Iterable[Check], remedy: str, *, of: str = "") -> None:
    """Refuse failed checks.

    Args:
        of: subject of the checks, if it differs from the request.

    Raises GateError: `check-failed`, with the first failed check.
    """
    failed = next((check for check in checks if not check.ok), None)
    if failed is not None:
        value = "not known" if failed.value is None else f"{failed.value:.4g}"
        where = ": ".join(part for part in (of, failed.where or failed.name) if part)
        value = f"{failed.name} is {value}"
        raise GateError("check-failed", where=where, value=value, rule=failed.rule, remedy=remedy)


def refuse(decisions: Sequence[Decision]) -> None:
    """Raise GateError for the first decision that the recipe did not ask for, if there is any."""
    unasked = [taken for taken in decisions if taken.code not in {*ASKED, NEAR, NOTE}]
    if unasked:
        first = unasked[0]
        rule = f"--strict allows no decision beyond the recipe; {first.reason} ({len(unasked)} in all)"
        remedy = f"{_written(first)}, or leave --strict out (--resume goes on)"
        raise GateError("strict", first.where, f"{first.pass_}: {first.code}", rule, remedy)


def _written(taken: Decision) -> str:
    """Show how a recipe asks for a decision."""
    ways = {
        EXPERTS: f"add '*.{taken.where.rpartition('.')[2]}' to the recipe's `keep`",
        FLOATS: "name in the recipe's `keep` the modules in its blocks that are meant to stay in floats",
        UNJUDGED: f"take the gate out: --set {taken.where}=null",
        "expert-unrouted": "calibrate on more text (calibration.samples), "
        "or be content with less: --set calibration.expert_tokens=1",
        LEFT_OUT: f"leave `{taken.where}` out of the recipe's `export`",
        "form-chosen": "ask for it: --set calibration.template=chat, or give plain text",
        EMULATED: "take another recipe or target",
    }
    if taken.code in ways:
        return ways[taken.code]
    if taken.where.startswith("scheme.") and taken.to is not None:
        return f"ask for it: --set {taken.where}={taken.to}"
    return "write it into the recipe (keep, overrides, settings)"
