"""Find the best choice of one candidate per unit within a budget, from the harms and costs of the units.

    predicted KL of a choice = Σ harms                  (a harm is the KL with that unit alone quantized)
    expected KL of a choice  = factor · predicted KL    (factor = measured KL / predicted KL of the compiled choice)

Harms do not simply add up, and a compile fits each block to the quantized blocks before it. The factor corrects the
error that all choices have in common.

The best choice is a multiple-choice knapsack:

    minimise  Σ_u Σ_c goal[u, c] x[u, c]
    subject to  Σ_c x[u, c] = 1 for every unit,  Σ table[u, c] x[u, c] <= limit for every limit,  x in {0, 1}

HiGHS' branch and bound (scipy.optimize.milp) solves it to a relative gap of `GAP`. A table holds nan where a unit does
not have a candidate.

The time of a unit comes from measured `latency.op` rows of a `measurements.jsonl`: the product of an activation [M, K]
with a weight [N, K] in one format. The linears of a unit share their input, so the time of their fused product [ΣN, K]
is used if it was measured, else the sum of the single times. A batch with a missing shape or format is reported and
left out.

Limits of a budget:

bits=4.25       mean over the linears inside the blocks; those in high precision count at their own width
bytes=100MB     all weights of the model, embeddings and head included
kl=0.05         nats a token; the smallest model within the limit is chosen, instead of the least harm
latency=12ms    all linears inside the blocks together, at every batch of the timings
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.formats import stored_bits
from quantkit.measurement.rows import Row
from quantkit.tuning.candidates import FLOAT, Candidate, Choices
from quantkit.tuning.harm import UnitHarm

# number of budgets for which the front is solved
STEPS = 24


@dataclass(frozen=True)
class Unit:
    """The linears of a block that share an input; `weights` is the number of their weights."""

    block: int
    members: tuple[str, ...]
    weights: int


@dataclass(frozen=True)
class Tables:
    """Harms and costs of U units in C candidates.

    Args:
        units: the units.
        names: names of the candidates.
        harm: KL [U, C] in nats a token; nan where a unit does not have the candidate.
        bits: stored bits [U, C] of a unit.
        fixed_bits: stored bits of the untuned linears inside the blocks.
        weights: number of weights of all linears inside the blocks.
        rest_bytes: bytes of all weights outside the blocks' linears.
        seconds: time [U, C] of a unit, by batch; empty without timings.
    """

    units: Sequence[Unit]
    names: Sequence[str]
    harm: Table
    bits: Table
    fixed_bits: float
    weights: int
    rest_bytes: float
    seconds: Mapping[int, Table]

    def mean_bits(self, choice: Choice) -> float:
        """Return mean bits per weight over all linears inside the blocks."""
        return (total(self.bits, choice) + self.fixed_bits) / self.weights

    def bytes(self, choice: Choice) -> float:
        """Return bytes of all weights of the model."""
        return (total(self.bits, choice) + self.fixed_bits) / 8 + self.rest_bytes

    def predicted(self, choice: Choice) -> float:
        """Return the sum of harms, in nats a token."""
        return total(self.harm, choice)

    def uniform(self, name: str) -> Choice | None:
        """Return the choice of one candidate for all units; None if a unit does not have it."""
        column = list(self.names).index(name)
        if np.isnan(self.harm[:, column]).any():
            return None
        return np.full(len(self.units), column)


def tables(harms: Sequence[UnitHarm], options: Choices, *, dtype_bits: int, total_bytes: float) -> Tables:
    """Make the tables of a model.

    Args:
        harms: measured harms of all units and candidates.
        options: the candidates and the untuned linears.
        dtype_bits: bits of one weight in the source model.
        total_bytes: bytes of all weights in the source model.
    """
    members = list(dict.fromkeys((harm.block, harm.members) for harm in harms))
    shapes = options.shapes
    units = [Unit(block, names, sum(_count(shapes[name]) for name in names)) for block, names in members]
    at = {(harm.members, harm.candidate): harm.kl for harm in harms}
    harm = np.full((len(units), len(options.candidates)), np.nan)
    bits = np.full_like(harm, np.nan)
    for u, unit in enumerate(units):
        for c, candidate in enumerate(options.candidates):
            if candidate.scheme is None:
                harm[u, c], bits[u, c] = 0.0, dtype_bits * unit.weights
            elif (unit.members, candidate.name) in at:
                harm[u, c] = at[unit.members, candidate.name]
                bits[u, c] = sum(stored_bits(shapes[name], candidate.layers[name]) for name in unit.members)
    tuned = {name for unit in units for name in unit.members}
    inside = {name: shape for name, shape in shapes.items() if name != options.head}
    fixed = 0.0
    for name, shape in inside.items():
        if name not in tuned:
            scheme = options.fixed.get(name)
            fixed += stored_bits(shape, scheme) if scheme is not None else dtype_bits * _count(shape)
    weights = sum(_count(shape) for shape in inside.values())
    rest = total_bytes - dtype_bits / 8 * weights
    if options.head is not None and options.head in options.fixed:
        # a quantized head is stored beside the embedding that it may be tied to
        rest += stored_bits(shapes[options.head], options.fixed[options.head]) / 8
    names = [candidate.name for candidate in options.candidates]
    return Tables(units, names, harm, bits, fixed, weights, rest, {})


def _count(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


@dataclass(frozen=True)
class FrontPoint:
    """One choice [U] with its figures: bits per weight, bytes of all weights, sum of harms in nats a token."""

    choice: Choice
    bits: float
    bytes: float
    predicted: float

    def as_dict(self, tables: Tables, factor: float = 1.0) -> dict[str, Any]:
        """Return the entry in `front.json`."""
        counts = Counter(tables.names[c] for c in self.choice)
        record = {
            "bits": self.bits,
            "bytes": round(self.bytes),
            "predicted": self.predicted,
            "expected": factor * self.predicted,
            "units": {name: counts[name] for name in tables.names if counts[name]},
        }
        if tables.seconds:
            record["seconds"] = {str(batch): total(table, self.choice) for batch, table in tables.seconds.items()}
        return record


def point(tables: Tables, choice: Choice) -> FrontPoint:
    """Return a choice with its figures."""
    return FrontPoint(choice, tables.mean_bits(choice), tables.bytes(choice), tables.predicted(choice))


def best(tables: Tables, budget: Budget, factor: float = 1.0) -> FrontPoint:
    """Find the choice with the least harm within a budget, or with the fewest bits under a limit on KL.

    `factor` is measured KL over predicted KL.

    Raises InputError: `budget-unreachable`, which names the nearest reachable limits; `timings-missing`.
    """
    limits = []
    if budget.bits is not None:
        limits.append((tables.bits, budget.bits * tables.weights - tables.fixed_bits))
    if budget.bytes is not None:
        limits.append((tables.bits, 8 * (budget.bytes - tables.rest_bytes) - tables.fixed_bits))
    if budget.latency is not None:
        if not tables.seconds:
            value, rule = "latency without timings", "a latency budget needs measured `latency.op` rows"
            remedy = "--timings measurements.jsonl"
            raise InputError("timings-missing", where="--budget", value=value, rule=rule, remedy=remedy)
        limits += [(table, budget.latency) for table in tables.seconds.values()]
    if budget.kl is not None:
        limits.append((tables.harm, budget.kl / factor))
    goal = tables.bits if budget.kl is not None else tables.harm
    chosen = choose(goal, limits)
    if chosen is None:
        raise _unreachable(tables, budget, factor)
    return point(tables, chosen)


def _unreachable(tables: Tables, budget: Budget, factor: float) -> InputError:
    """Name the limits met by no choice; if each alone can be met, say that all together cannot."""
    smallest, kindest = least(tables.bits), least(tables.harm)
    nearest = {
        "bits": tables.mean_bits(smallest),
        "bytes": tables.bytes(smallest),
        "kl": factor * tables.predicted(kindest),
        "latency": max((total(table, least(table)) for table in tables.seconds.values()), default=0.0),
    }
    short = [kind for kind, limit in budget.as_dict().items() if limit < nearest[kind] * (1 - 1e-9)]
    if short:
        near = ", ".join(f"{kind}={_upwards(nearest[kind])}" for kind in short)
        rule = f"the nearest limit that these candidates reach is {near}"
    else:
        rule = "each limit can be met alone, all of them together cannot"
        fewest = choose(tables.bits, [(tables.harm, budget.kl / factor)]) if budget.kl is not None else None
        if fewest is not None:
            rule = f"{rule}: kl={budget.kl:g} takes bits={_upwards(tables.mean_bits(fewest))}"
    remedy = "allow that, or add candidates (--formats, --scheme)"
    return InputError("budget-unreachable", where="--budget", value=str(budget), rule=rule, remedy=remedy)


def _upwards(value: float) -> str:
    """Round up to four significant digits, so that the printed limit can be reached."""
    power = 10.0 ** (np.floor(np.log10(value)) - 3) if value > 0 else 1.0
    return f"{np.ceil(value / power - 1e-9) * power:.10g}"


def sweep(tables: Tables, steps: int = STEPS) -> list[FrontPoint]:
    """Return the Pareto front, from the fewest bits to those of the largest quantized candidate."""
    quantized = [c for c, _ in enumerate(tables.names) if (tables.harm[:, c] != 0).any()] or [0]
    columns = np.nanmax(np.where(np.isnan(tables.bits), -np.inf, tables.bits)[:, quantized], axis=1)
    low = tables.mean_bits(least(tables.bits))
    high = max((float(columns.sum()) + tables.fixed_bits) / tables.weights, low)
    points: list[FrontPoint] = []
    # budgets lie closer together at few bits, where a little more helps most
    for share in np.linspace(0.0, 1.0, steps) ** 1.5:
        limit = (low + share * (high - low)) * tables.weights - tables.fixed_bits
        choice = choose(tables.harm, [(tables.bits, limit)])
        if choice is not None:
            points.append(point(tables, choice))
    kept: list[FrontPoint] = []
    for candidate in sorted(points, key=lambda candidate: (candidate.bits, candidate.predicted)):
        if not kept or candidate.predicted < kept[-1].predicted:
            kept.append(candidate)
    return kept


Table = NDArray[np.float64]
Choice = NDArray[np.int64]

# relative optimality gap; harms themselves are known to a few per cent
GAP = 1e-5
# relative excess over a limit that rounding may cause
_SLACK = 1e-9


def choose(goal: Table, limits: Sequence[tuple[Table, float]]) -> Choice | None:
    """Choose the candidate of every unit, [U]; None if no choice meets the limits.

    Args:
        goal: table [U, C] whose sum is minimized; nan where a unit does not have the candidate.
        limits: tables [U, C] without negative values, each with the largest allowed sum.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    units, candidates = goal.shape
    there = ~np.isnan(goal)
    one = np.kron(np.eye(units), np.ones(candidates))
    constraints = [LinearConstraint(csr_array(one), 1, 1)]
    for table, most in limits:
        row, scale = np.where(there, table, 0.0).reshape(1, -1), max(abs(most), 1e-300)
        constraints.append(LinearConstraint(csr_array(row / scale), -np.inf, most / scale * (1 + _SLACK)))
    cost = np.where(there, goal, 0.0).reshape(-1)
    solved: Any = milp(
        cost / (np.abs(cost).max() or 1.0),
        constraints=constraints,
        integrality=np.ones(cost.size),
        bounds=Bounds(0, there.reshape(-1).astype(float)),
        options={"mip_rel_gap": GAP},
    )
    if solved.x is None:
        return None
    picked: Choice = np.asarray(solved.x).reshape(units, candidates).argmax(axis=1)
    return picked


