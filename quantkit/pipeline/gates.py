"""Gates: what must hold for a result to be accepted, held against its measurements."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.bundle import Check, Decision
from quantkit.measure.rows import Row
from quantkit.passes import decision
from quantkit.recipe import Gates

# gate -> (measurement, whether the gate is about its ratio to the baseline, whether more is worse)
_ABOUT = {
    "kl_max": ("accuracy.kl", False, True),
    "top1_agreement_min": ("accuracy.top1_agreement", False, False),
    "perplexity_ratio_max": ("accuracy.perplexity", True, True),
    "cosine_min": ("accuracy.cosine", False, False),
    "bits_per_weight_max": ("size.bits_per_weight", False, True),
}


def judge(gates: Gates, rows: Sequence[Row]) -> tuple[list[Check], list[Decision]]:
    """One check for each gate that was set, and a decision for each whose measurement there is none of."""
    values = {row.name: row for row in rows}
    checks, decisions = [], []
    for gate, limit in gates.model_dump().items():
        if limit is None:
            continue
        name, is_ratio, more_is_worse = _ABOUT[gate]
        value = _measured(values.get(name), is_ratio)
        if value is None:
            reason = f"{name} was not measured for this kind of model"
            decisions.append(decision("gates", "gate-not-judged", f"gates.{gate}", reason, limit))
        else:
            ok = value <= limit if more_is_worse else value >= limit
            checks.append(Check(name=f"gate.{gate}", value=value, limit=limit, ok=ok))
    return checks, decisions


def _measured(row: Row | None, is_ratio: bool) -> float | None:
    if row is None or row.value is None or not is_ratio:
        return None if row is None else row.value
    return None if row.baseline is None else row.value / row.baseline.value
