"""Sizes of a model by a reference, from its `config.json` alone: no weights, no torch.

llama-3-8b                a shipped config (`quantkit list models`), also of the models that come in packages: figures
                          from `config.json` of well-known models, one YAML each in `shipped_configs/`
./folder, ./config.json   a Hugging Face folder, or the file itself
./bundle                  the config of its checkpoint
hf:org/name[@revision]    a config in the hub's own cache; nothing is fetched
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from quantkit import limits
from quantkit.bundle.manifest import MANIFEST, Manifest
from quantkit.content import Closed, is_path, read_yaml, validated
from quantkit.errors import InputError, MissingDependency, absent, one, unknown_name
from quantkit.model.sight import demand_no_adapter, models_below
from quantkit.model.sizes.architecture import Architecture, Figures
from quantkit.model.sizes.encoder_decoders import PAIRS, encoder_decoder
from quantkit.model.sizes.encoders import TEXT, VISION, text_encoder, vision_encoder
from quantkit.model.sizes.families import FAMILIES, assumed_family, decoder
from quantkit.model.sizes.quantized import KEY, SourceGrid, grid_of
from quantkit.model.structure.kinds import demand_no_head

CONFIG = "config.json"
# keys of the text part in a model of several modalities
_NESTED = ("text_config", "llm_config")
_HEADS = ("ForCausalLM", "LMHeadModel")
# config, name, assumptions
Stated = tuple[Mapping[str, Any], str, list[str]]


def read(reference: str) -> Architecture:
    """Read a model by shipped name, path, or from the hub's cache.

    Raises InputError: `unknown-model`, `file-missing`, `config-missing`, `config-invalid`, `config-unknown`,
    `hub-not-cached`, `manifest-invalid`.
    """
    config, name, notes = stated(reference)
    architecture = from_config(config, name)
    return replace(architecture, assumed=[*architecture.assumed, *notes]) if notes else architecture


def stated(reference: str) -> Stated:
    """Return the config of a model; as `read`, but for the sizes."""
    if reference.startswith("hf:"):
        return parsed(cached(reference, CONFIG)), reference[3:].partition("@")[0].rpartition("/")[2], []
    if is_path(reference):
        return _from_path(Path(reference).expanduser())
    if reference not in shipped_names():
        error = unknown_name("model", reference, shipped_names())
        rule = "plan reads config.json: a shipped one, or the one of a folder"
        remedy = folder_called(reference) or f"{error.remedy}; a folder is ./{reference}"
        raise InputError(error.code, "", error.value, rule, remedy)
    return shipped(reference).config, reference, []


def folder_called(name: str) -> str:
    """Write the remedy for a folder that was named without `./`; "" where there is no such folder."""
    return f"did you mean ./{name}? a path begins with ./, / or ~" if Path(name).is_dir() else ""


def from_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Read the sizes from a `config.json`, or from its text part.

    Raises InputError: `config-invalid`, `config-unknown`, `architecture-unsupported` for a draft head.
    """
    if not isinstance(config, Mapping):
        raise InputError("config-invalid", name, one(type(config).__name__), "it is an object")
    return of_source(_of_floats(config, name), config, name)


def of_source(architecture: Architecture, config: Mapping[str, Any], name: str) -> Architecture:
    """Add the assumption of a source that is quantized already. Raises InputError `already-quantized`."""
    grid = grid_of(config, name)
    if grid is None or not grid.format:
        return architecture
    size = stored_bytes(architecture, grid) / 1e9
    stored = f"weights opened to {architecture.dtype}: the source has {grid.words}, about {size:.2f} GB"
    return replace(architecture, assumed=[*architecture.assumed, stored])


def stored_bytes(architecture: Architecture, grid: SourceGrid) -> float:
    """Return the bytes of a quantized source's tensors: the linears of its blocks on the grid, all else in floats."""
    coded = [one for one in architecture.inside() if not one.router and (one.count > 1 or not grid.experts)]
    weights = sum(one.count * one.N * one.K for one in coded)
    bits = sum(one.count * one.N * one.K * grid.bits_per_weight(one.K) for one in coded)
    return bits / 8 + (architecture.parameters - weights) * (4 if architecture.dtype == "float32" else 2)


