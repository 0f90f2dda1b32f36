"""Where the choice of a search is scored."""

from __future__ import annotations

import pytest

from quantkit.errors import InputError
from quantkit.tuning.search import scored_in


def test_the_first_runtime_that_is_here_scores() -> None:
    assert scored_in(["torch", "onnxruntime"], "a recipe") == "torch"


def test_an_engine_alone_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.runtimes.tensorrt import TensorrtRuntime

    monkeypatch.setattr(TensorrtRuntime, "why_not_here", lambda self, folder=None: "no NVIDIA GPU")
    assert scored_in(["tensorrt", "onnxruntime"], "a recipe") == "onnxruntime"
    with pytest.raises(InputError) as caught:
        scored_in(["tensorrt"], "int4-tensorrt")
    assert caught.value.code == "tune-unscored"
    assert "tensorrt: no NVIDIA GPU" in caught.value.line()
