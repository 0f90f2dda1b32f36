"""A resume of a graph: another bundle is never given back, an interrupt says what to do, a full disk is told before."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graph import chain

import quantkit
from quantkit.errors import GateError, InputError, QuantkitError
from quantkit.pipeline.graphs.prepared import prepare
from quantkit.pipeline.graphs.subject import estimate
from quantkit.pipeline.request import Request

# nothing is declined, but samples without labels cannot judge the gate, which is a decision
ASKED = ["passes=[gptq]", "gates={recall_drop_max: 1.0}"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph, samples, other samples, and the bundle of the first two."""
    folder = tmp_path_factory.mktemp("made")
    chain(folder / "graph.onnx", folder / "set.npz")
    chain(folder / "other.onnx", folder / "other.npz", seed=1)
    compiled(folder, folder / "bundle")
    return folder


def compiled(made: Path, out: Path, **more: Any) -> quantkit.Bundle:
    graph, samples = more.pop("graph", "graph.onnx"), more.pop("samples", "set.npz")
    asked = {"recipe": "int8", "target": "cpu-x86", "changes": ASKED, "speed": False, **more}
    return quantkit.compile(str(made / graph), calibration=made / samples, out=out, **asked)


def test_what_is_finished_is_given_back(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.pipeline.graphs.subject.QuantizedGraph", None)
    before = quantkit.Bundle.load(made / "bundle")
    again = compiled(made, made / "bundle", resume=True)
    assert again.manifest == before.manifest


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"graph": "other.onnx"}, "model"),
        ({"recipe": "int8-network"}, "recipe"),
        ({"changes": [*ASKED, "scheme.weights.format=int7"]}, "recipe"),
        ({"samples": "other.npz"}, "recipe and calibration"),
        ({"target": "cpu-arm"}, "target"),
    ],
)
def test_another_finished_bundle_is_refused(made: Path, asked: dict[str, Any], what: str) -> None:
    before = quantkit.Bundle.load(made / "bundle").manifest
    with pytest.raises(InputError, match="out-exists") as caught:
        compiled(made, made / "bundle", resume=True, **asked)
    assert caught.value.value == f"a finished bundle of another {what}"
    assert quantkit.Bundle.load(made / "bundle").manifest == before


def test_samples_are_told_apart_by_their_content(made: Path, tmp_path: Path) -> None:
    shutil.copyfile(made / "graph.onnx", tmp_path / "graph.onnx")
    shutil.copyfile(made / "other.npz", tmp_path / "set.npz")
    with pytest.raises(InputError, match="a finished bundle of another calibration"):
        compiled(tmp_path, made / "bundle", resume=True)


def test_bits_depend_on_threads(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    with pytest.raises(InputError, match="a finished bundle of another number of threads"):
        compiled(made, made / "bundle", resume=True)


def test_strict_looks_at_what_is_finished(made: Path) -> None:
    with pytest.raises(GateError, match=r"strict.*gate-not-judged"):
        compiled(made, made / "bundle", resume=True, strict=True)


def test_an_interrupt_before_anything_is_kept_leaves_nothing_to_resume(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.pipeline.compile._compiled", interrupted)
    for _ in range(2):  # the second as the remedy says
        with pytest.raises(QuantkitError) as caught:
            compiled(made, tmp_path / "out")
        assert (caught.value.code, caught.value.exit) == ("interrupted", 75)
        assert "--resume" not in caught.value.line() and "anew" in caught.value.remedy
        assert not list(tmp_path.glob("out*"))


def test_an_interrupt_says_what_is_kept_and_what_to_do(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quantkit.graph.codes.solve.solved", interrupted)
        with pytest.raises(QuantkitError) as caught:
            compiled(made, tmp_path / "out")
    assert (caught.value.code, caught.value.exit) == ("interrupted", 75)
    assert (caught.value.where, caught.value.value) == (str(tmp_path / "out"), "1 step kept")
    assert "--resume" in str(caught.value.remedy)
    with pytest.raises(InputError, match="unfinished-build"):
        compiled(made, tmp_path / "out")
    for asked, key in (({"recipe": "int8-network"}, "recipe"), ({"target": "cpu-arm"}, "target.name")):
        with pytest.raises(InputError, match="resume-mismatch") as caught:
            compiled(made, tmp_path / "out", resume=True, **asked)
        assert f": {key}" in str(caught.value.where)
    assert (tmp_path / "out.partial").exists()


def test_before_anything_is_kept_an_interrupt_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.graph.codes.solve.ranges", interrupted)
    with pytest.raises(QuantkitError, match="interrupted"):
        compiled(made, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_hold_it_is_refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request.of(str(made / "graph.onnx"), recipe="int8", target="cpu-x86", calibration=made / "set.npz")
    free = estimate(prepare(request)).disk.most - 1
    monkeypatch.setattr("quantkit.pipeline.estimate.shutil.disk_usage", lambda _: type("Usage", (), {"free": free})())
    with pytest.raises(InputError, match="disk-space"):
        compiled(made, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