def _of_floats(config: Mapping[str, Any], name: str) -> Architecture:
    """Read the sizes of a model without its quantization."""
    stated = _class_name(config, name)
    demand_no_head(stated, name)
    sees = isinstance(config.get("vision_config"), dict) and not stated.endswith(_HEADS)
    inner, assumed = _text_part(config, name)
    model_type, class_name = inner.get("model_type"), _class_name(inner, name)
    if not isinstance(model_type, str) or not model_type:
        where, rule = f"{name}: model_type", "it names the type of the model"
        raise InputError("config-invalid", where, f"{model_type!r:.60}", rule)
    if model_type in TEXT or model_type in VISION:
        figures = Figures(inner, name)
        figures.assumed += assumed
        build = text_encoder if model_type in TEXT else vision_encoder
        return build(figures, class_name, name)
    if class_name in ("", PAIRS.get(model_type)) and model_type in PAIRS:
        figures = Figures(inner, name)
        figures.assumed += assumed
        return encoder_decoder(figures, name)
    family = FAMILIES.get(model_type)
    if family is None:
        family = assumed_family(inner)
        assumed.append(f"blocks like Llama's: {model_type} is unknown")
    if family is None:
        # llava and its like state the family of their text
        kinds = [kind.removesuffix("_text") for kind in (*FAMILIES, *PAIRS, *TEXT, *VISION, "llava")]
        # a mixture is named like its dense kin
        known = ", ".join(sorted(kind for kind in kinds if not kind.endswith(("_vl", "_moe"))))
        rule = "not a known model"
        raise InputError("config-unknown", name, f"model_type {model_type!r:.60}", rule, f"known: {known}")
    figures = Figures(inner, name, family.defaults)
    figures.assumed += assumed
    head = not class_name.endswith("Model") or class_name.endswith(_HEADS)
    if head and class_name and not class_name.endswith(_HEADS):
        figures.assume(f"a language model: {class_name} is not")
    tower = config if sees else None
    return replace(decoder(figures, family, name, head=head, tower=tower), class_name=class_name)


def is_known(config: Mapping[str, Any]) -> bool:
    """Tell whether the blocks of a `model_type` are known, for the text part if there is one."""
    inner = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), config)
    return str(inner.get("model_type")) in (*FAMILIES, *PAIRS, *TEXT, *VISION)


