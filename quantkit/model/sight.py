"""Refusal of a model before torch is imported: by its name, its config.json, and transformers' source text.

A class is looked up in `transformers/models/<type>/modeling_<type>.py`, which is parsed and not imported: the arguments
of its forward, and its declared inputs. If that does not decide, the model is opened, and `structure/kinds.py` judges.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle.manifest import MANIFEST
from quantkit.content import is_path, near
from quantkit.errors import InputError, absent
from quantkit.model.sizes.quantized import grid_of
from quantkit.model.source.weights import INDEX, SINGLE, no_weights
from quantkit.model.structure.kinds import by_python, judge, model_graph, takes

# most models below a folder that an error names
_LISTED = 5
# suffix -> (kind of file, remedy)
_GRAPH = "export it to ONNX there, and compile that file"
_PICKLED = ("holds a pickle, which may run anything", f"load it where you trust it; then {by_python('module')}")
_FILES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib"), _PICKLED),
    **dict.fromkeys((".h5", ".hdf5", ".keras", ".pb"), ("is a model of TensorFlow or Keras", _GRAPH)),
    ".tflite": ("is a model of LiteRT", "export the model that it was made from to ONNX, and compile that file"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), ("is a model of Core ML", "compile the model that it was made from")),
    **dict.fromkeys((".engine", ".plan"), ("is an engine, made for one GPU", "compile the graph it was built from")),
    ".safetensors": ("is weights alone", "put it into a folder with its config.json and tokenizer"),
    **dict.fromkeys((".csv", ".json", ".jsonl", ".txt", ".parquet", ".npz"), ("is data", "")),
}


def demand_possible(ref: str) -> None:
    """Refuse a model early, if its files show that it cannot be compiled.

    Raises:
        InputError: `file-missing`, `not-a-folder`, `config-missing`, `architecture-unsupported`, `model-graph`,
            `weights-absent`, `weights-pickle`, `already-quantized`; other errors come from opening the model.
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
        raise absent(ref)
    if path.is_file():
        raise not_a_folder(path, ref)
    for place in ("model_index.json", "config.json"):
        stated = _json(path / place)
        if "_class_name" in stated:
            value, remedy = f"{stated['_class_name']!r:.60}, of diffusers", f"each part by itself, {by_python('part')}"
            rule = "a decoder, an encoder or an image model"
            raise InputError("architecture-unsupported", ref, value, rule, remedy)
    if not (path / "config.json").exists():
        raise no_config(path, f"path:{path.name}")
    config = _json(path / "config.json")
    grid_of(config, f"path:{path.name}")
    _demand_kind(config, f"path:{path.name}")
    if not (path / SINGLE).exists() and not (path / INDEX).exists():
        raise no_weights(path)


def not_a_folder(path: Path, ref: str) -> InputError:
    """Make the error for a file that is no model, from its suffix."""
    value, remedy = _FILES.get(path.suffix.lower(), ("is a file", ""))
    if (path.parent / "config.json").is_file():
        value, remedy = "is a file", f"give its folder: {near(path.parent)}"
    rule = "a model is a Hugging Face folder, a .gguf file or an .onnx file"
    return InputError("not-a-folder", where=ref, value=value, rule=rule, remedy=remedy or "give a folder")


def no_config(path: Path, ref: str) -> InputError:
    """Make the error for a folder without config.json; the remedy names a model file in it, or models below it."""
    others = [file for suffix in (".gguf", ".onnx") for file in sorted(path.glob(f"*{suffix}"))]
    rule = "a model folder has config.json, safetensors and tokenizer files"
    remedy = f"give the file: {near(others[0])}" if others else "model.save_pretrained(folder) writes all of it"
    count, below = (0, "") if others else models_below(path)
    more = f", but {count} model{'s' if count > 1 else ''} below it" if count else ""
    return InputError("config-missing", ref, f"no config.json in {path.name}{more}", rule, below or remedy)


def models_below(path: Path) -> tuple[int, str]:
    """Return how many models a folder holds, and a remedy that names the first; "" for none."""
    below = _models_below(path)
    listed = f"{', '.join(map(near, below[:_LISTED]))}{', ...' if below[_LISTED:] else ''}"
    return len(below), f"give one of them: {listed}" if below else ""


def _models_below(path: Path) -> list[Path]:
    """List the models in a folder of models, or in the hub's cache; a bundle is no such folder."""
    if (path / MANIFEST).is_file():
        return []
    folders = {
        file.parent for below in ("*", "snapshots/*", "*/snapshots/*") for file in path.glob(f"{below}/config.json")
    }
    return sorted(folders | set(path.glob("*/*.gguf")))


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
    stem = name.partition("For")[0].removesuffix("Model")
    encoder = f"{stem}EncoderModel" if f"{stem}EncoderModel" in classes else None
    writes = any(
        isinstance(b, ast.Name) and b.id.endswith("GenerationMixin") for n in _bases(name, classes) for b in n.bases
    )
    if judge(name, takes(claimed, arguments), both, config, where, encoder, writes) == "network":
        raise model_graph(name, where)


