"""OpenVINO's products with 4-bit weights against ONNX Runtime's and quantkit's, in the form that OpenVINO wants.

    python -m pip install openvino==2026.4.0
    python benchmarks/openvino_products.py

The linears of SmolLM2-135M's 30 blocks in a chain, with SiLU between gate, up and down, random codes: groups of 64 (of
128 into down), zero points, float16 scales. ONNX Runtime has them as MatMulNBits at level 4, `quantkit_cpu` as its own
operators, OpenVINO as u4 constants less their zero points, times their scales, which is what its CPU plug-in keeps
packed; its dynamic quantization of inputs is on, by groups of 64. All in one process, in turns; ratios are to ONNX
Runtime, above 1 where a side is faster. What they put out is compared, in float32 at that.

No claim: it decides whether OpenVINO is worth an exporter on x86 processors (docs/design.md).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime
from harness.process import THREADS
from harness.record import parsing, record, show
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from scipy import stats

from quantkit import machine
from quantkit.kernels.cpu.library import library
from quantkit.runtimes.onnxruntime.own_products import own_products

Array = NDArray[Any]
LAYERS, WIDTH, HIDDEN, HEADS = 30, 576, 1536, 960
ROWS = (1, 16, 256)
ORT, OWN, VINO = "onnxruntime", "quantkit_cpu", "openvino"


def weights(seed: int, rows: int, columns: int, group: int) -> tuple[Array, Array, Array]:
    """Codes [rows, groups, group], zero points and float16 scales [rows, groups]."""
    draw = np.random.default_rng(seed)
    shape = (rows, columns // group)
    zeros = draw.integers(6, 10, shape, dtype=np.uint8)
    return (
        draw.integers(0, 16, (*shape, group), dtype=np.uint8),
        zeros,
        draw.uniform(0.5, 1.5, shape).astype(np.float16) / np.float16(10 * columns**0.5),
    )


def layers() -> list[dict[str, tuple[Array, Array, Array]]]:
    shapes = {"qkv": (HEADS, WIDTH, 64), "o": (WIDTH, WIDTH, 64)} | {
        "up": (2 * HIDDEN, WIDTH, 64),
        "down": (WIDTH, HIDDEN, 128),
    }
    return [{name: weights(4 * at + n, *size) for n, (name, size) in enumerate(shapes.items())} for at in range(LAYERS)]


def packed(codes: Array) -> Array:
    """Two a byte along the last axis, the first in the low half; odd ends are filled up."""
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return even[..., ::2] | even[..., 1::2] << 4


def graph(blocks: list[dict[str, tuple[Array, Array, Array]]]) -> ModelProto:
    nodes, stored = [], [numpy_helper.from_array(np.array([HIDDEN, HIDDEN], np.int64), "halves")]
    stored += [
        numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in (("zero", [0]), ("width", [WIDTH]), ("axis", [1]))
    ]

    def product(x: str, name: str, weight: tuple[Array, Array, Array]) -> str:
        codes, zeros, scales = weight
        parts = {"codes": packed(codes), "scales": scales.astype(np.float32), "zeros": packed(zeros)}
        stored.extend(numpy_helper.from_array(array, f"{name}.{part}") for part, array in parts.items())
        sizes = {"K": codes.shape[1] * codes.shape[2], "N": codes.shape[0], "block_size": codes.shape[2]}
        names = [x, *(f"{name}.{part}" for part in parts)]
        nodes.append(
            helper.make_node("MatMulNBits", names, [name], domain="com.microsoft", bits=4, accuracy_level=4, **sizes)
        )
        return name

    x = "x"
    for at, block in enumerate(blocks):
        inner = product(x, f"{at}.qkv", block["qkv"])
        nodes.append(helper.make_node("Slice", [inner, "zero", "width", "axis"], [f"{at}.cut"]))
        added = product(f"{at}.cut", f"{at}.o", block["o"])
        nodes.append(helper.make_node("Add", [x, added], [f"{at}.mid"]))
        both = product(f"{at}.mid", f"{at}.up", block["up"])
        nodes.append(helper.make_node("Split", [both, "halves"], [f"{at}.gate", f"{at}.lift"], axis=-1))
        nodes.append(helper.make_node("Sigmoid", [f"{at}.gate"], [f"{at}.sigmoid"]))
        nodes.append(helper.make_node("Mul", [f"{at}.gate", f"{at}.sigmoid"], [f"{at}.silu"]))
        nodes.append(helper.make_node("Mul", [f"{at}.silu", f"{at}.lift"], [f"{at}.hidden"]))
        down = product(f"{at}.hidden", f"{at}.down", block["down"])
        x = f"{at}.out"
        nodes.append(helper.make_node("Add", [f"{at}.mid", down], [x]))
    value = helper.make_tensor_value_info
    whole = helper.make_graph(
        nodes, "chain", [value("x", TensorProto.FLOAT, ["m", WIDTH])], [value(x, TensorProto.FLOAT, None)], stored
    )
    return helper.make_model(
        whole, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )


def onnx_side(model: ModelProto, *, own: bool = False) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if own:
        assert own_products(model)
        options.register_custom_ops_library(str(library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def openvino_side(blocks: list[dict[str, tuple[Array, Array, Array]]]) -> Any:
    import openvino
    from openvino import opset13 as ops

    kept: list[Array] = []  # what constants do not copy

    def kept_of(array: Array) -> Array:
        kept.append(array)
        return array

    def product(x: Any, weight: tuple[Array, Array, Array]) -> Any:
        codes, zeros, scales = weight
        shape = list(codes.shape)

        def u4(values: Array, sizes: list[int]) -> Any:
            flat = packed(values.reshape(-1))
            return ops.convert(
                openvino.op.Constant(openvino.Tensor(kept_of(flat), openvino.Shape(sizes), openvino.Type.u4)), "f16"
            )

        less = ops.subtract(u4(codes, shape), u4(zeros, [*shape[:2], 1]))
        whole = ops.multiply(less, ops.constant(kept_of(scales.reshape(*shape[:2], 1))))
        flat = ops.convert(ops.reshape(whole, ops.constant([shape[0], -1], np.int64), special_zero=False), "f32")
        return ops.matmul(x, flat, transpose_a=False, transpose_b=True)

    given = ops.parameter([-1, WIDTH], openvino.Type.f32, name="x")
    x: Any = given
    for block in blocks:
        inner = product(x, block["qkv"])
        cut = ops.slice(inner, *(ops.constant([value], np.int64) for value in (0, WIDTH, 1, 1)))
        middle = ops.add(x, product(cut, block["o"]))
        gate, lift = ops.split(product(middle, block["up"]), ops.constant(1), 2).outputs()
        x = ops.add(middle, product(ops.multiply(ops.swish(gate), lift), block["down"]))
    settings = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"} | {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64,
    }
    core, model = openvino.Core(), openvino.Model([x], [given], "chain")
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    alive = (core, model, kept)  # constants are read where they are
    return lambda x, alive=alive: np.array(request.infer({0: x})[0])


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    blocks = layers()
    sides = {ORT: onnx_side(graph(blocks)), OWN: onnx_side(graph(blocks), own=True), VINO: openvino_side(blocks)}
    rows = []
    for count in ROWS:
        x = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
        answers = {name: np.array(side(x)) for name, side in sides.items()}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(options.rounds):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                sides[name](x)
                began = time.perf_counter()
                for _ in range(1 if count > 16 else 8):
                    sides[name](x)
                taken[name].append((time.perf_counter() - began) / (1 if count > 16 else 8))
        base, right = np.array(taken[ORT]), answers[ORT]
        for name, times in taken.items():
            ratios = base / np.array(times)
            found = stats.bootstrap((ratios,), np.median, method="percentile", rng=np.random.default_rng(0))
            apart = float(np.abs(answers[name] - right).max() / np.abs(right).max())
            rows.append(
                {"rows": count, "side": name, "ms": 1e3 * float(np.median(times)), "ratio": float(np.median(ratios))}
                | {"ratio_ci95": list(map(float, found.confidence_interval)), "apart": apart}
            )
    for row in rows:
        row["interval"] = "{:.2f} to {:.2f}".format(*row["ratio_ci95"])
    columns = {"rows": "rows:d", "side": "side", "ms": "ms:.2f", "ratio": "times ONNX Runtime:.2f", "interval": "95 %"}
    show(
        f"products of 30 blocks, {THREADS} threads, {machine.cpu_name()}, {machine.isa()}",
        rows,
        columns | {"apart": "largest difference:.4f"},
    )
    record("openvino-products", "no claim", rows, {"isa": machine.isa(), "threads": THREADS})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
