"""Run a sweep over shapes, variants, batches and thread counts, and make its rows.

Each thread count, and a GPU, runs in its own process: a library's threads are set before it is loaded, and the memory
of the calling process does not disturb the figures. Each child measures the ceilings before and after, on a CPU with
the threads of the products. If a GPU's clocks fell in between, its ceilings have the flag `throttled`.

Each shape, variant and batch has `latency.op` and `tax.total` rows, and `tax.activation` if quantizing the input can be
timed alone. Each shape and variant has `tax.break_even`. A model has the same rows for the sum over its linears, each
counted as often as it occurs (`op.layer` is `all linears`). For our own kernels, the twin without decoding splits the
rest:

    tax.streaming = t_raw - R     tax.decode = t - t_raw

For a runtime's kernels only the sum of both is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.errors import MissingDependency
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling, Pool, joined
from quantkit.measurement.operators.products import Bench, SweepPlan, TimedVariant, measure
from quantkit.measurement.operators.tax import Limits, Shape, StepCost, ideal_sum
from quantkit.measurement.rows import Baseline, Device, Operation, Row
from quantkit.measurement.timing.latency import Fields, Point, break_even_row, latency_row, tax_row
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes import child
from quantkit.runtimes.child import Report
from quantkit.stats.abba import Interval, summed, summed_spread
from quantkit.stats.evidence import SpeedUp

ALL = "all linears"
# of a GPU's ceilings
_BLOCKS = 4
# bytes of a number, and the input type whose measured rate bounds its products, by high-precision variant
_FLOATS = {"float32": (4.0, "fp32"), "float16": (2.0, "fp16"), "bfloat16": (2.0, "bf16")}
_FEWEST = 16


@dataclass(frozen=True)
class SweepJob:
    """The work of one child process.

    Args:
        linears: distinct shapes, as `Linear.model_dump()`.
        model: name of the linears' model; "" for single shapes, which have no sum.
        baseline: name of the high-precision variant.
        variants: names of the other variants.
        batches: batches M (rows of the activation).
        threads: threads of one product; 0 for a GPU.
        seconds: time for all products, without ceilings and preparation.
        seed: seed of weights, activations and the order of steps.
        rounds: number of rounds over the batches of each shape.
        bisections: see `SweepPlan`.
    """

    linears: Sequence[Mapping[str, Any]]
    model: str
    baseline: str
    variants: Sequence[str]
    batches: Sequence[int]
    threads: int
    seconds: float
    seed: int = 0
    rounds: int = 8
    bisections: int = 0


def demand(threads: int) -> None:
    """Check for missing packages. Raises MissingDependency."""
    for package in ("onnxruntime", "onnx", "scipy", "torch") if threads else ("triton", "scipy", "torch"):
        if not machine.has(package):
            extra = "gpu" if package == "triton" else "compile"
            raise MissingDependency(package, extra=extra, purpose="timing single products")


def environment(threads: int) -> dict[str, str]:
    """Return environment variables for a child's threads; `threads` is 0 for a GPU."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**{name: str(threads or 1) for name in names}, "GOMP_SPINCOUNT": "0"}


def run(job: SweepJob, progress: Report | None = None) -> list[Row]:
    """Time all products of one thread count, in a process of its own.

    Raises InputError: an error of the child, or `speed-failed`; MissingDependency: onnxruntime, onnx, scipy or torch;
    on a GPU triton.
    """
    demand(job.threads)
    remedy, variables = "use fewer shapes or smaller batches: --batch 1,2,4", environment(job.threads)
    rows = child.run(_answer, asdict(job), progress, remedy=remedy, environment=variables)
    return [Row.model_validate(row) for row in rows]


def _answer(data: Mapping[str, Any], caller: child.Caller) -> None:
    job = SweepJob(**data)
    for row in (_on_cpu if job.threads else _on_gpu)(job, caller.at):
        caller.row(row.as_dict())


def _measured(
    job: SweepJob, bench: Bench, ceilings: Callable[[], list[Ceiling]], report: Report
) -> tuple[list[TimedVariant], list[Ceiling], list[Ceiling]]:
    report(0.0, "ceilings")
    before = ceilings()
    linears = [LinearShape.model_validate(dict(linear)) for linear in job.linears]
    plan = SweepPlan(tuple(job.batches), job.seconds, job.rounds, job.seed, job.bisections)
    timed = measure(bench, linears, job.baseline, job.variants, plan, progress=report)
    report(1.0, "ceilings")
    return timed, before, ceilings()