def _classes(model_type: str) -> dict[str, ast.ClassDef]:
    """Parse the classes in the source text of a model type; none if there is no such file."""
    spec = importlib.util.find_spec("transformers")
    folder = model_type.replace("-", "_")
    if spec is None or spec.origin is None or not folder.isidentifier():
        return {}
    file = Path(spec.origin).parent / "models" / folder / f"modeling_{folder}.py"
    if not file.is_file():
        return {}
    tree = ast.parse(limits.read(file))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _bases(name: str, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """List a class and its base classes in the same file, nearest first."""
    if name not in classes:
        return []
    own = classes[name]
    inherited = [_bases(base.id, classes) for base in own.bases if isinstance(base, ast.Name)]
    return [own, *(base for bases in inherited for base in bases)]


def _forward(name: str, classes: Mapping[str, ast.ClassDef]) -> list[str] | None:
    """List the arguments of a class's forward; None if it is not in this file."""
    for node in _bases(name, classes):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "forward":
                return [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
    return None


def _claimed(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return a class's declared inputs; the default is text."""
    for node in _bases(name, classes):
        for item in node.body:
            target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            value = getattr(item, "value", None)
            if isinstance(target, ast.Name) and target.id == "input_modalities" and value is not None:
                stated = ast.literal_eval(value)
                return {stated} if isinstance(stated, str) else set(stated)
    return {"text"}


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} on any error, which the opening of the model reports."""
    try:
        parsed = json.loads(limits.read(path)) if path.is_file() else {}
    except (InputError, ValueError, RecursionError, OSError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


# --- adapters -----------------------------------------------------------------------------------------------------

ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model*"
# kinds of peft that add tokens or keys in front of a text, and change no weight
_PROMPTS = ("PROMPT", "PREFIX", "P_TUNING", "CPT", "ADAPTION")
_AUTO = {
    **{"SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification"},
    **{"QUESTION_ANS": "QuestionAnswering", "FEATURE_EXTRACTION": "FeatureExtraction", "SEQ_2_SEQ_LM": "Seq2SeqLM"},
}


def is_prompt(kind: str) -> bool:
    """Tell whether a kind of adapter changes no weight."""
    return any(word in kind for word in _PROMPTS)


def by_peft(where: Path | str, config: Mapping[str, Any], tokens: str = "", model: str = "") -> str:
    """Return Python code for merging an adapter with PEFT.

    Args:
        tokens: folder of its tokenizer; "" for the base model's.
        model: base model as the user named it; "" for the one of the adapter's config.
    """
    folder, base = str(where), str(config.get("base_model_name_or_path") or "") or "BASE"
    kind = _AUTO.get(str(config.get("task_type")), "CausalLM")
    if is_path(model) or model.startswith("hf:"):
        base = model.removeprefix("hf:")
        stated = _json(Path(base).expanduser() / "config.json") if is_path(model) else {}
        own = None if "auto_map" in stated else next(iter(stated.get("architectures") or ()), None)
        whole = f"transformers.{own or f'AutoModelFor{kind}'}.from_pretrained({base!r})"
        model = f"peft.PeftModel.from_pretrained({whole}, {folder!r})"
    else:
        model = f"peft.AutoPeftModelFor{kind}.from_pretrained({folder!r})"
    tokenizer = f"transformers.AutoTokenizer.from_pretrained({tokens or base!r})"
    merged = f"{model}.merge_and_unload().save_pretrained('./merged'); {tokenizer}.save_pretrained('./merged')"
    return f"merged, in Python: import peft, transformers; {merged}"


def demand_no_adapter(folder: Path, ref: str) -> None:
    """Refuse a model's folder with an adapter in it: `adapter-unmerged`. Only file names and the adapter's config are
    read.

    A folder with an adapter (LoRA and similar) beside a model may hold the base and its adapter, or the merged model
    and a leftover adapter: the files do not tell. If peft is installed, transformers follows `adapter_config.json` and
    loads the base that it names, whatever weights are beside it.

    Args:
        ref: the model as the user named it.
    """
    if not (folder / ADAPTER).is_file():
        return
    weights = sorted(path.name for path in folder.glob(_ADAPTER_WEIGHTS))
    stated = _json(folder / ADAPTER)
    kind, base = (str(stated.get(key) or "") for key in ("peft_type", "base_model_name_or_path"))
    kind = kind or "of no known kind"
    alone = not (folder / "config.json").is_file()
    name, _, revision = ref.removeprefix("hf:").partition("@")
    where = name if ref.startswith("hf:") else ref
    left_out = f"delete or move {' and '.join([ADAPTER, *weights])} out of the folder"
    if ref.startswith("hf:"):
        place = f"./{name.rpartition('/')[2]}"
        chosen = f"{name!r}, revision={revision or 'main'!r}, ignore_patterns='adapter_*', local_dir={place!r}"
        left_out = f"huggingface_hub.snapshot_download({chosen}), and compile {place}"
    ways = [] if alone else [f"without it, if the weights are merged already: {left_out}"]
    if kind == "LORA" and "adapter_model.safetensors" in weights:
        model = f"hf:{base}" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) else base or "BASE"
        own = f"move the adapter's files to a folder ./adapter; quantkit compile {shlex.quote(ref)} --adapter ./adapter"
        ways.append(f"merged: {f'quantkit compile {model} --adapter {shlex.quote(ref)}' if alone else own}")
    elif weights and not is_prompt(kind):
        ways.append(by_peft(where, stated, where if any(folder.glob("tokenizer*")) else base))
    elif alone:
        ways.append(f"compile its base model: {base or 'see its card'}")
    beside = "alone" if alone else f"beside a model{'' if weights else ', without its weights'}"
    value = f"an adapter ({kind}{f' of {base}' if base else ''}) {beside}"
    rule = "an adapter is merged where --adapter names it"
    raise InputError("adapter-unmerged", f"{ref}: {ADAPTER}", value, rule, "; or ".join(ways))
