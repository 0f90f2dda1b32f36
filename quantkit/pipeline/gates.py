"""Gates: what must hold for a result to be accepted, held against its measurements."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.bundle import Check, Decision, Manifest
from quantkit.errors import GateError
from quantkit.measure.rows import Row
from quantkit.passes import decision
from quantkit.recipe import Gates
from quantkit.report import figures

# gate -> (measurement, whether the gate is about its ratio to the baseline, whether more is worse)
_ABOUT = {
    "kl_max": ("accuracy.kl", False, True),
    "top1_agreement_min": ("accuracy.top1_agreement", False, False),
    "perplexity_ratio_max": ("accuracy.perplexity", True, True),
    "cosine_min": ("accuracy.cosine", False, False),
    "bits_per_weight_max": ("size.bits_per_weight", False, True),
}


def judge(gates: Gates, rows: Sequence[Row]) -> tuple[list[Check], list[Decision]]:
    """One check for each gate that was set and each runtime it was measured in, and a decision for each gate whose
    measurement there is none of.

    The first runtime's checks are called `gate.kl_max`; others bear the runtime's name: `gate.onnxruntime.kl_max`.
    """
    checks, decisions = [], []
    for gate, limit in gates.model_dump().items():
        if limit is None:
            continue
        name, is_ratio, more_is_worse = _ABOUT[gate]
        # what a longer context costs is told, and not gated
        plain = [row for row in rows if row.name == name and "context" not in (row.shape or {})]
        found = {row.runtime: _measured(row, is_ratio) for row in plain}
        values = [(runtime, value) for runtime, value in found.items() if value is not None]
        if not values:
            reason = f"{name} was not measured for this kind of model"
            decisions.append(decision("gates", "gate-not-judged", f"gates.{gate}", reason, limit))
        for number, (runtime, value) in enumerate(values):
            ok = value <= limit if more_is_worse else value >= limit
            label = f"gate.{gate}" if number == 0 else f"gate.{runtime}.{gate}"
            checks.append(Check(name=label, value=value, limit=limit, ok=ok))
    return checks, decisions


def _measured(row: Row, is_ratio: bool) -> float | None:
    if row.value is None or not is_ratio:
        return row.value
    return None if row.baseline is None else row.value / row.baseline.value


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
