"""The float model as ONNX: made once, kept by all that changes it, and no reason for anything else to fail."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_onnx import EXPORT

from quantkit.bundle import Check
from quantkit.errors import GateError, InputError, Stopped
from quantkit.model.source.open import Source, open_model
from quantkit.pipeline import baseline
from quantkit.pipeline.baseline import float_export

if TYPE_CHECKING:
    from conftest import Made

OPTIONS = {"dialect": "onnxruntime", "accuracy_level": 4, "merge": True}


@pytest.fixture
def source(made: Made, own_cache: Path) -> Iterator[Source]:
    yield open_model(str(made.model))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An exporter that writes next to nothing, and where it did."""
    written: list[Path] = []

    def write(self: object, build: Path, *_: object) -> None:
        written.append(build)
        build.mkdir()
        (build / "model.onnx").write_text("graph")

    monkeypatch.setattr(type(EXPORT), "export", write)
    monkeypatch.setattr(type(EXPORT), "check", lambda *_, **__: [])
    return written


def test_it_is_the_float_model_in_float(source: Source, made: Made) -> None:
    folder = float_export(source, "onnx", OPTIONS)
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    model = OnnxModel(folder, threads=1)
    assert model.accuracy_level == 0
    assert model.context == 64
    # the same exporter's graph of the float recipe is the same file
    wanted = made.floating / "onnx"
    for name in ("model.onnx", "model.onnx.data"):
        assert (folder / name).read_bytes() == (wanted / name).read_bytes()


def test_it_is_made_once_for_all_that_has_the_same_graph(source: Source, quick: list[Path]) -> None:
    first = float_export(source, "onnx", OPTIONS)
    assert float_export(source, "onnx", {**OPTIONS, "accuracy_level": 0}) == first, "which nothing of it is computed in"
    assert first == baseline.place(source, "onnx", OPTIONS) / "onnx"
    assert len(quick) == 1
    assert float_export(source, "onnx", {**OPTIONS, "merge": False}) != first
    assert len(quick) == 2
    assert [path.name for path in first.parent.parent.iterdir() if "-" in path.name] == []


@pytest.mark.parametrize("change", ["source", "code", "versions"])
def test_another_source_exporter_or_version_gets_another(
    change: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    before = baseline.place(source, "onnx", OPTIONS)
    if change == "source":
        source = replace(source, hashing=lambda: "0" * 64)
    elif change == "code":
        monkeypatch.setattr(baseline, "_files", lambda exporter: [])
    else:
        monkeypatch.setattr("quantkit.machine.versions", lambda: {"onnxruntime": "0.1"})
    assert baseline.place(source, "onnx", OPTIONS) != before


def test_the_code_that_is_hashed_is_all_of_the_exporter_s() -> None:
    """A module that the exporter imports and the hash does not know would leave old graphs in the cache."""
    from house.source import files, tree

    modules, seen, todo = files(), set(), ["quantkit.exporters.onnx.exporter"]
    while todo:
        module = todo.pop()
        if module in seen or not module.startswith("quantkit.exporters."):
            continue
        seen.add(module)
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                todo += [name for name in names if name in modules]
    # what copies files and what checks changes no float graph
    unrelated = {"quantkit.exporters.carried", "quantkit.exporters.check"}
    hashed = set(baseline._files("onnx"))
    assert len(seen) > 8, seen
    assert {modules[module] for module in seen - unrelated} <= hashed


def test_two_at_once_make_one(source: Source, quick: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    inside, may_go = threading.Event(), threading.Event()
    write = type(EXPORT).export

    def slow(self: Any, build: Path, *rest: object) -> None:
        inside.set()
        assert may_go.wait(20)
        write(self, build, *rest)

    monkeypatch.setattr(type(EXPORT), "export", slow)
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(float_export(source, "onnx", OPTIONS))) for _ in range(2)]
    both[0].start()
    assert inside.wait(20)
    both[1].start()
    may_go.set()
    for each in both:
        each.join(20)
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(quick) == 1


def test_what_a_killed_process_left_is_cleared_away(source: Source, quick: list[Path]) -> None:
    left = baseline.place(source, "onnx", OPTIONS).with_name("0123-abcd")
    (left / "bundle").mkdir(parents=True)
    float_export(source, "onnx", OPTIONS)
    assert not left.exists()


def test_a_graph_that_is_wrong_is_not_kept(source: Source, quick: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Check(name="reload.onnxruntime", value=0.3, limit=1e-4, ok=False, where="steps")
    monkeypatch.setattr(type(EXPORT), "check", lambda *_, **__: [wrong])
    with pytest.raises(GateError, match="float baseline"):
        float_export(source, "onnx", OPTIONS)
    assert not baseline.place(source, "onnx", OPTIONS).exists()
    assert [path.name for path in baseline.place(source, "onnx", OPTIONS).parent.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_says_so(
    source: Source, quick: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cache-not-writable.*set QUANTKIT_CACHE"):
        float_export(source, "onnx", OPTIONS)
    assert quick == []


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_is_wrong_input_and_not_a_stop(
    when: str, source: Source, quick: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Stopped` would promise a --resume, and end a compile whose own disk has room."""

    def full(*_: object) -> None:
        raise Stopped("disk-full", where="x", value="No space left on device")

    if when == "before":
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    else:
        monkeypatch.setattr(type(EXPORT), "export", full)
    with pytest.raises(InputError, match=r"disk-space.*QUANTKIT_CACHE"):
        float_export(source, "onnx", OPTIONS)
    assert not baseline.place(source, "onnx", OPTIONS).exists()
