"""Sole owner of the order of things: from a request to a bundle."""

from __future__ import annotations

from quantkit.pipeline.compile import Compiled, compile_model, expected_seconds, fingerprint, prepare
from quantkit.pipeline.measure import measure_bundle
from quantkit.pipeline.module import Pipeline
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import DEFAULT_MODEL, Request

__all__ = [
    "DEFAULT_MODEL",
    "Compiled",
    "Pipeline",
    "Progress",
    "Request",
    "compile_model",
    "expected_seconds",
    "fingerprint",
    "measure_bundle",
    "prepare",
]
