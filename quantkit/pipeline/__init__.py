"""Sole owner of the order of a compile, from request to bundle.

Importing this package is cheap: a request is validated whole before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.pipeline.blocks.module import Pipeline
    from quantkit.pipeline.blocks.prepared import Prepared, prepare
    from quantkit.pipeline.compile import Compiled, compile_model
    from quantkit.pipeline.measure import measure_bundle
    from quantkit.pipeline.progress import Progress
    from quantkit.pipeline.request import DEFAULT_MODEL, Request

__all__ = [
    "DEFAULT_MODEL",
    "Compiled",
    "Pipeline",
    "Prepared",
    "Progress",
    "Request",
    "compile_model",
    "measure_bundle",
    "prepare",
]

_HOMES = {
    "DEFAULT_MODEL": "request",
    "Compiled": "compile",
    "Pipeline": "blocks.module",
    "Prepared": "blocks.prepared",
    "Progress": "progress",
    "Request": "request",
    "compile_model": "compile",
    "measure_bundle": "measure",
    "prepare": "blocks.prepared",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"quantkit.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'quantkit.pipeline' has no attribute {name!r}")
