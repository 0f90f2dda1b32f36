"""What can be done with a bundle, by what is in it."""

from __future__ import annotations

import inspect
import types
from typing import Any

import planted
import pytest

import quantkit
from quantkit.report.bundle import usage


def bundle(kind: str, *paths: str, **options: Any) -> Any:
    """The manifest of a bundle with these files; the options are those of its TensorRT export."""
    made = planted.manifest()
    file = made.files[0].model_dump(by_alias=True)
    model = made.model.model_dump() | {"kind": kind}
    recipe = {"name": "r", "export": [{"tensorrt": options}]}
    return planted.manifest(model=model, files=[{**file, "path": path} for path in paths], recipe=recipe)


@pytest.mark.parametrize(
    ("kind", "paths", "options", "last"),
    [
        ("decoder", ["model/m.safetensors"], {}, "quantkit measure . --runtime onnxruntime"),
        ("decoder", ["engine/sm89.engine"], {}, "quantkit measure . --runtime tensorrt_rtx"),
        ("decoder", ["engine/sm89.engine"], {"library": "tensorrt"}, "quantkit measure . --runtime tensorrt"),
        ("decoder", ["engine/sm89.engine", "onnx/model.onnx"], {}, "quantkit measure . --runtime onnxruntime"),
        ("network", ["engine/sm89.engine"], {}, "tensorrt_rtx --loadEngine=engine/sm89.engine"),
        ("network", ["engine/sm89.engine"], {"library": "tensorrt"}, "trtexec --loadEngine=engine/sm89.engine"),
    ],
)
def test_what_measures_speed_is_what_the_bundle_holds(kind: str, paths: Any, options: Any, last: str) -> None:
    found = usage.measure(bundle(kind, *paths, **options))
    assert found[-1] == last
    assert any("--to onnx" in line for line in found) == (paths == ["model/m.safetensors"])


def test_a_network_without_an_engine_is_built_first() -> None:
    found = usage.measure(bundle("network", "engine/network.onnx"), "'a place'")
    assert found[1:] == [
        "quantkit export 'a place' --to tensorrt",
        "tensorrt_rtx --loadEngine='a place'/engine/smNN.engine",
    ]


def test_an_engine_of_a_graph_is_run_by_its_own_tool() -> None:
    (command,) = [each for each in usage.commands(bundle("network", "engine/sm89.engine")) if each.label == "TensorRT"]
    assert "tensorrt_rtx --loadEngine=engine/sm89.engine" in command.text
    assert "generate" not in command.text


def test_a_module_is_made_again_in_python_since_no_command_has_it() -> None:
    made = planted.manifest()
    model = made.model.model_dump() | {"source": made.model.source.model_dump() | {"ref": "module:Crepe"}}
    recipe = {"name": "r", "calibration": {"set": "path:pitch.npz"}}
    again = usage.again(planted.manifest(model=model, recipe=recipe))
    assert again.language == "python" and "module:Crepe" not in again.text
    given: list[Any] = []
    names = {"quantkit": types.SimpleNamespace(compile=lambda *args, **more: given.append((args, more)))}
    exec(again.text.replace("import quantkit", ""), names)
    ((args, more),) = given
    inspect.signature(quantkit.compile).bind(*args, **more)
    assert args[1] == "./recipe.yaml" and more["calibration"] == "./pitch.npz"


def test_files_are_named_as_they_were_typed() -> None:
    made = planted.manifest()
    model = made.model.model_dump() | {"kind": "network"}
    model["source"] |= {"ref": "path:x.onnx"}
    file = {**made.files[0].model_dump(by_alias=True), "path": "onnx/model.onnx"}
    recipe = {"name": "r", "calibration": {"set": "path:set.npz"}}
    manifest = planted.manifest(model=model, files=[file], recipe=recipe)
    typed = usage.Files("/data/my models/x.onnx", "/data/set.npz")
    assert usage.measure(manifest, "out", typed) == [
        "quantkit measure out --runtime onnxruntime --baseline '/data/my models/x.onnx' --calibration /data/set.npz"
    ]
