"""The products of a block in both ways, and what a timing of them decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quantkit import machine
from quantkit.exporters import LayerSpec
from quantkit.exporters.onnx import trial
from quantkit.exporters.onnx.exporter import EXPORT
from quantkit.measurement.timing.speed import compared
from quantkit.scheme import WeightScheme
from quantkit.stats.abba import Comparison, compare
from quantkit.target import Target

VNNI = any("vnni" in name for name in machine.isa_features())
SCHEME = WeightScheme(format="int4", granularity="group", group=32, symmetric=False)
SHAPES = {"q_proj": (64, 96), "up_proj": (128, 96), "down_proj": (96, 128)}
ASKED = LayerSpec(
    schemes=dict.fromkeys([*(f"layers.{block}.{name}" for block in (0, 1) for name in SHAPES), "head"], SCHEME),
    shapes={f"layers.{block}.{name}": shape for block in (0, 1) for name, shape in SHAPES.items()},
)


def test_both_ways_are_the_products_of_one_block() -> None:
    linears = trial.block_of(ASKED)
    assert [*linears] == [f"layers.0.{name}" for name in SHAPES]
    given = trial.feeds(linears, 40)
    assert {name: value.shape for name, value in given.items()} == {"x.96": (1, 40, 96), "x.128": (1, 40, 128)}
    found = {}
    for way, model in trial.graphs(linears, 4).items():
        kinds = {node.op_type for node in onnx.load_model_from_string(model).graph.node}
        assert ("MatMulNBits" in kinds, "MatMulIntegerToFloat" in kinds) == (way == "steps", way == "prompts")
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        found[way] = dict(zip([each.name for each in session.get_outputs()], session.run(None, given), strict=True))
    for name, expected in found["steps"].items():
        apart = np.linalg.norm(found["prompts"][name] - expected) / np.linalg.norm(expected)
        # without VNNI sums of pairs saturate
        assert 1e-4 < apart < (0.03 if VNNI else 1)


def test_a_block_without_codes_has_no_trial() -> None:
    floats = LayerSpec(schemes={"layers.0.x": WeightScheme(format="nf4", granularity="group", group=64)})
    assert trial.block_of(floats) == {}


def timed(ratio: float) -> Comparison:
    times = np.full((8, 2, 2), 1.0) + np.random.default_rng(0).normal(0, 1e-3, (8, 2, 2))
    return compare(times / ratio, times)


@pytest.mark.parametrize(("ratio", "way"), [(2.0, "int8"), (0.8, "same")])
def test_a_timing_decides_on_the_machine_at_hand(ratio: float, way: str) -> None:
    target = Target.load("cpu-x86")
    fast = target.model_copy(update={"arch": target.arch.model_copy(update={"isa": ["avx512_vnni"]})})

    def stopped(subject: bytes, baseline: bytes, feeds: Mapping[str, Any]) -> Comparison:
        assert b"MatMulIntegerToFloat" in subject
        assert b"MatMulNBits" in baseline
        return timed(ratio)

    options, said = EXPORT.for_target(EXPORT.Options(prefill="auto"), fast, ASKED, stopped)
    assert options["prefill"] == way
    assert f"{ratio:.2f} times as fast" in said


def test_the_smaller_of_two_graphs_is_faster() -> None:
    sizes = {}
    for rows in (64, 1024):
        linears = trial.block_of(LayerSpec(schemes={"layers.0.x": SCHEME}, shapes={"layers.0.x": (rows, 256)}))
        sizes[rows] = trial.graphs(linears, 0)["steps"], trial.feeds(linears, 64)
    found = compared(sizes[64][0], sizes[1024][0], sizes[64][1], 1, seconds=0.2)
    assert found.ratio_ci95[0] > 1