def total(table: Table, choice: Choice) -> float:
    """Return the sum of a table over a choice."""
    return float(np.take_along_axis(table, choice[:, None], axis=1).sum())


def least(table: Table) -> Choice:
    """Choose the candidate with the least value for each unit."""
    picked: Choice = np.nanargmin(table, axis=1)
    return picked


Key = tuple[str, int, int, int]  # format, K, N, M
_FLOATS = ("float32", "float16", "bfloat16")


def unit_seconds(
    rows: Iterable[Row],
    units: Sequence[Sequence[tuple[int, int]]],
    candidates: Sequence[Candidate],
    batches: Sequence[int] = (),
) -> tuple[dict[int, Table], list[str]]:
    """Return the seconds [U, C] of every unit in every candidate by batch, and a sentence for each incomplete batch.

    Args:
        rows: measurements; only `latency.op` rows are used.
        units: shapes [N, K] of each unit's linears.
        candidates: the candidates.
        batches: batches to use; all timed ones if empty.
    """
    times = _times(rows)
    wanted = list(batches) or sorted({key[3] for key in times})
    by_batch: dict[int, Table] = {}
    missing = []
    for batch in wanted:
        table = np.array([[_unit(times, shapes, one, batch) for one in candidates] for shapes in units], dtype=float)
        if np.isnan(table).any():
            u, c = (int(i[0]) for i in np.nonzero(np.isnan(table)))
            rows_, columns = units[u][0]
            missing.append(f"batch {batch}: {candidates[c].name}, K {columns}, N {rows_} was not timed")
        else:
            by_batch[batch] = table
    return by_batch, missing


