"""What each unit costs in time, from measured rows: `latency.op` of a `measurements.jsonl`.

A row is about one product of an activation [M, K] with a weight [N, K] stored in a format. A unit's linears share their
input: where their fused product [K, ΣN] was timed, that counts, else the sum of the single ones. Nothing is guessed:
a batch for which a shape or a format is missing is left out, and said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from quantkit.measurement.rows import Row
from quantkit.tuning.candidates import FLOAT, Candidate
from quantkit.tuning.front import Table

Key = tuple[str, int, int, int]  # format, K, N, M
_FLOATS = ("float32", "float16", "bfloat16")


def seconds(
    rows: Iterable[Row],
    units: Sequence[Sequence[tuple[int, int]]],
    candidates: Sequence[Candidate],
    batches: Sequence[int] = (),
) -> tuple[dict[int, Table], list[str]]:
    """Batch -> seconds [U, C] of every unit in every candidate, and what is missing, a sentence a batch.

    Args:
        rows: measurements; only `latency.op` counts.
        units: the shapes [N, K] of each unit's linears.
        candidates: in the order of the table's columns.
        batches: wanted; all that were timed if empty.
    """
    times = _times(rows)
    wanted = list(batches) or sorted({key[3] for key in times})
    found: dict[int, Table] = {}
    missing = []
    for batch in wanted:
        table = np.array([[_unit(times, shapes, each, batch) for each in candidates] for shapes in units], dtype=float)
        if np.isnan(table).any():
            u, c = (int(i[0]) for i in np.nonzero(np.isnan(table)))
            rows_, columns = units[u][0]
            missing.append(f"batch {batch}: {candidates[c].name}, K {columns}, N {rows_} was not timed")
        else:
            found[batch] = table
    return found, missing


def _times(rows: Iterable[Row]) -> Mapping[Key, float]:
    found: dict[Key, float] = {}
    for row in rows:
        op = row.op
        if row.name != "latency.op" or row.value is None or op is None:
            continue
        if op.format and op.K is not None and op.N is not None and op.M is not None:
            key = (op.format, op.K, op.N, op.M)
            # a sweep times several ways to store one format: a runtime is given the fastest
            found[key] = min(found.get(key, row.value), row.value)
    return found


def _unit(times: Mapping[Key, float], shapes: Sequence[tuple[int, int]], candidate: Candidate, batch: int) -> float:
    """Seconds of one unit; nan where they are not known."""
    formats = _FLOATS if candidate.name == FLOAT or candidate.scheme is None else (candidate.scheme.format,)
    for name in formats:
        fused = times.get((name, shapes[0][1], sum(rows for rows, _ in shapes), batch))
        single = [times.get((name, columns, rows, batch)) for rows, columns in shapes]
        if fused is not None:
            return fused
        if all(each is not None for each in single):
            return sum(each for each in single if each is not None)
    return float("nan")
