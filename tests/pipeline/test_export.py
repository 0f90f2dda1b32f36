"""An export added to a finished bundle: the same as a compile's, or nothing at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from small_onnx import EXPORT

from quantkit.bundle import Bundle, Check
from quantkit.errors import GateError, InputError
from quantkit.pipeline.export import export_bundle

if TYPE_CHECKING:
    from conftest import Made

Copy = Callable[[Path], Bundle]
CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}


def test_it_is_what_a_compile_would_have_made(made: Made, copied: Copy) -> None:
    bundle = copied(made.packed)
    done = export_bundle(bundle, "onnx")
    whole = Bundle.load(made.both)
    assert done.bundle.manifest.as_dict() == Bundle.load(bundle.path).manifest.as_dict()
    assert done.bundle.manifest.content_sha256 == whole.manifest.content_sha256 != bundle.manifest.content_sha256
    assert done.bundle.manifest.content_sha256 in done.says
    assert {check.name for check in done.checks} >= {"reload.onnxruntime", "onnx.contained"}
    assert {check.name for check in done.bundle.manifest.checks} == {check.name for check in whole.manifest.checks}
    assert all(check.ok for check in [*done.checks, *done.bundle.verify()])
    assert [next(iter(step)) for step in done.bundle.manifest.recipe["export"]] == ["checkpoint", "onnx"]
    assert {row["subject"] for row in done.bundle.measurements} == {done.bundle.manifest.content_sha256}
    # nothing lies about beside it, and the card speaks of what is there now
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]
    card = (bundle.path / "README.md").read_text()
    assert done.bundle.manifest.content_sha256 in card
    assert bundle.manifest.content_sha256 not in card
    with pytest.raises(InputError, match="export-exists"):
        export_bundle(done.bundle, "onnx")


def test_options_come_from_the_target_and_from_who_asks(made: Made, copied: Copy) -> None:
    stored = Bundle.load(made.both).manifest.recipe["export"][1]["onnx"]
    assert stored["accuracy_level"] == 4
    done = export_bundle(copied(made.packed), "onnx", ["accuracy_level=0"])
    assert done.bundle.manifest.recipe["export"][1]["onnx"]["accuracy_level"] == 0
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    assert OnnxModel(done.bundle.path / "onnx", threads=1).accuracy_level == 0


@pytest.mark.parametrize(
    ("to", "changes", "code", "says"),
    [
        ("onxx", [], "unknown-exporter", "did you mean 'onnx'"),
        ("checkpoint", [], "export-unsupported", "one of gguf, onnx"),
        ("onnx", ["accuracy_level"], "set-invalid", "NAME=YAML"),
        ("onnx", ["accuracy_level=3"], "set-invalid", "0, 1 or 4"),
        ("onnx", ["acuracy_level=4"], "set-invalid", "did you mean 'accuracy_level'"),
        ("onnx", ["accuracy_level={"], "yaml-invalid", "--set accuracy_level"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_impossible_export_is_refused(
    made: Made, to: str, changes: list[str], code: str, says: str, dry_run: bool
) -> None:
    with pytest.raises(InputError) as caught:
        export_bundle(Bundle.load(made.packed), to, changes, dry_run=dry_run)
    assert caught.value.code == code
    assert says in caught.value.line()


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_the_checkpoint_alone_knows_is_refused_by_a_dry_run_too(made: Made, dry_run: bool) -> None:
    bundle = Bundle.load(made.packed)
    layers = [
        each.model_copy(update={"scheme": {**each.scheme, "scale": "float16"}}) for each in bundle.manifest.layers
    ]
    held = Bundle(bundle.path, bundle.manifest.model_copy(update={"layers": layers}))
    with pytest.raises(InputError, match=r"gguf-tokenizer.*a BPE of no merges"):
        export_bundle(held, "gguf", dry_run=dry_run)


def test_a_bundle_that_has_no_codes_is_refused_by_a_dry_run_too(made: Made, copied: Copy) -> None:
    bundle = copied(made.packed)
    dense = [{"checkpoint": {"layout": "dense"}}]
    changed = bundle.put_all({}, recipe={**bundle.manifest.recipe, "export": dense})
    with pytest.raises(InputError, match="bundle-dense"):
        export_bundle(changed, "onnx", dry_run=True)
    graph = [entry for entry in bundle.manifest.files if not entry.path.startswith("model/")]
    without = Bundle(bundle.path, bundle.manifest.model_copy(update={"files": graph}))
    with pytest.raises(InputError, match="bundle-without-checkpoint"):
        export_bundle(without, "onnx", dry_run=True)


def test_a_dry_run_writes_nothing(made: Made, copied: Copy) -> None:
    bundle = copied(made.packed)
    done = export_bundle(bundle, "onnx", dry_run=True)
    assert "nothing was written" in done.says
    assert done.as_dict()["dry_run"]
    assert Bundle.load(bundle.path) == bundle
    assert not (bundle.path / "onnx").exists()


def test_a_damaged_checkpoint_is_not_exported(made: Made, copied: Copy) -> None:
    bundle = copied(made.packed)
    weights = bundle.path / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match=r"hash-mismatch.*model\.safetensors"):
        export_bundle(bundle, "onnx")
    assert not (bundle.path / "onnx").exists()


def test_an_export_that_differs_from_the_checkpoint_is_not_added(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Check(name="reload.onnxruntime", value=0.3, limit=1e-4, ok=False, where="steps")
    monkeypatch.setattr(type(EXPORT), "check", lambda *_, **__: [wrong])
    bundle = copied(made.packed)
    before = json.loads((bundle.path / "manifest.json").read_text())
    with pytest.raises(GateError, match="check-failed"):
        export_bundle(bundle, "onnx")
    assert json.loads((bundle.path / "manifest.json").read_text()) == before
    assert all(check.ok for check in bundle.verify())
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]


def test_stopped_in_the_middle_leaves_the_bundle_as_it_was(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    bundle = copied(made.packed)
    with monkeypatch.context() as patched:
        patched.setattr(type(EXPORT), "check", stop)
        with pytest.raises(KeyboardInterrupt):
            export_bundle(bundle, "onnx")
    assert all(check.ok for check in Bundle.load(bundle.path).verify())
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]


def test_through_a_link_it_stays_on_the_disk_of_the_bundle(made: Made, copied: Copy, tmp_path: Path) -> None:
    bundle = copied(made.packed)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(bundle.path)
    done = export_bundle(Bundle.load(link), "onnx")
    assert all(check.ok for check in done.bundle.verify())
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["link"]
