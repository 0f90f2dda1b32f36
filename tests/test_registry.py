"""The contract of every file that a folder of passes, formats, exporters or runtimes holds: parametrised over all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

import quantkit
from quantkit import plugins
from quantkit.errors import InputError
from quantkit.model.layouts import Layout

PACKAGE = Path(quantkit.__file__).parent
EVERY = [(kind, name) for kind in plugins.CONSTANTS for name in plugins.names(kind)]
FACTS = {"unassigned", "codes", "folded", "moved"}
STATISTICS = {"hessian", "absmax", "mean", "weight_errors", "inputs", "original_outputs"}


def passes() -> list[str]:
    return plugins.names("passes")


def test_what_ships_today_is_there() -> None:
    assert {"rtn", "gptq", "awq", "fold_norms", "fuse_qkv"} <= set(passes())
    assert {"int4", "int8", "float32", "float16", "bfloat16"} <= set(plugins.names("formats"))
    assert "checkpoint" in plugins.names("export")
    assert "torch" in plugins.names("runtimes")
    assert "pack_quantized" in plugins.names("model.layouts")


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_one_file_one_thing(kind: str, name: str) -> None:
    summary = plugins.summaries(kind)[name]
    assert 10 < len(summary) <= 120, "the docstring's first line is its summary"
    assert summary.endswith((".", ":")) or "." in summary
    thing = plugins.load(kind, name)
    assert thing.name == name == PACKAGE.joinpath(*kind.split("."), f"{name}.py").stem


@pytest.mark.parametrize("kind", plugins.CONSTANTS)
def test_helpers_are_not_listed_and_a_near_miss_is_named(kind: str) -> None:
    assert not [name for name in plugins.names(kind) if name.startswith("_")]
    assert plugins.names(kind) == sorted(plugins.names(kind))
    known = plugins.names(kind)[0]
    with pytest.raises(InputError) as caught:
        plugins.load(kind, known + "x", where="here")
    singular = {"passes": "pass", "formats": "format", "export": "exporter", "runtimes": "runtime"}.get(kind, "layout")
    assert caught.value.code == f"unknown-{singular}"
    assert caught.value.where == "here"
    assert "did you mean" in caught.value.remedy
    assert known in caught.value.remedy
    with pytest.raises(InputError, match=f"unknown-{singular}"):
        plugins.load(kind, "__init__")


def closed(model: type[BaseModel]) -> bool:
    return model.model_config.get("extra") == "forbid" and model.model_config.get("frozen") is True


@pytest.mark.parametrize("name", passes())
def test_a_pass_says_what_it_needs_and_takes_no_unknown_setting(name: str) -> None:
    step = plugins.load("passes", name)
    assert isinstance(step.paper, str)
    assert step.scope in ("block", "model")
    assert callable(step.run if step.scope == "block" else step.transform)
    assert step.needs <= STATISTICS
    assert step.requires <= FACTS
    assert step.ensures <= FACTS
    assert isinstance(step.requires, frozenset)
    # nothing may touch weights once codes stand for them; who assigns codes may take both
    assert step.requires & {"unassigned", "codes"} or "codes" in step.ensures
    assert closed(step.Settings)
    step.Settings()  # every setting has a default
    with pytest.raises(ValidationError):
        step.Settings(no_such_setting=1)


@pytest.mark.parametrize("name", passes())
def test_every_setting_is_documented_and_bounded(name: str) -> None:
    settings = plugins.load("passes", name).Settings
    for field, about in settings.model_fields.items():
        assert f"{field}:" in (settings.__doc__ or ""), f"{name}.{field} is not in the docstring"
        if about.annotation is bool or get_origin(about.annotation) is Literal:
            assert about.default in (get_args(about.annotation) or (True, False))
        elif about.annotation in (int, float):
            with pytest.raises(ValidationError):
                settings(**{field: -1})


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_a_format_offers_what_others_rely_on(name: str) -> None:
    form = plugins.load("formats", name)
    assert 0 < form.bits <= 32
    for method in ("quantize", "dequantize", "pack", "unpack", "bits_per_weight"):
        assert callable(getattr(form, method))


@pytest.mark.parametrize("name", plugins.names("export"))
def test_an_exporter_offers_what_the_pipeline_relies_on(name: str) -> None:
    exporter = plugins.load("export", name)
    assert exporter.runtimes
    assert isinstance(exporter.fuses, bool)
    assert exporter.Options.model_config.get("extra") == "forbid"
    exporter.Options()
    for method in ("accepts", "write", "check"):
        assert callable(getattr(exporter, method))


@pytest.mark.parametrize("name", plugins.names("model.layouts"))
def test_a_layout_offers_what_writing_and_reading_rely_on(name: str) -> None:
    layout = plugins.load("model.layouts", name)
    assert layout.codes in layout.parts
    assert layout.libraries
    methods = [method for method, value in vars(Layout).items() if callable(value) and not method.startswith("_")]
    assert "read_back" in methods
    for method in methods:
        assert callable(getattr(layout, method))


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_a_runtime_loads(name: str) -> None:
    assert callable(plugins.load("runtimes", name).load)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent, timeout=120
    )


def test_everything_but_solving_is_imported_without_torch() -> None:
    """Listing, validating recipes and knowing every pass's settings costs no heavy import, and needs none installed."""
    heavy = ["torch", "transformers", "datasets", "compressed_tensors", "scipy", "pyarrow", "gguf", "onnx"]
    done = run(
        f"""
import sys
for name in {heavy!r}:
    sys.modules[name] = None
import quantkit, quantkit.cli
from quantkit import content, plugins
from quantkit.pipeline import Request
from quantkit.recipe import Recipe
for kind in plugins.CONSTANTS:
    for name in plugins.names(kind):
        plugins.load(kind, name)
for name in content.names("recipes"):
    Request.of(recipe=name, target="t4" if name == "int8-tensorrt" else None)  # an engine alone: no CPU runs it
quantkit.Pipeline([{{"gptq": {{"damping": 0.1}}}}])
assert not [name for name in {heavy!r} if sys.modules.get(name)]
print("fine")
"""
    )
    assert done.stdout == "fine\n", done.stderr


def test_summaries_are_read_without_importing() -> None:
    done = run(
        "import sys; from quantkit import plugins; plugins.summaries('passes'); "
        "print([name for name in sys.modules if name.startswith('quantkit.passes')])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_the_same_object_every_time(kind: str, name: str) -> None:
    assert plugins.load(kind, name) is plugins.load(kind, name)
