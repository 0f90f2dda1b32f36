"""What a compile would fail with is found on one block, without reading or doing the rest."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.pipeline import Request
from quantkit.pipeline import rehearsal as one_block
from quantkit.pipeline.blocks.prepared import prepare
from quantkit.pipeline.rehearsal import Rehearsal, _multiplied, rehearse
from quantkit.recipe import Recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """A tiny decoder in three shards, one a block."""
    home = tmp_path_factory.mktemp("rehearsed") / "llama.tiny"
    model = zoo.tiny("llama", vocab_size=258)
    model.save_pretrained(home)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(home)
    whole = load_file(home / "model.safetensors")
    (home / "model.safetensors").unlink()
    placed = {name: f"model-{name.split('.')[2] if '.layers.' in name else 0}.safetensors" for name in whole}
    for shard in set(placed.values()):
        save_file({name: whole[name] for name in whole if placed[name] == shard}, home / shard)
    index = {"metadata": {}, "weight_map": placed}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    return home


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "llama.tiny")


def recipe(*passes: str, group: int = 32, **changes: Any) -> Recipe:
    data = {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 3, "tokens": 32},
        "scheme": {"weights": {"format": "int4", "granularity": "group", "group": group, "symmetric": False}},
        "passes": list(passes or ("gptq",)),
        "export": [{"checkpoint": {}}],
        **changes,
    }
    return Recipe.from_dict(data, name="tiny")


def rehearsed(model: Path, out: Path, chosen: Recipe | None = None) -> Rehearsal:
    request = Request.of(str(model), recipe=chosen or recipe(), out=out / "bundle", speed=False)
    return rehearse(request)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsal, Path]:
    place = tmp_path_factory.mktemp("out")
    return rehearsed(folder, place), place


def test_a_good_compile_has_no_findings_and_leaves_nothing(found: tuple[Rehearsal, Path]) -> None:
    rehearsal, place = found
    assert rehearsal.ok and not rehearsal.findings
    assert list(place.iterdir()) == []
    assert rehearsal.sequences == 3
    assert rehearsal.block == "model.layers.0"


def test_what_was_measured_corrects_what_was_reckoned(found: tuple[Rehearsal, Path]) -> None:
    rehearsal, _ = found
    assert set(rehearsal.measured) == {"quantize", "export", "check"}
    assert all(seconds > 0 for seconds in rehearsal.measured.values())
    assert rehearsal.compiling is not None
    assert set(rehearsal.compiling.seconds or ()) == {"quantize", "export", "check"}
    assert rehearsal.compiling.peak > 1e8
    assert json.loads(json.dumps(rehearsal.as_dict()))["compiling"]["total_seconds"] > 0


def test_a_missing_shard_of_a_later_block(own: Path, tmp_path: Path) -> None:
    (own / "model-2.safetensors").unlink()
    (finding,) = rehearsed(own, tmp_path).findings
    assert finding.fails and finding.code == "weights-missing-shard"
    assert "model-2.safetensors" in finding.line


@pytest.mark.parametrize(("block", "name"), [(0, "self_attn.q_proj"), (2, "mlp.down_proj")])
def test_weights_that_are_not_finite(own: Path, tmp_path: Path, block: int, name: str) -> None:
    """In the block that is run, and in one that is only looked through."""
    shard = own / f"model-{block}.safetensors"
    tensors = load_file(shard)
    tensors[f"model.layers.{block}.{name}.weight"][3, 5] = torch.nan
    save_file(tensors, shard)
    rehearsal = rehearsed(own, tmp_path)
    assert not rehearsal.ok
    assert [finding.code for finding in rehearsal.findings] == ["weights-nonfinite"]
    assert f"layers.{block}.{name}" in rehearsal.findings[0].line


def test_a_disk_that_is_too_small(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("quantkit.pipeline.estimate.shutil.disk_usage", lambda _: usage(10, 9, 1000))
    codes = {finding.code for finding in rehearsed(folder, tmp_path).findings if finding.fails}
    assert codes == {"disk-space"}


def test_a_process_that_may_not_have_the_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.machine.memory_limit", lambda *_: 10**8)
    codes = {finding.code: finding.fails for finding in rehearsed(folder, tmp_path).findings}
    assert codes == {"block-not-run": False, "out-of-memory": True}


@pytest.mark.parametrize(
    ("chosen", "code"),
    [
        (recipe(group=48), "group-indivisible"),
        (recipe(calibration={"set": "prose-en", "samples": 100000, "tokens": 512}), "calibration-short"),
        (recipe(overrides=[{"match": "*.nothing", "weights": None}]), "override-unmatched"),
    ],
)
def test_what_is_refused_is_a_finding(folder: Path, tmp_path: Path, chosen: Recipe, code: str) -> None:
    rehearsal = rehearsed(folder, tmp_path, chosen)
    assert [finding.code for finding in rehearsal.findings] == [code]
    assert rehearsal.compiling is None and not rehearsal.ok


def test_an_export_that_cannot_be_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("an operator that nobody has")

    monkeypatch.setattr("quantkit.exporters.checkpoint.exporter.Checkpoint.export", fails)
    rehearsal = rehearsed(folder, tmp_path)
    (finding,) = rehearsal.findings
    assert finding.code == "rehearsal-failed" and "an operator that nobody has" in finding.line
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_attention_keeps_from_being_exported(byte_tokenizer: Any, tmp_path: Path) -> None:
    """Bloom's attention is its own: an export says so after every block, a rehearsal after one."""
    zoo.save(tmp_path / "bloom", byte_tokenizer, "bloom", vocab_size=258)
    rehearsal = rehearsed(tmp_path / "bloom", tmp_path, recipe("rtn", export=[{"onnx": {}}]))
    assert [finding.code for finding in rehearsal.findings] == ["attention-unsupported"]


