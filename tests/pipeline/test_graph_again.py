"""A bundle of a graph, finished: verified, measured again, shown, and what is asked of it that it cannot be."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small

import quantkit
from quantkit import cli
from quantkit.bundle import seal
from quantkit.errors import InputError
from quantkit.pipeline.compare import compare_bundles
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.reload import reload
from quantkit.report.bundle import usage


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph, a set, another set, and the bundle of the first two."""
    folder = tmp_path_factory.mktemp("again")
    networks.write(folder / "tiny.onnx")
    networks.image_set(folder / "set.npz", 120)
    np.savez(folder / "other.npz", images=networks.images(60, seed=5))
    quantkit.compile(
        str(folder / "tiny.onnx"), "int8", calibration=folder / "set.npz", out=folder / "bundle", speed=False
    )
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))


def test_it_is_loaded_again_and_its_kernels_looked_at(bundle: Path) -> None:
    checks, notes = reload(quantkit.load(bundle))
    assert not notes
    assert {check.name: check.ok for check in checks} == {
        "onnxruntime.loads": True,
        "scales.finite": True,
        "layers.stored": True,
        "integer.layers": True,
    }
    model = ir.load(bundle / "onnx" / "model.onnx")
    name = next(name for name in model.graph.initializers if name.endswith(".weight.scale"))
    scale = model.graph.initializers[name].const_value.numpy().copy()  # type: ignore[union-attr]
    scale[0] = np.nan
    model.graph.initializers[name].const_value = ir.tensor(scale, name=name)
    ir.save(model, bundle / "onnx" / "model.onnx")
    failed = [check for check in reload(quantkit.load(bundle))[0] if not check.ok]
    assert ("scales.finite", name) in [(check.name, check.where) for check in failed]


def test_it_is_scored_again_on_a_named_set(made: Path, bundle: Path) -> None:
    before = {row["name"]: row for row in quantkit.load(bundle).measurements}
    again: dict[str, Any] = {"speed": False, "baseline": str(made / "tiny.onnx")}
    rows = {row["name"]: row for row in quantkit.measure(bundle, calibration=str(made / "set.npz"), **again)}
    for name in ("accuracy.top1", "accuracy.kl", "size.bytes"):
        assert rows[name]["value"] == pytest.approx(before[name]["value"], abs=1e-6), name
        assert rows[name]["baseline"]["subject"] == before[name]["baseline"]["subject"]
    rows = {row["name"]: row for row in quantkit.measure(bundle, calibration=str(made / "other.npz"), **again)}
    assert rows["accuracy.top1_agreement"]["data"]["set"] == "other.npz"
    kept = quantkit.load(bundle)
    seen = [row["data"]["set"] for row in kept.measurements if row["name"] == "accuracy.top1_agreement"]
    assert seen and set(seen) == {"other.npz"}
    assert all(check.ok for check in kept.verify())


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, "baseline-needed"),
        ({"baseline": "tiny.onnx"}, "calibration-needed"),
        ({"baseline": "bundle"}, "baseline-kind"),
        ({"baseline": "none.onnx"}, "file-missing"),
        ({"baseline": "tiny.onnx", "calibration": "fashion-mnist"}, "calibration-shape"),
    ],
)
def test_what_is_missing_is_said(made: Path, bundle: Path, asked: dict[str, str], code: str, own_cache: Path) -> None:
    given = {name: value if value == "fashion-mnist" else str(made / value) for name, value in asked.items()}
    with pytest.raises(InputError) as caught:
        quantkit.measure(bundle, speed=False, **given)  # type: ignore[arg-type]
    assert caught.value.code == code, caught.value.line()


