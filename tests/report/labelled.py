"""Bundles of a classifier and of an encoder, with figures that are known."""

from __future__ import annotations

from typing import Any

import planted

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row

_SCHEME = {"format": "int8", "granularity": "channel", "group": None, "symmetric": True, "scale": "float32"}


def _bundle(
    name: str, kind: str, seen: dict[str, Any], gates: dict[str, float], checks: list[dict[str, Any]]
) -> Manifest:
    source = {"ref": f"alias:{name}", "sha256": "b" * 64, "dtype": "float32"}
    file = {**planted.manifest().files[0].model_dump(by_alias=True), "path": "onnx/model.onnx", "role": "onnx"}
    return planted.manifest(
        model={"name": name, "kind": kind, "source": source},
        recipe={
            "schema": 1,
            "name": "int8",
            "summary": "8-bit weights and activations",
            "passes": [{"rtn": {}}],
            "export": [{"onnx": {"dialect": "onnxruntime"}}],
            "gates": gates,
        },
        calibration={"split": "calib", "ids_sha256": "c" * 64, "tokens": 0, **seen},
        layers=[{"name": f"conv.{i}", "shape": [64, 9], "scheme": _SCHEME, "bits_per_weight": 8.3} for i in range(4)],
        files=[file],
        decisions=[],
        checks=checks,
    )


def classifier(**gates: float) -> Manifest:
    """A classifier's bundle, its gate on top-1 met."""
    check = {"name": "gate.top1_drop_max", "value": 0.14, "limit": 0.3, "ok": True}
    gates = gates or {"top1_drop_max": 0.3, "agreement_min": 0.97}
    return _bundle("fashion-mnist-cnn", "network", {"set": "fashion-mnist", "samples": 512}, gates, [check])


def encoder() -> Manifest:
    """An encoder's bundle."""
    check = {"name": "gate.recall_drop_max", "value": 0.4, "limit": 0.5, "ok": True}
    gates = {"recall_drop_max": 0.5, "cosine_min": 0.995}
    return _bundle("minilm-l6", "encoder", {"set": "verse-pairs", "samples": 64}, gates, [check])


def _share(name: str, value: float, n: int, ci95: tuple[float, float], **changes: Any) -> Row:
    return Row(name=name, value=value, unit="1", stat="mean", better="higher", ci95=ci95, n=n, **_common(n) | changes)


def _common(n: int) -> dict[str, Any]:
    return {
        "subject": planted.CONTENT,
        "runtime": "onnxruntime",
        "data": {"set": "made-up", "split": "eval", "sha256": "e" * 64, "items": n},
    }


def _base(
    value: float, difference: float | None = None, sure: tuple[float, float] | None = None, p: float = 0.0
) -> Any:
    base: dict[str, Any] = {"subject": "b" * 64, "value": value}
    return base if difference is None else base | {"difference": difference, "difference_ci95": sure, "p_value": p}


def classified(n: int = 5000, *, labels: bool = True) -> list[Row]:
    """Top-1 91.38 to 91.24 %, p 0.30; the same class for 98.60 %, of what the original is sure of 99.10 %."""
    shape = {"classes": 10}
    right = [
        _share(
            "accuracy.top1",
            0.9124,
            n,
            (0.9042, 0.9199),
            shape=shape,
            flags=["ci95-by-image"],
            baseline=_base(0.9138, -0.0014, (-0.0040, 0.0010), 0.2968),
        ),
        _share(
            "accuracy.top5",
            0.9962,
            n,
            (0.9941, 0.9976),
            shape=shape,
            flags=["ci95-by-image"],
            baseline=_base(0.9964, -0.0002, (-0.0010, 0.0006), 1.0),
        ),
    ]
    moved = [
        _share("accuracy.top1_agreement", 0.986, n, (0.9824, 0.9889), shape=shape, baseline=_base(1.0)),
        _share(
            "accuracy.top1_agreement",
            0.991,
            4800,
            (0.9879, 0.9933),
            shape=shape,
            baseline=_base(1.0),
            settings={"surer_than": 0.3},
        ),
        Row(
            name="accuracy.kl",
            value=0.0041,
            unit="nat",
            ci95=(0.0037, 0.0045),
            n=n,
            shape=shape,
            quantiles={"p50": 0.001, "p90": 0.009, "p99": 0.04},
            **_common(n),
        ),
    ]
    return [*(right if labels else []), *moved, *sized()]


def retrieved(n: int = 480) -> list[Row]:
    """Recall at 1 61.5 to 61.0 %, p 0.69; cosine 0.99861, least 0.98712."""
    flags = ["ci95-by-pair"]
    rows = [
        _share(f"accuracy.recall_at_{k}", after, n, ci95, flags=flags, baseline=_base(before, after - before, sure, p))
        for k, before, after, ci95, sure, p in (
            (1, 0.615, 0.610, (0.566, 0.653), (-0.017, 0.006), 0.6875),
            (5, 0.800, 0.802, (0.764, 0.835), (-0.006, 0.010), 1.0),
            (10, 0.860, 0.860, (0.826, 0.888), (-0.008, 0.008), 1.0),
        )
    ]
    cosine = _share(
        "accuracy.cosine",
        0.99861,
        2 * n,
        (0.99852, 0.99870),
        flags=flags,
        baseline=_base(1.0),
        quantiles={"p0": 0.98712, "p50": 0.99884},
        data={**_common(n)["data"], "items": n},
    )
    return [*rows, cosine, *sized()]


def plain() -> list[Row]:
    """Two outputs of a graph that is neither."""
    found = []
    for name, cosine, error in (("boxes", 0.9991, 0.042), ("scores", 0.9942, 0.11)):
        settings = {"output": name}
        found.append(_share("accuracy.cosine", cosine, 64, (cosine - 0.0004, cosine + 0.0004), settings=settings))
        found.append(
            Row(
                name="accuracy.relative_error",
                value=error,
                unit="1",
                ci95=(error - 0.004, error + 0.004),
                n=64,
                settings=settings,
                **_common(64),
            )
        )
    return [*found, *sized()]


def sized() -> list[Row]:
    """2.1 to 0.6 MB."""
    against = {"subject": "b" * 64, "value": 2.1e6, "ratio": 3.5}
    return [Row(name="size.bytes", value=0.6e6, unit="B", subject=planted.CONTENT, baseline=against)]