def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("quantkit.pipeline.rehearsal.tempfile.mkdtemp", refuses)
    (finding,) = rehearsed(folder, tmp_path).findings
    assert finding.code == "out-not-writable"


def test_a_block_is_multiplied_by_a_straight_line_through_what_it_took() -> None:
    runs = [(1, {"quantize": (9.0, 2.0), "export": (1.0, 0.5)}), (4, {"quantize": (9.0, 5.0), "export": (1.0, 0.5)})]
    assert _multiplied(runs, 10, 3.0) == {"quantize": 3 * (5 + 1.0 * 6), "export": 3 * 0.5}
    assert _multiplied(runs[:1], 1, 3.0) == {"quantize": 6.0, "export": 1.5}


def test_the_largest_block_is_the_one_that_is_run(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of DeepSeek's blocks the first is dense and the second has the experts."""
    model = zoo.mixture("deepseek", vocab_size=258)
    model.save_pretrained(tmp_path / "mixture")  # type: ignore[operator]
    byte_tokenizer.save_pretrained(tmp_path / "mixture")
    export = [{"checkpoint": {"layout": "dense"}}]
    chosen = recipe("rtn", group=16, on_indivisible="keep", export=export)
    rehearsal = rehearsed(tmp_path / "mixture", tmp_path, chosen)
    assert not rehearsal.findings
    assert rehearsal.block == "model.layers.1"


def test_a_block_alone_is_stored_as_in_the_whole(folder: Path, tmp_path: Path) -> None:
    weights = {"format": "int4", "granularity": "group", "group": 32}
    changes = {"scheme": {"weights": weights}, "keep": ["*.v_proj"]}
    chosen = recipe(overrides=[{"match": "model.layers.1.mlp.*", "weights": {"format": "int8"}}], **changes)
    prepared = prepare(Request.of(str(folder), recipe=chosen, out=tmp_path / "x"), whole=False)
    alone = one_block.alone(prepared.request.recipe, prepared, 1)
    for name in ("mlp.up_proj", "self_attn.k_proj", "self_attn.v_proj"):
        mine = alone.weights_for(f"model.layers.0.{name}")
        assert mine == prepared.layers.schemes.get(f"model.layers.1.{name}")


def test_the_cut_model_holds_that_block_and_little_else(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(one_block, "ROWS", 100)
    prepared = prepare(Request.of(str(folder), recipe=recipe(), out=tmp_path / "x"), whole=False)
    one_block.cut(prepared, 2, tmp_path / "cut")
    stored = load_file(tmp_path / "cut" / "model.safetensors")
    whole = load_file(folder / "model-2.safetensors")
    inside = {name: value for name, value in stored.items() if ".layers." in name}
    assert len(inside) == len(whole)
    for name, value in whole.items():
        assert torch.equal(inside[name.replace("layers.2", "layers.0")], value)
    assert stored["model.embed_tokens.weight"].shape == (100, 64)
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_hidden_layers"] == 1


def test_a_graph_is_not_rehearsed(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        rehearse(Request.of("fashion-mnist-cnn", recipe="int8-network", out=tmp_path / "x"))
    assert refused.value.code == "compile-unknown"
