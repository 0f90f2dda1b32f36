"""The model card: `README.md` of a bundle, in the form of Hugging Face's cards.

YAML front matter for machines, then what it is, how to load it, what it costs in accuracy, and where it came from.
It is made from the manifest and the measurements alone, so the same two give the same card. Names come from files that
others wrote: in the text they are escaped, in the front matter YAML quotes them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from quantkit.bundle import Manifest
from quantkit.measure.rows import Row
from quantkit.model.alias import ALIASES
from quantkit.report import figures

_TEMPLATE = Path(__file__).with_name("card.md.j2")
_TASKS = {"decoder": "text-generation", "encoder": "feature-extraction", "vision": "image-classification"}
_CLASSES = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel", "vision": "AutoModelForImageClassification"}
# what Markdown gives a meaning, `<` and `&` for the HTML in it, `|` for tables
_SPECIAL = re.compile(r"([\\`*_#\[\]|~])")
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def card(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The card's text.

    Args:
        manifest: of the bundle.
        rows: its measurements.
        notes: what a reader must know about the figures; stands beside them.
    """
    from jinja2 import Environment, StrictUndefined

    # no HTML escaping: this is Markdown, whose own escaping is the filter `md`
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    environment.filters |= {"md": escape, "fenced": fenced}
    environment.filters |= {"change": figures.change, "relation": figures.relation, "short": figures.short}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    answer, because = figures.verdict(manifest)
    packed = bool(manifest.layers) and _layout(manifest) == "pack-quantized"
    text = template.render(
        front=_yaml(front_matter(manifest)),
        manifest=manifest,
        origin=_origin(manifest),
        schemes=_schemes(manifest),
        lines=figures.lines(rows, layers=len(manifest.layers), dtype=manifest.model.source.dtype),
        scored=figures.scored(rows),
        notes=[note.rstrip(".") for note in notes],
        gates=figures.gates(manifest.checks),
        checks=figures.other_checks(manifest.checks),
        groups=figures.grouped(manifest.decisions),
        verdict=answer,
        because=because,
        load=_load(manifest, packed=packed),
        serve="vllm serve ./model" if packed and manifest.model.kind == "decoder" else "",
        files=[entry for entry in manifest.files if entry.role in {"weights", "onnx", "engine", "gguf"}],
        versions=", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
        recipe=_yaml({key: value for key, value in manifest.recipe.items() if key != "name"}),
        again=_command(manifest),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def front_matter(manifest: Manifest) -> dict[str, Any]:
    """What the hub reads: base model, licence if known, task, tags, quantization."""
    source = manifest.model.source
    licence = ALIASES[name].licence.lower() if (name := source.ref.removeprefix("alias:")) in ALIASES else None
    formats = sorted({str(layer.scheme.get("format")) for layer in manifest.layers})
    packed = formats and _layout(manifest) == "pack-quantized"
    found: dict[str, Any] = {"library_name": "transformers", "base_model": _NOT_SHOWN.sub(" ", _origin(manifest))}
    if formats:
        found["base_model_relation"] = "quantized"
    if licence:
        found["license"] = licence
    found["pipeline_tag"] = _TASKS[manifest.model.kind]
    found["tags"] = ["quantkit", *(["compressed-tensors"] if packed else []), *formats]
    if formats:
        found["quantization"] = {
            "recipe": str(manifest.recipe.get("name", "")),
            "method": [name for step in manifest.recipe.get("passes", []) for name in step],
            "schemes": [text for _, text in _schemes(manifest)],
            "content_sha256": manifest.content_sha256,
        }
    return found


def escape(value: object) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> escape("a_b|<i>")
    'a\\\\_b\\\\|&lt;i&gt;'
    """
    text = _NOT_SHOWN.sub(" ", str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", text)


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _yaml(data: Any) -> str:
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    return text.rstrip("\n")


def _origin(manifest: Manifest) -> str:
    """The source as the hub names it: `org/name` of a hub model, else the model's name."""
    ref = manifest.model.source.ref
    return ref.removeprefix("hf:").split("@", maxsplit=1)[0] if ref.startswith("hf:") else manifest.model.name


def _layout(manifest: Manifest) -> str:
    for step in manifest.recipe.get("export", []):
        if "checkpoint" in step:
            return str((step["checkpoint"] or {}).get("layout", "pack-quantized"))
    return ""


def _schemes(manifest: Manifest) -> list[tuple[int, str]]:
    """(how many layers, scheme in words), the most frequent first."""
    counts: dict[str, int] = {}
    for layer in manifest.layers:
        text = figures.scheme_of(layer.scheme)
        counts[text] = counts.get(text, 0) + 1
    return sorted(((count, text) for text, count in counts.items()), key=lambda pair: (-pair[0], pair[1]))


def _load(manifest: Manifest, *, packed: bool) -> str:
    auto = _CLASSES[manifest.model.kind]
    needs = "transformers compressed-tensors" if packed else "transformers"
    lines = [f"# pip install {needs}", f"from transformers import {auto}, AutoTokenizer", ""]
    lines += [f'model = {auto}.from_pretrained("./model")', 'tokenizer = AutoTokenizer.from_pretrained("./model")']
    return "\n".join(lines)


def _command(manifest: Manifest) -> str:
    """How to make it again; a folder is named as it was, wherever it stood."""
    kind, _, rest = manifest.model.source.ref.partition(":")
    model = {"alias": rest, "path": f"./{rest}"}.get(kind, manifest.model.source.ref)
    return f"quantkit compile {shlex.quote(model)} --recipe ./recipe.yaml"
