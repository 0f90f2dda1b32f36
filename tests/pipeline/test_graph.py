"""`quantkit compile model.onnx`: a tiny network all the way to a verified bundle, and what is refused."""

import shlex
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small

import quantkit
from quantkit.errors import GateError, InputError
from quantkit.graph.run import Runner
from quantkit.runtimes.onnxruntime.open import write_optimized


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("network")
    return networks.write(folder / "tiny.onnx"), networks.image_set(folder / "set.npz", 120)


def compiled(files: tuple[Path, Path], out: Path, **more: Any) -> Any:
    asked = {"recipe": "int8", "calibration": files[1], "out": out, "speed": False, **more}
    return quantkit.compile(str(files[0]), **asked)


def test_a_graph_becomes_a_verified_bundle(files: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = compiled(files, tmp_path / "bundle")
    manifest = bundle.manifest
    assert all(check.ok for check in bundle.verify())
    assert (manifest.model.kind, manifest.model.source.ref) == ("network", "path:tiny.onnx")
    assert {check.name for check in manifest.checks if check.ok} >= {"reload.onnxruntime", "integer.macs"}
    assert len(manifest.layers) == 4
    assert all(8 < layer.bits_per_weight < 20 and layer.input_scale for layer in manifest.layers)
    rows = {row["name"]: row for row in bundle.measurements}
    assert rows["accuracy.top1"]["value"] > 0.8
    assert rows["accuracy.top1"]["baseline"]["value"] == 1.0, "the labels are the float network's"
    assert rows["size.bytes"]["baseline"]["value"] == files[0].stat().st_size
    # a plain session of the file gives these classes
    x = networks.images(16, seed=3)
    own = Runner(bundle.path / "onnx" / "model.onnx")({"images": x})["logits"]
    expected = Runner(files[0])({"images": x})["logits"]
    assert np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.05
    assert (bundle.path / "report.html").is_file()


def test_what_is_kept_stays_float(files: tuple[Path, Path], tmp_path: Path) -> None:
    everything = compiled(files, tmp_path / "all").manifest.layers
    kept = everything[1].name
    bundle = compiled(files, tmp_path / "kept", changes=[f"keep=['{kept}']"])
    assert [layer.name for layer in bundle.manifest.layers] == [
        layer.name for layer in everything if layer.name != kept
    ]
    # between pairs ONNX Runtime would quantize it on its own, one scale for all of its channels
    write_optimized(bundle.path / "onnx" / "model.onnx", tmp_path / "optimised.onnx")
    operators = [node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph]
    assert operators.count("Conv") + operators.count("FusedConv") == 1, operators


def test_a_gate_that_samples_cannot_judge_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    changes = [
        "gates={recall_drop_max: 1.0, agreement_min: 0.5}",
        "passes=[{rtn: {range: minmax}}, {bias_correct: {}}]",
    ]
    with pytest.raises(GateError, match="gate-not-judged") as caught:
        compiled(files, tmp_path / "bundle", changes=changes, strict=True)
    assert caught.value.where == "gates.recall_drop_max"
    bundle = compiled(files, tmp_path / "bundle", changes=changes, resume=True)
    assert {each.where for each in bundle.manifest.decisions if each.code == "gate-not-judged"} == {
        "gates.recall_drop_max"
    }
    assert " 1 is not judged" in (bundle.path / "README.md").read_text()
    assert [check.name for check in bundle.manifest.checks if "gate" in check.name] == ["gate.agreement_min"]


def errors(bundle: Any) -> list[float]:
    return [layer.error for layer in bundle.manifest.layers]


def test_the_passes_of_a_recipe_do_what_they_are_called(files: tuple[Path, Path], tmp_path: Path) -> None:
    plain = compiled(files, tmp_path / "rtn", changes=["passes=[{rtn: {range: minmax}}, {bias_correct: {}}]"])
    assert not [found for found in plain.manifest.decisions if found.code != "note"], "biases are corrected as it is"
    nearer = compiled(files, tmp_path / "mse", changes=["passes=[{rtn: {}}]"])
    assert sum(errors(nearer)) < sum(errors(plain)), "least squares are about the weights"
    steps = "{smoothquant: {}}, {fold_norms: {}}, {rtn: {}}, {round: {iterations: 40, batch: 8, rate: 0.02}}"
    moved = compiled(files, tmp_path / "round", changes=[f"passes=[{steps}]"])
    assert errors(moved) != errors(nearer)
    said = {found.pass_: found.reason for found in moved.manifest.decisions if found.code == "declined"}
    assert set(said) == {"smoothquant", "fold_norms"}
    assert "equalize" in said["smoothquant"]
    assert "batch norms" in said["fold_norms"]
    solved = compiled(files, tmp_path / "gptq", changes=["passes=[{gptq: {gradients: 2}}]"])
    (taken,) = (found for found in solved.manifest.decisions if found.code != "note")
    assert (taken.code, taken.from_, taken.to) == ("gradients-unavailable", 2, 0)


def test_symmetric_ranges_by_entropy(files: tuple[Path, Path], tmp_path: Path) -> None:
    changes = ["scheme.activations.symmetric=true", "scheme.activations.range=entropy"]
    bundle = compiled(files, tmp_path / "bundle", changes=changes)
    checks = {check.name: check.value for check in bundle.manifest.checks}
    assert checks["integer.macs"] == 1.0
    assert bundle.manifest.layers[0].activations["range"] == "entropy"  # type: ignore[index]


def test_activations_are_quantized_as_the_model_runs(files: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = compiled(files, tmp_path / "bundle", recipe="int8-dynamic")
    manifest = bundle.manifest
    assert {check.name for check in manifest.checks if check.ok} >= {"reload.onnxruntime", "integer.macs"}
    (found,) = [each for each in manifest.decisions if each.code == "by-tensor"]
    assert (found.from_, found.to) == ("token", "tensor")
    assert "3 convolutions" in found.reason
    given = [(layer.activations["granularity"], layer.input_scale) for layer in manifest.layers]  # type: ignore[index]
    assert given == [("tensor", None)] * 3 + [("token", None)]
    rows = {row["name"]: row for row in bundle.measurements}
    assert rows["accuracy.top1_agreement"]["value"] > 0.8
    assert rows["size.bits_per_weight"]["value"] < 20


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["keep=['*']"], "no-linears"),
        (["scheme.activations=null"], "scheme-unsupported"),
        (["scheme.weights.format=int4"], "scheme-unsupported"),
        (["models=[decoder]"], "model-kind"),
    ],
)
def test_what_a_graph_cannot_be(files: tuple[Path, Path], tmp_path: Path, changes: list[str], code: str) -> None:
    with pytest.raises(InputError) as caught:
        compiled(files, tmp_path / "bundle", changes=changes)
    assert caught.value.code == code, caught.value.line()
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_calibration_fits_the_graph(files: tuple[Path, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", images=networks.images(30)[:, :, :6])
    with pytest.raises(InputError, match="calibration-shape"):
        compiled((files[0], tmp_path / "wrong.npz"), tmp_path / "bundle")
    with pytest.raises(InputError, match="calibration-kind"):
        compiled((files[0], "prose-en"), tmp_path / "bundle")  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["int8-network", "int8-mixed"])
def test_what_is_always_the_same_is_kept_as_the_error_says(tmp_path: Path, recipe: str) -> None:
    """A convolution whose Relu lets nothing through: it, and what reads it, stay in floats, and the rest does not."""
    small = Small()
    x = small.input("x", "n", 3, 8, 8)
    seen = small.op("Relu", small.op("Conv", x, small.normal(8, 3, 3, 3), small.normal(8)))
    dead = small.op("Relu", small.op("Conv", seen, small.normal(4, 8, 1, 1), np.full(4, -1e4, np.float32)))
    flat = (small.op("Flatten", small.op("GlobalAveragePool", each)) for each in (seen, dead))
    sums = [small.op("Gemm", each, small.normal(5, width), transB=1) for each, width in zip(flat, (8, 4), strict=True)]
    logits = small.op("Add", *sums)
    ir.save(small.model(logits), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=networks.images(60)[:, :, :8, :8])
    files = tmp_path / "m.onnx", tmp_path / "x.npz"
    with pytest.raises(InputError, match="activations-constant") as caught:
        compiled(files, tmp_path / "a", recipe=recipe)
    option, change = shlex.split(caught.value.remedy.partition("floats: ")[2])
    assert option == "--set"
    bundle = compiled(files, tmp_path / "b", recipe=recipe, changes=[change])
    assert len(bundle.manifest.layers) == 2, "the living convolution and its linear"
    assert all(check.ok for check in bundle.manifest.checks)


def test_tune_names_what_chooses_for_graphs(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model-graph") as caught:
        quantkit.tune(str(files[0]), ["bits=4.5"])
    _, _, model, _, recipe, option, _ = shlex.split(caught.value.remedy)
    assert (model, option) == (str(files[0]), "--calibration")
    bundle = compiled(files, tmp_path / "bundle", recipe=recipe)
    assert (bundle.path / "harm.json").is_file(), "the search is in the bundle"
