"""What ends a compile: gates, held against its measurements, a check that failed, a decision that nobody asked for.

A shipped recipe names gates for every kind of model that it is for; those of other kinds are a note. A gate that
somebody asked for and that nothing scored can judge is said: a decision, a warning, and an error under `--strict`. So
are all gates of a recipe, where none of them can be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from quantkit.bundle import Check, Decision, Manifest
from quantkit.errors import GateError
from quantkit.measurement.rows import Row
from quantkit.model.sizes.assigned import ASKED, EXPERTS, FLOATS
from quantkit.passes import NOTE, decision
from quantkit.planning.support import EMULATED
from quantkit.recipe import Gates
from quantkit.report.bundle import figures

UNJUDGED = "gate-not-judged"
_WHERE = "gates."


@dataclass(frozen=True)
class _About:
    """What a gate is about: rows of a name, what has them, what is held against the limit, and of which of them."""

    name: str
    takes: str
    read: Callable[[Row], float | None]
    among: Callable[[Row], bool] = lambda row: True


def _itself(row: Row) -> float | None:
    return row.value


def _ratio(row: Row) -> float | None:
    return None if row.value is None or row.baseline is None else row.value / row.baseline.value


def _points_lost(row: Row) -> float | None:
    lost = row.baseline.difference if row.baseline is not None else None
    # rounded, so that 0.3 points of 5,000 images are 0.3
    return None if lost is None else round(-100 * lost, 9) + 0.0


def _of_classes(row: Row) -> bool:
    """Whether a row is about a classifier's answers, not about next words."""
    return "classes" in (row.shape or {})


_WORDS, _CLASSES = (
    "a language model, and its original",
    "an output with a row of classes a sample (labels or its name say so)",
)
_ABOUT = {
    "kl_max": _About("accuracy.kl", "next words or classes", _itself),
    "top1_agreement_min": _About("accuracy.top1_agreement", _WORDS, _itself, lambda row: not _of_classes(row)),
    "perplexity_ratio_max": _About("accuracy.perplexity", _WORDS, _ratio),
    "top1_drop_max": _About("accuracy.top1", f"{_CLASSES}, and labels", _points_lost),
    "agreement_min": _About("accuracy.top1_agreement", _CLASSES, _itself, _of_classes),
    "recall_drop_max": _About("accuracy.recall_at_1", "an encoder, and pairs of texts", _points_lost),
    "cosine_min": _About("accuracy.cosine", "a model that gives vectors", _itself),
    "bits_per_weight_max": _About("size.bits_per_weight", "quantized layers", _itself),
}


def judge(gates: Gates, rows: Sequence[Row], asked: Container[str] | None = None) -> tuple[list[Check], list[Decision]]:
    """One check for each gate that was set and each runtime it was measured in, on the worst of its rows there, and a
    decision for each gate whose measurement there is none of: a note, if nobody asked for it.

    Args:
        asked: gates that somebody asked for; None is all.

    The first runtime's checks are called `gate.kl_max`; others bear the runtime's name: `gate.onnxruntime.kl_max`.
    """
    checks: list[Check] = []
    unjudged: list[tuple[str, float, str]] = []
    for gate, limit in gates.model_dump().items():
        if limit is None:
            continue
        about, worse = _ABOUT[gate], max if gate.endswith("_max") else min
        found: dict[str | None, float] = {}
        for row in rows:
            if row.name == about.name and _is_plain(row) and about.among(row):
                value = about.read(row)
                if value is not None:
                    found[row.runtime] = worse(value, found.get(row.runtime, value))
        if not found:
            unjudged.append((gate, limit, f"not judged: {about.name} was not measured, which takes {about.takes}"))
        for number, (runtime, value) in enumerate(found.items()):
            ok = worse(value, limit) == limit
            label = f"gate.{gate}" if number == 0 else f"gate.{runtime}.{gate}"
            checks.append(Check(name=label, value=value, limit=limit, ok=ok))
    meant = {gate for gate, *_ in unjudged if asked is None or gate in asked or not checks}
    return checks, [
        decision("gates", UNJUDGED if gate in meant else NOTE, f"{_WHERE}{gate}", reason, limit)
        for gate, limit, reason in unjudged
    ]


