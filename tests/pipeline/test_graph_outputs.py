"""What a network gives is compared as what it is: classes where something says so, detections as sets.

What a graph's answers are worth on crops of few photographs: as much as so many photographs, not as many crops.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from scipy import stats
from small_graph import Small

import quantkit
from quantkit.bundle import Bundle
from quantkit.calibrate.sets.inputs import load_inputs
from quantkit.errors import InputError
from quantkit.graph.open import FloatGraphInput
from quantkit.graph.outputs import OutputKinds
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.graphs.answers import agreement
from quantkit.report.bundle import figures
from quantkit.stats.shares import wilson

Array = NDArray[Any]
SEED = 3
ML = {"domain": "ai.onnx.ml"}
TAILS: dict[str, list[tuple[Any, ...]]] = {
    "logits": [("Identity", ["z"], ["logits"], {})],
    "softmax": [("Softmax", ["z"], ["y"], {"axis": 1})],
    "scikit": [
        ("Softmax", ["z"], ["probabilities"], {"axis": 1}),
        ("ArgMax", ["probabilities"], ["label"], {"axis": 1, "keepdims": 0}),
    ],
    "zipmap": [
        ("Softmax", ["z"], ["chances"], {"axis": 1}),
        ("ArgMax", ["chances"], ["at"], {"axis": 1, "keepdims": 0}),
        ("LabelEncoder", ["at"], ["label"], {**ML, "keys_int64s": list(range(5)), "values_strings": list("abcde")}),
        ("ZipMap", ["chances"], ["output"], {**ML, "classlabels_strings": list("abcde")}),
    ],
    "numbers": [("Identity", ["z"], ["y"], {})],
    "kept": [
        ("Greater", ["z", "least"], ["over"], {}),
        ("NonZero", ["over"], ["at"], {}),
        ("Transpose", ["at"], ["where"], {}),
        ("GatherND", ["z", "where"], ["kept"], {}),
    ],
    "sequence": [("SequenceConstruct", ["z"], ["several"], {})],
    "answer": [("ArgMax", ["z"], ["y"], {"axis": 1, "keepdims": 0})],
}


def typed(name: str, kind: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def network(
    folder: Path, tail: str, outputs: dict[str, tuple[int, list[Any]]], labels: bool = False, **meta: str
) -> Path:
    """Two linears and a tail, with samples beside it."""
    rng = np.random.default_rng(SEED)
    weights = {
        "w1": rng.normal(size=(16, 24)) / 4,
        "b1": np.zeros(24),
        "w2": rng.normal(size=(24, 5)) / 3,
        "b2": np.zeros(5),
        "least": np.ones(1),
    }
    nodes = [("Gemm", ["x", "w1", "b1"], ["a"], {}), ("Relu", ["a"], ["r"], {}), ("Gemm", ["r", "w2", "b2"], ["z"], {})]
    infos = [typed(name, kind, shape) for name, (kind, shape) in outputs.items()]
    if tail == "zipmap":
        row = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        infos.append(helper.make_value_info("output", helper.make_sequence_type_proto(row)))
    if tail == "sequence":
        row = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 5])
        infos.append(helper.make_value_info("several", helper.make_sequence_type_proto(row)))
    graph = helper.make_graph(
        [helper.make_node(kind, *sides, **how) for kind, *sides, how in [*nodes, *TAILS[tail]]],
        "g",
        [typed("x", TensorProto.FLOAT, ["n", 16])],
        infos,
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    helper.set_model_props(model, meta)
    onnx.save(model, folder / "model.onnx")
    more = {"labels": rng.integers(0, 5, 96)} if labels else {}
    np.savez(folder / "x.npz", x=rng.normal(size=(96, 16)).astype(np.float32), **more)
    return folder / "model.onnx"


def detector(folder: Path, least: float, *, batch: int | str = 1) -> Path:
    """A convolution each for boxes and scores of an 8 x 8 grid, and what NonMaxSuppression keeps of them."""
    rng = np.random.default_rng(SEED)
    grid = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), -1).reshape(1, 64, 2)
    constants: dict[str, Any] = {
        "w": rng.normal(size=(8, 3, 3, 3)) / 3,
        "wb": rng.normal(size=(2, 8, 1, 1)) / 8,
        "ws": rng.normal(size=(3, 8, 1, 1)) / 2,
        "grid": grid,
        "two": np.full(1, 2.0),
        "least": np.full(1, least),
        "overlap": np.full(1, 0.5),
    }
    whole = {"flat": [0, 2, 64], "rows": [0, 3, 64], "most": [9], "first": 0, "second": 1, "third": 2}
    nodes: list[tuple[Any, ...]] = [
        ("Conv", ["x", "w"], ["c"], {"pads": [1] * 4}),
        ("Relu", ["c"], ["r"], {}),
        ("Conv", ["r", "wb"], ["b"], {}),
        ("Conv", ["r", "ws"], ["s"], {}),
        ("Reshape", ["b", "flat"], ["offsets"], {}),
        ("Transpose", ["offsets"], ["moved"], {"perm": [0, 2, 1]}),
        ("Add", ["moved", "grid"], ["near"], {}),
        ("Add", ["near", "two"], ["far"], {}),
        ("Concat", ["near", "far"], ["corners"], {"axis": 2}),
        ("Reshape", ["s", "rows"], ["logits"], {}),
        ("Sigmoid", ["logits"], ["chances"], {}),
        ("NonMaxSuppression", ["corners", "chances", "most", "overlap", "least"], ["chosen"], {}),
        ("Gather", ["chosen", "second"], ["labels"], {"axis": 1}),
        ("GatherND", ["chances", "chosen"], ["scores"], {}),
        ("Gather", ["chosen", "third"], ["place"], {"axis": 1}),
        ("Gather", ["corners", "first"], ["image"], {"axis": 0}),
        ("Gather", ["image", "place"], ["boxes"], {"axis": 0}),
    ]
    stored = {name: value.astype(np.float32) for name, value in constants.items()}
    stored |= {name: np.array(value, np.int64) for name, value in whole.items()}
    graph = helper.make_graph(
        [helper.make_node(kind, *sides, **how) for kind, *sides, how in nodes],
        "g",
        [typed("x", TensorProto.FLOAT, [batch, 3, 8, 8])],
        [
            typed("boxes", TensorProto.FLOAT, ["k", 4]),
            typed("scores", TensorProto.FLOAT, ["k"]),
            typed("labels", TensorProto.INT64, ["k"]),
        ],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    np.savez(folder / "x.npz", x=rng.normal(size=(48, 3, 8, 8)).astype(np.float32))
    return folder / "model.onnx"


def compiled(model: Path, recipe: str = "int8-network") -> Bundle:
    data, out = str(model.parent / "x.npz"), model.parent / "bundle"
    return compile_model(Request.of(str(model), recipe=recipe, calibration=data, out=out, speed=False)).bundle


def rows_of(bundle: Bundle) -> dict[tuple[str, str], dict[str, Any]]:
    """Of all items, by (measure, output)."""
    return {
        (row["name"].removeprefix("accuracy."), row["settings"].get("output", "")): row
        for row in bundle.measurements
        if row["name"].startswith("accuracy.") and "surer_than" not in row["settings"]
    }


def runs(model: Path, samples: Array) -> list[list[Any]]:
    """What a file gives of each sample by itself."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return [session.run(None, {"x": samples[i : i + 1]}) for i in range(len(samples))]


