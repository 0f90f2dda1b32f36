"""Scales of MatMulNBits in 16 bits: which way is right in ONNX Runtime, and what it costs.

    python benchmarks/graph_scales.py

int4 in blocks of 64 with zero points. The operator's scales have the type of its input, so float16 scales take either a
Cast of the scales, which ONNX Runtime folds as it optimizes the graph, or casts of input and output around the
operator. Errors are against float64, with optimizations and without; times are those of the optimized graphs, in turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from cpu_blocks import step
from harness.process import THREADS
from harness.record import layout, parsing, record, show
from harness.turns import in_turns
from onnx import TensorProto, helper, numpy_helper

from quantkit.measurement.timing.schedule import Visit
from quantkit.stats.abba import compare

BLOCK, ROWS = 64, (1, 64)
SHAPES = ((1536, 576), (576, 1536), (2048, 2048))
WAYS = ("float32", "float16, scales cast", "float16, inputs cast")


def model(way: str, k: int, n: int, layers: int) -> tuple[bytes, Any]:
    """`layers` products of one input, and the values of the last one's weights, float64 [N, K]."""
    generator, nodes, constants = np.random.default_rng(0), [], []
    half, cast = TensorProto.FLOAT16, way == WAYS[2]
    if cast:
        nodes.append(helper.make_node("Cast", ["x"], ["x16"], to=half))
    for layer in range(layers):
        codes = generator.integers(0, 256, (n, k // BLOCK, BLOCK // 2), dtype=np.uint8)
        scales = generator.uniform(0.001, 0.003, (n, k // BLOCK)).astype(np.float16)
        zeros = generator.integers(0, 256, (n, -(-k // BLOCK // 2)), dtype=np.uint8)
        inputs = {"c": codes, "s": scales.astype(np.float32) if way == WAYS[0] else scales, "z": zeros}
        constants += [numpy_helper.from_array(values, f"{name}{layer}") for name, values in inputs.items()]
        scale, output = f"s{layer}", f"y{layer}"
        if way == WAYS[1]:
            scale = f"wide{layer}"
            nodes.append(helper.make_node("Cast", [f"s{layer}"], [scale], to=TensorProto.FLOAT))
        names = ["x16" if cast else "x", f"c{layer}", scale, f"z{layer}"]
        how = {"K": k, "N": n, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        made = f"half{layer}" if cast else output
        nodes.append(helper.make_node("MatMulNBits", names, [made], domain="com.microsoft", **how))
        if cast:
            nodes.append(helper.make_node("Cast", [made], [output], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info(f"y{layer}", TensorProto.FLOAT, ["M", n]) for layer in range(layers)],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    points = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(n, -1)[:, : k // BLOCK, None]
    words = np.stack([codes & 15, codes >> 4], axis=-1).reshape(n, -1, BLOCK).astype(np.float64)
    values = ((words - points) * scales.astype(np.float64)[:, :, None]).reshape(n, k)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), values


def session(graph: bytes, optimized: bool = True) -> onnxruntime.InferenceSession:
    """On the pool of threads that all sessions share."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def error(loaded: onnxruntime.InferenceSession, values: Any) -> float:
    """Relative error of the last product on 3 rows."""
    x = np.random.default_rng(1).standard_normal((3, values.shape[1]), dtype=np.float32)
    expected = x.astype(np.float64) @ values.T
    return float(np.linalg.norm(loaded.run(None, {"x": x})[-1] - expected) / np.linalg.norm(expected))


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--layers", type=int, default=24, help="products of a graph, each with weights of its own")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each shape and number of rows")
    options = parser.parse_args()
    onnxruntime.set_global_thread_pool_sizes(THREADS, 1)
    rows = []
    for k, n in SHAPES:
        graphs = [model(way, k, n, options.layers) for way in WAYS]
        loaded = [session(graph) for graph, _ in graphs]
        wrong = [
            (error(one, values), error(session(graph, False), values))
            for one, (graph, values) in zip(loaded, graphs, strict=True)
        ]
        for m in ROWS:
            steps = [step(each, m, k, n) for each in loaded]
            times = in_turns(
                steps, blocks=(6, 60), seconds=options.seconds, generator=np.random.default_rng(m), visit=Visit(1, 1)
            )
            for way, (graph, _), errors, taken in zip(WAYS, graphs, wrong, times, strict=True):
                result = compare(taken, times[0])
                rows.append(
                    {"K": k, "N": n, "M": m, "way": way, "bits": 8 * len(graph) / (k * n * options.layers)}
                    | {"error": errors[0], "error_unoptimized": errors[1], "n": result.n}
                    | {"ratio": result.ratio, "ratio_ci95": list(result.ratio_ci95), "flags": list(result.flags)}
                )
    columns = layout(
        "K:d | N:d | M:d | way | bits:.2f | error:.4f | error_unoptimized=without optimizations:.4f | "
        "ratio=times as fast:.2f | ratio_ci95=95 %:.2f"
    )
    show(f"int4 in blocks of {BLOCK}, {THREADS} threads", rows, columns)
    settings = {"threads": THREADS, "layers": options.layers, "seconds": options.seconds, "onnx": onnx.__version__}
    record("graph_scales", "float16 scales of MatMulNBits", rows, {**settings, "onnxruntime": onnxruntime.__version__})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
