"""`modules.json`: what it names is part of the model, and leads nowhere else."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.errors import InputError
from quantkit.exporters.carried import carried
from quantkit.model.source.files import modules_of
from quantkit.model.source.open import open_model

OWN = "sentence_transformers.models."
LISTED = [("", f"{OWN}Transformer"), ("1_Pooling", f"{OWN}Pooling"), ("2_Dense", f"{OWN}Dense"), ("3_X", "mine.X")]
FILES = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin")


def put(folder: Path, listed: Any = LISTED) -> Path:
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in listed]))
    for name in (*FILES, "3_X/mine.py", "4_Other/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_every_folder_that_it_names_goes_along_with_its_weights_and_without_code(tmp_path: Path) -> None:
    names = [name for _, name in carried(put(tmp_path))]
    assert sorted(names) == sorted([*FILES, "modules.json"])
    assert [module.kind for module in modules_of(tmp_path)] == ["Transformer", "Pooling", "Dense", ""]


@pytest.mark.parametrize("path", ["../up", "/etc", "a\\..\\b", 1, "link"])
def test_a_module_lies_below_its_model(tmp_path: Path, path: Any) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="modules-invalid"):
        modules_of(put(tmp_path / "model", [(path, "x")]))


@pytest.mark.parametrize("text", ["{}", "[1]", "[", "[{}]", "\udce4"])
def test_what_is_no_list_of_modules_is_refused_as_it_is_opened(tmp_path: Path, text: str) -> None:
    zoo.tiny("bert").save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "modules.json").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match="modules-invalid"):
        open_model(str(tmp_path))


def test_a_hub_gives_the_folders_that_are_named_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, home = put(tmp_path), tmp_path / "hub"
    zoo.tiny("bert").save_pretrained(remote)  # type: ignore[operator]
    there = {file.relative_to(remote).as_posix(): file.read_bytes() for file in remote.rglob("*") if file.is_file()}
    asked: list[str | None] = []

    def download(repository: str, revision: str | None, allow_patterns: Any, ignore_patterns: Any) -> str:
        asked.append(revision)
        snapshot = home / "models--o--n" / "snapshots" / "0a1"
        for name, data in there.items():
            if any(fnmatch(name, each) for each in allow_patterns) and not any(
                fnmatch(name, each) for each in ignore_patterns
            ):
                blob = home / "models--o--n" / "blobs" / name.replace("/", "-")
                blob.parent.mkdir(parents=True, exist_ok=True)
                blob.write_bytes(data)
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                (snapshot / name).unlink(missing_ok=True)
                (snapshot / name).symlink_to(blob)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = open_model("hf:o/n@main")
    assert asked == ["main", "0a1"]
    # what is there besides is not fetched, and the model is the one that lies in a folder
    assert sorted(name for _, name in carried(source.path)) == sorted([*FILES, "modules.json"])
    assert source.sha256 == open_model(str(remote)).sha256