F, N = TensorProto.FLOAT, "n"


@pytest.mark.parametrize(
    ("tail", "outputs", "labels", "meta", "classes"),
    [
        ("logits", {"logits": (F, [N, 5])}, False, {}, True),
        ("softmax", {"y": (F, [N, 5])}, False, {}, True),
        ("scikit", {"label": (TensorProto.INT64, [N]), "probabilities": (F, [N, 5])}, False, {}, True),
        ("zipmap", {"label": (TensorProto.STRING, [N])}, False, {}, True),
        ("numbers", {"y": (F, [N, 5])}, True, {}, True),
        ("numbers", {"y": (F, [N, 5])}, False, {"names": "{0: 'a', 1: 'b', 2: 'c', 3: 'd', 4: 'e'}"}, True),
        ("numbers", {"y": (F, [N, 5])}, False, {"names": "{0: 'a', 1: 'b'}"}, False),
        ("numbers", {"y": (F, [N, 5])}, False, {}, False),
    ],
)
def test_classes_only_where_labels_or_names_say_so(
    tmp_path: Path, tail: str, outputs: Any, labels: bool, meta: dict[str, str], classes: bool
) -> None:
    bundle = compiled(network(tmp_path, tail, outputs, labels, **meta))
    rows = rows_of(bundle)
    gate = next((check for check in bundle.manifest.checks if check.name == "gate.agreement_min"), None)
    assert (("top1_agreement", "") in rows, gate is not None) == (classes, classes)
    assert (("top1", "") in rows) == labels
    decided = {decision.code for decision in bundle.manifest.decisions if decision.where == "gates.agreement_min"}
    assert ("gate-not-judged" in decided) == (not classes)
    if tail in ("scikit", "zipmap"):
        # the label is the most likely class, so that both agree as often
        assert rows["same", "label"]["value"] == rows["top1_agreement", ""]["value"]


