"""Which block and accuracy level ONNX Runtime's MatMulNBits is fastest with on this CPU: the table behind `cpu-x86`.

    python benchmarks/cpu_blocks.py
    python benchmarks/cpu_blocks.py --shapes 2048x2048 --rows 1 --seconds 20 --bits 2

A graph holds products of one shape, each with weights of its own: so many that even the 4-bit ones exceed the
last-level cache half over again. All read the same input, and write to memory that is there already. The float32
product and all variants are visited in randomised palindromes on one pool of threads, so
what else runs on the machine hits all alike: only ratios are of use, and they are printed with their 95 % intervals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from harness.process import THREADS
from harness.record import layout, parsing, record, show, verdicts
from harness.turns import in_turns
from onnx import TensorProto, helper, numpy_helper

from quantkit import machine
from quantkit.measurement.timing.schedule import Visit
from quantkit.stats.abba import compare
from quantkit.target import Target

# K x N: down and gate of SmolLM2-135M, a square of a 1B model, a head
SHAPES = ["1536x576", "576x1536", "2048x2048", "576x49152"]
ROWS = [1, 8, 64]
BLOCKS = (16, 32, 64, 128, 256)
FEWEST, MOST = 6, 60


@dataclass(frozen=True)
class Variant:
    """A way to store and compute one product; 32 bits is the float32 baseline."""

    bits: int = 32
    block: int = 0
    level: int = 0
    zeros: bool = False

    def bytes(self, k: int, n: int) -> int:
        """What has to be read of the weights."""
        if self.bits == 32:
            return 4 * k * n
        blocks = -(-k // self.block)
        return n * blocks * (self.block * self.bits // 8 + 4) + self.zeros * n * -(-blocks * self.bits // 8)


FLOAT = Variant()
# float32 activations with 8 bits are so slow that two blocks say enough
KINDS = ((4, True), (4, False), (8, False), (2, True), (2, False))
FAST = [
    Variant(bits, block, 4, zeros) for bits, zeros in KINDS for block in BLOCKS if bits > 2 or block in (32, 64, 128)
]
EXACT = [Variant(4, block, 0, True) for block in BLOCKS] + [Variant(8, block, 0) for block in (32, 128)]
# without a kernel: so slow that two products and one row say enough
EXPANDED = [Variant(2, 16, 4, True), Variant(2, 256, 4, True), Variant(2, 32, 0, True)]


def model(variant: Variant, k: int, n: int, layers: int, generator: np.random.Generator) -> bytes:
    """`layers` products [M, K] x [K, N] of one input, each an output."""
    nodes, constants = [], []

    def constant(name: str, values: Any) -> str:
        constants.append(numpy_helper.from_array(values, name))
        return name

    for layer in range(layers):
        output = f"y{layer}"
        if variant.bits == 32:
            weight = constant(f"w{layer}", generator.standard_normal((k, n), dtype=np.float32) * 0.02)
            nodes.append(helper.make_node("MatMul", ["x", weight], [output]))
            continue
        blocks, size = -(-k // variant.block), variant.block * variant.bits // 8
        inputs = [
            "x",
            constant(f"c{layer}", generator.integers(0, 256, (n, blocks, size), dtype=np.uint8)),
            constant(f"s{layer}", generator.uniform(0.001, 0.003, (n, blocks)).astype(np.float32)),
        ]
        if variant.zeros:
            packed = -(-blocks * variant.bits // 8)
            inputs.append(constant(f"z{layer}", generator.integers(0, 256, (n, packed), dtype=np.uint8)))
        how = {"K": k, "N": n, "bits": variant.bits, "block_size": variant.block, "accuracy_level": variant.level}
        nodes.append(helper.make_node("MatMulNBits", inputs, [output], domain="com.microsoft", **how))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info(f"y{layer}", TensorProto.FLOAT, ["M", n]) for layer in range(layers)],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    found: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return found


def session(variant: Variant, k: int, n: int, layers: int) -> onnxruntime.InferenceSession:
    """On the pool of threads that all sessions share: one that spins after its step would slow the next."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    made = model(variant, k, n, layers, np.random.default_rng(0))
    return onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def step(loaded: onnxruntime.InferenceSession, m: int, k: int, n: int) -> Callable[[], object]:
    """One run, from memory to memory."""
    binding = loaded.io_binding()
    x = np.random.default_rng(1).standard_normal((m, k), dtype=np.float32)
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    for output in loaded.get_outputs():
        place = onnxruntime.OrtValue.ortvalue_from_shape_and_type([m, n], np.float32)
        binding.bind_ortvalue_output(output.name, place)
    return lambda: loaded.run_with_iobinding(binding)


