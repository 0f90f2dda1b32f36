"""The linears of a model timed on a device: their products are made here and carried, raw times come back.

The device has neither torch nor the package onnx. What it gets is what a bench here would make, byte for byte, with
what each product must give; what it says is made into rows by the same code as for this machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.bundle.disk import stopping_when_full
from quantkit.devices.answers import LINEAR, CeilingSamples, Cells, DeviceFacts, ProductTimes, believed, invalid, read
from quantkit.devices.asked import usual
from quantkit.devices.reached import Reached
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters.onnx import single_op as single
from quantkit.measurement.operators.ceilings import LARGE_CACHE, joined, write_graphs
from quantkit.measurement.operators.onnxruntime import SMALL, ProductSource, RandomProducts, cost_of, file_of
from quantkit.measurement.operators.products import RanSide, TimedVariant, copies, demand_any
from quantkit.measurement.operators.run import ALL, SweepJob, environment, rows_of
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.clocks import Between, settings_of
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Timing
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax import Question
from quantkit.runtimes.child import Report

# number of a linear, M, variant -> what it took
_Found = dict[tuple[int, int, str], ProductTimes]


# in the file, in the session, and packed for its kernel: as the bench that runs them has it
_TIMES = 3
# rows of x and y, in float32, that stand beside each weight
_KNOWN = 18 * 4


@dataclass(frozen=True)
class ProductNeeds:
    """Args: memory: bytes at once, without which nothing can be compared; disk: bytes of all files."""

    memory: float
    disk: float

    @classmethod
    def of(
        cls, linears: Sequence[tuple[LinearShape, ProductSource]], baseline: str, others: Sequence[str], cache: int
    ) -> ProductNeeds:
        """Of products of each linear: where the baseline's weights do not fit, nothing is timed; others are left out.

        Args:
            cache: bytes of the last-level cache there, beyond which the weights together have to go.
        """
        memory = disk = 0.0
        for linear, source in linears:
            sizes = {name: source.weight_bytes(name) for name in (baseline, *others)}
            disk += sum(size + _KNOWN * (linear.K + linear.N) for size in sizes.values())
            memory = max(memory, _TIMES * sizes[baseline] * copies(StepCost(baseline, sizes[baseline]), cache))
        return cls(memory, disk)


class TaxDevice:
    """A device that linears are timed on; see `pipeline.tax.tax.Sweep`.

    Args:
        reached: it.
        carrying: told what is carried.
    """

    def __init__(self, reached: Reached, carrying: Report = lambda share, words: None) -> None:
        self._reached, self._link, self._carrying = reached, reached.link, carrying
        self._cache = reached.about.last_level_cache or LARGE_CACHE
        self._places: dict[LinearShape, str] = {}
        self._costs: dict[tuple[LinearShape, str], StepCost] = {}

    def asked(self, question: Question) -> Question:
        """The question as it is on the device: its target, its cores. Raises InputError `usage` for a GPU."""
        if question.device not in ("", "cpu"):
            raise InputError(
                "usage",
                where="--device",
                value=f"{question.device} with --on",
                rule="on a device products are timed on its processor: those of a GPU need torch there",
                remedy="log in there, and run: quantkit tax --device cuda",
            )
        about, name = self._reached.about, self._reached.device.name
        return replace(question, device="cpu", target=question.target or usual(name, about), cores=about.cores)

    def __call__(self, job: SweepJob, report: Report) -> list[Row]:
        """All rows of one thread count.

        Raises:
            InputError: what the device answers, `out-of-memory`, those of the link.
            MissingDependency: onnx, scipy or torch, here.
        """
        for package in ("onnx", "scipy", "torch"):
            if not machine.has(package):
                raise MissingDependency(package, extra="compile", purpose="making single products for a device")
        linears = [LinearShape.model_validate(dict(linear)) for linear in job.linears]
        if not self._places:
            self._carry(job, linears)
        with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
            graphs = self._link.carry("ceilings", {path.name: path for path in write_graphs(Path(folder))})
        asked: dict[str, Any] = {
            "linears": [{"K": linear.K, "N": linear.N, "place": self._places[linear]} for linear in linears],
            "small": self._places[next(filter(_is_small, linears), SMALL)],
            "graphs": graphs,
            "cache": self._cache,
        }
        asked |= {name: getattr(job, name) for name in ("baseline", "threads", "seconds", "rounds", "seed")}
        asked |= {"variants": list(job.variants), "batches": list(job.batches)}
        answers = self._link.run("tax", asked, report, environment=environment(job.threads))
        return self._rows(answers, job, linears)

    def _carry(self, job: SweepJob, linears: Sequence[LinearShape]) -> None:
        """All products, a linear at a time: they take no more room here than those of one."""
        names = [job.baseline, *job.variants]
        names += dict.fromkeys(part for name in names if (part := single.variant(name).quantizer))
        every = [*linears, *([] if any(_is_small(each) for each in linears) else [SMALL])]
        sources = [(each, RandomProducts(each, job.seed)) for each in every]
        needs = ProductNeeds.of(sources, job.baseline, names[1:], self._cache)
        self._reached.about.demand_room(needs.memory, needs.disk, "the products", self._reached.device.name)
        self._link.install(self._carrying)
        for number, linear in enumerate(every):
            source = RandomProducts(linear, job.seed)
            with tempfile.TemporaryDirectory(prefix="quantkit-products-") as name, stopping_when_full(Path(name)):
                files = {}
                for variant in names:
                    self._carrying(number / len(every), f"making {linear.label} in {variant}")
                    product, file = source.product(variant), Path(name) / file_of(variant)
                    product.save(file)
                    files[file.name], self._costs[linear, variant] = file, cost_of(product)

                def sent(share: float, words: str, number: int = number) -> None:
                    self._carrying((number + share) / len(every), words)

                self._places[linear] = self._link.carry(f"products-{linear.label}", files, sent)

    def _rows(self, answers: Cells, job: SweepJob, linears: Sequence[LinearShape]) -> list[Row]:
        about, found = answers.about, self._found(answers, job, linears)
        limits = [answers.one(CeilingSamples, cell).ceilings for cell in ("ceilings", "ceilings-after")]
        if len({tuple(each.name for each in some) for some in limits}) != 1:
            raise invalid(answers.on, "other ceilings than before")
        with believed(answers.on):
            rows = rows_of(
                self._timed(found, job, linears),
                joined(*limits),
                job,
                device=about.device(answers.on),
                versions=about.versions,
                cache=self._cache,
            )
        clocks = {(linears[n].K, linears[n].N): (one.before, one.after) for (n, _, _), one in found.items()}
        slow = {size for size, looks in clocks.items() if Between.of(*looks, counted=True).throttled}
        return [_there(row, about, clocks, slow) for row in rows]

    def _found(self, answers: Cells, job: SweepJob, linears: Sequence[LinearShape]) -> _Found:
        """All that was asked for, each once. Raises InputError `answer-invalid`."""
        found: _Found = {}
        rows = [row for cell, rows in answers.items() if cell.startswith(LINEAR) for row in rows]
        for row in rows:
            one = read(ProductTimes, row, answers.on)
            one.demand_whole(f"{answers.on}, {one.variant}, batch {one.M}")
            found[one.linear, one.M, one.variant] = one
        names = (job.baseline, *job.variants)
        asked = {(n, M, name) for n in range(len(linears)) for M in job.batches for name in names}
        if set(found) != asked or len(rows) != len(asked):
            raise invalid(answers.on, f"{len(rows)} times of products, not the {len(asked)} that were asked for")
        return found

    def _timed(self, found: _Found, job: SweepJob, linears: Sequence[LinearShape]) -> list[TimedVariant]:
        """Against the baseline, in the order of a bench here."""
        timed: list[TimedVariant] = []
        for n, linear in enumerate(linears):
            for M in job.batches:
                for variant in (job.baseline, *job.variants):
                    taken = _taken(linear, found[n, M, variant], self._costs[linear, variant])
                    timed.append(taken.compared(job.seed + len(timed)))
        demand_any(timed, job.baseline)
        return timed


def _is_small(linear: LinearShape) -> bool:
    return (linear.K, linear.N) == (SMALL.K, SMALL.N)


def _taken(linear: LinearShape, one: ProductTimes, cost: StepCost) -> TimedVariant:
    side = RanSide(cost, one.products, one.resident_bytes, one.settings) if one.prepared else None
    seconds = {SUBJECT: np.array(one.ours), BASELINE: np.array(one.theirs)} if one.ours else {}
    timing = Timing(seconds, rounds=one.rounds, skipped=one.skipped)
    return TimedVariant(linear, one.M, one.variant, side, timing, hot=one.hot, quantizing=one.quantizing)


def _there(row: Row, about: DeviceFacts, clocks: dict[Any, Any], slow: set[tuple[int, int]]) -> Row:
    """A row with what the device says of itself while that linear was timed."""
    flags, settings = [*row.flags, *about.flags], dict(row.settings)
    if row.op is not None:
        size = (row.op.K, row.op.N)
        if size in slow or (row.op.layer == ALL and slow):
            flags.append("throttled")
        settings |= settings_of(*clocks[size]) if size in clocks else {}
    return row.model_copy(update={"flags": list(dict.fromkeys(flags)), "settings": settings})
