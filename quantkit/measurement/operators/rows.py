"""Rows of products that were timed: what each took, what bounds it, the tax, and the batches at which it wins.

For each shape, variant and batch `latency.op` and `tax.total`, `tax.activation` where quantizing the input can be had
apart; `tax.break_even` for each shape and variant. For a model the same of the sum over its linears, each as often as
it occurs (`op.layer` is `all linears`). Where the kernel is ours its twin without decoding splits the rest:

    tax.streaming = t_raw - R     tax.decode = t - t_raw

A runtime is a black box: of its tax only the sum is known, but for what quantizing the input takes alone and what
launching costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.measurement.operators.products import TimedVariant
from quantkit.measurement.operators.tax import Limits, Shape, StepCost, ideal_sum
from quantkit.measurement.rows import Baseline, Device, Operation, Row
from quantkit.measurement.timing.rows import Fields, Point, break_even_row, latency_row, tax_row
from quantkit.stats.abba import Interval, summed, summed_spread
from quantkit.stats.deciding.apart import SpeedUp

ALL = "all linears"
# high-precision variant -> bytes of a number, the input type whose measured rate bounds its products
_FLOATS = {"float32": (4.0, "fp32"), "float16": (2.0, "fp16"), "bfloat16": (2.0, "bf16")}
_FEWEST = 16


@dataclass(frozen=True)
class Setting:
    """What all rows of one run share.

    Args:
        runtime: that ran them.
        threads: of one product; None on a GPU.
        device: `machine.device()`.
        versions: `machine.versions()`.
        limits: the measured roofline.
        launch: seconds of running a graph that does nothing; None where it is not known.
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
        """Fields of every row."""
        return {
            "subject": f"op:{variant}",
            "runtime": self.runtime,
            "device": Device.model_validate(dict(self.device)),
            "versions": dict(self.versions),
        }


def rows(timed: Sequence[TimedVariant], setting: Setting, *, model: str = "") -> list[Row]:
    """All rows of products timed in one run; with `model` those of the sum over its linears too."""
    found: list[Row] = []
    for each in timed:
        found += _rows(each, setting)
    groups: dict[tuple[str, str], list[TimedVariant]] = {}
    for each in timed:
        groups.setdefault((each.linear.label, each.variant), []).append(each)
    for (_, variant), curve in groups.items():
        if variant != setting.baseline:
            found.append(_break_even([[each] for each in curve], setting))
    if model:
        found += _model(timed, setting, model)
    return found


def _shape(m: float) -> Shape:
    return (m, 1.0, 0.0)


def _rows(timed: TimedVariant, setting: Setting) -> list[Row]:
    linear, found, side = timed.linear, timed.times, timed.side
    common = setting.common(timed.variant) | {"batch": timed.M}
    settings: dict[str, Any] = {"threads": setting.threads, "variant": timed.variant}
    settings |= dict(side.settings) if side is not None else {}
    size: dict[str, Any] = {"K": linear.K, "N": linear.N, "M": timed.M}
    if found is None or side is None:
        op = Operation(**size, format=side.cost.format if side else None)
        return [_absent(op, [timed.skipped or "not-measured"], settings, common)]
    cost = side.cost
    bound, hp_cost = cost.bound(*_shape(timed.M), setting.limits), _baseline_cost(timed, setting)
    hp_bound = hp_cost.bound(*_shape(timed.M), setting.limits)
    time_s, hp_s = found.quantiles["p50"], found.baseline["p50"]
    op = Operation(**size, format=cost.format, bound_s=bound, hp_bound_s=hp_bound, hp_s=hp_s, raw_s=timed.raw)
    launch = setting.launch / side.products if setting.launch is not None else None
    settings["products_a_run"] = side.products
    settings |= {"hot_s": timed.hot, "launch_s": launch, "activation_s": timed.quantizing}
    settings |= setting.limits.promise(bound, hp_bound)
    common |= {"n": found.n, "aa_spread": found.aa_spread, "resident_bytes": side.resident_bytes}
    alone = timed.variant == setting.baseline
    result = [
        latency_row(
            "latency.op",
            found,
            None if alone else f"op:{setting.baseline}",
            settings=settings,
            flags=[flag for flag in found.flags if not alone or flag == "noisy"] + _few(found.n),
            common={**common, "op": op},
        )
    ]
    result += _tax(time_s, found.ci95, found.ratio, settings, setting, op, common)
    if timed.quantizing is not None:
        part = _part(
            "tax.activation", timed.quantizing, Operation(**size, format=cost.format, hp_s=hp_s), settings, common
        )
        # what another kernel does before the product; a fused one may hide some of it
        result.append(part.model_copy(update={"flags": ["unfused"]}))
    return result


