"""What was exported is scored by the runtime that reads it, or it is said why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.pipeline.blocks.score import unscored
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_an_engine_is_asked_of_the_library_that_made_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        runtime = load_runtime(name)
        monkeypatch.setattr(type(runtime), "why_not_here", lambda self, folder=None: f"no {self.name} here")
    steps = [
        ExportStep(name="checkpoint", options={}),
        ExportStep(name="tensorrt", options={"library": library, "sm": "9.0"}),
    ]
    (said,) = unscored(steps, tmp_path)
    assert said.reason == f"not run: no {library} here"