@pytest.mark.parametrize(("least", "batch"), [(0.7, 1), (0.7, "n"), (1.5, 1)])
def test_detections_are_compared_as_sets(tmp_path: Path, least: float, batch: int | str) -> None:
    """Boxes are paired by their overlap, as here by hand; none at all is said."""
    model = detector(tmp_path, least, batch=batch)
    bundle = compiled(model)
    assert all(check.ok for check in bundle.manifest.checks)
    rows = rows_of(bundle)
    # the last tenth scores
    samples = np.load(tmp_path / "x.npz")["x"][-rows["same", "boxes"]["data"]["items"] :]
    before, after = (runs(path, samples) for path in (model, bundle.path / "onnx" / "model.onnx"))
    kept = [sum(len(each[0]) for each in side) for side in (before, after)]
    same = rows["same", "boxes"]
    if least > 1:
        assert (kept, same["value"], same["flags"]) == ([0, 0], None, ["nothing-chosen"])
        return
    assert [same["shape"]["original"], same["shape"]["candidate"]] == kept
    assert min(kept) > 20
    found = labels = 0
    for one, other in zip(before, after, strict=True):
        free = set(range(len(other[0])))
        for box, label in zip(one[0], one[2], strict=True):
            best = max(free, key=lambda j: overlap(box, other[0][j]), default=None)
            # boxes are 2 x 2 and barely move: another cell's overlaps by a third at most
            if best is not None and overlap(box, other[0][best]) > 0.8:
                same_cell = [j for j in free if overlap(box, other[0][j]) > 0.8]
                free.discard(next((j for j in same_cell if other[2][j] == label), best))
                found += 1
        labels += sum((Counter(one[2].tolist()) & Counter(other[2].tolist())).values())
    assert same["value"] == pytest.approx(2 * found / sum(kept))
    assert rows["same", "labels"]["value"] <= 2 * labels / sum(kept)
    assert rows["relative_error", "boxes"]["value"] < 0.02
    pytest.importorskip("openvino")
    # another runtime need not keep as many, and is held against what the choice is made of
    added = quantkit.export(bundle, "openvino", calibration=tmp_path / "x.npz").manifest.checks[-1]
    assert (added.name, added.ok, added.where) == ("reload.openvino", True, "corners")


