"""Two bundles are timed in turns, each in the runtime that reads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.pipeline import sides
from quantkit.runtimes.llama_cpp.runtime import LlamaCpp


def test_a_file_is_timed_by_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace())
    monkeypatch.setattr(sides.usage, "file_runtime", lambda manifest: "llama_cpp")
    monkeypatch.setattr(LlamaCpp, "checked", lambda self, given: given.path / "gguf")
    monkeypatch.setattr(sides, "holds_graph", lambda given: False)
    monkeypatch.setattr(LlamaCpp, "context", lambda self, folder: 77)
    assert sides._reader(bundle) == (tmp_path / "gguf", "llama_cpp", 77)