def _absent(op: Operation, flags: list[str], settings: dict[str, Any], common: Mapping[str, Any]) -> Row:
    """The row of what was not timed; its flags say why."""
    return Row(name="latency.op", value=None, unit="s", better="lower", op=op, flags=flags, settings=settings, **common)


def _few(n: int) -> list[str]:
    return ["few-steps"] if n < _FEWEST else []


def _tax(
    time_s: float, ci95: Interval, ratio: float, settings: Fields, setting: Setting, op: Operation, common: Fields
) -> list[Row]:
    """`tax.total`, and its two parts where there is a twin."""
    total = tax_row(time_s, ci95, ratio, f"op:{setting.baseline}", op=op, settings=settings, common=common)
    if total.value is None or op.raw_s is None or op.bound_s is None:
        return [total]
    parts = {"tax.streaming": op.raw_s - op.bound_s, "tax.decode": time_s - op.raw_s}
    return [total, *(_part(name, part, op, settings, common) for name, part in parts.items())]


def _part(name: str, seconds: float, op: Operation, settings: Fields, common: Fields) -> Row:
    """What a part of a product takes."""
    return Row(
        name=name,
        value=seconds,
        unit="s",
        stat="median",
        better="lower",
        op=op,
        settings={**settings, "share_of_baseline": seconds / (op.hp_s or seconds)},
        flags=["negative-tax"] if seconds < 0 else [],
        **{**common, "aa_spread": None},
    )


def _baseline_cost(timed: TimedVariant, setting: Setting) -> StepCost:
    """Of the float product of the same shape: what a runtime would have to move and compute without quantizing."""
    linear = timed.linear
    each, compute = _FLOATS[setting.baseline]
    return StepCost(
        setting.baseline,
        each * linear.K * linear.N,
        flops_per_token=2.0 * linear.K * linear.N,
        io_bytes_per_token=each * (linear.K + linear.N),
        compute=compute,
    )


# --- over batches, and over linears ----------------------------------------------------------------------------------


def _break_even(curve: Sequence[Sequence[TimedVariant]], setting: Setting, *, layer: str | None = None) -> Row:
    """The `tax.break_even` row of one variant: of one shape, or of a model's linears.

    Args:
        curve: for each batch the linears; skipped ones leave their batch out.
        layer: `all linears` of a sum.
    """
    first = curve[0][0]
    settings: dict[str, Any] = {"threads": setting.threads, "variant": first.variant, "over": "batch"}
    side = first.side
    shape = {} if layer else {"K": first.linear.K, "N": first.linear.N}
    op = Operation(layer=layer, format=side.cost.format if side else None, K=shape.get("K"), N=shape.get("N"))
    costs = [
        (each.side.cost, _baseline_cost(each, setting), each.linear.count) for each in curve[0] if each.side is not None
    ]
    flags: list[str] = []
    if len(costs) == len(curve[0]):
        settings["ideal"], reason = ideal_sum(costs, setting.limits, _shape)
        flags += [reason] if reason else []
    points = []
    for group in curve:
        comparisons = [each.times for each in group if each.times is not None]
        if len(comparisons) == len(group):
            ratio, interval, draws = _summed(group)
            n = min(found.n for found in comparisons)
            bounds = [_total(each) for each in _bounds(group, setting)]
            most = setting.limits.promise(*bounds).get("promised_most", math.inf)
            points.append(Point(group[0].M, SpeedUp(ratio, interval, _spread(group), most), draws, n))
    common = setting.common(first.variant) | {"op": op}
    return break_even_row(points, settings=settings, flags=flags, common=common)


def _summed(group: Sequence[TimedVariant]) -> tuple[float, Interval, Any]:
    """(ratio, interval, draws) of the linears of one batch, each as often as it occurs."""
    found = [each.times for each in group if each.times is not None]
    if len(found) == 1:
        return found[0].ratio, found[0].ratio_ci95, found[0].draws
    return summed(found, [each.linear.count for each in group])


def _spread(group: Sequence[TimedVariant]) -> float:
    """The A/A spread of the linears of one batch, each as often as it occurs."""
    timed = [(each.times, each.linear.count) for each in group if each.times is not None]
    return summed_spread([found for found, _ in timed], [count for _, count in timed])


