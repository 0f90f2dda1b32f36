"""Refusals of a model before torch is imported: by its name, its config.json, and transformers' source text.

A class is looked up in `transformers/models/<type>/modeling_<type>.py`, which is parsed and not imported: what its
forward takes, and what it claims to. Where that says nothing, the model is opened, and `structure/kinds.py` judges.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.content import is_path
from quantkit.errors import InputError
from quantkit.model.source.weights import INDEX, SINGLE, no_weights
from quantkit.model.structure.kinds import by_python, judge, model_graph, takes

# suffix -> (what such a file is, what to do)
_GRAPH = "export it to ONNX there, and compile that file"
_PICKLED = ("holds a pickle, which may run anything", f"load it where you trust it; then {by_python('module')}")
_FILES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib"), _PICKLED),
    **dict.fromkeys((".h5", ".hdf5", ".keras", ".pb"), ("is a model of TensorFlow or Keras", _GRAPH)),
    ".tflite": ("is a model of LiteRT", "export the model that it was made from to ONNX, and compile that file"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), ("is a model of Core ML", "compile the model that it was made from")),
    **dict.fromkeys((".engine", ".plan"), ("is an engine, made for one GPU", "compile the graph it was built from")),
    ".safetensors": (
        "is weights alone",
        "put it into a folder with its config.json and tokenizer",
    ),
    **dict.fromkeys((".csv", ".json", ".jsonl", ".txt", ".parquet", ".npz"), ("is data", "")),
}


def demand_possible(ref: str) -> None:
    """Refuse what cannot be compiled, as far as it can be seen.

    Raises:
        InputError: `file-missing`, `not-a-folder`, `config-missing`, `architecture-unsupported`, `model-graph`,
            `weights-absent`, `weights-pickle`; all else is left to the opening of the model.
    """
    if not is_path(ref):
        return
    try:
        path = Path(ref).expanduser().resolve()
    except (RuntimeError, OSError):  # ~nobody
        return
    if path.suffix.lower() in (".onnx", ".gguf"):
        return
    if not path.exists():
        raise InputError("file-missing", where=ref, value="no such file or folder", remedy="check the path")
    if path.is_file():
        raise not_a_folder(path, ref)
    for place in ("model_index.json", "config.json"):
        stated = _json(path / place)
        if "_class_name" in stated:
            raise InputError(
                "architecture-unsupported",
                where=ref,
                value=f"{stated['_class_name']!r:.60}, of diffusers",
                rule="a decoder, an encoder or an image model",
                remedy=f"each part by itself, {by_python('part')}",
            )
    if not (path / "config.json").exists():
        raise no_config(path, f"path:{path.name}")
    _demand_kind(_json(path / "config.json"), f"path:{path.name}")
    if not (path / SINGLE).exists() and not (path / INDEX).exists():
        raise no_weights(path)


def not_a_folder(path: Path, ref: str) -> InputError:
    """The error for a file that is no model, by what its suffix says of it."""
    value, remedy = _FILES.get(path.suffix.lower(), ("is a file", ""))
    if (path.parent / "config.json").is_file():
        remedy = f"give its folder: {_as_typed(path.parent)}"
    rule = "a model is a Hugging Face folder, a .gguf file or an .onnx file"
    return InputError("not-a-folder", where=ref, value=value, rule=rule, remedy=remedy or "give a folder")


def no_config(path: Path, ref: str) -> InputError:
    """The error for a folder that is no model; files of other kinds in it are named, since they can be compiled."""
    others = [each for suffix in (".gguf", ".onnx") for each in sorted(path.glob(f"*{suffix}"))]
    return InputError(
        "config-missing",
        where=ref,
        value=f"no config.json in {path.name}",
        rule="a model folder has config.json, safetensors and tokenizer files",
        remedy=f"give the file: {_as_typed(others[0])}" if others else "model.save_pretrained(folder) writes all of it",
    )


def _as_typed(path: Path) -> str:
    """As a user may type it, from where they are."""
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


def _demand_kind(config: Mapping[str, Any], where: str) -> None:
    stated, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(stated, list) or not stated or not isinstance(stated[0], str) or not isinstance(model_type, str):
        return
    name, classes = str(stated[0]), _classes(model_type)
    if config.get("auto_map") or name not in classes:
        return
    arguments, claimed = _forward(name, classes), _claimed(name, classes)
    if arguments is None:
        return
    both = bool(config.get("is_encoder_decoder")) and "decoder_input_ids" in arguments
    stem = name.removesuffix("ForConditionalGeneration").removesuffix("Model")
    encoder = f"{stem}EncoderModel" if f"{stem}EncoderModel" in classes else None
    if judge(name, takes(claimed, arguments), both, config, where, encoder) == "network":
        raise model_graph(name, where)


def _classes(model_type: str) -> dict[str, ast.ClassDef]:
    """Classes in the source text of a type of model; none where it is not there."""
    found = importlib.util.find_spec("transformers")
    folder = model_type.replace("-", "_")
    if found is None or found.origin is None or not folder.isidentifier():
        return {}
    file = Path(found.origin).parent / "models" / folder / f"modeling_{folder}.py"
    if not file.is_file():
        return {}
    tree = ast.parse(limits.read(file))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _bases(name: str, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and those that it inherits from, as far as they stand in the same file, nearest first."""
    if name not in classes:
        return []
    own = classes[name]
    inherited = [_bases(base.id, classes) for base in own.bases if isinstance(base, ast.Name)]
    return [own, *(each for some in inherited for each in some)]


def _forward(name: str, classes: Mapping[str, ast.ClassDef]) -> list[str] | None:
    """Arguments of a class's forward; None: it stands elsewhere."""
    for node in _bases(name, classes):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "forward":
                return [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
    return None


def _claimed(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return what a class says it takes; text is what all of them say by default."""
    for node in _bases(name, classes):
        for item in node.body:
            target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            value = getattr(item, "value", None)
            if isinstance(target, ast.Name) and target.id == "input_modalities" and value is not None:
                stated = ast.literal_eval(value)
                return {stated} if isinstance(stated, str) else set(stated)
    return {"text"}


def _json(path: Path) -> dict[str, Any]:
    """An object; empty where it is none, which the opening of the model says."""
    try:
        found = json.loads(limits.read(path)) if path.is_file() else {}
    except (InputError, ValueError, RecursionError, OSError):
        return {}
    return found if isinstance(found, dict) else {}