def _text_part(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config of the language model in one of several modalities, and a note on the parts left out."""
    key = next((key for key in _NESTED if config.get(key) is not None), None)
    if key is None and "vision_config" in config and f"{config.get('model_type')}_text" in FAMILIES:  # an old Qwen2-VL
        text = {part: value for part, value in config.items() if part not in ("vision_config", "architectures")}
        return {**text, "model_type": f"{config['model_type']}_text"}, []
    if key is None:
        return dict(config), []
    inner = config[key]
    if not isinstance(inner, dict) or any(other in inner for other in _NESTED):
        raise InputError("config-invalid", f"{name}: {key}", f"{inner!r:.60}", "a config of its own")
    outer = {part: config[part] for part in ("dtype", "torch_dtype", "tie_word_embeddings") if part in config}
    # the class name belongs to the whole model
    whole = {**outer, **inner, "architectures": None}
    left = [part for part in config if part.endswith("_config") and part not in (key, "vision_config")]
    return whole, [f"without {', '.join(left)}"] if left else []


def _class_name(config: Mapping[str, Any], name: str) -> str:
    stated = config.get("architectures")
    if stated is None or stated == []:
        return ""
    if not isinstance(stated, list) or not all(isinstance(entry, str) for entry in stated):
        raise InputError("config-invalid", f"{name}: architectures", f"{stated!r:.60}", "a list of class names")
    return str(stated[0])


def _from_path(path: Path) -> Stated:
    if path.is_file():
        if path.suffix != ".json":
            raise _missing(path, f"{'a file of type ' + path.suffix if path.suffix else 'a file'}, not a config")
        return parsed(path), path.resolve().parent.name if path.name == CONFIG else path.stem, []
    if not path.exists():
        raise absent(path)
    if (path / MANIFEST).is_file():
        manifest = Manifest.read(path / MANIFEST)
        stored, source = parsed(_present(path, "model", "onnx")), manifest.model.source
        # the plan is about the original, not about the checkpoint in the bundle
        config = {key: value for key, value in stored.items() if key != KEY} | {"dtype": source.dtype}
        opened = [f"weights opened to {source.dtype}: the original was {source.was}"] if source.was else []
        return config, manifest.model.name, opened
    if not (path / CONFIG).is_file():
        demand_no_adapter(path, str(path))
    return parsed(_present(path, "")), path.resolve().name, []


def _present(folder: Path, *inside: str) -> Path:
    for path in (folder / place / CONFIG for place in inside):
        if path.is_file():
            return path
    count, below = models_below(folder)
    if count:
        value = f"no {CONFIG} in it, but {count} model{'s' if count > 1 else ''} below it"
        raise InputError("config-missing", str(folder), value, f"sizes are read from {CONFIG}", below)
    raise _missing(folder, f"no {CONFIG} in it")


def _missing(path: Path, value: str) -> InputError:
    rule = f"sizes are read from {CONFIG}"
    remedy = f"name a folder with a {CONFIG}, the {CONFIG} itself, or one of `quantkit list models`"
    compiled = f"quantkit compile {shlex.quote(str(path))}"
    if path.suffix.lower() == ".gguf":
        remedy = f"`{compiled} --dry-run` says what a compile needs"
    if path.suffix.lower() == ".onnx":
        remedy = f"a graph has one usual recipe: {compiled} --recipe int8-network --calibration ./FILE.npz"
    return InputError("config-missing", str(path), value, rule, remedy)


def cached(reference: str, file: str) -> Path:
    """Return a file of a hub repository in the cache. Raises InputError: `hub-name`, `hub-not-cached`."""
    with MissingDependency.unless_found("huggingface_hub", extra="compile", purpose="the hub's cache"):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    name, _, revision = reference[3:].partition("@")
    try:
        place = try_to_load_from_cache(name, file, revision=revision or None)
    except HFValidationError as error:
        raise InputError("hub-name", reference, str(error), remedy="hf:org/name") from None
    if isinstance(place, str):
        return Path(place)
    value, remedy = "not in the hub's cache on this machine", f"fetch it once: hf download {name} {file}"
    raise InputError("hub-not-cached", reference, value, "plan fetches nothing", remedy)


def parsed(path: Path) -> dict[str, Any]:
    """Parse a JSON object with finite numbers. Raises InputError `config-invalid`."""

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is no number of JSON")

    try:
        parsed = json.loads(limits.read(path), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("config-invalid", str(path), str(error), "it is a JSON object") from None
    if not isinstance(parsed, dict):
        raise InputError("config-invalid", str(path), one(type(parsed).__name__), "it is an object")
    return parsed


# --- the configs that ship --------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "shipped_configs"


class Published(Closed):
    """A published number of parameters, its source, and its significant digits (None for an exact count)."""

    parameters: int = Field(gt=0)
    digits: int | None = Field(default=None, gt=0)
    source: str


class ShippedModel(Closed):
    """A file of `shipped_configs/`: the keys of a model's `config.json` that determine its sizes."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    summary: str
    source: str
    published: Published
    config: dict[str, Any]


@cache
def shipped_names() -> tuple[str, ...]:
    """List all shipped models."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def shipped_summaries() -> dict[str, str]:
    """Return the summary of each shipped model by name."""
    return {name: shipped(name).summary for name in shipped_names()}


def shipped(name: str) -> ShippedModel:
    """Read a shipped model. Raises InputError (`unknown-model`, with a did-you-mean)."""
    if name not in shipped_names():
        raise unknown_name("model", name, shipped_names())
    path = FOLDER / f"{name}.yaml"
    return validated(ShippedModel, read_yaml(path), where=str(path), code="model-invalid")
