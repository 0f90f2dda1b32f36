"""The search for where inputs are quantized: by a planted timer, and over real networks with `fake_tensorrt`."""

from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import onnx_ir as ir
import pytest
import small_graph
import small_onnx
from fake_tensorrt import GPU

from quantkit import machine
from quantkit.bundle import inventory
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.exporters.tensorrt import graph as pairs
from quantkit.runtimes.tensorrt import TensorrtRuntime
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import Profile
from quantkit.tuning.placement import Placements, PlacementTime, autotune, search

pytestmark = pytest.mark.usefixtures("one_thread")
# what switching a group off changes: seconds, KL
EFFECTS = {"qkv": (-0.2, -0.01), "o": (0.1, 0.0), "gate_up": (-0.004, 0.0), "down": (-0.1, 0.5)}
PROFILE = Profile(name="decode", batch=(1, 1, 1), length=(1, 8, 8), context=(1, 16, 50))


class Planted:
    """A GPU that takes exactly that long."""

    def __init__(self, stop_after: int = 100) -> None:
        self.asked: list[frozenset[str]] = []
        self.stop_after = stop_after

    def __call__(self, off: frozenset[str]) -> PlacementTime:
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(off)
        return PlacementTime(
            1 + sum(EFFECTS[each][0] for each in off), 1e-3, 0.05 + sum(EFFECTS[each][1] for each in off)
        )


def test_what_gains_and_holds_the_gate_is_switched_off(tmp_path: Path) -> None:
    gpu = Planted()
    found = search(EFFECTS, gpu, harm_max=0.1, journal=tmp_path / "j.jsonl")
    # `down` gains and breaks the gate, `gate_up` gains less than the noise
    assert found.off == ("qkv",)
    assert found.gain == pytest.approx(1 / 0.8)
    assert len(gpu.asked) == len(set(gpu.asked)) == found.tried
    assert found.overrides({"qkv": ["a.0.q_proj", "a.0.k_proj", "a.1.q_proj"]}) == [
        {"match": "*.q_proj", "activations": None},
        {"match": "*.k_proj", "activations": None},
    ]
    loose = search(EFFECTS, Planted(), harm_max=1.0, journal=tmp_path / "other.jsonl")
    assert loose.off == ("down", "qkv")


def test_a_search_that_was_killed_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(EFFECTS, Planted(stop_after=3), harm_max=0.1, journal=journal)
    with journal.open("a") as file:
        file.write('{"off": ["qk')
    gpu = Planted()
    found = search(EFFECTS, gpu, harm_max=0.1, journal=journal)
    assert found.off == ("qkv",)
    assert len(gpu.asked) == found.tried - 3


