"""What rows of made-up runs share."""

from __future__ import annotations

from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.rows import Data, Device


def about(items: int = 1) -> About:
    return About(
        subject="aa",
        baseline="bb",
        runtime="onnxruntime",
        data=Data(set="made-up", split="eval", sha256="cc", items=items),
        device=Device(id="x", kind="cpu", name="a processor"),
        versions={"onnxruntime": "1"},
        settings={"threads": 2},
    )