def _model(timed: Sequence[TimedVariant], setting: Setting, model: str) -> list[Row]:
    """The rows of the sum over all linears, one curve a variant."""
    result: list[Row] = []
    for variant in dict.fromkeys(each.variant for each in timed):
        mine = [each for each in timed if each.variant == variant]
        curve = [[each for each in mine if each.M == M] for M in sorted({each.M for each in mine})]
        for group in curve:
            result += _sum(group, setting, model)
        if variant != setting.baseline:
            result.append(_break_even(curve, setting, layer=ALL))
    return result


def _sum(group: Sequence[TimedVariant], setting: Setting, model: str) -> list[Row]:
    """`latency.op` and `tax.total` of all linears of a model at one batch."""
    first = group[0]
    alone = first.variant == setting.baseline
    settings: dict[str, Any] = {"threads": setting.threads, "variant": first.variant, "model": model}
    settings |= {"linears": sum(each.linear.count for each in group)}
    common = setting.common(first.variant) | {"batch": first.M}
    missing = [each for each in group if each.times is None or each.side is None]
    if missing:
        flags = ["incomplete", *dict.fromkeys(each.skipped for each in missing)]
        return [_absent(Operation(layer=ALL, M=first.M), flags, settings, common)]
    parts = [(each, each.times, each.side, each.linear.count) for each in group if each.times and each.side]
    time_s = sum(n * found.quantiles["p50"] for _, found, _, n in parts)
    hp_s = sum(n * found.baseline["p50"] for _, found, _, n in parts)
    ci95 = tuple(sum(n * found.ci95[i] for _, found, _, n in parts) for i in (0, 1))
    bound, hp_bound = (_total(each) for each in _bounds(group, setting))
    ratio, ratio_ci95, _ = _summed(group)
    side = parts[0][2]
    raw = _total([(each.raw, n) for each, _, _, n in parts])
    limits: dict[str, Any] = {"bound_s": bound, "hp_bound_s": hp_bound, "hp_s": hp_s, "raw_s": raw}
    op = Operation(layer=ALL, M=first.M, format=side.cost.format, **limits)
    how = side.settings
    hot = [(each.hot, n) for each, _, _, n in parts]
    settings |= {key: how[key] for key in ("compute_type", "accuracy_level", "group") if key in how}
    settings |= {"hot_s": _total(hot), "activation_s": _total([(each.quantizing, n) for each, _, _, n in parts])}
    settings |= setting.limits.promise(bound, hp_bound)
    if setting.launch is not None:
        settings["launch_s"] = sum(n * setting.launch / side.products for _, _, side, n in parts)
    common |= {"n": min(found.n for _, found, _, _ in parts), "aa_spread": _spread(group)}
    common["resident_bytes"] = int(sum((side.resident_bytes or 0) * n for _, _, side, n in parts))
    flags = list(dict.fromkeys(flag for _, found, _, _ in parts for flag in found.flags if flag == "noisy"))
    against: dict[str, Any] = {}
    if not alone:
        low, high = ratio_ci95
        flags += ["interval-spans-1"] if low <= 1 <= high else []
        subject = f"op:{setting.baseline}"
        against["baseline"] = Baseline(subject=subject, value=hp_s, ratio=ratio, ratio_ci95=ratio_ci95)
    interval = (float(ci95[0]), float(ci95[1]))
    latency = Row(
        name="latency.op",
        value=time_s,
        unit="s",
        stat="sum of medians",
        better="lower",
        ci95=interval,
        settings=settings,
        flags=flags + _few(common["n"]),
        **against,
        **common,
        op=op,
    )
    return [latency, *_tax(time_s, interval, ratio, settings, setting, op, common)]


def _bounds(
    group: Sequence[TimedVariant], setting: Setting
) -> tuple[list[tuple[float | None, int]], list[tuple[float | None, int]]]:
    """The least seconds of each linear of one batch and how often it occurs; of the format, and of the baseline."""
    ours, theirs = [], []
    for each in group:
        if each.side is not None:
            ours.append((each.side.cost.bound(*_shape(each.M), setting.limits), each.linear.count))
            theirs.append((_baseline_cost(each, setting).bound(*_shape(each.M), setting.limits), each.linear.count))
    return ours, theirs


def _total(parts: Sequence[tuple[float | None, int]]) -> float | None:
    if any(value is None for value, _ in parts):
        return None
    return sum((value or 0.0) * n for value, n in parts)
