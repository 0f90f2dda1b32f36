"""Time a model's linears on a device: products are made here and carried, raw times come back.

The device needs neither torch nor the onnx package. It receives the products of a local bench, byte for byte, with
their expected results. The code for local measurements makes rows of its answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle.disk import stopping_when_full
from quantkit.devices.answers import LINEAR, Cells, DeviceFacts, ProductTimes, believed, ceilings_of, invalid
from quantkit.devices.asked import usual
from quantkit.devices.named import Reached
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters.onnx import single_op as single
from quantkit.measurement.operators.ceilings import LARGE_CACHE
from quantkit.measurement.operators.onnxruntime import SMALL, RandomProducts, cost_of, file_of
from quantkit.measurement.operators.products import RanSide, TimedVariant, copies, demand_any
from quantkit.measurement.operators.run import ALL, SweepJob, environment, rows_of
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Timing
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax import Question
from quantkit.runtimes.child import Report

# copies of a weight: in the file, in the session, and packed for its kernel
_TIMES = 3
# bytes for each input and output of a weight: rows of x and y, in float32
_KNOWN = 18 * 4


class TaxDevice:
    """A device to time linears on; see `pipeline.tax.Sweep`.

    Args:
        carrying: progress function of carrying.
    """

    def __init__(self, reached: Reached, carrying: Report = lambda share, words: None) -> None:
        self._reached, self._link, self._carrying = reached, reached.link, carrying
        self._cache = reached.about.last_level_cache or LARGE_CACHE
        self._places: dict[LinearShape, str] = {}
        self._costs: dict[tuple[LinearShape, str], StepCost] = {}

    def asked(self, question: Question) -> Question:
        """Adapt a question to the device: its target, its cores. Raises InputError `usage` for a GPU."""
        if question.device not in ("", "cpu"):
            rule = "a device times products on its CPU; a GPU would need torch"
            remedy = "log in there, and run: quantkit tax --device cuda"
            raise InputError("usage", "--device", f"{question.device} with --on", rule, remedy)
        about, name = self._reached.about, self._reached.device.name
        return replace(question, device="cpu", target=question.target or usual(name, about), cores=about.cores)

    def __call__(self, job: SweepJob, report: Report) -> list[Row]:
        """Return all rows of one thread count.

        Raises:
            InputError: `answer-invalid`, `out-of-memory`, those of the link.
            MissingDependency: onnx, scipy or torch, here.
        """
        for package in ("onnx", "scipy", "torch"):
            if not machine.has(package):
                raise MissingDependency(package, extra="compile", purpose="making single products for a device")
        linears = [LinearShape.model_validate(dict(linear)) for linear in job.linears]
        if not self._places:
            self._carry(job, linears)
        asked: dict[str, Any] = {
            "linears": [{"K": linear.K, "N": linear.N, "place": self._places[linear]} for linear in linears],
            "small": self._places[next(filter(_is_small, linears), SMALL)],
            "graphs": self._reached.carry_graphs(),
            "cache": self._cache,
        }
        asked |= {name: getattr(job, name) for name in ("baseline", "threads", "seconds", "rounds", "seed")}
        asked |= {"variants": list(job.variants), "batches": list(job.batches)}
        answers = self._link.run("tax", asked, report, environment=environment(job.threads))
        return self._rows(answers, job, linears)

    def _carry(self, job: SweepJob, linears: Sequence[LinearShape]) -> None:
        names = [job.baseline, *job.variants]
        names += dict.fromkeys(part for name in names if (part := single.variant(name).quantizer))
        every = [*linears, *([] if any(map(_is_small, linears)) else [SMALL])]
        self._demand_room([(linear, RandomProducts(linear, job.seed)) for linear in every], list(dict.fromkeys(names)))
        self._link.install(self._carrying)
        for number, linear in enumerate(every):
            source = RandomProducts(linear, job.seed)
            with tempfile.TemporaryDirectory(prefix="quantkit-products-") as folder, stopping_when_full(Path(folder)):
                files = {}
                for variant in names:
                    self._carrying(number / len(every), f"making {linear.label} in {variant}")
                    product, file = source.product(variant), Path(folder) / file_of(variant)
                    product.save(file)
                    files[file.name], self._costs[linear, variant] = file, cost_of(product)

                def sent(share: float, words: str, number: int = number) -> None:
                    self._carrying((number + share) / len(every), words)

                self._places[linear] = self._link.carry(f"products-{linear.label}", files, sent)

    def _demand_room(self, products: Sequence[tuple[LinearShape, RandomProducts]], names: Sequence[str]) -> None:
        """Refuse products too large for the device. Variants with too large weights are skipped there; the baseline
        is not."""
        memory = disk = 0.0
        for linear, source in products:
            sizes = [source.weight_bytes(name) for name in names]
            disk += sum(size + _KNOWN * (linear.K + linear.N) for size in sizes)
            # all copies together have to exceed the cache there
            memory = max(memory, _TIMES * sizes[0] * copies(StepCost(names[0], sizes[0]), self._cache))
        self._reached.about.demand_room(memory, disk, "the products", self._reached.device.name)

    def _rows(self, answers: Cells, job: SweepJob, linears: Sequence[LinearShape]) -> list[Row]:
        about, on, limits = answers.about, answers.on, ceilings_of(answers)
        timed, looks = self._timed(answers, job, linears)
        with believed(on):
            how: dict[str, Any] = {"device": about.device(on), "versions": about.versions, "cache": self._cache}
            rows = rows_of(timed, limits, job, **how)
        return [_there(row, about, looks) for row in rows]

    def _timed(
        self, answers: Cells, job: SweepJob, linears: Sequence[LinearShape]
    ) -> tuple[list[TimedVariant], dict[tuple[int, int], Timing]]:
        """Return every requested product once, against the baseline, in a local bench's order, and each linear's last
        timing.

        The last timing has the clocks around the linear. Raises InputError `answer-invalid`.
        """
        names, sides = (job.baseline, *job.variants), {SUBJECT, BASELINE}
        asked = {(n, M, name): linear for n, linear in enumerate(linears) for M in job.batches for name in names}
        answered = [one for _, one in answers.all(ProductTimes, LINEAR)]
        products = {(one.linear, one.M, one.variant): one for one in answered}
        if set(products) != set(asked) or len(answered) != len(asked):
            raise invalid(answers.on, f"{len(answered)} times of products, not the requested {len(asked)}")
        timed, looks = list[TimedVariant](), {}
        for key, linear in asked.items():
            one = products[key]
            timing = one.times.timing(sides, f"{answers.on}, {one.variant}, batch {one.M}")
            if not timing.skipped and not (one.prepared and sum(timing.rounds) > 1):
                raise invalid(answers.on, f"{one.variant}, batch {one.M}: times that do not fit together")
            cost = self._costs[linear, one.variant]
            side = RanSide(cost, one.products, one.resident_bytes, one.settings) if one.prepared else None
            taken = TimedVariant(linear, one.M, one.variant, side, timing, hot=one.hot, quantizing=one.quantizing)
            timed.append(taken.compared(job.seed + len(timed)))
            looks[linear.K, linear.N] = timing
        demand_any(timed, job.baseline)
        return timed, looks


def _is_small(linear: LinearShape) -> bool:
    return (linear.K, linear.N) == (SMALL.K, SMALL.N)


def _there(row: Row, about: DeviceFacts, looks: dict[tuple[int, int], Timing]) -> Row:
    flags, settings = [*row.flags, *about.flags], dict(row.settings)
    if row.op is not None:
        look = looks.get((row.op.K or 0, row.op.N or 0))
        slow = look.flags if look else [flag for of in looks.values() for flag in of.flags if row.op.layer == ALL]
        flags += slow
        settings |= look.settings if look else {}
    return row.model_copy(update={"flags": list(dict.fromkeys(flags)), "settings": settings})