def test_without_a_pair_there_is_nothing_to_tune(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing-to-tune"):
        search([], Planted(), harm_max=1.0, journal=tmp_path / "j")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`engine/` of a network with int8 weights and inputs."""
    made = small_onnx.export(
        tmp_path_factory.mktemp("qdq"),
        "llama",
        WeightScheme(format="int8", granularity="channel", scale="float32"),
        activations=ActivationScheme(format="int8", granularity="tensor", dynamic=False),
        exporter=load_exporter("tensorrt"),
        engine=False,
        profiles=[PROFILE.model_dump()],
    )
    return made.folder / "engine"


def operators(path: Path) -> list[str]:
    return [node.op_type for node in ir.load(path).graph]


def builder(profiles: list[Profile], *, graph: bool = False) -> Any:
    """Engines of the fake library."""
    runtime = TensorrtRuntime("tensorrt_rtx", library=fake_tensorrt.library(), gpus=lambda: ([GPU], ""), device="cpu")

    def build(beside: Path) -> Any:
        fake_tensorrt.engine(beside / "engine", profiles)
        built = {entry.path: entry.sha256 for entry in inventory(beside)}
        return runtime.open_graph(beside, built=built) if graph else runtime.open(beside, built=built)

    return build


def conversions(model: Any) -> list[float]:
    """A fake timer: each conversion takes a millisecond, and all else another."""
    count = operators(Path(model.engine.engine.path)).count("QuantizeLinear")
    return [1e-3 * (1 + count)] * 3


def test_pairs_go_by_what_reads_them(folder: Path) -> None:
    groups = pairs.groups(folder / "network.onnx")
    assert sorted(groups) == ["down_proj", "gate_proj up_proj", "o_proj", "q_proj k_proj v_proj"]
    assert len(groups["q_proj k_proj v_proj"]) == 3 * 3
    to = folder / "fewer.onnx"
    # a pair that another product reads too stays
    assert pairs.without(folder / "network.onnx", to, groups["down_proj"] + groups["gate_proj up_proj"][:1]) == 3
    assert operators(to).count("QuantizeLinear") == operators(folder / "network.onnx").count("QuantizeLinear") - 3
    to.unlink()


def test_placements_are_built_compared_and_timed(folder: Path, tmp_path: Path) -> None:
    groups = pairs.groups(folder / "network.onnx")
    ids = np.arange(12)[None] % 90
    measure = Placements(folder, groups, builder([PROFILE]), ids, timed=conversions)
    every, one = measure(frozenset()), measure(frozenset(["down_proj"]))
    assert every.seconds == pytest.approx(1e-3 * 13) and one.seconds == pytest.approx(1e-3 * 10)
    assert every.spread == pytest.approx(0, abs=1e-9)
    assert 0 < one.harm < every.harm
    assert measure(frozenset(groups)).harm == 0
    found = search(groups, measure, harm_max=1.0, journal=tmp_path / "j.jsonl")
    assert (found.off, [path.name for path in folder.parent.iterdir()]) == (tuple(sorted(groups)), ["engine"])


def test_an_encoder_s_passes_are_compared_by_cosine(tmp_path: Path) -> None:
    made = small_onnx.export(
        tmp_path,
        "bert",
        WeightScheme(format="int8", granularity="channel", scale="float32"),
        activations=ActivationScheme(format="int8", granularity="tensor", dynamic=False),
        exporter=load_exporter("tensorrt"),
        engine=False,
        changes={"num_hidden_layers": 2},
        profiles=[(passes := Profile(name="text", batch=(1, 1, 1), length=(1, 8, 16), context=(0, 0, 0))).model_dump()],
    )
    folder = made.folder / "engine"
    groups = pairs.groups(folder / "network.onnx")
    assert sorted(groups) == ["dense", "query key value"]
    measure = Placements(folder, groups, builder([passes]), np.arange(12)[None] % 90, timed=conversions)
    every, some = measure(frozenset()), measure(frozenset(["dense"]))
    assert every.seconds == pytest.approx(1e-3 * 9) and some.seconds == pytest.approx(1e-3 * 3)
    assert 0 < some.harm < every.harm < 0.5
    assert measure(frozenset(groups)).harm == pytest.approx(0, abs=1e-12)


def test_a_graph_s_products_of_one_shape_go_together(tmp_path: Path) -> None:
    """Two products of 16 x 16 and one of 16 x 4, all between pairs."""
    small = small_graph.Small()
    x = small.input("x", "batch", 16)
    for place, columns in enumerate((16, 16, 4)):
        codes = np.random.default_rng(place).integers(-127, 127, (16, columns)).astype(np.int8)
        pair = [np.array(0.05, np.float32), np.array(0, np.int8)]
        dense = small.op("DequantizeLinear", codes, np.array(0.01, np.float32))
        x = small.op("MatMul", small.op("DequantizeLinear", small.op("QuantizeLinear", x, *pair), *pair), dense)
    x.shape = ir.Shape(["batch", 4])
    model = small.model(x)
    for place, node in enumerate(model.graph):
        node.name = f"node{place}"
    folder = tmp_path / "bundle" / "engine"
    folder.mkdir(parents=True)
    ir.save(model, folder / "network.onnx")
    groups = pairs.groups(folder / "network.onnx")
    assert {name: len(nodes) for name, nodes in groups.items()} == {"MatMul 16x16": 2, "MatMul 16x4": 1}
    batches = Profile(name="batch", batch=(1, 2, 4), length=(1, 1, 1), context=(0, 0, 0))
    build = builder([batches], graph=True)
    feed = {"x": np.random.default_rng(9).standard_normal((2, 16)).astype(np.float32)}
    measure = Placements(folder, groups, build, feed, timed=conversions)
    found = search(groups, measure, harm_max=1.0, journal=tmp_path / "j.jsonl")
    assert found.off == ("MatMul 16x16", "MatMul 16x4")
    assert found.before.harm > 0 and found.after.harm == pytest.approx(0, abs=1e-12)
    assert found.gain == pytest.approx(4)
    assert sorted(found.keep(groups)) == sorted(name for nodes in groups.values() for name in nodes)


def test_without_a_gpu_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ([], "no NVIDIA driver"))
    bundle = small_onnx.bundle(folder.parent)
    (folder.parent / "manifest.json").unlink()
    with pytest.raises(InputError, match="gpu-absent") as caught:
        autotune(bundle, {})
    assert "no NVIDIA driver" in caught.value.line()
