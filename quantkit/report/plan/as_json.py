"""Plan as JSON: names include the unit, unknown values are null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedMemory, PlannedRecipe
from quantkit.planning.ranking import Losses, Ranked
from quantkit.report.plan import words as say


def as_dict(outlook: Outlook) -> dict[str, Any]:
    """Return `result` of the JSON envelope."""
    model, target, work = outlook.architecture, outlook.target, outlook.workload
    plan = {
        "model": {
            **_named(model, "name", "kind", "model_type", "dtype", "parameters", "active_parameters"),
            "layers": len(model.layers),
            **_named(model, "hidden", "vocabulary"),
            "max_context_tokens": model.max_context,
            "assumed": model.assumed,
        },
        "target": {
            **_named(target, "name", "summary", "kind"),
            "figures": {
                place: {"value": figure.number, **_named(figure, "unit", "state", "source")}
                for place, figure in target.figures().items()
            },
            "unmeasured": target.unmeasured(),
        },
        "workload": {
            "batches": work.batches,
            "prompt_tokens": work.prompt,
            "output_tokens": work.output,
            "context_tokens": work.context,
            "requests_per_s": work.rate,
            "assumed": work.assumed,
        },
        "candidates": [_candidate(candidate, work.output) for candidate in outlook.candidates],
        # a forecast: only a measurement decides
        "recommendation": {**dataclasses.asdict(outlook.recommendation), "forecast": True},
        "notes": outlook.notes,
    }
    result: dict[str, Any] = _plain(plan | ({"held": outlook.held} if outlook.held else {}))
    return result


def ranked_as_dict(outlook: Outlook, ranked: Sequence[Ranked]) -> dict[str, Any]:
    """Return `result` of `quantkit recommend`: the ranked recipes, and those that cannot run."""
    plan, losses = as_dict(outlook), Losses.shipped()
    rows = []
    for place, entry in enumerate(ranked, 1):
        one = entry.candidate
        row = {"rank": place, **_named(one, "recipe", "runtime"), "bits_per_weight": one.bits}
        row |= {"state": say.state(one), "weights_bytes": one.bytes, "fits": entry.row.fits}
        row["memory_bytes"] = sum(entry.row.parts.values())
        row["devices"] = None if one.memory is None else one.memory.devices
        step, loss = entry.row.step, None
        row["step"] = {"bound_s": step.least, "forecast_s": step.forecast, "forecast_interval_s": step.interval}
        if entry.loss is not None:
            loss = {**_named(entry.loss, "kl", "half", "record"), "class": entry.loss.name}
        rows.append({**row, "loss": loss, "because": entry.because})
    refused = [_named(one, "recipe", "problem") for one in outlook.candidates if one.problem is not None]
    kept = {key: plan[key] for key in ("model", "target", "workload", "recommendation", "notes")}
    result: dict[str, Any] = _plain({**kept, "recipes": rows, "refused": refused, "losses_measured_on": losses.model})
    return result


def _named(thing: object, *names: str) -> dict[str, Any]:
    """Return attributes with the same name in JSON."""
    return {name: getattr(thing, name) for name in names}


def _candidate(candidate: PlannedRecipe, output: int) -> dict[str, Any]:
    return {
        **_named(candidate, "label", "recipe"),
        "runtime": candidate.runtime or None,
        "cells": candidate.cells,
        "bits_per_weight": candidate.bits,
        "weights_bytes": candidate.bytes if candidate.problem is None else None,
        "memory": _memory(candidate.memory) if candidate.memory is not None else None,
        "rows": [_row(row, output) for row in candidate.rows],
        **_named(candidate, "forecast", "load", "cost", "compiling", "problem", "notes"),
    }


def _memory(memory: PlannedMemory) -> dict[str, Any]:
    return {
        "batch": memory.batch,
        "parts_bytes": memory.parts,
        "total_bytes": memory.total,
        "capacity_bytes": memory.capacity,
        "fits": say.fits(memory),
        "cache_bytes_per_token": memory.cache_per_token,
        "largest_batch": memory.largest_batch,
        "largest_context_tokens": memory.largest_context,
        "devices": memory.devices,
        "devices_needed": memory.needed,
        "notes": memory.notes,
    }


def _row(row: PlannedBatch, output: int) -> dict[str, Any]:
    rate = row.rate(output)
    return {
        **_named(row, "batch", "fits"),
        "parts_bytes": row.parts,
        "total_bytes": sum(row.parts.values()),
        "prefill": _timed(row.prefill) if row.prefill is not None else None,
        "step": _timed(row.step),
        "bound_per_s": rate.most,
        "forecast_per_s": rate.forecast,
        "forecast_interval_per_s": rate.interval,
        "cost": row.cost,
    }


def _timed(timed: TimedStep) -> dict[str, Any]:
    named = ("name", "format", "times", "bytes", "operations", "compute")
    return {
        "bound_s": timed.least,
        "forecast_s": timed.forecast,
        "forecast_interval_s": timed.interval,
        "because": timed.because,
        "measured_here": timed.here,
        "limit": None if timed.least is None else say.limit(timed),
        **_named(timed.bound, "bytes", "operations"),
        "ops": [{**_named(op, *named), "bound_s": op.seconds, "limit": op.limit} for op in timed.bound.ops],
    }


def _plain(value: Any) -> Any:
    """Convert to JSON values: NaN becomes null, tuples lists, dataclasses dictionaries."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if hasattr(value, "as_dict"):
        return _plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value
