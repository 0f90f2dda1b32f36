"""A graph's compile that is interrupted keeps what it has solved: a resume solves the rest, to the same content.

A graph's file against its pairs as they are written: what a network's own roundings carry far is no fault of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graph import chain

import quantkit
from quantkit.bundle import Build, Check
from quantkit.errors import GateError, QuantkitError
from quantkit.formats import QuantTensor
from quantkit.graph import run
from quantkit.graph.codes import solve
from quantkit.graph.pairs.qdq import Codes, Range
from quantkit.pipeline.graphs.prepared import prepare
from quantkit.pipeline.graphs.quantized import Products, QuantizedGraph, Steps
from quantkit.pipeline.graphs.subject import estimate
from quantkit.pipeline.request import Request
from quantkit.scheme import WeightScheme

NETWORK = {"target": "rtx-4090", "changes": ["export=[{tensorrt: {engine: false}}]"]}
ROUND = "passes=[{gptq: {}}, {round: {iterations: 2, batch: 8, rate: 0.02}}]"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("graphs")
    chain(folder / "chain.onnx", folder / "chain.npz")
    network = networks.write(folder / "tiny.onnx"), networks.image_set(folder / "tiny.npz", 60)
    return {"chain": (folder / "chain.onnx", folder / "chain.npz"), "convolutions": network}


def compiled(given: tuple[Path, Path], out: Path, **asked: Any) -> quantkit.Bundle:
    return quantkit.compile(str(given[0]), calibration=given[1], out=out, speed=False, **asked)


class Solver:
    """Stands where one product's codes are chosen: counts, and is interrupted once."""

    def __init__(self, plain: Callable[..., Any], after: int) -> None:
        self.plain, self.left, self.calls = plain, after, 0

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.left == 0:
            self.left = -1
            raise KeyboardInterrupt
        self.left -= 1
        self.calls += 1
        return self.plain(*given, **more)


@pytest.mark.parametrize(
    ("graph", "asked"),
    [
        ("convolutions", {"recipe": "int8", "changes": [ROUND]}),
        ("chain", {"recipe": "int8-tensorrt", **NETWORK}),
    ],
)
def test_what_is_solved_is_not_solved_again(
    files: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    graph: str,
    asked: dict[str, Any],
) -> None:
    whole = compiled(files[graph], tmp_path / "whole", **asked)
    ranges = Solver(solve.ranges, -1)
    solver = Solver(solve.product, 2)
    monkeypatch.setattr(solve, "product", solver)
    monkeypatch.setattr(solve, "ranges", ranges)
    with pytest.raises(QuantkitError, match="interrupted"):
        compiled(files[graph], tmp_path / "out", **asked)
    resumed = compiled(files[graph], tmp_path / "out", resume=True, **asked)
    assert (ranges.calls, solver.calls) == (1, 4)
    assert resumed.manifest.content_sha256 == whole.manifest.content_sha256
    assert resumed.manifest.layers == whole.manifest.layers
    assert resumed.manifest.decisions == whole.manifest.decisions
    assert not (tmp_path / "out.partial").exists()


def test_of_weights_alone_too(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"recipe": "int4-tensorrt", **NETWORK, "changes": [*NETWORK["changes"], "scheme.weights.group=16"]}
    whole = compiled(files["chain"], tmp_path / "whole", **asked)
    solver = Solver(solve.product, 2)
    monkeypatch.setattr(solve, "product", solver)
    with pytest.raises(QuantkitError, match="2 steps kept"):
        compiled(files["chain"], tmp_path / "out", **asked)
    resumed = compiled(files["chain"], tmp_path / "out", resume=True, **asked)
    assert solver.calls == 4
    assert resumed.manifest.content_sha256 == whole.manifest.content_sha256


def test_with_all_products_solved_nothing_runs_through_the_graph(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedGraph, "save", Solver(QuantizedGraph.save, 0))
    with pytest.raises(QuantkitError, match="5 steps kept"):
        compiled(files["chain"], tmp_path / "out", recipe="int8")
    kept = sum(path.stat().st_size for path in (tmp_path / "out.partial" / "steps").rglob("*") if path.is_file())
    request = Request.of(str(files["chain"][0]), recipe="int8", calibration=files["chain"][1])
    assert estimate(prepare(request)).disk.work == pytest.approx(kept, rel=0.3), "as was reckoned before"
    monkeypatch.undo()
    monkeypatch.setattr(solve, "Stepwise", None)
    monkeypatch.setattr(solve, "Runner", None)
    assert all(check.ok for check in compiled(files["chain"], tmp_path / "out", recipe="int8", resume=True).verify())