def _times(rows: Iterable[Row]) -> Mapping[Key, float]:
    fastest: dict[Key, float] = {}
    for row in rows:
        op = row.op
        if row.name != "latency.op" or row.value is None or op is None:
            continue
        if op.format and op.K is not None and op.N is not None and op.M is not None:
            key = (op.format, op.K, op.N, op.M)
            # a sweep times several layouts of one format: the fastest counts
            fastest[key] = min(fastest.get(key, row.value), row.value)
    return fastest


def _unit(times: Mapping[Key, float], shapes: Sequence[tuple[int, int]], candidate: Candidate, batch: int) -> float:
    """Return the seconds of one unit; nan if unknown."""
    formats = _FLOATS if candidate.name == FLOAT or candidate.scheme is None else (candidate.scheme.format,)
    for name in formats:
        fused = times.get((name, shapes[0][1], sum(rows for rows, _ in shapes), batch))
        single = [times.get((name, columns, rows, batch)) for rows, columns in shapes]
        if fused is not None:
            return fused
        if all(seconds is not None for seconds in single):
            return sum(seconds for seconds in single if seconds is not None)
    return float("nan")


KINDS = ("bits", "bytes", "kl", "latency")
_UNITS = {
    "bits": {"": 1.0},
    "bytes": {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "kl": {"": 1.0},
    "latency": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6},
}


