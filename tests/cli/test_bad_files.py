"""Plain bad input: each is one clear line, and none of it a mistake of ours."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import printable


def _text(name: str, content: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_text(content, encoding="utf-8")
        return ["compile", "smollm2-135m", "--recipe", str(folder / name), "--dry-run"]

    return make


def _loop(*arguments: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "loop.yaml").symlink_to("loop.yaml")
        return [each.replace("LOOP", str(folder / "loop.yaml")) for each in arguments]

    return make


def _folder(name: str, content: bytes, *arguments: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [*arguments, str(folder)]

    return make


CASES = {
    "bool": (_text("a.yaml", "schema: !!bool maybe"), "yaml-invalid"),
    "date": (_text("a.yaml", "schema: 2001-99-99"), "yaml-invalid"),
    "key": (_text("a.yaml", "? [a]\n: 1"), "yaml-invalid"),
    "zero": (_text("a.yaml", "a: \0"), "yaml-invalid"),
    "deep": (_text("a.yaml", "[" * 50_000), "yaml-invalid"),
    "digits": (_text("a.yaml", f"schema: {'9' * 6000}"), "yaml-invalid"),
    "name": (lambda folder: ["compile", f"./{os.fsdecode(b'x%xff'.replace(b'%x', bytes([255])))}"], "file-missing"),
    "loop": (_loop("compile", "smollm2-135m", "--recipe", "LOOP", "--dry-run"), "file-missing"),
    "loop-target": (_loop("compile", "smollm2-135m", "--target", "LOOP", "--dry-run"), "file-missing"),
    "loop-bundle": (_loop("verify", "LOOP"), "not-a-bundle"),
    "manifest": (_folder("manifest.json", b'{"a":' * 50_000, "verify"), "manifest-invalid"),
    "config": (_folder("config.json", b'{"a":' * 50_000, "plan"), "config-invalid"),
    "halves": (_folder("manifest.json", b'{"schema": 1, "\\ud800": 2}', "verify"), "manifest-invalid"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_in_one_line(name: str, tmp_path: Path, quantkit: Any) -> None:
    make, code = CASES[name]
    arguments = make(tmp_path)
    ran = quantkit(*arguments, "--json")
    assert (ran.code, ran.envelope["error"]["code"]) == (2, code)
    ran = quantkit(*arguments)
    assert ran.err.splitlines()[-1].startswith(f"error: [{code}]")
    assert printable(ran.err) == ran.err


def test_without_a_home_folder(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTKIT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert quantkit("compile", "smollm2-135m", "--dry-run", "--json").envelope["error"]["code"] == "no-home"
