"""Timings that nobody measured: what `measure.speed.run` would give for a job, with a speed-up that is chosen."""

from collections.abc import Callable
from typing import Any

from quantkit import machine
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.speed import SpeedJob

Ratio = Callable[[int], float]


def rows(job: SpeedJob, ratio: Ratio, *, device: dict[str, str] | None = None) -> list[Row]:
    """Decode and prefill rows of every shape, `ratio(batch)` times as fast, give or take one in a hundred."""
    common: dict[str, Any] = {
        "subject": job.ours.subject,
        "runtime": job.ours.runtime,
        "device": device or machine.device(),
        "settings": {"threads": job.threads, "baseline_format": job.theirs.format},
        "aa_spread": 0.001,
        "n": 60,
    }
    found = [Row(name="ceiling.read", value=2e10, unit="B/s", subject="cpu", device=common["device"])]
    shapes = [("latency.decode_step", batch, 1, context) for batch in job.plan.batches for context in job.plan.contexts]
    shapes += [("latency.prefill", batch, n, 0) for batch in job.plan.prefill_batches for n in job.plan.prefills]
    for name, batch, new, context in shapes:
        times = ratio(batch)
        against = {"subject": job.theirs.subject, "value": 0.01 * times, "ratio": times}
        against["ratio_ci95"] = (0.99 * times, 1.01 * times)
        shape = {"new_tokens": new, "context": context}
        found.append(Row(name=name, value=0.01, unit="s", batch=batch, shape=shape, baseline=against, **common))
    over = {**common, "settings": {**common["settings"], "over": "batch"}}
    return [*found, Row(name="tax.break_even", value=3.0, unit="1", shape={"new_tokens": 1, "context": 16}, **over)]


class Timer:
    """Stands in for `measure.speed.run`; remembers what it was asked."""

    def __init__(self, ratio: Ratio = lambda batch: 2.0) -> None:
        self.ratio = ratio
        self.jobs: list[SpeedJob] = []

    def __call__(self, job: SpeedJob, progress: object = None) -> list[Row]:
        self.jobs.append(job)
        return rows(job, self.ratio)
