"""The bundle's document: what it holds, what it refuses, what verification finds."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_build import compile_fake

from quantkit.bundle import Bundle, Manifest, Verdict, content_sha256, disk, inventory
from quantkit.errors import InputError

EXAMPLE: dict[str, Any] = {
    "schema": 1,
    "quantkit": "0.1.0",
    "content_sha256": "a" * 64,
    "state": "complete",
    "model": {
        "name": "smollm2-135m",
        "kind": "decoder",
        "source": {"ref": "alias:smollm2-135m", "sha256": "ab", "dtype": "float32", "was": "gguf Q4_1"},
    },
    "recipe": {"schema": 1},
    "target": {},
    "calibration": {"set": "prose-en", "split": "calib", "ids_sha256": "cd", "samples": 128, "tokens": 512},
    "seed": 0,
    "threads": 2,
    "isa": "avx512_vnni",
    "device": {"id": "x"},
    "versions": {"torch": "2.13.0"},
    "created": "2025-01-01T00:00:00Z",
    "layers": [{"name": "q", "shape": [576, 576], "scheme": {}, "bits_per_weight": 4.31, "error": 0.013}],
    "files": [
        {
            "path": "model/model.safetensors",
            "bytes": 1,
            "sha256": "b" * 64,
            "role": "weights",
            "deterministic": True,
            "for": None,
        }
    ],
    "decisions": [
        {"pass": "gptq", "code": "damping-raised", "where": "q", "from": 0.01, "to": 0.1, "reason": "not positive"}
    ],
    "checks": [{"name": "reload.onnxruntime", "value": 3e-6, "limit": 1e-4, "ok": True}],
    "weights": [
        {
            "state": "carried",
            "reason": "embeddings",
            "linear": False,
            "asked": True,
            "tensors": 1,
            "elements": 64,
            "example": "model.embed_tokens.weight",
        }
    ],
    "verdict": {"answer": "ship_up_to", "batch": 8, "format": None, "because": ["faster"], "forecast": False}
    | {"prompts": None, "instead": ""},
}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return compile_fake(tmp_path / "out", resume=False, steps=2, size=50)


def test_a_manifest_of_before_is_read_in_the_words_of_today(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(EXAMPLE | {"model": EXAMPLE["model"] | {"kind": "vision"}}))
    assert Manifest.read(path).model.kind == "network"
    path.write_text(json.dumps(EXAMPLE | {"model": EXAMPLE["model"] | {"kind": "graph"}}))
    with pytest.raises(InputError, match="'decoder', 'encoder' or 'network'"):
        Manifest.read(path)


def test_the_contract_round_trips_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(EXAMPLE))
    read = Manifest.read(path)
    assert read.as_dict() == EXAMPLE
    assert list(read.as_dict()) == list(EXAMPLE)
    assert json.loads(read.as_bytes()) == EXAMPLE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"schema": 2}, "manifest-schema"),
        ({"schema": None}, "manifest-schema"),
        ({"state": "done"}, "manifest-invalid"),
        ({"extra": 1}, "manifest-invalid"),
        ({"content_sha256": "abc"}, "manifest-invalid"),
        ({"checks": [{"name": "x", "value": float("nan"), "limit": 1, "ok": True}]}, "manifest-invalid"),
        ({"files": EXAMPLE["files"] * 2}, "manifest-invalid"),
        *(
            ({"files": [{**EXAMPLE["files"][0], "path": path}]}, "manifest-invalid")
            for path in ("../x", "/etc/passwd", "a/../b", "", ".", "manifest.json", "a//b", "a\\b", "./a")
        ),
    ],
)
def test_what_is_not_a_manifest_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({**EXAMPLE, **change}))
    with pytest.raises(InputError) as caught:
        Bundle.load(tmp_path)
    assert caught.value.code == code
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_manifest_that_is_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="manifest-invalid"):
        Bundle.load(tmp_path)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="not-a-bundle"):
            Bundle.load(path)


def test_content_sha256_is_what_sha256sum_would_say(bundle: Bundle) -> None:
    lines = ""
    for path in sorted((bundle.path / "model").iterdir()):
        lines += f"{hashlib.sha256(path.read_bytes()).hexdigest()}  model/{path.name}\n"
    assert bundle.manifest.content_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    # the order of the list, and what is not deterministic, do not enter
    assert content_sha256(reversed(bundle.manifest.files)) == bundle.manifest.content_sha256


def _failed(bundle: Bundle) -> dict[str, str]:
    return {check.name: check.where for check in Bundle.load(bundle.path).verify() if not check.ok}


def test_verify_names_what_is_wrong(bundle: Bundle, tmp_path: Path) -> None:
    assert _failed(bundle) == {}
    shard = bundle.path / "model/0.safetensors"
    good = shard.read_bytes()

    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert _failed(bundle) == {"files.sha256": "model/0.safetensors"}
    shard.write_bytes(good[:-1])
    assert _failed(bundle) == {"files.size": "model/0.safetensors"}
    shard.unlink()
    assert _failed(bundle) == {"files.present": "model/0.safetensors"}

    # the right bytes behind a link that leaves the bundle are not in the bundle
    outside = tmp_path / "outside"
    outside.write_bytes(good)
    shard.symlink_to(outside)
    assert _failed(bundle) == {"files.present": "model/0.safetensors", "files.links": "model/0.safetensors"}
    shard.unlink()
    shard.write_bytes(good)

    (bundle.path / "model/extra.py").touch()
    (bundle.path / "away").symlink_to("/")
    assert _failed(bundle) == {"files.unlisted": "away, model/extra.py", "files.links": "away"}


def test_verify_finds_an_edited_manifest(bundle: Bundle) -> None:
    path = bundle.path / "manifest.json"
    data = json.loads(path.read_text())
    data["files"] = [entry for entry in data["files"] if entry["path"] != "model/1.safetensors"]
    path.write_text(json.dumps(data))
    assert _failed(bundle) == {
        "files.unlisted": "model/1.safetensors",
        "content_sha256": "manifest.json",
        "seal": "manifest.json",
    }


def test_measurements_are_replaced_and_the_content_hash_stays(bundle: Bundle) -> None:
    assert bundle.measurements == [{"name": "size.bytes", "value": 1}]
    changed = bundle.put("measurements.jsonl", b'{"a": 1}\n{"a": 2}\n')
    assert changed.measurements == [{"a": 1}, {"a": 2}]
    assert changed == Bundle.load(bundle.path)
    assert changed.manifest.content_sha256 == bundle.manifest.content_sha256
    assert _failed(changed) == {}
    with pytest.raises(ValueError, match="never changes"):
        changed.put("model/config.json", b"{}")
    (bundle.path / "measurements.jsonl").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(InputError, match=r"measurements-invalid.*jsonl:2"):
        _ = bundle.measurements


def test_torch_free() -> None:
    code = "import sys, quantkit.bundle; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what is put into a finished bundle -------------------------------------------------------------------------------


def test_several_files_and_the_verdict_go_in_together(bundle: Bundle) -> None:
    verdict = Verdict(answer="ship_it", because=["faster"])
    changed = bundle.put_all({"README.md": b"card", "report.html": b"page"}, verdict=verdict)
    assert changed == Bundle.load(bundle.path)
    assert changed.manifest.verdict == verdict
    assert {entry.path: entry.role for entry in changed.manifest.files}["report.html"] == "report"
    assert _failed(changed) == {}
    without = changed.put_all({"report.html": None, "never-there": None})
    assert not (bundle.path / "report.html").exists()
    assert without == Bundle.load(bundle.path)
    assert _failed(without) == {}


def test_content_is_refused_before_anything_is_written(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="never changes"):
        bundle.put_all({"onnx/model.onnx": b"graph"})
    assert not (bundle.path / "onnx").exists()


def _beside(bundle: Bundle) -> Path:
    folder = bundle.path.parent / "made" / "onnx"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "tokenizer.json").write_bytes(b"{}")
    return folder


def test_added_content_gives_a_new_identity_that_the_rows_follow(bundle: Bundle) -> None:
    old = bundle.manifest.content_sha256
    bundle = bundle.put("measurements.jsonl", json.dumps({"subject": old, "value": 1}).encode() + b"\n")
    added = bundle.add_content("onnx", _beside(bundle), recipe={"export": [{"onnx": {}}]})
    assert added == Bundle.load(bundle.path)
    new = added.manifest.content_sha256
    assert new == content_sha256(inventory(bundle.path)) != old
    assert added.measurements == [{"subject": new, "value": 1}]
    assert added.manifest.recipe == {"export": [{"onnx": {}}]}
    assert {entry.path: entry.role for entry in added.manifest.files if entry.path.startswith("onnx/")} == {
        "onnx/model.onnx": "onnx",
        "onnx/tokenizer.json": "tokenizer",
    }
    assert _failed(added) == {}
    with pytest.raises(InputError, match="export-exists"):
        added.add_content("onnx", bundle.path.parent)
    assert _failed(added) == {}


def test_adding_content_does_not_vouch_for_what_was_damaged_since(bundle: Bundle) -> None:
    shard = bundle.path / "model/0.safetensors"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    with pytest.raises(InputError, match=r"hash-mismatch.*0\.safetensors"):
        bundle.demand_intact()
    assert _failed(bundle.add_content("onnx", _beside(bundle))) == {"files.sha256": "model/0.safetensors"}


@pytest.mark.parametrize("step", ["measurements", "manifest"])
def test_adding_that_was_killed_is_mended_by_adding_again(
    bundle: Bundle, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.dumps({"subject": bundle.manifest.content_sha256}).encode()
    bundle = bundle.put("measurements.jsonl", rows)

    def killed(path: Path, data: bytes, **how: Any) -> str:
        if path.name.startswith(step):
            raise KeyboardInterrupt
        return disk.write_atomic(path, data, **how)

    folder = _beside(bundle)
    with monkeypatch.context() as patched:
        patched.setattr("quantkit.bundle.bundle.write_atomic", killed)
        patched.setattr("quantkit.bundle.seal.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            bundle.add_content("onnx", folder)
    assert "onnx/model.onnx" in _failed(bundle)["files.unlisted"]
    (folder.parent / "again").mkdir()
    (folder.parent / "again" / "model.onnx").write_bytes(b"graph with other options")
    mended = Bundle.load(bundle.path).add_content("onnx", folder.parent / "again")
    assert _failed(mended) == {}
    assert mended.measurements == [{"subject": mended.manifest.content_sha256}]


def test_a_bundle_that_cannot_be_written_says_so(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle.demand_writable()
    assert _failed(bundle) == {}

    def refuse(**_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write where nobody may
    with pytest.raises(InputError, match=r"bundle-not-writable.*Permission denied"):
        bundle.demand_writable()


def test_what_a_stranger_planted_is_not_written_through(bundle: Bundle, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("precious", encoding="utf-8")
    (bundle.path / "kernels.json").symlink_to(outside / "mine")
    (bundle.path / "reports").symlink_to(outside)
    written = bundle.put("kernels.json", b"{}")
    assert (bundle.path / "kernels.json").read_bytes() == b"{}" and not (bundle.path / "kernels.json").is_symlink()
    for use in ({"reports/mine": b"theirs"}, {"reports/mine": None}, {"reports/deep/mine": b"theirs"}):
        with pytest.raises(InputError) as caught:
            written.put_all(use)
        assert caught.value.code == "bundle-link"
    assert [each.read_text(encoding="utf-8") for each in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("plant", ["unlisted", "link", "hard", "empty"])
def test_what_lies_beside_the_content_is_not_opened(bundle: Bundle, tmp_path: Path, plant: str) -> None:
    shard = bundle.path / "model" / "0.safetensors"
    if plant == "unlisted":
        (bundle.path / "model" / "pytorch_model.bin").touch()
    elif plant == "link":
        shutil.move(shard, bundle.path / "model" / "1.bin")
        shard.symlink_to("1.bin")
    elif plant == "hard":
        os.link(shard, tmp_path / "elsewhere")
    else:
        (bundle.path / "model" / "custom_generate").mkdir()
    with pytest.raises(InputError, match="hash-mismatch"):
        bundle.demand_intact()
    with pytest.raises(InputError, match="hash-mismatch"):
        bundle.demand_intact("model/")
    assert _failed(bundle)


def test_what_a_killed_write_left_is_in_nobodys_way(bundle: Bundle) -> None:
    (bundle.path / ".report.html.0123456789abcdef.tmp").touch()
    (bundle.path / "report.html").touch()
    bundle.demand_intact()
    assert _failed(bundle)["files.unlisted"] == "report.html"
    bundle.put("report.html", b"a page")
    assert not _failed(bundle) and not list(bundle.path.glob(".*.tmp"))


def test_a_folder_of_which_the_manifest_lists_nothing_is_not_opened(bundle: Bundle) -> None:
    (bundle.path / "onnx").mkdir()
    (bundle.path / "onnx" / "model.onnx").touch()
    for under in (None, ""):
        with pytest.raises(InputError, match="hash-mismatch"):
            bundle.demand_intact(under)


def test_what_git_and_downloads_leave_is_in_nobodys_way(bundle: Bundle) -> None:
    for name in (".gitattributes", ".git/config", ".cache/huggingface/x.lock", ".DS_Store", "model/.DS_Store"):
        (bundle.path / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle.path / name).touch()
    assert not _failed(bundle)
    bundle.demand_intact()