def compared(
    variants: Sequence[Variant], k: int, n: int, layers: int, rows: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Each variant against float32."""
    loaded = [session(variant, k, n, layers) for variant in (FLOAT, *variants)]
    found = []
    for m in rows:
        print(f"{k} x {n}, M {m}, {len(variants)} variants ...", file=sys.stderr)
        before = os.getloadavg()[0]
        steps = [step(each, m, k, n) for each in loaded]
        baseline, *times = in_turns(
            steps, blocks=(FEWEST, MOST), seconds=seconds, generator=np.random.default_rng(m), visit=Visit(1, 1)
        )
        for variant, taken in zip(variants, times, strict=True):
            result = compare(taken, baseline)
            found.append(
                {"K": k, "N": n, "M": m, "bits": variant.bits, "block": variant.block}
                | {"accuracy_level": variant.level, "zero_points": variant.zeros, "layers": layers}
                | {"bytes": variant.bytes(k, n), "ms": 1e3 * result.quantiles["p50"] / layers}
                | {"float32_ms": 1e3 * result.baseline["p50"] / layers, "ratio": result.ratio}
                | {"ratio_ci95": list(result.ratio_ci95)}
                | {"bytes_ratio": FLOAT.bytes(k, n) / variant.bytes(k, n), "aa_spread": result.aa_spread}
                | {"n": result.n, "flags": list(result.flags), "load_average": [before, os.getloadavg()[0]]}
            )
    return found


def beaten(rows: Sequence[dict[str, Any]], block: int, rows_up_to: int) -> list[str]:
    """Where a smaller block is faster than the chosen one by more than both intervals, 4 bits at level 4."""
    found = []
    for row in rows:
        if row["bits"] != 4 or row["accuracy_level"] != 4 or row["M"] > rows_up_to or row["block"] >= block:
            continue
        same = ("K", "N", "M", "bits", "accuracy_level", "zero_points")
        chosen = next(x for x in rows if x["block"] == block and all(x[key] == row[key] for key in same))
        if row["ratio_ci95"][0] > chosen["ratio_ci95"][1]:
            found.append(f"{row['K']}x{row['N']}, M {row['M']}: block {row['block']}")
    return found


def slower(rows: Sequence[dict[str, Any]], block: int) -> list[str]:
    """Where level 4 is slower than level 0 by more than both intervals, at the chosen block and 4 bits."""
    found = []
    for row in rows:
        if row["bits"] == 4 and row["block"] == block and row["accuracy_level"] == 0:
            same = ("K", "N", "M", "bits", "block", "zero_points")
            fast = next(x for x in rows if x["accuracy_level"] == 4 and all(x[key] == row[key] for key in same))
            if fast["ratio_ci95"][1] < row["ratio_ci95"][0]:
                found.append(f"{row['K']}x{row['N']}, M {row['M']}: level 0")
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="M, rows of the activation")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each M and each set of variants")
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 4, 8])
    options = parser.parse_args()

    onnxruntime.set_global_thread_pool_sizes(THREADS, 1)
    cache = machine.last_level_cache() or 1 << 25
    rows = []
    for shape in options.shapes:
        k, n = (int(size) for size in shape.split("x"))
        layers = max(2, -(-3 * cache // (2 * Variant(4, 256).bytes(k, n))))
        for every, count, many in ((FAST, layers, options.rows), (EXACT, layers, options.rows), (EXPANDED, 2, [1])):
            if variants := [each for each in every if each.bits in options.bits]:
                rows += compared(variants, k, n, count, many, options.seconds)
    columns = layout(
        "K:d | N:d | M:d | bits:d | zero_points=zero points | block:d | accuracy_level=level:d | "
        "float32_ms=fp32, ms:.3f | ms:.3f | ratio=times as fast:.2f | ratio_ci95=95 %:.2f | "
        "bytes_ratio=times fewer bytes:.1f"
    )
    show(f"MatMulNBits against MatMul in float32, {THREADS} threads, {machine.isa()}", rows, columns)

    build = Target.load("cpu-x86").build["onnxruntime"]
    block, level = int(build["block"]), int(build["accuracy_level"])
    settings = (
        {"threads": THREADS, "last_level_cache": cache, "seconds": options.seconds}
        | {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
        | {"chosen": {"block": block, "accuracy_level": level}, "note": options.note}
    )
    name = Path(__file__).stem
    record(name, "the table by which cpu-x86 picks block and accuracy level", rows, settings)
    fast, lost = beaten(rows, block, 8), slower(rows, block)
    for place in (*fast, *lost):
        print(f"        {place}")
    return verdicts(
        {
            f"level 0 is nowhere faster than level {level} at block {block}, 4 bits": not lost,
            f"at up to 8 rows no smaller block is faster than {block}, 4 bits": not fast,
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