def test_codes_and_ranges_are_read_bit_by_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = Codes(
        np.asfortranarray(random.integers(-128, 128, (3, 5)).astype(np.int8)),
        random.random(3, np.float32),
        alone=random.random(3, np.float32),
    )
    scheme = WeightScheme(format="fp8_e4m3", granularity="channel", scale="float32")
    tensor = QuantTensor(torch.randn(4, 6).to(torch.float8_e4m3fn), torch.rand(4, 1), None, scheme)
    ranges = {"x": Range(float(np.float32(1 / 3)), 128), "y": Range(1e-30, 0, signed=True)}
    with pytest.raises(KeyboardInterrupt), Build.open(tmp_path / "out", {}, resume=False) as build:
        steps = Steps(build)
        assert steps.ranges(lambda: ranges) == ranges
        Products(steps, "codes", ["a", "b"]).keep("b", codes)
        Products(steps, "kept-0001", ["a", "b"], scheme).keep("a", tensor)
        raise KeyboardInterrupt
    with Build.open(tmp_path / "out", {}, resume=True) as build:
        steps = Steps(build)
        assert steps.ranges(dict) == ranges
        again = Products(steps, "codes", ["a", "b"]).again
        assert list(again) == ["b"]
        assert np.array_equal(again["b"].codes, codes.codes) and np.array_equal(again["b"].scale, codes.scale)
        assert again["b"].bias is None and np.array_equal(again["b"].alone, codes.alone)
        read = Products(steps, "kept-0001", ["a", "b"], scheme).again["a"]
        assert torch.equal(read.codes.view(torch.uint8), tensor.codes.view(torch.uint8))
        assert torch.equal(read.scale, tensor.scale)
        assert sum(path.stat().st_size for path in build.steps.glob("*.safetensors")) < 1000
        steps.drop("dropped-0001", "kept-0001")
        assert [path.name for path in build.steps.glob("*.safetensors")] == ["codes-0001.safetensors"]


WRITTEN = ir.Model(ir.Graph([], [ir.Value(name="y")], nodes=[]), ir_version=8)
INPUTS = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


class Calibration:
    """Eight samples are asked for."""

    def first(self, count: int) -> dict[str, Any]:
        return {"x": INPUTS, "ids": np.arange(4)}


class Prepared:
    calib = Calibration()


class Planted(QuantizedGraph):
    """Nothing is quantized: what runs is planted."""

    def __init__(self) -> None:
        self.prepared, self.model = Prepared(), WRITTEN  # type: ignore[assignment]

    def _kernels(self, path: Path) -> Check:
        return Check(name="integer.macs", value=1.0, limit=0.95, ok=True)


def checked(monkeypatch: pytest.MonkeyPatch, written: Any, loaded: Any) -> Any:
    class Runner:
        def __init__(self, model: Any, *_: Any, **__: Any) -> None:
            self.run = written if model is WRITTEN else loaded

        def __call__(self, feed: Any) -> dict[str, Any]:
            assert np.array_equal(feed["ids"], np.arange(4)), "what is no float stays as it is"
            return {"y": self.run(feed["x"])}

    monkeypatch.setattr(run, "Runner", Runner)
    return Planted().checks(Path("model.onnx"))


def steep(x: Any) -> Any:
    """The last bits of an input decide; a tenth of it is theirs."""
    return x + 0.2 * np.sin(3e8 * x.astype(np.float64))


def test_a_calm_network_is_held_to_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (reloaded, _), taken = checked(monkeypatch, lambda x: x, lambda x: 1.04 * x)
    assert (reloaded.value, reloaded.limit, taken) == (pytest.approx(0.04, abs=1e-6), 0.05, [])
    with pytest.raises(GateError, match=r"reload.onnxruntime is 0.06.*--recipe int8-dynamic"):
        checked(monkeypatch, lambda x: x, lambda x: 1.06 * x)


def test_a_network_whose_last_bits_carry_far_is_held_to_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # two draws of 0.2 sin differ by 0.2 for each 1 of x, whose mean square is 1 too
    (reloaded, _), taken = checked(monkeypatch, steep, lambda x: steep(x * np.float32(1 + 3e-7)))
    assert 0.15 < reloaded.value < 0.25 and 0.25 < reloaded.limit < 0.35 and reloaded.ok
    assert [(each.where, each.from_) for each in taken] == [("reload.onnxruntime", 0.05)]
    assert "carry far" in taken[0].reason
    # a fault is more than that
    with pytest.raises(GateError, match=r"reload\.onnxruntime"):
        checked(monkeypatch, steep, lambda x: 1.5 * steep(x))
