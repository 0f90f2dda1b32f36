"""Traces of transformers, made once for all workers: one takes seconds, and does not depend on weights.

The session's fixture `_traces_once` shares them; `fresh_traces` has a test trace for itself.
"""

import functools
import hashlib
import inspect
import os
import pickle
import re
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from torch import nn

from quantkit.exporters.trace import repeat
from quantkit.exporters.trace.rewrite import Traced
from quantkit.model.source.weights import write_atomic

_Trace = Callable[..., Traced]


class _OfItsOwn(Exception):
    """A model holds what other processes cannot know again."""


def once(trace: _Trace) -> _Trace:
    """Return `transformer._traced` with a memory that all workers share; the key is all that a forward can read."""

    @functools.wraps(trace)
    def of(skeleton: nn.Module, *how: Any) -> Traced:
        try:
            key = hashlib.sha256(_about(skeleton, how).encode()).hexdigest()
        except _OfItsOwn:
            return trace(skeleton, *how)
        path = Path(os.environ["QUANTKIT_TESTS_SHARED"]) / f"{key}.traced"
        if not path.exists():
            write_atomic(path, [written(trace(skeleton, *how))])
        return read(path.read_bytes())

    return of


def own(trace: _Trace) -> _Trace:
    """Return what `once` was given."""
    return getattr(trace, "__wrapped__", trace)


def _about(skeleton: nn.Module, how: tuple[Any, ...]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "id", _known, raising=False)
        modules = [(name, type(module), repeat._state(module)) for name, module in skeleton.named_modules()]
    about = repr((modules, [sorted(each) if isinstance(each, Set) else each for each in how]))
    return re.sub(r"'_?name_or_path': '[^']*'", "", about)  # the folder that it was opened from


def _known(value: Any) -> str:
    """Return a name that means the same in every process."""
    if inspect.isroutine(value) and "<" not in value.__qualname__ and not inspect.ismethod(value):
        return f"{value.__module__}.{value.__qualname__}"
    if inspect.isclass(value):
        return repr(value)
    raise _OfItsOwn(repr(value))


def written(traced: Traced) -> bytes:
    """Return a trace as bytes."""
    graph = traced.model.graph
    count = len(graph.inputs)
    given = {*graph.inputs, *graph.initializers.values(), None}
    used = dict.fromkeys(value for node in graph for value in node.inputs)
    # a file cannot hold parameters, which no node makes; they become inputs
    graph.inputs.extend(value for value in used if value not in given and value.producer() is None)
    model = ir.to_proto(traced.model).SerializeToString()
    del graph.inputs[count:]
    return pickle.dumps((model, count, replace(traced, model=None, parameters=dict(traced.parameters))))  # type: ignore[arg-type]


def read(data: bytes) -> Traced:
    """Return the trace that `written` wrote; the dialects rewrite it in place."""
    stored, count, rest = pickle.loads(data)
    model = ir.from_proto(onnx.ModelProto.FromString(stored))
    del model.graph.inputs[count:]
    return replace(rest, model=model)
