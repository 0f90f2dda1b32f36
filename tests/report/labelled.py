"""Bundles of a classifier and of an encoder, with figures that are known."""

from typing import Any

import planted

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row

_SCHEME = {"format": "int8", "granularity": "channel", "group": None, "symmetric": True, "scale": "float32"}
_RECIPE = {"schema": 1, "name": "int8", "summary": "8-bit weights and activations", "passes": [{"rtn": {}}]}
Ends = tuple[float, float]


def _bundle(name: str, kind: str, seen: dict[str, Any], gates: dict[str, float], check: dict[str, Any]) -> Manifest:
    file = {**planted.manifest().files[0].model_dump(by_alias=True), "path": "onnx/model.onnx", "role": "onnx"}
    layer = {"shape": [64, 9], "scheme": _SCHEME, "bits_per_weight": 8.3}
    return planted.manifest(
        model={"name": name, "kind": kind, "source": {"ref": f"alias:{name}", "sha256": "b" * 64, "dtype": "float32"}},
        recipe={**_RECIPE, "export": [{"onnx": {"dialect": "onnxruntime"}}], "gates": gates},
        calibration={"split": "calib", "ids_sha256": "c" * 64, "tokens": 0, **seen},
        layers=[{"name": f"conv.{i}", **layer} for i in range(4)],
        files=[file],
        decisions=[],
        checks=[{**check, "ok": True}],
    )


def classifier(**gates: float) -> Manifest:
    """A classifier's bundle, its gate on top-1 met."""
    check = {"name": "gate.top1_drop_max", "value": 0.14, "limit": 0.3}
    gates = gates or {"top1_drop_max": 0.3, "agreement_min": 0.97}
    return _bundle("fashion-mnist-cnn", "network", {"set": "fashion-mnist", "samples": 512}, gates, check)


def encoder() -> Manifest:
    """An encoder's bundle."""
    check = {"name": "gate.recall_drop_max", "value": 0.4, "limit": 0.5}
    gates = {"recall_drop_max": 0.5, "cosine_min": 0.995}
    return _bundle("minilm-l6", "encoder", {"set": "verse-pairs", "samples": 64}, gates, check)


def _row(name: str, value: float, n: int, ci95: Ends, **changes: Any) -> Row:
    data = {"set": "made-up", "split": "eval", "sha256": "e" * 64, "items": n}
    known = {"subject": planted.CONTENT, "runtime": "onnxruntime", "data": data, "unit": "1", "n": n}
    return Row(name=f"accuracy.{name}", value=value, ci95=ci95, **known | changes)


def _base(value: float, difference: float | None = None, sure: Ends | None = None, p: float = 0.0) -> Any:
    base: dict[str, Any] = {"subject": "b" * 64, "value": value}
    return base if difference is None else base | {"difference": difference, "difference_ci95": sure, "p_value": p}


def classified(n: int = 5000, *, labels: bool = True) -> list[Row]:
    """Top-1 91.38 to 91.24 %, p 0.30; the same class for 98.60 %, of what the original is sure of 99.10 %."""
    shape = {"shape": {"classes": 10}}
    top1 = _base(0.9138, -0.0014, (-0.0040, 0.0010), 0.2968)
    top5 = _base(0.9964, -0.0002, (-0.0010, 0.0006), 1.0)
    right = [
        _row("top1", 0.9124, n, (0.9042, 0.9199), **shape, flags=["ci95-by-image"], baseline=top1),
        _row("top5", 0.9962, n, (0.9941, 0.9976), **shape, flags=["ci95-by-image"], baseline=top5),
    ]
    same, sure = {**shape, "baseline": _base(1.0)}, {"surer_than": 0.3}
    moved = [
        _row("top1_agreement", 0.986, n, (0.9824, 0.9889), **same),
        _row("top1_agreement", 0.991, 4800, (0.9879, 0.9933), **same, settings=sure),
        _row("kl", 0.0041, n, (0.0037, 0.0045), **shape, unit="nat"),
    ]
    return [*(right if labels else []), *moved, *sized()]


def retrieved(n: int = 480) -> list[Row]:
    """Recall at 1 61.5 to 61.0 %, p 0.69; cosine 0.99861, least 0.98712."""
    by = {"flags": ["ci95-by-pair"]}
    rows = [
        _row(f"recall_at_{k}", after, n, ci95, **by, baseline=_base(before, after - before, sure, p))
        for k, before, after, ci95, sure, p in (
            (1, 0.615, 0.610, (0.566, 0.653), (-0.017, 0.006), 0.6875),
            (5, 0.800, 0.802, (0.764, 0.835), (-0.006, 0.010), 1.0),
            (10, 0.860, 0.860, (0.826, 0.888), (-0.008, 0.008), 1.0),
        )
    ]
    spread = {"quantiles": {"p0": 0.98712, "p50": 0.99884}, "baseline": _base(1.0)}
    return [*rows, _row("cosine", 0.99861, n, (0.99852, 0.99870), **by, **spread), *sized()]


def plain() -> list[Row]:
    """Two outputs of a graph that is neither."""
    rows = []
    for name, cosine, error in (("boxes", 0.9991, 0.042), ("scores", 0.9942, 0.11)):
        of = {"settings": {"output": name}}
        rows.append(_row("cosine", cosine, 64, (cosine - 0.0004, cosine + 0.0004), **of))
        rows.append(_row("relative_error", error, 64, (error - 0.004, error + 0.004), **of))
    return [*rows, *sized()]


def sized() -> list[Row]:
    """2.1 to 0.6 MB."""
    against = {"subject": "b" * 64, "value": 2.1e6, "ratio": 3.5}
    return [Row(name="size.bytes", value=0.6e6, unit="B", subject=planted.CONTENT, baseline=against)]
