"""Products of 8-bit weights and 8-bit inputs in ONNX Runtime: how weights are stored, how inputs are scaled, and what
that costs. The table behind `weight_codes` in `cpu-x86` and behind `int8-encoder`.

    python benchmarks/w8a8_codes.py
    python benchmarks/w8a8_codes.py --shapes 384x1152 --rows 128 --seconds 5 --no-record

Every product is written by the exporter's own code and run as it is loaded, with and without the option that has
ONNX Runtime add up exactly where the processor has no VNNI. Its error is taken against what the exporter's check
expects. All sides are visited in randomised palindromes on one thread (`measurement/timing/schedule.py`): ratios count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from harness.record import layout, parsing, record, show, verdicts
from harness.turns import in_turns

from quantkit import machine
from quantkit.exporters.onnx.dialect import OrtDialect
from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName
from quantkit.exporters.onnx.single_op import EXACT_SUMS
from quantkit.exporters.trace.transformer import DOMAIN, Traced
from quantkit.formats.base import activation
from quantkit.formats.base.activation import InputCodes
from quantkit.measurement.timing.schedule import Visit
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.stats.abba import compare
from quantkit.target import Target

# K x N of MiniLM-L6: q, k and v in one, the two of a feed-forward part
SHAPES, ROWS = ["384x1152", "384x1536", "1536x384"], [1, 16, 128, 2048]
WEIGHT = WeightScheme(format="int8", granularity="channel", scale="float32")
INPUTS = {
    "fixed": InputCodes(ActivationScheme(format="int8", granularity="tensor", dynamic=False), 9 / 255, 0),
    "by tensor": InputCodes(ActivationScheme(format="int8", granularity="tensor", symmetric=False)),
    "by token": InputCodes(ActivationScheme(format="int8")),
    "by token, zero points": InputCodes(ActivationScheme(format="int8", symmetric=False)),
}
# how weights are stored -> whether ONNX Runtime is told to add up exactly
STORED = {"uint8": False, "int8, told": True, "int8": False, "int7": False}
ANYWHERE = ("uint8", "int7")
FLOAT, FEWEST, MOST = "float32", 6, 200


def model(weight: Any, how: InputCodes | None, stored: str) -> bytes:
    """x [1, M, K] -> x Wᵀ + b, as the exporter writes it."""
    n, k = weight.shape
    codes, scale = rounded(weight, stored)
    scheme = WEIGHT.model_copy(update={"format": "int7"}) if stored == "int7" else WEIGHT
    linear = LinearSpec(n, k, scheme if how else None, None, how)
    tensors = {"a.weight": weight, "a.bias": np.full(n, 0.1, np.float32)}
    shapes = {name: values.shape for name, values in tensors.items()}
    weights = WeightsByName({"a": linear}, shapes, tensors.__getitem__, lambda _: codes, lambda _: (scale, None))
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape([1, "M", k]), type=float32)
    bias = ir.Value(name="model.a.bias", shape=ir.Shape([n]), type=float32)
    product = ir.Value(name="product", shape=ir.Shape([1, "M", n]), type=float32)
    y = ir.Value(name="y", shape=ir.Shape([1, "M", n]), type=float32)
    nodes = [
        ir.Node(DOMAIN, "Linear", [x], ir.convenience.convert_attributes({"name": "a"}), outputs=[product]),
        ir.Node("", "Add", [product, bias], outputs=[y]),
    ]
    graph = ir.Graph([x], [y], nodes=nodes, opset_imports={"": 23, DOMAIN: 1}, name="one")
    traced = Traced(ir.Model(graph, ir_version=10), {"model.a.bias": "a.bias"}, False, 0)
    written = OrtDialect(traced, weights, codes="uint8" if stored == "uint8" else "int8").apply()
    found: bytes = ir.to_proto(written).SerializeToString()
    return found


def rounded(weight: Any, stored: str) -> tuple[Any, Any]:
    """Codes and scales."""
    top = 63 if stored == "int7" else 127
    scale = (np.abs(weight).max(axis=1, keepdims=True) / top).astype(np.float32)
    return np.round(weight / scale).astype(np.int8), scale


def session(proto: bytes, *, exact: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    for name, value in EXACT_SUMS.items() if exact else ():
        options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def error(found: Any, x: Any, weight: Any, how: InputCodes, stored: str) -> float:
    """Relative, in the median of the rows, against exact sums of the rounded numbers."""
    codes, scale = rounded(weight, stored)
    static = None if how.scale is None else activation.InputScale(torch.tensor(how.scale, dtype=torch.float32))
    inputs = activation.fake_quantize(torch.from_numpy(x), how.scheme, static).double().numpy()
    expected = inputs @ (codes * scale.astype(np.float64)).T + 0.1
    return float(np.median(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def compared(k: int, n: int, rows: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Every way against float32."""
    generator = np.random.default_rng(0)
    weight = (0.05 * generator.standard_normal((n, k))).astype(np.float32)
    x = generator.standard_normal((1, max(rows), k)).astype(np.float32)
    ways = [(inputs, stored) for inputs in INPUTS for stored in STORED if stored in ANYWHERE or "token" not in inputs]
    base = session(model(weight, None, ""), exact=True)
    loaded = {way: session(model(weight, INPUTS[way[0]], way[1]), exact=STORED[way[1]]) for way in ways}
    errors = {
        way: error(each.run(None, {"x": x[:, :64]})[0], x[:, :64], weight, INPUTS[way[0]], way[1])
        for way, each in loaded.items()
    }
    found = []
    for m in rows:

        def step(each: onnxruntime.InferenceSession, feeds: Any = {"x": x[:, :m]}) -> Callable[[], object]:  # noqa: B006
            return lambda: each.run(None, feeds)

        steps = [step(base), *(step(each) for each in loaded.values())]
        theirs, *times = in_turns(
            steps, blocks=(FEWEST, MOST), seconds=seconds, generator=np.random.default_rng(m), visit=Visit(1, 1)
        )
        for way, taken in zip(ways, times, strict=True):
            result = compare(taken, theirs)
            found.append(
                {**{"K": k, "N": n, "M": m, "inputs": way[0], "weights": way[1], "error": errors[way]}}
                | {**{"ms": 1e3 * result.quantiles["p50"], "float32_ms": 1e3 * result.baseline["p50"]}}
                | {**{"ratio": result.ratio, "ratio_ci95": list(result.ratio_ci95), "aa_spread": result.aa_spread}}
                | {**{"n": result.n, "load_average": os.getloadavg()[0]}}
            )
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="M, tokens")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each shape and M")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes:
        k, n = (int(size) for size in shape.split("x"))
        rows += compared(k, n, options.rows, options.seconds)
    columns = layout(
        "K:d | N:d | M:d | inputs | weights | error:.0e | float32_ms=fp32, ms:.3f | ratio=times as fast:.2f | "
        "ratio_ci95=95 %:.2f"
    )
    show(f"8 by 8 bits against MatMul in float32, 1 thread, {machine.isa()}", rows, columns)
    chosen = Target.load("cpu-x86").build["onnxruntime"]["weight_codes"]
    settings = {"threads": 1, "seconds": options.seconds, "onnxruntime": onnxruntime.__version__, "note": options.note}
    claim = "the table by which cpu-x86 picks how weights of integer products are stored"
    record(Path(__file__).stem, claim, rows, settings)
    wrong = sorted({row["weights"] for row in rows if row["error"] > 1e-4})
    return verdicts({f"{chosen} weights give exact sums, as they are loaded by anyone": chosen not in wrong})


if __name__ == "__main__":
    raise SystemExit(main())
