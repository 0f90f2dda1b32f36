"""`quantkit tax`: what quantized products cost on this machine beyond what its own limits ask for, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit._version import __version__
from quantkit.bundle import Verdict
from quantkit.kernels.dispatch import FILE, LAYERS, KernelTiming, Recorded, fastest
from quantkit.measurement.operators import run as ops_run
from quantkit.measurement.operators.rows import ALL
from quantkit.measurement.operators.run import SweepJob
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import MeasuredFormat, advise, verdicts
from quantkit.pipeline.tax.question import TaxPlan
from quantkit.planning.bound import efficiency
from quantkit.report.taxed import Taxed

Report = Callable[[float, str], None]
# what times one thread count
Sweep = Callable[[SweepJob, Report], list[Row]]
# the flag of a processor that is a program
EMULATED = "emulated"
# what the fastest kernel depends on besides the device
_RECORDED = ("torch", "triton", "driver")


@dataclass(frozen=True)
class TaxAnswer:
    """What was found.

    Args:
        plan: what was timed.
        rows: of all thread counts.
        verdicts: threads -> the verdict on each variant; 0 is a GPU.
        advice: threads -> what to do.
        notes: what a reader must know.
    """

    plan: TaxPlan
    rows: Sequence[Row]
    verdicts: Mapping[int, Sequence[Verdict]]
    advice: Mapping[int, Verdict]
    notes: Sequence[str] = field(default=())

    @property
    def inconclusive(self) -> bool:
        """Whether noise hides what to do, whatever the number of threads."""
        return bool(self.advice) and all(each.answer == "inconclusive" for each in self.advice.values())

    def choices(self, variant: str) -> Recorded | None:
        """Which kernel at which batch, for a variant that our kernels ran on a GPU; None where they did not."""
        timed = [
            row
            for row in self.rows
            if row.name == "latency.op" and row.settings.get("variant") == variant and row.value is not None
        ]
        timings = [_timing(row) for row in timed if row.settings.get("kernel") in LAYERS]
        device = timed[0].device if timed else None
        if not timings or device is None:
            return None
        versions = {name: version for name, version in timed[0].versions.items() if name in _RECORDED}
        return Recorded(device.model_dump(mode="json"), versions, variant, fastest(timings))

    def reported(self) -> Taxed:
        """For the page and the screen."""
        plan = self.plan
        found = (self.rows, self.verdicts, self.advice, plan.traffic, self.notes)
        return Taxed(plan.shapes, plan.on.target, *found, baseline=plan.on.baseline, version=__version__)

    def as_dict(self) -> dict[str, Any]:
        """The result of the command."""
        return {
            "model": self.plan.shapes.name or None,
            "linears": [each.model_dump() for each in self.plan.shapes.linears],
            "source": self.plan.shapes.source,
            "target": self.plan.on.target.name,
            "on": next((row.on for row in self.rows), None),
            "baseline": self.plan.on.baseline,
            "traffic": {str(batch): share for batch, share in (self.plan.traffic or {}).items()} or None,
            "advice": [{"threads": n or None, **each.model_dump(mode="json")} for n, each in self.advice.items()],
            "verdicts": [
                {"threads": n or None, **each.model_dump(mode="json")}
                for n, found in self.verdicts.items()
                for each in found
            ],
            "measurements": [row.as_dict() for row in self.rows],
        }


def measure_tax(plan: TaxPlan, progress: Report | None = None, sweep: Sweep | None = None) -> TaxAnswer:
    """Time it and judge it; an emulator's times are not judged.

    Args:
        sweep: what times; None: this machine.

    Raises:
        InputError: what the timed process met.
        MissingDependency: onnxruntime, onnx, scipy or torch; on a GPU triton.
    """
    progress = progress or (lambda share, words: None)
    rows: list[Row] = []
    judged: dict[int, Sequence[Verdict]] = {}
    advice: dict[int, Verdict] = {}
    for i, threads in enumerate(plan.threads):

        def report(share: float, words: str, i: int = i, threads: int = threads) -> None:
            of = f", {threads} threads" if len(plan.threads) > 1 else ""
            progress((i + share) / len(plan.threads), f"{words}{of}")

        job = SweepJob(
            [linear.model_dump() for linear in plan.shapes.distinct()],
            plan.shapes.name,
            plan.on.baseline,
            plan.variants,
            plan.batches,
            threads,
            plan.seconds / len(plan.threads),
            plan.seed,
        )
        found = (sweep or ops_run.run)(job, report)
        rows += found
        if any(EMULATED in row.flags for row in found):
            continue
        judged[threads], advice[threads] = judge(found, plan)
    first = [row for row in rows if row.settings.get("threads") in (None, plan.threads[0], 0)]
    said = plan.ways.said(first, plan.shapes, plan.batches) if plan.ways is not None and advice else []
    return TaxAnswer(plan, rows, judged, advice, [*said, *_notes(rows)])


def _timing(row: Row) -> KernelTiming:
    """One row as the dispatcher takes it."""
    op, place = row.op, "config."
    assert op is not None
    assert op.N and op.K and op.M
    tiles = {name.removeprefix(place): int(size or 0) for name, size in row.settings.items() if name.startswith(place)}
    kernel = str(row.settings["kernel"])
    return KernelTiming(kernel, (op.N, op.K), op.M, row.value or 0.0, row.resident_bytes or 0, tiles or None)


def record(answer: TaxAnswer) -> None:
    """Put what was chosen on a GPU into the bundle that was asked about, if there is one; remember it all."""
    plan = answer.plan
    # what a device says that it is does not teach this machine's forecasts
    efficiency.keep([row.as_dict() for row in answer.rows if row.on is None])
    if plan.records and plan.bundle is not None and (choices := answer.choices(plan.subject)):
        plan.bundle.put(FILE, choices.as_bytes())


def judge(rows: Sequence[Row], plan: TaxPlan) -> tuple[list[Verdict], Verdict]:
    """(the verdict on each variant, what to do), from the rows of one thread count."""
    layer = ALL if plan.shapes.name else None
    timed = [row for row in rows if row.name == "latency.op" and row.op is not None and row.op.layer == layer]
    measured = [
        MeasuredFormat(
            name, [row for row in timed if row.settings.get("variant") == name and row.op and row.op.layer == layer]
        )
        for name in plan.variants
    ]
    found = verdicts(measured, plan.batches, plan.traffic)
    return found, advise(measured, plan.batches, traffic=plan.traffic, subject=plan.subject)


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the flags say that no single row does."""
    found = []
    wrong = sorted({str(row.settings.get("variant")) for row in rows if "wrong-result" in row.flags})
    if wrong:
        found.append(f"not timed, because the runtime gave wrong numbers: {', '.join(wrong)}")
    if any(EMULATED in row.flags for row in rows):
        found.append("an emulator: what it computes counts, how long it takes says nothing of any machine: no verdict")
    if slowed := [row for row in rows if "throttled" in row.flags]:
        which = "GPU" if slowed[0].device is not None and slowed[0].device.kind == "gpu" else "processor"
        less = ", or lower its power limit," if which == "GPU" else ""
        found.append(f"the {which}'s clocks fell while it was timed: let it cool{less} and time it again")
    return found
