"""Graphs for a GPU target: networks for TensorRT, and engines that are built without a GPU."""

import json
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small
from thorough import beside

import quantkit
from quantkit.errors import GateError, InputError
from quantkit.exporters.tensorrt import check as network_check
from quantkit.exporters.tensorrt import graph as _graph_network
from quantkit.graph.open import open_graph
from quantkit.graph.run import Runner
from quantkit.pipeline.graphs import network as graph_network
from quantkit.pipeline.measure import measure_bundle
from quantkit.pipeline.reload import reload

EXPORT = "export=[{tensorrt: {}}]"
STATIC = "scheme.activations={format: fp8_e4m3, granularity: tensor, dynamic: false}"
KINDS = "models=[network]"
NETWORK = "engine/network.onnx"
# form -> recipe and changes
FORMS: dict[str, tuple[str, list[str]]] = {
    "float16": ("float", []),
    "int8": ("int8-tensorrt", []),
    "fp8": ("fp8", [KINDS, STATIC]),
    "int4": ("int4-tensorrt", ["scheme.weights.group=32"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("networks")
    network = networks.write(folder / "tiny.onnx"), networks.image_set(folder / "set.npz", 60)
    model = attention()
    ir.save(model, folder / "attention.onnx")
    np.savez(folder / "patches.npz", images=np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32))
    return {"cnn": network, "vit": (folder / "attention.onnx", folder / "patches.npz")}


def attention() -> ir.Model:
    """A vision transformer of one block: patches, a norm, two heads of 32, a classifier."""
    small = Small()
    x = small.input("images", "n", 3, 8, 8)
    patches = small.op("Conv", x, small.normal(64, 3, 4, 4), small.normal(64), strides=[4, 4])
    tokens = small.op("Transpose", small.op("Reshape", patches, np.array([0, 64, 4])), perm=[0, 2, 1])
    ones = np.ones(64, np.float32)
    normed = small.op("LayerNormalization", tokens, ones, small.normal(64), axis=-1)
    heads = []
    for _ in range(3):
        made = small.op("Add", small.op("MatMul", normed, small.normal(64, 64) / 8), small.normal(64))
        heads.append(small.op("Transpose", small.op("Reshape", made, np.array([0, 4, 2, 32])), perm=[0, 2, 1, 3]))
    query, key, value = heads
    scores = small.op("MatMul", query, small.op("Transpose", key, perm=[0, 1, 3, 2]))
    shares = small.op("Softmax", small.op("Mul", scores, np.float32(32**-0.5)))
    seen = small.op("Transpose", small.op("MatMul", shares, value), perm=[0, 2, 1, 3])
    out = small.op("MatMul", small.op("Reshape", seen, np.array([0, 4, 64])), small.normal(64, 64) / 8)
    pooled = small.op("ReduceMean", small.op("Add", out, tokens), np.array([1]), keepdims=0)
    logits = small.op("Gemm", pooled, small.normal(10, 64), small.normal(10), transB=1)
    logits.name = "logits"
    return small.model(logits)


def compiled(given: tuple[Path, Path], out: Path, form: str, *changes: str, build: bool = False, **more: Any) -> Any:
    recipe, own = FORMS[form]
    exports = EXPORT if build else EXPORT.replace("{}", "{engine: false}")
    asked = {"recipe": recipe, "target": "rtx-4090", "calibration": given[1], "out": out, "speed": False, **more}
    return quantkit.compile(str(given[0]), changes=[exports, *own, *changes], **asked)


KEPT = [("cnn", "int8"), ("cnn", "int4"), *(("vit", form) for form in FORMS if form not in ("float16", "int4"))]


@pytest.mark.parametrize(("name", "form"), beside(KEPT, [(name, form) for name in ("cnn", "vit") for form in FORMS]))
def test_networks_compute_what_was_decided_on(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, name: str, form: str
) -> None:
    if (name, form) == ("cnn", "int4"):
        with pytest.raises(InputError, match="layout-unsupported"):  # its one linear has 8 inputs
            compiled(files[name], tmp_path / "b", form)
        assert not list(tmp_path.iterdir())
        return
    bundle = compiled(files[name], tmp_path / "b", form)
    checks = {check.name: check for check in bundle.manifest.checks}
    assert all(check.ok for check in checks.values()), checks
    assert 0 < checks["network.outputs"].value < 4e-3
    graph = ir.load(bundle.path / NETWORK).graph
    assert {node.domain for node in graph} == {""}
    kinds = {node.op_type for node in graph}
    assert ("QuantizeLinear" in kinds) == (form in ("int8", "fp8"))
    assert ("DequantizeLinear" in kinds) == (form != "float16")
    assert all(value.dtype != ir.DataType.INT32 for value in graph.initializers.values()), "biases are floats"
    rows = {row["name"]: row for row in bundle.measurements}
    assert rows["accuracy.kl"]["value"] < 0.3
    (said,) = [each.reason for each in bundle.manifest.decisions if each.where == "engine"]
    assert "scored is its network" in said


@pytest.mark.parametrize(
    ("name", "form"), beside([("cnn", "int8")], [("cnn", "int8"), ("vit", "int8"), ("vit", "int4")])
)
def test_it_builds_without_a_gpu(files: dict[str, tuple[Path, Path]], tmp_path: Path, name: str, form: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    bundle = compiled(files[name], tmp_path / "b", form, build=True)
    record = json.loads((bundle.path / "engine" / "sm89.json").read_text())
    assert record["bytes"] == (bundle.path / "engine" / "sm89.engine").stat().st_size
    (profile,) = record["profiles"]
    (sizes,) = profile["inputs"].values()
    # the target's least, likeliest and largest batches; sizes of images are fixed
    assert [shape[0] for shape in sizes] == [1, 8, 64]
    assert {tuple(shape[1:]) for shape in sizes} == {(3, *files_shape(files[name]))}
    kept = [each.where for each in bundle.manifest.decisions if each.code == "kept"]
    assert len(kept) == (1 if form == "int4" else 0), "a convolution of weights alone in codes"
    assert all(check.ok for check in quantkit.Bundle.load(bundle.path).verify())


def files_shape(given: tuple[Path, Path]) -> tuple[int, int]:
    with np.load(given[1]) as arrays:
        height, width = arrays["images"].shape[2:]
    return height, width


def test_a_fixed_batch_is_kept(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model = ir.load(files["vit"][0])
    model.graph.inputs[0].shape = ir.Shape([2, 3, 8, 8])
    ir.save(model, tmp_path / "two.onnx")
    bundle = compiled((tmp_path / "two.onnx", files["vit"][1]), tmp_path / "b", "float16")
    assert list(ir.load(bundle.path / NETWORK).graph.inputs[0].shape) == [2, 3, 8, 8]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "changes", "code"),
    [
        ("int8", ["scheme.activations.symmetric=false"], "target-cannot-run"),
        ("int8", ["scheme.activations={format: int8, granularity: token}"], "layout-unsupported"),
        ("int8", ["scheme.activations.format=fp8_e4m3"], "scheme-unsupported"),
        ("int8", ["scheme.weights={format: nf4}", "scheme.activations=null"], "scheme-unsupported"),
        ("int8", ["keep=['*']"], "no-linears"),
        ("int8", ["export=[{tensorrt: {engine: false, type: bfloat16}}]"], "layout-unsupported"),
        ("int4", ["scheme.weights.symmetric=false"], "target-cannot-run"),
    ],
)
def test_what_no_engine_is_made_of(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, form: str, changes: list[str], code: str
) -> None:
    with pytest.raises(InputError) as caught:
        compiled(files["vit"], tmp_path / "b", form, *changes)
    assert caught.value.code == code, caught.value.line()
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_operators_and_sizes_that_no_engine_has(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    small = Small()
    x = small.input("images", "n", 3, 8, 8)
    flat = small.op("Flatten", x)
    model = small.model(small.op("Gelu", small.op("Gemm", flat, small.normal(192, 4))))
    list(model.graph)[-1].domain = "com.microsoft"
    model.opset_imports["com.microsoft"] = 1
    ir.save(model, tmp_path / "contrib.onnx")
    with pytest.raises(InputError, match=r"network-unsupported.*Gelu.*a runtime's own optimizations"):
        compiled((tmp_path / "contrib.onnx", files["vit"][1]), tmp_path / "b", "float16")
    for kind, given in (("Det", False), ("MeanVarianceNormalization", False), ("Celu", True)):  # by name; as it is read
        small = Small()
        x = small.op("Conv", small.input("images", "n", 3, 8, 8), small.normal(3, 3, 3, 3), name="first")
        y = small.op(kind, x)
        last = y if kind == "Det" else small.op("Conv", y, small.normal(3, 3, 3, 3))
        ir.save(small.model(last), tmp_path / "rare.onnx")
        if given:  # in 32 bits, which is all that ONNX defines it in
            assert compiled((tmp_path / "rare.onnx", files["vit"][1]), tmp_path / "celu", "int8").manifest.layers
            continue
        with pytest.raises(InputError, match=rf"rare\.onnx: {kind}.*no pass replaces it"):
            compiled((tmp_path / "rare.onnx", files["vit"][1]), tmp_path / "b", "int8")
        assert not (tmp_path / "b").exists()
    model = ir.load(files["cnn"][0])
    model.graph.inputs[0].shape = ir.Shape(["n", 3, "height", 12])
    ir.save(model, tmp_path / "free.onnx")
    with pytest.raises(InputError, match="profile-unknown-size"):
        compiled((tmp_path / "free.onnx", files["cnn"][1]), tmp_path / "b", "float16")


@pytest.mark.parametrize(
    ("end", "change", "failed"),
    [
        (".codes", lambda values: values - (values > 3), "network.weights"),
        ("images.scale", lambda values: values * np.float16(1.01), "network.pairs"),
        (".bias", lambda values: values + np.float16(1), "network.outputs"),
    ],
)
def test_what_is_spoilt_is_found(
    files: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    change: Any,
    failed: str,
) -> None:
    save = graph_network.Network.save

    def spoilt(self: Any, path: Path) -> None:
        save(self, path)
        model = ir.load(path)
        ir.external_data.load_to_model(model)
        value = next(value for name, value in model.graph.initializers.items() if name.endswith(end))
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.tensor(change(tensor.numpy()).astype(tensor.numpy().dtype), name=value.name)
        ir.save(model, path)

    monkeypatch.setattr(graph_network.Network, "save", spoilt)
    with pytest.raises(GateError, match=failed):
        compiled(files["cnn"], tmp_path / "b", "int8")


def test_the_network_agrees_with_what_codes_stand_for(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """By another way than the check: pairs included, against the float graph."""
    bundle = compiled(files["vit"], tmp_path / "b", "int8")
    x = np.random.default_rng(5).standard_normal((8, 3, 8, 8)).astype(np.float32)
    (own,) = Runner(bundle.path / NETWORK, literal=True)({"images": x}).values()
    (wanted,) = Runner(files["vit"][0])({"images": x}).values()
    assert np.linalg.norm(own - wanted) / np.linalg.norm(wanted) < 0.05


@pytest.mark.parametrize(("times", "ok"), [(1 + 2.0**-7, True), (1 + 2.0**-5, False)])
def test_a_network_may_be_off_by_what_sixteen_bits_are(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, times: float, ok: bool
) -> None:
    """Outputs of a float network made larger by a known share of themselves: 2^-6 is what separates the two."""
    model = open_graph(files["vit"][0]).model
    model.graph.outputs[0].shape = ir.Shape(["n", 10])
    more = model.clone()
    last = next(node for node in more.graph if node.op_type == "Gemm")
    for value in last.inputs[1:]:
        assert value is not None and value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(times), name=value.name)
    ir.save(_graph_network.network(more, {}, {}, "int8"), tmp_path / "network.onnx")
    with np.load(files["vit"][1]) as arrays:
        feed = {"images": arrays["images"][:4]}
    checks = network_check.check_graph(tmp_path / "network.onnx", model, {}, {}, "int8", feed)
    (outputs,) = [check for check in checks if check.name == "network.outputs"]
    assert outputs.ok == ok, outputs
    assert outputs.value == pytest.approx(times - 1, rel=0.2)


def test_a_bundle_is_reloaded_and_scored_again(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    bundle = compiled(files["cnn"], tmp_path / "b", "int8")
    checks, notes = reload(bundle)
    assert {check.name: check.ok for check in checks} == {"scales.finite": True, "layers.stored": True}
    assert not notes
    first = {row["name"]: row["value"] for row in bundle.measurements}
    again = measure_bundle(bundle, str(files["cnn"][0]), calibration=str(files["cnn"][1]))
    scores = {row.name: row.value for row in again if row.name.startswith("accuracy.")}
    # against the graph as it came, not as it was fused
    assert scores == pytest.approx({name: first[name] for name in scores}, rel=1e-2)
    assert not [row for row in again if row.name.startswith("latency.")], "a network for TensorRT is not timed on a CPU"
