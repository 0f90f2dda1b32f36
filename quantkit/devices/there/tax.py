"""Single products on this device, from files: raw times, for whoever asked makes rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.devices import job as jobs
from quantkit.devices.answers import CeilingSamples, ProductTimes, dumped
from quantkit.measurement.operators.onnxruntime import SMALL, OnnxRuntimeBench, StoredProducts
from quantkit.measurement.operators.products import SweepPlan, TimedVariant, take
from quantkit.measurement.operators.run import CpuLimits
from quantkit.measurement.timing.clocks import Clocks, of_cpu
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Array
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes import child

# variants in one line: with all their times they are a third of what a line may be
_TOGETHER = 8


def tax(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Cells: `ceilings`, some for each linear and batch, `ceilings-after`. What a linear lacks is timed at one time."""
    work, workdir, done = jobs.Tax.model_validate(data["work"]), Path(data["workdir"]), data["cells"]
    limits = CpuLimits.of(work.threads, workdir / work.graphs)

    def ceilings(cell: str) -> None:
        if cell not in done:
            caller.row({"cell": cell, "rows": [dumped(CeilingSamples(ceilings=tuple(limits.measured())))]})

    places = {(SMALL.K, SMALL.N): work.small, **{(each.K, each.N): each.place for each in work.linears}}
    bench = OnnxRuntimeBench(
        work.threads,
        work.cache,
        source=lambda linear: StoredProducts(workdir / places[linear.K, linear.N]),
    )
    caller.at(0.0, "ceilings")
    ceilings("ceilings")
    names = (work.baseline, *work.variants)
    answered = [row for cell, rows in done.items() if cell.startswith(jobs.LINEAR) for row in rows]
    known = {(row["linear"], row["M"], row["variant"]) for row in answered}
    for number, each in enumerate(work.linears):
        left = [M for M in work.batches if any((number, M, name) not in known for name in names)]
        if not left:
            continue

        def report(share: float, words: str, number: int = number) -> None:
            caller.at((number + share) / len(work.linears), words)

        before = of_cpu()
        taken = take(
            bench,
            LinearShape(name=f"{each.K}x{each.N}", K=each.K, N=each.N),
            work.baseline,
            work.variants,
            SweepPlan(tuple(left), work.seconds, work.rounds, work.seed),
            seconds=work.seconds / (len(work.linears) * len(work.batches)),
            progress=report,
        )
        new = [one for one in taken if (number, one.M, one.variant) not in known]
        for cell, rows in _cells(number, new, before, of_cpu()):
            caller.row({"cell": cell, "rows": rows})
    caller.at(1.0, "ceilings")
    ceilings("ceilings-after")


def _cells(
    number: int, taken: list[TimedVariant], before: Clocks, after: Clocks
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, rows), each of them small enough for a line."""
    for M in dict.fromkeys(one.M for one in taken):
        mine = [one for one in taken if one.M == M]
        for first in range(0, len(mine), _TOGETHER):
            some = mine[first : first + _TOGETHER]
            yield f"{jobs.LINEAR}{number}-{M}-{some[0].variant}", [_row(number, one, before, after) for one in some]


def _row(number: int, one: TimedVariant, before: Clocks, after: Clocks) -> dict[str, Any]:
    side = one.side
    return dumped(
        ProductTimes(
            linear=number,
            M=one.M,
            variant=one.variant,
            prepared=side is not None,
            products=1 if side is None else side.products,
            resident_bytes=None if side is None else side.resident_bytes,
            settings={} if side is None else dict(side.settings),
            ours=_listed(one.timing.seconds.get(SUBJECT)),
            theirs=_listed(one.timing.seconds.get(BASELINE)),
            rounds=one.timing.rounds,
            skipped=one.skipped,
            hot=one.hot,
            quantizing=one.quantizing,
            before=before,
            after=after,
        )
    )


def _listed(times: Array | None) -> list[Any]:
    """To a ten-millionth of each: more digits than any clock has, in half the bytes."""
    if times is None:
        return []
    return [[[float(f"{seconds:.6e}") for seconds in visit] for visit in block] for block in times.tolist()]
