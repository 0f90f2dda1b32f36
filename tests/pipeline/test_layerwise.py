"""Layers of a Q/DQ network beside the float one's, by Polygraphy in ONNX Runtime; an engine as one runner more."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import small_onnx

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.measurement.accuracy import layerwise
from quantkit.pipeline.reload import compare_layers, fed
from quantkit.report.bundle.engine import layers as shown
from quantkit.runtimes import child
from quantkit.runtimes.tensorrt import library as tensorrt_library
from quantkit.scheme import WeightScheme
from quantkit.target import Profile

pytest.importorskip("polygraphy")
pytestmark = pytest.mark.usefixtures("one_thread")
PROFILE = Profile(name="decode", batch=(1, 1, 1), length=(1, 8, 8), context=(1, 16, 50)).model_dump()
INT4 = WeightScheme(format="int4", granularity="group", group=32, symmetric=True)
HARMED = "model.layers.1.mlp.up_proj"


def made(folder: Path, how: Any, **more: Any) -> Bundle:
    options = {"engine": False, "profiles": [PROFILE], "changes": small_onnx.LAYERS, **more}
    small = small_onnx.export(folder, "llama", how, exporter=load_exporter("tensorrt"), **options)
    return small_onnx.bundle(small.folder)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """One linear in 4 bits, and none."""
    folder = tmp_path_factory.mktemp("layerwise")
    one = made(folder / "int4", lambda linear: INT4 if linear == HARMED else None)
    return one, made(folder / "float", None)


def test_an_error_begins_where_it_was_made(sides: tuple[Bundle, Bundle]) -> None:
    found, notes = compare_layers(*sides)
    assert "no tokenizer" in notes[0]
    names = [each.layer for each in found]
    place = names.index(HARMED)
    assert {"model.layers.0.self_attn.q_proj", "model.norm", "logits"} <= set(names)
    for each in found[:place]:
        assert each.max_error == 0 and each.cosine == pytest.approx(1)
    harmed = found[place]
    assert 0.01 < harmed.mean_error < 0.3 and harmed.kind == "MatMul"
    assert harmed.cosine is not None and 0.97 < harmed.cosine < 0.9999
    assert harmed.snr == pytest.approx(-20 * np.log10(np.sqrt(2 * (1 - harmed.cosine))), abs=1)
    assert 0 < found[-1].mean_error < harmed.mean_error and found[-1].kind == "output"
    text = str(shown(found, notes))
    assert f"{len(found)} layers" in text


def test_an_engine_is_one_runner_more(sides: tuple[Bundle, Bundle]) -> None:
    """In its place one that gives everything with the other sign."""
    from polygraphy.backend.onnxrt import OnnxrtRunner

    class Engine(OnnxrtRunner):
        def infer_impl(self, feed_dict: Any) -> Any:
            return {name: -value for name, value in super().infer_impl(feed_dict).items()}

    network = sides[1].path / "engine" / "network.onnx"
    feed, _ = fed(network)
    asked: list[Path] = []

    def make(path: Path, tensors: list[str], feed: Any) -> Any:
        asked.append(path)
        return Engine(layerwise._session(ir.load(path), path.parent, tensors), name="engine")

    found = layerwise.compared(network, network, feed, make)
    assert asked == [network]
    assert all(each.max_error == 0 and each.cosine == pytest.approx(1) for each in found)
    assert all(each.engine == pytest.approx(-1) for each in found)


def test_without_a_gpu_the_engine_is_refused(sides: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ([], "no NVIDIA driver"))
    with pytest.raises(InputError, match="gpu-absent"):
        compare_layers(*sides, runtime="tensorrt_rtx")


def test_what_cannot_be_compared_is_refused(sides: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="engine-missing"):
        compare_layers(small_onnx.bundle(tmp_path / "empty"), sides[1])
    longer = {**PROFILE, "context": [1, 16, 60]}
    with pytest.raises(InputError, match="networks-differ") as caught:
        compare_layers(sides[0], made(tmp_path / "longer", None, profiles=[longer]))
    assert "attention_mask" in str(caught.value.value)
    np.savez(tmp_path / "few.npz", input_ids=np.zeros((1, 3)))
    with pytest.raises(InputError, match=r"inputs-differ.*attention_mask"):
        compare_layers(*sides, inputs=tmp_path / "few.npz")


def test_polygraphy_builds_the_marked_network_without_a_gpu(tmp_path: Path) -> None:
    """The network with its layers given out, for one shape, up to the engine's bytes; in a child, as it is done."""
    pytest.importorskip("tensorrt_rtx")
    network = made(tmp_path / "grown", INT4, cache="grown").path / "engine" / "network.onnx"
    library = tensorrt_library.load("tensorrt_rtx")
    (tmp_path / "place").mkdir()
    job = {"network": str(network), "place": str(tmp_path / "place")}
    assert child.run(engine_bytes, job, remedy="none", environment=library.environment())[0] > 10_000
    with pytest.raises(InputError, match="cache-in-place"):
        kept = made(tmp_path / "kept", INT4).path / "engine" / "network.onnx"
        feed, _ = fed(kept)
        layerwise.prepared(kept, tmp_path / "place", [], feed, library, sm="8.9")


def engine_bytes(job: dict[str, str], caller: child.Caller) -> None:
    """Bytes of an engine for a GPU that is not there."""
    from polygraphy.backend.trt import EngineBytesFromNetwork

    network, library = Path(job["network"]), tensorrt_library.load("tensorrt_rtx")
    tensors = [tensor for tensor, _ in layerwise.layers(ir.load(network)).values()]
    loaders = layerwise.prepared(network, Path(job["place"]), tensors, fed(network)[0], library, sm="8.9")
    caller.row(EngineBytesFromNetwork(*loaders)().nbytes)


def test_an_engine_is_run_by_the_library_that_was_asked_for(sides: tuple[Bundle, Bundle]) -> None:
    """Without a GPU the child ends in an error of the library, not in one of Polygraphy's settings."""
    pytest.importorskip("tensorrt_rtx")
    network = sides[1].path / "engine" / "network.onnx"
    if machine.gpus()[0]:
        pytest.skip("a GPU is here")
    with pytest.raises(InputError) as caught:
        layerwise.with_engine(network, network, fed(network)[0], tensorrt_library.load("tensorrt_rtx"))
    assert caught.value.code in {"network-unrunnable", "cache-in-place"}
    assert "USE_TENSORRT_RTX" not in str(caught.value)
