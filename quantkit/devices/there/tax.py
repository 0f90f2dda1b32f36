"""Single products on this device, from files: raw times, for whoever asked makes rows of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.devices.answers import LINEAR, CeilingSamples, ProductTimes, Rows, dumped
from quantkit.measurement.operators.onnxruntime import SMALL, OnnxRuntimeBench, StoredProducts
from quantkit.measurement.operators.products import SweepPlan, TimedVariant, take
from quantkit.measurement.operators.run import CpuLimits
from quantkit.measurement.timing.clocks import Clocks, of_cpu
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Array
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes import child


def tax(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """Cells: `ceilings`, one for each product, `ceilings-after`. What a linear lacks is timed at one time.

    Args:
        job: `linears`, `K`, `N` and `place` of each; `small`, the place of the products that say which kernels run;
            `graphs` of the ceilings; `baseline`, `variants`, `batches`, `threads` of one product; `cache`, bytes beyond
            which the weights of a product have to go together; `seconds` of all, `rounds` and `seed`.
    """
    limits = CpuLimits.of(job["threads"], Path(job["graphs"]))

    def ceilings(cell: str) -> None:
        caller.at(float(cell != "ceilings"), "ceilings")
        if cell not in done:
            caller.row({"cell": cell, "rows": [dumped(CeilingSamples(ceilings=tuple(limits.measured())))]})

    linears, names = job["linears"], (job["baseline"], *job["variants"])
    places = {(SMALL.K, SMALL.N): job["small"], **{(each["K"], each["N"]): each["place"] for each in linears}}
    bench = OnnxRuntimeBench(
        job["threads"], job["cache"], source=lambda linear: StoredProducts(Path(places[linear.K, linear.N]))
    )
    ceilings("ceilings")
    for number, linear in enumerate(linears):
        left = [M for M in job["batches"] if any(_cell(number, M, name) not in done for name in names)]
        if not left:
            continue

        def report(share: float, words: str, number: int = number) -> None:
            caller.at((number + share) / len(linears), words)

        before = of_cpu()
        taken = take(
            bench,
            LinearShape(name=f"{linear['K']}x{linear['N']}", K=linear["K"], N=linear["N"]),
            job["baseline"],
            job["variants"],
            SweepPlan(tuple(left), job["seconds"], job["rounds"], job["seed"]),
            seconds=job["seconds"] / (len(linears) * len(job["batches"])),
            progress=report,
        )
        after = of_cpu()
        for one in taken:
            if (cell := _cell(number, one.M, one.variant)) not in done:
                caller.row({"cell": cell, "rows": [_row(number, one, before, after)]})
    ceilings("ceilings-after")


def _cell(number: int, M: int, variant: str) -> str:
    return f"{LINEAR}{number}-{M}-{variant}"


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