def allowed(gates: Gates, name: str, before: float | None) -> float | None:
    """How much worse than another model the gates allow a bundle to be in a thing; None where none is about it.

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
    of_classes, cosine = gates.agreement_min, gates.cosine_min
    if name == "accuracy.kl":
        return None if kl is None else kl - (before or 0.0)
    if name == "accuracy.next_word":
        return 1 - agreement if agreement is not None else None if kl is None else math.sqrt(kl / 2)
    if name == "accuracy.perplexity":
        return kl if ratio is None else math.log(ratio)
    drops = {"accuracy.top1": gates.top1_drop_max, "accuracy.recall_at_1": gates.recall_drop_max}
    if (points := drops.get(name)) is not None:
        return points / 100
    least = {"accuracy.top1_agreement": of_classes, "accuracy.cosine": cosine}.get(name)
    return None if least is None else (1.0 if before is None else before) - least


def warnings(decisions: Sequence[Decision]) -> list[str]:
    """What a reader has to know: of gates that were asked for and not judged, of formats that are not computed
    in, of weights that stay in floats."""
    said = {
        UNJUDGED: "{0.where} {0.from_:g} is {0.reason}",
        EMULATED: "{0.where}: {0.reason}",
        FLOATS: "{0.reason}",
    }
    return [said[each.code].format(each) for each in decisions if each.code in said]


def still_unjudged(decisions: Sequence[Decision], checks: Sequence[Check]) -> list[Decision]:
    """Decisions without those on gates that have a check by now."""
    judged = {f"{_WHERE}{check.name.rpartition('.')[2]}" for check in figures.gates(checks)}
    return [each for each in decisions if each.code not in (UNJUDGED, NOTE) or each.where not in judged]


def measured(gate: str, rows: Sequence[Row]) -> Row | None:
    """The first row that a gate is about."""
    about = _ABOUT[gate]
    return next((row for row in rows if row.name == about.name and _is_plain(row) and about.among(row)), None)


def _is_plain(row: Row) -> bool:
    """What a longer context costs, and what becomes of the answers that the original is sure of, is told, not gated."""
    return "context" not in (row.shape or {}) and "surer_than" not in row.settings


def failed_gate(manifest: Manifest) -> GateError | None:
    """The error of a bundle whose gate failed."""
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
        remedy="the bundle is kept; use another recipe, or change the gate if that is good enough",
    )


def demand(checks: Iterable[Check], remedy: str, *, of: str = "") -> None:
    """Refuse what failed a check.

    Args:
        of: what the checks are of, where that is not what was asked for.

    Raises:
        GateError: `check-failed`, with the first that failed.
    """
    failed = next((check for check in checks if not check.ok), None)
    if failed is None:
        return
    value = "not known" if failed.value is None else f"{failed.value:.4g}"
    raise GateError(
        "check-failed",
        where=": ".join(part for part in (of, failed.where or failed.name) if part),
        value=f"{failed.name} is {value}",
        rule=failed.rule,
        remedy=remedy,
    )


def refuse(decisions: Sequence[Decision]) -> None:
    """Raise GateError for the first decision that the recipe did not ask for, if there is any."""
    unasked = [found for found in decisions if found.code not in {*ASKED, NOTE}]
    if unasked:
        first = unasked[0]
        raise GateError(
            "strict",
            where=first.where,
            value=f"{first.pass_}: {first.code}",
            rule=f"--strict allows no decision beyond the recipe; {first.reason} ({len(unasked)} in all)",
            remedy=f"{_written(first)}, or leave --strict out (--resume goes on)",
        )


def _written(taken: Decision) -> str:
    """Say how a recipe asks for what was decided."""
    if taken.code == EXPERTS:
        return f"add '*.{taken.where.rpartition('.')[2]}' to the recipe's `keep`"
    if taken.code == FLOATS:
        return "name in the recipe's `keep` the modules in its blocks that are meant to stay in floats"
    if taken.code == UNJUDGED:
        return f"take the gate out: --set {taken.where}=null"
    if taken.code == "expert-unrouted":
        return (
            "calibrate on more text (calibration.samples), or be content with less: --set calibration.expert_tokens=1"
        )
    if taken.code == EMULATED:
        return "take another recipe or target"
    if taken.where.startswith("scheme.") and taken.to is not None:
        return f"ask for it: --set {taken.where}={taken.to}"
    return "write it into the recipe (keep, overrides, settings)"