@dataclass(frozen=True)
class Budget:
    """Limits on bits per weight, bytes of all weights, KL in nats a token, and seconds; at least one is set."""

    bits: float | None = None
    bytes: float | None = None
    kl: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Budget:
        """Parse `["bits=4.25", "latency=12ms"]`; commas separate too. Raises InputError: `budget-invalid`."""
        limits: dict[str, float] = {}
        for text in (part.strip() for whole in texts for part in whole.split(",")):
            kind, equals, value = text.partition("=")
            number = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*", value)
            unit = _UNITS.get(kind, {}).get(number.group(2)) if number else None
            try:
                amount = float(number.group(1)) * unit if number and unit else 0.0
            except ValueError:
                amount = 0.0
            if not equals or kind in limits or amount <= 0:
                value, rule = text or "nothing", "one of bits=, bytes=, kl=, latency=, each once, with a number above 0"
                remedy = "--budget bits=4.25 (or bytes=100MB, kl=0.05, latency=12ms)"
                raise InputError("budget-invalid", where="--budget", value=value, rule=rule, remedy=remedy)
            limits[kind] = amount
        return cls(**limits)

    def as_dict(self) -> dict[str, float]:
        """Return the set limits by kind."""
        return {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{kind}={value:g}" for kind, value in self.as_dict().items())
