"""Sole owner of the order of things: from a request to a bundle.

Importing this package is cheap: a request is validated whole before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.pipeline.compile import Compiled, Prepared, compile_model, fingerprint, prepare
    from quantkit.pipeline.estimate import Estimate
    from quantkit.pipeline.measure import measure_bundle
    from quantkit.pipeline.module import Pipeline
    from quantkit.pipeline.progress import Progress
    from quantkit.pipeline.request import DEFAULT_MODEL, Request

__all__ = [
    "DEFAULT_MODEL",
    "Compiled",
    "Estimate",
    "Pipeline",
    "Prepared",
    "Progress",
    "Request",
    "compile_model",
    "fingerprint",
    "measure_bundle",
    "prepare",
]

_HOMES = {
    "DEFAULT_MODEL": "request",
    "Request": "request",
    "Progress": "progress",
    "Pipeline": "module",
    "Estimate": "estimate",
    "measure_bundle": "measure",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"quantkit.pipeline.{_HOMES.get(name, 'compile')}"), name)
    raise AttributeError(f"module 'quantkit.pipeline' has no attribute {name!r}")
