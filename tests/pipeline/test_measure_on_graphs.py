"""Networks and encoders measured on a device: what runs there, and the same figures as this machine finds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import zoo
from devices.local import local
from thorough import beside

import quantkit
from quantkit.bundle import Bundle
from quantkit.calibrate.sets.pairs import PairSet, load_pairs
from quantkit.devices.measure import measure_on
from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.measure import measure_bundle

PLAN = TimingPlan(batches=(1, 3), contexts=(16,), prefills=(8,), seconds=0.2, cell_seconds=0.2, rounds=2)
CHANGES = {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 64}
ENCODED = ["calibration.samples=2", "calibration.tokens=32", "gates={}", "export=[{onnx: {}}, {checkpoint: {}}]"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float network, its set, and a bundle of it for ONNX Runtime and OpenVINO."""
    pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("network")
    networks.write(folder / "tiny.onnx")
    networks.image_set(folder / "set.npz", 120)
    quantkit.compile(
        str(folder / "tiny.onnx"), "int8", calibration=folder / "set.npz", out=folder / "bundle", speed=False
    )
    with pytest.raises(InputError, match=r"--calibration ./set.npz"):
        quantkit.export(folder / "bundle", "openvino")
    quantkit.export(folder / "bundle", "openvino", calibration=folder / "set.npz")
    return folder


def measured(folder: Path, link: Any, runtime: str, **how: Any) -> dict[str, Row]:
    asked: dict[str, Any] = {"calibration": str(folder / "set.npz"), "plan": PLAN, **how}
    rows = measure_on(Bundle.load(folder / "bundle"), link, str(folder / "tiny.onnx"), runtime=runtime, **asked)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("runtime", beside(["onnxruntime"], ["onnxruntime", "openvino"]))
def test_a_network_is_scored_and_timed_in_the_runtime_that_was_asked_for(
    network: Path, tmp_path: Path, runtime: str
) -> None:
    link = local(tmp_path / "there", "pi5", absent=("torch", "onnx", "onnx_ir"))
    there = measured(network, link, runtime)
    how: dict[str, Any] = {"calibration": str(network / "set.npz"), "runtime": runtime, "speed": False}
    here = measure_bundle(Bundle.load(network / "bundle"), str(network / "tiny.onnx"), **how)
    scored = {row.name: row for row in here if row.name.startswith("accuracy.")}
    assert {name for name in there if name.startswith("accuracy.")} == scored.keys()
    for name, row in scored.items():
        # the same kernels on the same samples; batches differ, and with them the last bits
        assert there[name].value == pytest.approx(row.value, rel=1e-4, abs=1e-6), name
        assert (there[name].data, there[name].baseline) == (row.data, row.baseline)
    assert {row.runtime for row in there.values() if row.name.startswith(("accuracy.", "latency."))} == {runtime}
    assert there["latency.prefill"].on == "pi5"
    (subject,) = (tmp_path / "there" / "files").glob("subject*")
    wanted = {"openvino": {"model.xml", "model.bin"}, "onnxruntime": {"model.onnx"}}[runtime]
    assert {path.name for path in subject.iterdir()} == wanted


@pytest.mark.thorough
def test_openvino_scores_a_network_without_onnx_runtime(network: Path, tmp_path: Path) -> None:
    link = local(tmp_path / "there", absent=("onnxruntime",))
    assert "accuracy.top1" in measured(network, link, "openvino", speed=False)
    with pytest.raises(InputError, match="onnxruntime"):
        measured(network, link, "onnxruntime", speed=False)


def test_a_network_s_runtime_is_refused_before_anything_is_carried(network: Path, tmp_path: Path) -> None:
    link = local(tmp_path / "there")
    for runtime, code in (("quantkit_cpu", "runtime-unsupported"), ("llama_cpp", "runtime-unsupported")):
        with pytest.raises(InputError, match=code):
            measured(network, link, runtime)
    assert not (tmp_path / "there").exists()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    zoo.save(folder / "bert", byte_tokenizer, "bert", **CHANGES)
    return folder


@pytest.mark.parametrize("scored_on", beside(["verse-pairs"], ["prose-en", "verse-pairs"]))
def test_an_encoder_s_vectors_come_back_and_are_compared_here(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored_on: str
) -> None:
    def few(*args: Any, **settings: Any) -> PairSet:
        whole = load_pairs(*args, **settings)
        return replace(whole, left=whole.left[:12], right=whole.right[:12])

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.calibrate.tokens.ids.load_pairs", few)
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    changes = [*ENCODED, f"calibration.set={scored_on}"]
    out, model = tmp_path / "out", str(encoder / "bert")
    compile_model(Request.of(model, recipe="int8", target="cpu-x86", changes=changes, out=out, speed=False))
    monkeypatch.setattr("quantkit.pipeline.measure.float_export", lambda *_: out / "onnx")  # it is not run
    here = measure_bundle(Bundle.load(out), model, runtime="onnxruntime", speed=False)
    link = local(tmp_path / "there", "pi5", absent=("torch", "tokenizers", "onnx"))
    there = measure_on(Bundle.load(out), link, model, runtime="onnxruntime", plan=PLAN, speed=False)
    found = {row.name: row for row in there}
    scored = {row.name: row for row in here if row.name.startswith("accuracy.")}
    assert found.keys() == scored.keys()
    assert ("accuracy.recall_at_1" in found) is (scored_on == "verse-pairs")
    for name, row in scored.items():
        assert found[name].value == pytest.approx(row.value, rel=1e-5), name
        assert found[name].data == row.data, name
        assert found[name].n == row.n
