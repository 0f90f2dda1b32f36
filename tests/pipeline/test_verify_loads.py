"""A finished bundle, loaded again: what its graph does to the process that opens it is a check that fails."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import small_onnx
from small_onnx import Small, export, kept, scheme

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.kernels.cpu import library
from quantkit.pipeline import reload
from quantkit.runtimes import child

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return export(tmp_path_factory.mktemp("good"), "llama", scheme(), accuracy_level=4)


def _changed(good: Small, folder: Path, kind: str, name: str, add: int) -> Bundle:
    small = kept(good, folder)
    model = small.proto()
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == kind else ():
            attribute.i += add if attribute.name == name else 0
    (small.onnx / "model.onnx").write_bytes(model.SerializeToString())
    small_onnx.bundle(small.folder)
    return Bundle.load(small.folder)


def test_an_honest_graph_is_loaded_in_each_runtime_that_is_here(good: Small, tmp_path: Path) -> None:
    names = ["onnxruntime"]
    if library.why_not() is None and "avx512_vnni" in machine.isa_features():
        names.append("quantkit_cpu")
    found = reload.loaded(_changed(good, tmp_path / "b", "", "", 0))
    assert [(check.name, check.ok) for check in found] == [(f"{name}.loads", True) for name in names]


@pytest.mark.parametrize(
    ("kind", "name", "add"),
    [
        ("GroupQueryAttention", "num_heads", 2**60),
        ("GroupQueryAttention", "kv_num_heads", 2**32 - 2),
        ("GroupQueryAttention", "num_heads", 1),
        ("MatMulNBits", "K", 2**32),
        ("MatMulNBits", "block_size", -16),
    ],
)
def test_a_graph_that_does_not_open_is_said(good: Small, tmp_path: Path, kind: str, name: str, add: int) -> None:
    (found,) = reload.loaded(_changed(good, tmp_path / "b", kind, name, add))
    assert not found.ok and found.name == "onnxruntime.loads" and "onnx-unreadable" in (found.where or "")


def _dies(_: Any, caller: child.Caller) -> None:
    caller.row({"onnxruntime": ""})
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.usefixtures("fresh_children")
def test_one_that_ends_its_process_is_said(good: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = _changed(good, tmp_path / "b", "", "", 0)
    monkeypatch.setattr(reload, "_steps", _dies)
    monkeypatch.setattr("quantkit.kernels.cpu.library.why_not", lambda: None)
    monkeypatch.setattr("quantkit.runtimes.quantkit_cpu.why_not", lambda: None)
    stock, own = reload.loaded(bundle)
    assert stock.ok and own.name == "quantkit_cpu.loads" and not own.ok and "SIGSEGV" in (own.where or "")
