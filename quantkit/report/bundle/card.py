"""The model card: `README.md` of a bundle, in the form of Hugging Face's cards.

YAML front matter for machines, then the verdict, how to run it, what it costs, how fast it is, and where it came from.
It is made from the manifest and the measurements alone, so the same two give the same card. Names come from files that
others wrote: in the text they are escaped, in the front matter YAML quotes them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.model.source.alias import ALIASES
from quantkit.report.bundle import curves, figures, usage
from quantkit.report.bundle.curves import Series
from quantkit.report.kit import shares

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = Path(__file__).with_name("card.md.j2")
# what Markdown gives a meaning, `<` and `&` for the HTML in it, `|` for tables
_SPECIAL = re.compile(r"([\\`*_#\[\]|~])")
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


@dataclass(frozen=True)
class _Timed:
    """One curve as a table, and what is said under it."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    said: Sequence[str]
    cautions: Sequence[str]
    how: str

    @classmethod
    def of(cls, curve: Series) -> _Timed:
        head, body = curves.brief(curve)
        return cls(curve.title, head, body, curves.results(curve), curves.cautions(curve), curves.how(curve))


def card(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The card's text.

    Args:
        notes: what a reader must know about the figures; stands beside them.
    """
    timed = curves.series(manifest, rows)
    answer, because = figures.verdict(manifest, rows)
    text = _template().render(
        front=usage.as_yaml(front_matter(manifest, rows)),
        manifest=manifest,
        origin=figures.origin(manifest),
        schemes=figures.schemes(manifest),
        tables=figures.tables(rows, layers=len(manifest.layers), dtype=manifest.model.source.dtype),
        scored=figures.scored(rows),
        calibrated=figures.calibrated(manifest.calibration) if manifest.calibration else "",
        hash_of=figures.hash_of(manifest.calibration is not None and manifest.calibration.tokens > 0),
        notes=[note.rstrip(".") for note in notes],
        gates=figures.gates(manifest.checks),
        unjudged=figures.unjudged(manifest),
        checks=figures.other_checks(manifest.checks),
        groups=figures.grouped(manifest.decisions),
        verdict=answer,
        because=because,
        speed=[_Timed.of(curve) for curve in timed],
        conditions=curves.conditions(timed, rows),
        sides=curves.names(manifest),
        commands=usage.commands(manifest),
        checkpoint=usage.has(manifest, "model/"),
        report=usage.has(manifest, "report.html"),
        files=[entry for entry in manifest.files if entry.role in {"weights", "onnx", "engine", "gguf"}],
        versions=", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
        recipe=usage.recipe(manifest),
        again=usage.again(manifest),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    # no HTML escaping: this is Markdown, whose own escaping is the filter `md`
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    environment.filters |= {"md": escape, "fenced": fenced}
    environment.filters |= {"relation": figures.relation, "short": figures.short}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def front_matter(manifest: Manifest, rows: Sequence[Row]) -> dict[str, Any]:
    """What the hub reads: base model, licence if known, task, tags, quantization."""
    source = manifest.model.source
    licence = ALIASES[name].licence.lower() if (name := source.ref.removeprefix("alias:")) in ALIASES else None
    formats = sorted({str(layer.scheme.get("format")) for layer in manifest.layers})
    checkpoint, graph = usage.has(manifest, "model/"), usage.has(manifest, "onnx/")
    found: dict[str, Any] = {}
    if checkpoint or graph:
        found["library_name"] = "transformers" if checkpoint else "onnx"
    found["base_model"] = _NOT_SHOWN.sub(" ", figures.origin(manifest))
    if formats:
        found["base_model_relation"] = "quantized"
    if licence:
        found["license"] = licence
    if task := _task(manifest.model.kind, rows):
        found["pipeline_tag"] = task
    forms = [form for form, there in (("onnx", graph), ("tensorrt", usage.has(manifest, "engine/"))) if there]
    found["tags"] = ["quantkit", manifest.model.kind, *usage.libraries(manifest), *forms, *formats]
    if formats:
        found["quantization"] = {
            "recipe": str(manifest.recipe.get("name", "")),
            "method": [name for step in manifest.recipe.get("passes", []) for name in step],
            "schemes": [text for _, text in figures.schemes(manifest)],
            "content_sha256": manifest.content_sha256,
        }
    return found


def _task(kind: str, rows: Sequence[Row]) -> str | None:
    """What the hub calls the model's task; None of a graph that was not scored as one that tells images apart."""
    if kind == "decoder":
        return "text-generation"
    if kind == "encoder" and any(row.name == "accuracy.top1" for row in rows):
        return "text-classification"
    if kind == "encoder":
        return "sentence-similarity" if any(row.name in shares.RECALL for row in rows) else "feature-extraction"
    return "image-classification" if any(figures.counted(row) == "image" for row in rows) else None


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