@dataclass(frozen=True)
class CpuLimits:
    """The ceilings of a processor, with the threads of its products."""

    threads: int
    pool: Pool

    @classmethod
    def of(cls, threads: int, graphs: Path | None = None) -> CpuLimits:
        """Prepare this process before its first session; `graphs` is that of `ceilings.Pool`."""
        import onnxruntime

        if threads > 1:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
        return cls(threads, Pool(threads, shared=threads > 1, graphs=graphs))

    def measured(self) -> list[Ceiling]:
        """Measure all ceilings, in a second or two."""
        return _ceilings.measured(self.threads, ("read", "copy", "compute", "launch"), pool=self.pool)


def _on_cpu(job: SweepJob, report: Report) -> list[Row]:
    from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench

    limits, bench = CpuLimits.of(job.threads), OnnxRuntimeBench(job.threads, seed=job.seed)
    timed, before, after = _measured(job, bench, limits.measured, report)
    facts: dict[str, Any] = {"device": machine.device(), "versions": machine.versions(), "cache": bench.cache}
    return rows_of(timed, joined(before, after), job, **facts)


def _on_gpu(job: SweepJob, report: Report) -> list[Row]:
    import torch

    from quantkit.kernels.matmul import interpreted
    from quantkit.measurement.cuda.device import GpuDevice, sampled, slower
    from quantkit.measurement.operators.cuda import RUNTIME, CudaBench

    # tests run it with tiny shapes in the interpreter; else it needs the device
    device = GpuDevice("cpu", dry=True) if interpreted() else GpuDevice("cuda", dry=False)
    generator, bench = np.random.default_rng(job.seed), CudaBench(device, torch.bfloat16, job.seed)
    timed, before, after = _measured(job, bench, lambda: sampled(device, _BLOCKS, generator), report)
    device.sample("end")
    own, driver = device.identity(), str(device.describe().get("driver", ""))
    fell = slower(*([ceiling.as_dict(device=own, versions={}) for ceiling in part] for part in (before, after)))
    return rows_of(
        timed,
        joined(before, after),
        job,
        runtime=RUNTIME,
        device=own,
        versions={**machine.versions(), "driver": driver},
        cache=device.cache_bytes,
        flags=["throttled"] if fell or device.throttled() else [],
    )


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The common fields of all rows of one run.

    Args:
        runtime: runtime of the products.
        threads: threads of one product; None on a GPU.
        device: result of `machine.device()`.
        versions: result of `machine.versions()`.
        limits: measured roofline.
        launch: seconds of running an empty graph; None if unknown.
        cache: bytes of the last-level cache.
        baseline: name of the high-precision variant.
    """

    runtime: str
    threads: int | None
    device: Mapping[str, str]
    versions: Mapping[str, str]
    limits: Limits
    launch: float | None
    cache: int
    baseline: str

    def common(self, variant: str) -> dict[str, Any]:
        """Return the fields of every row of a variant."""
        device = Device.model_validate(dict(self.device))
        return {"subject": f"op:{variant}", "runtime": self.runtime, "device": device, "versions": dict(self.versions)}


def rows_of(
    timed: Sequence[TimedVariant],
    ceilings: Sequence[Ceiling],
    job: SweepJob,
    *,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int,
    runtime: str = "onnxruntime",
    flags: Sequence[str] = (),
) -> list[Row]:
    """Return the rows of timed products and of the device's ceilings.

    Args:
        timed: timed products.
        ceilings: joined ceilings from before and after.
        job: work of the child.
        device, versions, runtime: see `Setting`.
        cache: bytes of the last-level cache.
        flags: flags of the ceilings.
    """
    launch = next((ceiling.value for ceiling in ceilings if ceiling.name == "ceiling.launch"), None)
    threads = {"threads": job.threads} if job.threads else {}
    result = []
    for ceiling in ceilings:
        row = ceiling.row(device=dict(device), versions=dict(versions))
        extra = {"last_level_cache": cache} if ceiling.name == "ceiling.read" else {}
        update = {"settings": {**row.settings, **threads, **extra}, "flags": [*row.flags, *flags]}
        result.append(row.model_copy(update=update))
    setting = Setting(runtime, job.threads or None, device, versions, Limits.of(ceilings), launch, cache, job.baseline)
    return result + rows(timed, setting, model=job.model)


def rows(timed: Sequence[TimedVariant], setting: Setting, *, model: str = "") -> list[Row]:
    """Return the rows of all products of one run; with `model`, also those of the sum over its linears."""
    result = [row for one in timed for row in _of_one(one, setting)]
    curves: dict[tuple[str, str], list[list[TimedVariant]]] = {}
    for one in timed:
        curves.setdefault((one.linear.label, one.variant), []).append([one])
    result += [_break_even(curve, setting) for (_, name), curve in curves.items() if name != setting.baseline]
    for variant in dict.fromkeys(one.variant for one in timed) if model else ():
        mine = [one for one in timed if one.variant == variant]
        curve = [[one for one in mine if one.M == M] for M in sorted({one.M for one in mine})]
        for group in curve:
            result += _of_model(group, setting, model)
        if variant != setting.baseline:
            result.append(_break_even(curve, setting, layer=ALL))
    return result


def _of_one(timed: TimedVariant, setting: Setting) -> list[Row]:
    linear, times, side = timed.linear, timed.times, timed.side
    common = setting.common(timed.variant) | {"batch": timed.M}
    settings: dict[str, Any] = {"threads": setting.threads, "variant": timed.variant}
    settings |= dict(side.settings) if side is not None else {}
    size: dict[str, Any] = {"K": linear.K, "N": linear.N, "M": timed.M}
    if times is None or side is None:
        op = Operation(**size, format=side.cost.format if side else None)
        return [_absent(op, [timed.skipped or "not-measured"], settings, common)]
    bound, hp_bound = (cost.bound(*_shape(timed.M), setting.limits) for cost in (side.cost, _floats(timed, setting)))
    hp_s, form = times.baseline["p50"], side.cost.format
    op = Operation(**size, format=form, bound_s=bound, hp_bound_s=hp_bound, hp_s=hp_s, raw_s=timed.raw)
    launch = setting.launch / side.products if setting.launch is not None else None
    settings["products_a_run"] = side.products
    settings |= {"hot_s": timed.hot, "launch_s": launch, "activation_s": timed.quantizing}
    settings |= setting.limits.promise(bound, hp_bound)
    common |= {"n": times.n, "aa_spread": times.aa_spread, "resident_bytes": side.resident_bytes}
    alone = timed.variant == setting.baseline
    against = None if alone else f"op:{setting.baseline}"
    flags = [flag for flag in times.flags if not alone or flag == "noisy"] + _few(times.n)
    row = latency_row("latency.op", times, against, settings=settings, flags=flags, common={**common, "op": op})
    result = [row, *_tax(times.quantiles["p50"], times.ci95, times.ratio, settings, setting, op, common)]
    if timed.quantizing is not None:
        part = Operation(**size, format=form, hp_s=hp_s)
        # the time of a separate kernel before the product; a fused kernel may hide part of it
        result.append(_part("tax.activation", timed.quantizing, part, settings, common, ["unfused"]))
    return result


def _of_model(group: Sequence[TimedVariant], setting: Setting, model: str) -> list[Row]:
    first = group[0]
    settings: dict[str, Any] = {"threads": setting.threads, "variant": first.variant, "model": model}
    settings |= {"linears": sum(one.linear.count for one in group)}
    common = setting.common(first.variant) | {"batch": first.M}
    missing = [one for one in group if one.times is None or one.side is None]
    if missing:
        flags = ["incomplete", *dict.fromkeys(one.skipped for one in missing)]
        return [_absent(Operation(layer=ALL, M=first.M), flags, settings, common)]
    parts = [(one, one.times, one.side, one.linear.count) for one in group if one.times and one.side]
    seconds = sum(n * times.quantiles["p50"] for _, times, _, n in parts)
    hp_s = sum(n * times.baseline["p50"] for _, times, _, n in parts)
    low, high = (float(sum(n * times.ci95[i] for _, times, _, n in parts)) for i in (0, 1))
    bound, hp_bound = _bounds(group, setting)
    ratio, ratio_ci95, _ = _summed(group)
    side = parts[0][2]
    limits: dict[str, Any] = {"bound_s": bound, "hp_bound_s": hp_bound, "hp_s": hp_s}
    limits["raw_s"] = _total((one.raw, n) for one, _, _, n in parts)
    op = Operation(layer=ALL, M=first.M, format=side.cost.format, **limits)
    settings |= {key: side.settings[key] for key in ("compute_type", "accuracy_level", "group") if key in side.settings}
    settings["hot_s"] = _total((one.hot, n) for one, _, _, n in parts)
    settings["activation_s"] = _total((one.quantizing, n) for one, _, _, n in parts)
    settings |= setting.limits.promise(bound, hp_bound)
    if setting.launch is not None:
        settings["launch_s"] = sum(n * setting.launch / side.products for _, _, side, n in parts)
    common |= {"n": min(times.n for _, times, _, _ in parts), "aa_spread": _spread(group)}
    common["resident_bytes"] = int(sum((side.resident_bytes or 0) * n for _, _, side, n in parts))
    flags = ["noisy"] if any("noisy" in times.flags for _, times, _, _ in parts) else []
    against: dict[str, Any] = {}
    if first.variant != setting.baseline:
        flags += ["interval-spans-1"] if ratio_ci95[0] <= 1 <= ratio_ci95[1] else []
        subject = f"op:{setting.baseline}"
        against["baseline"] = Baseline(subject=subject, value=hp_s, ratio=ratio, ratio_ci95=ratio_ci95)
    fields: dict[str, Any] = {"ci95": (low, high), "settings": settings, "flags": flags + _few(common["n"]), "op": op}
    latency = Row.seconds("latency.op", seconds, stat="sum of medians", **fields, **against, **common)
    return [latency, *_tax(seconds, (low, high), ratio, settings, setting, op, common)]


def _absent(op: Operation, flags: list[str], settings: Fields, common: Fields) -> Row:
    return Row.seconds("latency.op", None, stat=None, op=op, flags=flags, settings=dict(settings), **common)


def _few(n: int) -> list[str]:
    return ["few-steps"] if n < _FEWEST else []


def _tax(
    seconds: float, ci95: Interval, ratio: float, settings: Fields, setting: Setting, op: Operation, common: Fields
) -> list[Row]:
    total = tax_row(seconds, ci95, ratio, f"op:{setting.baseline}", op=op, settings=settings, common=common)
    if total.value is None or op.raw_s is None or op.bound_s is None:
        return [total]
    parts = {"tax.streaming": op.raw_s - op.bound_s, "tax.decode": seconds - op.raw_s}
    return [total, *(_part(name, part, op, settings, common) for name, part in parts.items())]


def _part(
    name: str, seconds: float, op: Operation, settings: Fields, common: Fields, flags: list[str] | None = None
) -> Row:
    flags = flags or (["negative-tax"] if seconds < 0 else [])
    settings = {**settings, "share_of_baseline": seconds / (op.hp_s or seconds)}
    return Row.seconds(name, seconds, op=op, settings=settings, flags=flags, **{**common, "aa_spread": None})


def _shape(m: float) -> Shape:
    return (m, 1.0, 0.0)


def _floats(timed: TimedVariant, setting: Setting) -> StepCost:
    linear, (size, compute) = timed.linear, _FLOATS[setting.baseline]
    weights, io = linear.K * linear.N, size * (linear.K + linear.N)
    return StepCost(
        setting.baseline, size * weights, flops_per_token=2.0 * weights, io_bytes_per_token=io, compute=compute
    )


def _break_even(curve: Sequence[Sequence[TimedVariant]], setting: Setting, *, layer: str | None = None) -> Row:
    """Return the `tax.break_even` row of one variant, for one shape or for a model's linears.

    Args:
        curve: timed products of each batch; a batch with a skipped one is left out.
        setting: common fields of the rows.
        layer: `all linears` for a sum; None for one shape.
    """
    first = curve[0][0]
    settings: dict[str, Any] = {"threads": setting.threads, "variant": first.variant, "over": "batch"}
    shape: dict[str, Any] = {} if layer else {"K": first.linear.K, "N": first.linear.N}
    op = Operation(layer=layer, format=first.side.cost.format if first.side else None, **shape)
    costs = [(one.side.cost, _floats(one, setting), one.linear.count) for one in curve[0] if one.side is not None]
    flags: list[str] = []
    if len(costs) == len(curve[0]):
        settings["ideal"], reason = ideal_sum(costs, setting.limits, _shape)
        flags += [reason] if reason else []
    points = []
    for group in curve:
        counts = [one.times.n for one in group if one.times is not None]
        if len(counts) == len(group):
            ratio, interval, draws = _summed(group)
            most = setting.limits.promise(*_bounds(group, setting)).get("promised_most", math.inf)
            points.append(Point(group[0].M, SpeedUp(ratio, interval, _spread(group), most), draws, min(counts)))
    common = setting.common(first.variant) | {"op": op}
    return break_even_row(points, settings=settings, flags=flags, common=common)


def _summed(group: Sequence[TimedVariant]) -> tuple[float, Interval, Any]:
    times = [one.times for one in group if one.times is not None]
    if len(times) == 1:
        return times[0].ratio, times[0].ratio_ci95, times[0].draws
    return summed(times, [one.linear.count for one in group])


def _spread(group: Sequence[TimedVariant]) -> float:
    timed = [(one.times, one.linear.count) for one in group if one.times is not None]
    return summed_spread([times for times, _ in timed], [count for _, count in timed])


def _bounds(group: Sequence[TimedVariant], setting: Setting) -> tuple[float | None, float | None]:
    costs = [(one.side.cost, _floats(one, setting), one.M, one.linear.count) for one in group if one.side is not None]
    ours = _total((own.bound(*_shape(M), setting.limits), n) for own, _, M, n in costs)
    return ours, _total((hp.bound(*_shape(M), setting.limits), n) for _, hp, M, n in costs)


def _total(parts: Iterable[tuple[float | None, int]]) -> float | None:
    total = 0.0
    for value, count in parts:
        if value is None:
            return None
        total += value * count
    return total
