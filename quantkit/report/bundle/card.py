"""The model card: `README.md` of a bundle, in the form of Hugging Face's cards.

YAML front matter for machines, then the bundle's tree as Markdown. It is made from the manifest and the measurements
alone, so the same two give the same card. Names come from files that others wrote: in the text they are escaped, in the
front matter YAML quotes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.model.source.alias import ALIASES
from quantkit.report.bundle import figures, usage
from quantkit.report.bundle.document import document
from quantkit.report.kit import markdown, shares


def card(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Write the card's text; `notes` are what a reader must know about the figures."""
    front = usage.as_yaml(front_matter(manifest, rows))
    return f"---\n{front}\n---\n\n{markdown.document(document(manifest, rows, notes))}\n"


def front_matter(manifest: Manifest, rows: Sequence[Row]) -> dict[str, Any]:
    """What the hub reads: base model, licence if known, task, tags, quantization."""
    source = manifest.model.source
    licence = ALIASES[name].licence.lower() if (name := source.ref.removeprefix("alias:")) in ALIASES else None
    formats = sorted({str(layer.scheme.get("format")) for layer in manifest.layers})
    checkpoint, graph = usage.has(manifest, "model/"), usage.has(manifest, "onnx/")
    found: dict[str, Any] = {}
    if checkpoint or graph:
        found["library_name"] = "transformers" if checkpoint else "onnx"
    found["base_model"] = markdown.on_one_line(figures.origin(manifest))
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
