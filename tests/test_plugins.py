"""The contract of every file that a folder of passes, formats, exporters or runtimes holds: parametrised over all."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

import quantkit
from quantkit import plugins
from quantkit.errors import InputError
from quantkit.exporters import Exporter, load_exporter
from quantkit.formats import Format, load_format
from quantkit.formats.base.grid import GridFormat
from quantkit.model.layouts import Layout, load_layout
from quantkit.passes import ANSWERS, Pass, load_pass
from quantkit.plugins import Kind
from quantkit.runtimes import Runtime, load_runtime

PACKAGE = Path(quantkit.__file__).parent
EVERY = [(kind, name) for kind in plugins.KINDS for name in kind.names()]
LOADERS = {
    "passes": (load_pass, Pass),
    "formats": (load_format, Format),
    "exporters": (load_exporter, Exporter),
    "runtimes": (load_runtime, Runtime),
    "model.layouts": (load_layout, Layout),
}
FACTS = {"unassigned", "codes", "folded", "moved"}
STATISTICS = {"hessian", "absmax", "mean", "weight_errors", "inputs", "original_outputs"}


def passes() -> list[str]:
    return plugins.PASSES.names()


def test_what_ships_today_is_there() -> None:
    assert {"rtn", "gptq", "awq", "fold_norms", "fuse_qkv"} <= set(passes())
    assert {"int4", "int8", "float32", "float16", "bfloat16"} <= set(plugins.FORMATS.names())
    assert "checkpoint" in plugins.EXPORTERS.names()
    assert "torch" in plugins.RUNTIMES.names()
    assert "pack_quantized" in plugins.LAYOUTS.names()


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_plugin_has_a_name_and_a_short_summary(kind: Kind[Any], name: str) -> None:
    summary = kind.summaries()[name]
    assert 10 < len(summary) <= 120, "the docstring's first line is its summary"
    assert summary.endswith((".", ":")) or "." in summary
    assert kind.load(name).name == name


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_helpers_are_not_listed_and_a_near_miss_is_named(kind: Kind[Any]) -> None:
    assert not [name for name in kind.names() if name.startswith("_")]
    assert kind.names() == sorted(kind.names())
    known = kind.names()[0]
    with pytest.raises(InputError) as caught:
        kind.load(known + "x", where="here")
    assert caught.value.code == f"unknown-{kind.singular}"
    assert caught.value.where == "here"
    assert "did you mean" in caught.value.remedy
    assert known in caught.value.remedy
    with pytest.raises(InputError, match=f"unknown-{kind.singular}"):
        kind.load("__init__")


def closed(model: type[BaseModel]) -> bool:
    return model.model_config.get("extra") == "forbid" and model.model_config.get("frozen") is True


@pytest.mark.parametrize("name", passes())
def test_a_pass_says_what_it_needs_and_takes_no_unknown_setting(name: str) -> None:
    step = load_pass(name)
    assert isinstance(step.paper, str)
    assert step.scope in ("block", "model", "answers")
    # what trains on answers is work of the pipeline, and the pass holds its settings alone
    own = {"block": {"run"}, "model": {"transform"}, "answers": set[str]()}[step.scope]
    assert own == {"run", "transform"} & vars(type(step)).keys()
    assert step.needs <= (STATISTICS if step.scope != "answers" else {ANSWERS})
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
    settings = load_pass(name).Settings
    for field, about in settings.model_fields.items():
        assert f"{field}:" in (settings.__doc__ or ""), f"{name}.{field} is not in the docstring"
        if about.annotation is bool or get_origin(about.annotation) is Literal:
            assert about.default in (get_args(about.annotation) or (True, False))
        elif about.annotation in (int, float):
            with pytest.raises(ValidationError):
                settings(**{field: -1})


def members(protocol: type) -> set[str]:
    """What a Protocol names, with what it goes on from."""
    found: set[str] = set()
    for base in protocol.__mro__[:-1]:
        if base is not Protocol:
            found |= {
                name for name in (*vars(base), *vars(base).get("__annotations__", ())) if not name.startswith("_")
            }
    return found


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_plugin_has_every_member_that_its_protocol_names(kind: Kind[Any], name: str) -> None:
    load, protocol = LOADERS[kind.folder]
    found, named = load(name), members(protocol)
    assert found is kind.load(name)
    assert "name" in named
    assert not {each for each in named if not hasattr(found, each)}


@pytest.mark.parametrize("name", plugins.FORMATS.names())
def test_a_format_says_its_bits(name: str) -> None:
    form = load_format(name)
    assert 0 < form.bits <= 32
    assert form.rules.codes == isinstance(form, GridFormat)


@pytest.mark.parametrize("name", plugins.EXPORTERS.names())
def test_an_exporter_s_options_are_closed(name: str) -> None:
    exporter = load_exporter(name)
    assert exporter.runtimes
    assert exporter.Options.model_config.get("extra") == "forbid"
    exporter.Options()
    own = {name for base in type(exporter).__mro__ if base is not Exporter for name in vars(base)}
    assert "export" in own
    assert exporter.builds == ("build" in own)


@pytest.mark.parametrize("name", plugins.LAYOUTS.names())
def test_a_layout_lists_its_codes_among_its_parts(name: str) -> None:
    layout = load_layout(name)
    assert layout.codes in layout.parts
    # a layout of merged experts is read by transformers and vLLM themselves
    assert layout.libraries or layout.stacks


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
for kind in plugins.KINDS:
    for name in kind.names():
        kind.load(name)
models = {{"decoder": "smollm2-135m", "encoder": "minilm-l6", "network": "fashion-mnist-cnn"}}
for name in content.names("recipes"):
    model = models[Recipe.load(name).models[0]]
    Request.of(model, recipe=name, target="t4" if name == "int8-tensorrt" else None)  # an engine alone: no CPU runs it
quantkit.Pipeline([{{"gptq": {{"damping": 0.1}}}}], weights={{"format": "int8"}})
assert not [name for name in {heavy!r} if sys.modules.get(name)]
print("fine")
"""
    )
    assert done.stdout == "fine\n", done.stderr


def test_summaries_are_read_without_importing() -> None:
    done = run(
        "import sys; from quantkit import plugins; plugins.PASSES.summaries(); "
        "print([name for name in sys.modules if name.startswith('quantkit.passes')])"
    )
    assert done.stdout == "[]\n", done.stderr