def overlap(one: Array, other: Array) -> float:
    near, far = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    shared = float(np.maximum(far - near, 0).prod())
    return shared / (float((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod()) - shared)


def test_detectors_are_compared_with_each_other(tmp_path: Path) -> None:
    model = detector(tmp_path, 0.7)
    other = quantkit.compile(str(model), "int8", calibration=tmp_path / "x.npz", out=tmp_path / "b", speed=False)
    found = quantkit.compare(compiled(model), other)
    assert {(cell.name, cell.output) for cell in found.cells if cell.what == "accuracy"} == {
        ("accuracy.same", "boxes"),
        ("accuracy.same", "labels"),
        ("accuracy.relative_error", "boxes"),
        ("accuracy.relative_error", "scores"),
    }


def test_what_is_chosen_by_position_is_compared_by_it(tmp_path: Path) -> None:
    outputs = {"kept": (F, ["k"]), "where": (TensorProto.INT64, ["k", 2])}
    model = network(tmp_path, "kept", outputs)
    bundle = compiled(model)
    rows = rows_of(bundle)
    samples = np.load(tmp_path / "x.npz")["x"][-rows["same", "where"]["data"]["items"] :]
    before, after = (runs(path, samples) for path in (model, bundle.path / "onnx" / "model.onnx"))
    sides = [[{tuple(row) for row in each[1]} for each in side] for side in (before, after)]
    both = sum(len(one & other) for one, other in zip(*sides, strict=True))
    assert rows["same", "where"]["value"] == pytest.approx(2 * both / sum(len(each) for side in sides for each in side))
    assert rows["relative_error", "kept"]["value"] < 0.3


def test_what_nothing_is_compared_by_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="onnx-outputs"):
        compiled(network(tmp_path, "sequence", {}))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("recipe", "reads"), [("int8-network", True), ("int8-dynamic", False)])
def test_places_of_the_largest_are_held_by_what_they_are_of(recipe: str, reads: bool, tmp_path: Path) -> None:
    small = Small()
    logits = small.op("Gemm", small.input("x", "n", 24), small.normal(24, 5), small.normal(5), name="head")
    best = small.op("ArgMax", logits, axis=1, keepdims=0)
    ir.save(small.model(best, dtype=ir.DataType.INT64), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=small.normal(40, 24))
    given: dict[str, Any] = {"calibration": tmp_path / "x.npz", "speed": False}
    bundle = quantkit.compile(str(tmp_path / "m.onnx"), recipe=recipe, out=tmp_path / "b", **given)
    assert bundle.manifest.layers[0].name == "head"
    pytest.importorskip("openvino")
    if not reads:  # it would multiply floats
        with pytest.raises(InputError, match="openvino-operator"):
            quantkit.export(bundle, "openvino", calibration=tmp_path / "x.npz")
        return
    added = quantkit.export(bundle, "openvino", calibration=tmp_path / "x.npz").manifest.checks[-1]
    assert (added.name, added.ok, added.where) == ("reload.openvino", True, logits.name)


def test_480_crops_of_five_photographs_are_five_draws(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    photograph = np.tile(np.arange(5), 96)
    images = generator.standard_normal((480, 3, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", images=images, clusters=photograph)
    samples = load_inputs(str(tmp_path / "eval.npz"), "calib", [FloatGraphInput("x", "float32", (None, 3, 4, 4))],
                          samples=None, seed=0)  # fmt: skip
    assert len(samples) == 96 * 4, "of five photographs without splits four calibrate"
    expected = generator.standard_normal((len(samples), 10))
    # rounding turns over more of one photograph's crops than of another's
    lost = generator.random(len(samples)) < np.array([0.0, 0.02, 0.04, 0.10, 0.0])[samples.clusters]
    given = np.where(lost[:, None], -expected, expected)
    said = OutputKinds(classes=frozenset({"y"}))
    rows = agreement({"y": expected}, {"y": given}, samples, said, subject="a", baseline="b")
    row = next(each for each in rows if each.name == "accuracy.top1_agreement" and "surer_than" not in each.settings)
    shares = np.array([1 - lost[samples.clusters == number].mean() for number in range(4)])
    reach = stats.t.ppf(0.975, 3) * stats.sem(shares)
    assert row.value == pytest.approx(shares.mean())
    assert row.shape == {"classes": 10, "clusters": 4}
    assert row.ci95 is not None
    assert np.ptp(row.ci95) > 1.3 * reach, "no narrower than four numbers that differ as much"
    alone = wilson(int((~lost).sum()), lost.size)
    assert row.ci95[0] < alone[0] - 0.02
    kl = next(each for each in rows if each.name == "accuracy.kl")
    assert kl.flags == row.flags == ["ci95-by-cluster"]
    assert figures.scored(rows).endswith("intervals 95 % over 4 groups of similar images")
