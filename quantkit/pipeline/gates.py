"""Gates: what must hold for a result to be accepted, held against its measurements."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.bundle import Check
from quantkit.measure.rows import Row
from quantkit.recipe import Gates

# gate -> (measurement, whether the gate is about its ratio to the baseline, whether more is worse)
_ABOUT = {
    "kl_max": ("accuracy.kl", False, True),
    "top1_agreement_min": ("accuracy.top1_agreement", False, False),
    "perplexity_ratio_max": ("accuracy.perplexity", True, True),
    "cosine_min": ("accuracy.cosine", False, False),
    "bits_per_weight_max": ("size.bits_per_weight", False, True),
}


def judge(gates: Gates, rows: Sequence[Row]) -> list[Check]:
    """One check a gate that was set and whose measurement there is."""
    values = {row.name: row for row in rows}
    checks = []
    for gate, limit in gates.model_dump().items():
        name, is_ratio, more_is_worse = _ABOUT[gate]
        row = values.get(name)
        if limit is None or row is None or row.value is None:
            continue
        value = row.value
        if is_ratio:
            if row.baseline is None:
                continue
            value = row.value / row.baseline.value
        ok = value <= limit if more_is_worse else value >= limit
        checks.append(Check(name=f"gate.{gate}", value=value, limit=limit, ok=ok))
    return checks
