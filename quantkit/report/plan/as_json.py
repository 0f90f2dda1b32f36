"""A plan as JSON: units stand in the names, what is not known is null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.planning.bound.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedMemory, PlannedRecipe
from quantkit.report.plan import words as say


def as_dict(outlook: Outlook) -> dict[str, Any]:
    """For the envelope's `result`."""
    model, target, work = outlook.architecture, outlook.target, outlook.workload
    found = {
        "model": {
            "name": model.name,
            "kind": model.kind,
            "model_type": model.model_type,
            "dtype": model.dtype,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "layers": len(model.layers),
            "hidden": model.hidden,
            "vocabulary": model.vocabulary,
            "max_context_tokens": model.max_context,
            "assumed": model.assumed,
        },
        "target": {
            "name": target.name,
            "summary": target.summary,
            "kind": target.kind,
            "figures": {
                place: {"value": figure.number, "unit": figure.unit, "state": figure.state, "source": figure.source}
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
        "candidates": [_candidate(each, work.output) for each in outlook.candidates],
        # only a measurement decides
        "recommendation": {**dataclasses.asdict(outlook.recommendation), "forecast": True},
        "notes": outlook.notes,
    }
    result: dict[str, Any] = _plain(found)
    return result


def _candidate(each: PlannedRecipe, output: int) -> dict[str, Any]:
    return {
        "label": each.label,
        "recipe": each.recipe,
        "runtime": each.runtime or None,
        "cells": [dataclasses.asdict(cell) for cell in each.cells],
        "bits_per_weight": each.bits,
        "weights_bytes": each.bytes if each.problem is None else None,
        "memory": _memory(each.memory) if each.memory is not None else None,
        "rows": [_row(row, output) for row in each.rows],
        "forecast": each.forecast,
        "load": each.load,
        "cost": each.cost,
        "compiling": each.compiling,
        "problem": each.problem.as_dict() if each.problem is not None else None,
        "notes": each.notes,
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
        "batch": row.batch,
        "fits": row.fits,
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
    return {
        "bound_s": timed.least,
        "forecast_s": timed.forecast,
        "forecast_interval_s": timed.interval,
        "because": timed.because,
        "measured_here": timed.here,
        "limit": None if timed.least is None else say.limit(timed),
        "bytes": timed.bound.bytes,
        "operations": timed.bound.operations,
        "ops": [
            {
                "name": op.name,
                "format": op.format,
                "times": op.times,
                "bytes": op.bytes,
                "operations": op.operations,
                "compute": op.compute,
                "bound_s": op.seconds,
                "limit": op.limit,
            }
            for op in timed.bound.ops
        ],
    }


def _plain(value: Any) -> Any:
    """What JSON holds: no NaN, no tuple, no dataclass."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if hasattr(value, "as_dict"):
        return _plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value