def test_the_command_that_a_bundle_prints_measures_it(
    made: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder where the model and the set lie; its remedies name both too, of an empty cache."""
    monkeypatch.chdir(made)
    known: dict[str, Any] = {"calibration": made / "set.npz", "speed": False}
    assert quantkit.measure(bundle, **known) == quantkit.measure(bundle, baseline=str(made / "tiny.onnx"), **known)
    monkeypatch.setenv("QUANTKIT_CACHE", str(bundle.parent / "cache"))
    (command,) = usage.measure(quantkit.load(bundle).manifest, str(bundle))
    assert cli.run([*shlex.split(command)[1:], "--no-speed"]) == 0, capsys.readouterr().err
    given: dict[str, Any] = {}
    for code in ("baseline-needed", "calibration-needed"):
        with pytest.raises(InputError, match=code) as caught:
            quantkit.measure(bundle, speed=False, **given)
        option, value = caught.value.remedy.partition(",")[0].split()
        given[option.removeprefix("--")] = value
    assert quantkit.measure(bundle, speed=False, **given)


def test_the_command_that_a_bundle_prints_makes_it_again(
    made: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    manifest = quantkit.load(bundle).manifest
    (made / "recipe.yaml").write_text(usage.recipe(manifest), encoding="utf-8")
    command = shlex.split(usage.again(manifest).text)[1:]
    assert cli.run([*command, "--no-speed", "--dry-run"]) == 0, capsys.readouterr().err


def test_two_are_timed_in_turns_on_the_samples_that_scored_them(made: Path, bundle: Path) -> None:
    options: dict[str, Any] = {"measure": True, "batches": [1, 4], "seconds": 0.5}
    with pytest.raises(InputError, match="calibration-needed"):
        compare_bundles(made / "bundle", bundle, **options)
    found = compare_bundles(made / "bundle", bundle, calibration=str(made / "set.npz"), **options)
    times = [cell for cell in found.cells if cell.what == "latency"]
    assert [(cell.batch, cell.how, cell.shape) for cell in times] == [
        (batch, "interleaved", {"new_tokens": 1, "context": 0}) for batch in (1, 4)
    ]
    # six rounds of one block, two visits and two steps at least
    assert all((cell.n or 0) >= 24 and 0 < (cell.a or 0) < 1 for cell in times)


def test_another_graph_is_no_baseline(made: Path, bundle: Path, tmp_path: Path) -> None:
    model = ir.load(made / "tiny.onnx")
    model.graph.inputs[0].name = "pictures"
    ir.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match="baseline-inputs"):
        quantkit.measure(bundle, str(tmp_path / "other.onnx"), speed=False)


def test_a_bundle_of_before_is_verified_measured_and_compared(made: Path, bundle: Path) -> None:
    path = bundle / "manifest.json"
    assert json.loads(path.read_text())["model"]["kind"] == "network"
    seal.write_manifest(bundle, path.read_bytes().replace(b'"network"', b'"vision"'))
    old = quantkit.load(bundle)
    assert json.loads(path.read_text())["recipe"]["models"] == ["decoder", "encoder", "vision"]
    assert all(check.ok for check in (*old.verify(), *reload(old)[0]))
    found = compare_bundles(made / "bundle", bundle)
    assert found.kind == "network"
    assert all(cell.answer != "worse" for cell in found.cells)
    rows = quantkit.measure(bundle, str(made / "tiny.onnx"), calibration=str(made / "set.npz"), speed=False)
    assert "accuracy.top1" in {row["name"] for row in rows}
    assert quantkit.load(bundle).manifest.model.kind == "network"
    assert '"vision"' not in (bundle / "README.md").read_text()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sentence encoder in small: rows of a table, a linear of them, their mean; and a set for it."""
    folder = tmp_path_factory.mktemp("reader")
    small = Small()
    ids, mask = (small.input(name, "N", 6, dtype=ir.DataType.INT64) for name in ("input_ids", "attention_mask"))
    read = small.op("Gather", small.constant(small.normal(20, 16)), ids)
    counted = small.op("Unsqueeze", small.op("Cast", mask, to=ir.DataType.FLOAT), np.array([-1]))
    linear = small.op("MatMul", small.op("Mul", read, counted), small.normal(16, 8))
    ir.save(small.model(small.op("ReduceMean", linear, np.array([1]), keepdims=0)), folder / "reader.onnx")
    given = np.random.default_rng(0).integers(0, 20, (80, 6))
    np.savez(folder / "set.npz", input_ids=given, attention_mask=np.ones_like(given))
    return folder


def test_a_graph_of_token_ids_is_an_encoder_from_beginning_to_end(
    reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, data = str(reader / "reader.onnx"), str(reader / "set.npz")
    # a recipe for networks goes on to take it, and one for encoders does too
    for recipe in ("int8-network", "int8-encoder"):
        command = ["compile", model, "--recipe", recipe, "--calibration", data, "--no-speed", "--dry-run", "--json"]
        assert cli.run(command) == 0
        assert json.loads(capfd.readouterr().out)["result"]["model"]["kind"] == "encoder"
    with pytest.raises(InputError, match=r"model-kind.*an ONNX graph.*is for decoder.*--recipe"):
        quantkit.compile(model, "int8", calibration=data, out=tmp_path / "no", changes=["models=[decoder]"])
    # a recipe of one's own, as it was written before
    changes = ["models=[vision]", "gates={}"]
    made = quantkit.compile(model, "int8", calibration=data, out=tmp_path / "new", changes=changes, speed=False)
    assert made.manifest.model.kind == "encoder"
    assert holds_graph(made)
    assert all(check.ok for check in (*made.verify(), *reload(made)[0]))
    assert "pipeline_tag: feature-extraction" in (made.path / "README.md").read_text()
    # an older bundle of it says network, and is compared all the same
    shutil.copytree(made.path, tmp_path / "old")
    path = tmp_path / "old" / "manifest.json"
    seal.write_manifest(path.parent, path.read_bytes().replace(b'"kind": "encoder"', b'"kind": "vision"'))
    assert quantkit.load(tmp_path / "old").manifest.model.kind == "network"
    assert all(cell.answer != "worse" for cell in compare_bundles(tmp_path / "old", made.path).cells)
    rows = quantkit.measure(made.path, model, calibration=data, speed=False)
    assert "accuracy.cosine" in {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["export", "BUNDLE", "--to", "onnx"], "export-graph"),
        (["export", "BUNDLE", "--to", "checkpoint"], "export-graph"),
        (["measure", "BUNDLE", "--runtime", "torch"], "runtime-unsupported"),
        (["generate", "BUNDLE", "--prompt", "a"], "not-a-decoder"),
        (["verify", "BUNDLE"], None),
        (["show", "BUNDLE"], None),
    ],
)
def test_every_command_has_an_answer(
    bundle: Path, command: list[str], code: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    left = cli.run([str(bundle) if part == "BUNDLE" else part for part in command] + ["--json"])
    answer = json.loads(capfd.readouterr().out)
    assert (answer["error"] or {}).get("code") == code, answer["error"]
    assert left == (2 if code else 0)


def test_a_dry_run_says_what_a_compile_does(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["compile", str(made / "tiny.onnx"), "--recipe", "int8", "--calibration", str(made / "set.npz")]
    command += ["--out", str(tmp_path / "out"), "--dry-run"]
    assert cli.run([*command, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capfd.readouterr().out)["result"]
    assert not (tmp_path / "out").exists()
    manifest = quantkit.load(made / "bundle").manifest
    assert plan["schemes"][0]["layers"] == len(manifest.layers)
    bits = sum(layer.bits_per_weight * np.prod(layer.shape) for layer in manifest.layers)
    weights = sum(np.prod(layer.shape) for layer in manifest.layers)
    assert plan["schemes"][0]["bits_per_weight"] == pytest.approx(bits / weights)
    # a stem of 3 to 8 channels on 6 x 6, depthwise 3 x 3, pointwise, 8 to 6 classes
    assert plan["macs"] == {"quantized": 36 * (27 * 8 + 9 * 8 + 8 * 8) + 8 * 6, "all": 36 * (27 * 8 + 136) + 48}
    assert plan["floats"] == 0
    size = next(entry.bytes for entry in manifest.files if entry.path == "onnx/model.onnx")
    assert plan["disk_bytes"]["bundle"] == pytest.approx(size, rel=0.5)
    assert plan["scoring"]["samples"] == 12
    assert plan["memory_bytes"] > 1e8 and plan["seconds"] is None
    assert cli.run(command) == 0
    assert "multiply-accumulates a sample" in " ".join(capfd.readouterr().out.split())
