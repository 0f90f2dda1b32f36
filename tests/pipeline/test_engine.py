"""One more engine for a bundle that has its network: real builds by TensorRT-RTX, no GPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_onnx

from quantkit import machine
from quantkit.bundle import Bundle, seal
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.pipeline import engines as engine
from quantkit.pipeline.export import export_bundle
from quantkit.runtimes.tensorrt.file import verified
from quantkit.target import Profile

pytestmark = pytest.mark.usefixtures("one_thread")
PROFILE = Profile(name="decode", batch=(1, 1, 2), length=(1, 1, 4), context=(1, 16, 60))
HERE = [{"name": "NVIDIA A10", "sm": "8.6", "memory": 1, "driver": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a float network, without an engine, for a card of SM 8.9."""
    pytest.importorskip("tensorrt_rtx")
    made = small_onnx.export(
        tmp_path_factory.mktemp("engine"),
        "llama",
        None,
        exporter=load_exporter("tensorrt"),
        engine=False,
        changes=small_onnx.LAYERS,
        profiles=[PROFILE.model_dump()],
    )
    bundle = small_onnx.bundle(made.folder)
    target = {"runtimes": ["tensorrt_rtx"], "arch": {"sm": "8.9"}, "profiles": [PROFILE.model_dump(mode="json")]}
    manifest = bundle.manifest.model_copy(update={"target": target})
    seal.write_manifest(made.folder, manifest.as_bytes())
    return made.folder


def test_engines_are_built_for_the_target_and_for_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Bundle.load(folder)
    assert export_bundle(before, "tensorrt", dry_run=True).bundle.manifest == before.manifest
    done = export_bundle(before, "tensorrt")
    assert done.engine == "engine/sm89.engine"
    assert "the bundle keeps its content_sha256" in done.says
    monkeypatch.setattr(machine, "gpus", lambda: (HERE, ""))
    done = export_bundle(done.bundle, "tensorrt")
    assert done.engine == "engine/sm86.engine"
    after = Bundle.load(folder)
    assert after.manifest.content_sha256 == before.manifest.content_sha256
    assert [path.name for path in verified(after) if path.suffix == ".engine"] == ["sm86.engine", "sm89.engine"]
    assert all(check.ok for check in after.verify())
    record = json.loads((folder / "engine" / "sm86.json").read_text())
    assert (record["sm"], record["driver"]) == (["8.6"], "")
    assert record["options"] == {"workspace": 4e9, "optimization_level": 3}, "what was applied"
    # again, over a damaged one: that is what it is for
    (folder / "engine" / "sm86.engine").write_bytes(b"")
    with pytest.raises(InputError, match="hash-mismatch"):
        verified(after)
    export_bundle(after, "tensorrt")
    verified(Bundle.load(folder))
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("fake_builder")
def test_what_the_timing_cache_saved_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (HERE, ""))
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    bundle = Bundle.load(shutil.copytree(folder, tmp_path / "b"))
    said = []
    for _ in range(2):
        done = export_bundle(bundle, "tensorrt", ["library=tensorrt", "hardware_compatible=true"])
        bundle = done.bundle
        (note,) = [each for each in bundle.manifest.decisions if each.where == "engine/sm86.engine"]
        assert note.code == "note" and note.reason in done.says
        said.append(note.reason)
    assert "the timing cache was empty" in said[0]
    record = json.loads((bundle.path / "engine" / "sm86.json").read_text())
    assert record["cache_hit"] and record["saved_seconds"] > 0
    assert record["driver"] == "x" and record["options"]["hardware_compatible"]
    assert f"the timing cache saved {record['saved_seconds']:.1f} s" in said[1]
    verified(bundle)


def test_a_damaged_network_builds_nothing(folder: Path) -> None:
    path = folder / "engine" / "network.onnx.data"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    try:
        with pytest.raises(InputError, match="hash-mismatch"):
            export_bundle(Bundle.load(folder), "tensorrt")
    finally:
        data[7] ^= 1
        path.write_bytes(data)


def test_a_capability_that_is_not_known_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="sm-unsupported"):
        export_bundle(Bundle.load(folder), "tensorrt", ["sm='9.0'"])


@pytest.mark.parametrize(
    ("asked", "known", "wanted"),
    [
        ({}, ["8.6", "8.9"], "8.6"),
        ({"sm": None}, ["8.6", "8.9"], "8.9"),
        ({}, ["8.9"], "8.9"),
        ({}, [], "8.6"),
    ],
)
def test_whose_gpu_it_is_for(
    asked: dict[str, Any], known: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (HERE, ""))
    assert engine.here({"sm": "8.9"}, asked, known)["sm"] == wanted
    monkeypatch.setattr(machine, "gpus", lambda: ([], "none"))
    assert engine.here({"sm": "8.9"}, asked, known)["sm"] == "8.9"
