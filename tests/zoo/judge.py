"""Is quantkit right about a model? Held against plain transformers, which knows nothing of quantkit.

Four verdicts: right, refused (by an `InputError`, whose code and line are kept), WRONG (figures that differ), CRASH
(anything else: an internal error, a failed check, a traceback).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zoo import shrink
from zoo.exceptions import LEFT_OUT

# of the truth's spread: far above float32's rounding, far below what a wrong mask or a lost bias does
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What came of one part of the campaign for one class."""

    table: str
    model_type: str
    name: str
    part: str
    verdict: str
    code: str = ""
    line: str = ""
    error: float | None = None
    share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def streamed(folder: Path, tokens: Tensor, chunk: int = 2) -> tuple[Tensor, str]:
    """What quantkit's stream makes of ids [samples, tokens], the last chunk smaller than the others, and the kind.

    A decoder's logits; of an encoder, whatever its head, the last hidden states.
    """
    from quantkit.model.open import open_model
    from quantkit.model.stream import StreamedModel

    source = open_model(str(folder))
    return StreamedModel(source).answers(tokens, chunk).all(), source.kind


def apart(found: Tensor, true: Tensor) -> float:
    """The largest difference, in standard deviations of the truth; infinite where shapes differ or a value is none."""
    if found.shape != true.shape or not found.isfinite().all():
        return float("inf")
    return float((found - true).abs().max() / true.std())


def float_stream(architecture: shrink.Architecture) -> Verdict:
    """The stream of a tiny model against the model's own forward."""

    def verdict(kind: str, **more: Any) -> Verdict:
        return Verdict(architecture.table, architecture.model_type, architecture.name, "stream", kind, **more)

    from quantkit.errors import InputError

    if architecture.name in LEFT_OUT:
        return verdict("not here", line=LEFT_OUT[architecture.name])
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        folder = Path(home) / architecture.name
        try:
            shrink.tiny(architecture, folder)
        except Exception as problem:
            return verdict("not here", line=first_line(problem))
        tokens, kind, crash = shrink.ids(), "decoder", None
        try:
            found, kind = streamed(folder, tokens)
        except InputError as problem:
            return verdict("refused", code=problem.code, line=str(problem))
        except Exception as problem:
            crash = verdict("CRASH", code=type(problem).__name__, line=f"{first_line(problem)} {place(problem)}")
        try:
            true = shrink.truth(folder, tokens, kind)
        except Exception as problem:  # what is no function of token ids, and was not refused
            return crash or verdict("not here", line=first_line(problem))
        if crash:
            return crash
        error = apart(found, true)
    return verdict("right" if error < TOLERANCE else "WRONG", error=error)


# the share of linear weights on whose fate manifest and zoo may differ
_UNSAID = 0.03
# sequences that are scored
_SCORED = 20
_RECIPE = """
schema: 1
summary: what the campaign compiles by
models: [decoder, encoder]
calibration: {set: %s, samples: 8, tokens: %d}
scheme:
  weights: {format: int4, granularity: group, group: 32, symmetric: true, scale: float32}
passes:
  - gptq: {damping: 0.01}
on_indivisible: keep
export:
  - checkpoint: {layout: %s}
"""
# tried in turn: a layout that refuses a model's linears says that `dense` takes them
_LAYOUTS = ("pack-quantized", "dense")


def whole_compile(architecture: shrink.Architecture) -> Verdict:
    """A whole compile, then its manifest's rows against what plain transformers makes of source and bundle."""

    def verdict(kind: str, **more: Any) -> Verdict:
        return Verdict(architecture.table, architecture.model_type, architecture.name, "compile", kind, **more)

    import quantkit
    from quantkit.errors import InputError

    if architecture.name in LEFT_OUT:
        return verdict("not here", line=LEFT_OUT[architecture.name])
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        folder, out = Path(home) / architecture.name, Path(home) / "out"
        try:
            shrink.tiny(architecture, folder)
            shrink.tokenizer().save_pretrained(folder)
        except Exception as problem:
            return verdict("not here", line=first_line(problem))
        scored = shrink.ids(_SCORED, seed=2)
        recipe, tokens = Path(home) / "recipe.yaml", _token_set(Path(home) / "ids", scored)
        for layout in _LAYOUTS:
            recipe.write_text(_RECIPE % (tokens, shrink.TOKENS, layout))
            try:
                with patch("quantkit.pipeline.tokens.SCORED", _SCORED * (shrink.TOKENS - 1)):
                    bundle = quantkit.compile(str(folder), recipe, out=out, speed=False)
                break
            except InputError as problem:
                if problem.code != "layout-unsupported" or layout == _LAYOUTS[-1]:
                    return verdict("refused", code=problem.code, line=str(problem))
            except Exception as problem:
                code = getattr(problem, "code", type(problem).__name__)
                return verdict("CRASH", code=code, line=f"{first_line(problem)} {place(problem)}")
        try:
            stated = figures(bundle.measurements)
            true = plain_figures(folder, bundle.model_folder, scored, bundle.manifest.model.kind)
        except Exception as problem:
            return verdict("CRASH", code="plain", line=f"{first_line(problem)} {place(problem)}")
        off = {
            name: abs(stated.get(name, float("inf")) - value) / max(abs(value), 1e-3) for name, value in true.items()
        }
        worst = max(off, key=lambda name: off[name])
        line = ", ".join(f"{name} {stated.get(name)!s:.8} (plain {value:.6g})" for name, value in true.items())
        share, told = said(bundle, folder)
        code = worst if off[worst] >= TOLERANCE else "" if told else "weights-unsaid"
        return verdict("WRONG" if code else "right", code=code, line=line, error=off[worst], share=share)


def _token_set(folder: Path, scored: Tensor) -> Path:
    """A set of token ids whose splits have nothing in common; all of `scored` is its eval split."""
    folder.mkdir()
    files = []
    for split, ids in {"calib": shrink.ids(16, seed=1), "eval": scored}.items():
        data = "".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()).encode()
        (folder / f"{split}.jsonl").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        files.append(f"  - {{split: {split}, path: {split}.jsonl, bytes: {len(data)}, sha256: {digest}}}")
    head = "schema: 1\nsummary: ids\nkind: tokens\nsource: {title: drawn, retrieved: drawn}\nlicence: CC0-1.0\nfiles:"
    (folder / "card.yaml").write_text("\n".join([head, *files]) + "\n")
    return folder


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What a bundle says of its accuracy."""
    found = {row["name"]: row for row in rows}
    stated = {}
    if (row := found.get("accuracy.perplexity")) is not None:
        stated = {"float perplexity": row["baseline"]["value"], "perplexity": row["value"]}
    for name in ("kl", "cosine"):
        if (row := found.get(f"accuracy.{name}")) is not None:
            stated[name] = row["value"]
    return stated


@torch.no_grad()
def plain_figures(source: Path, made: Path, tokens: Tensor, kind: str) -> dict[str, float]:
    """The same by two forwards of transformers, in float64 from the logits on."""
    models = [shrink.loaded(source), shrink.loaded(made)]
    if kind != "decoder":
        pooled = [
            torch.cat([shrink.states(model, part).double().mean(dim=1) for part in tokens.split(32)])
            for model in models
        ]
        return {"cosine": float(torch.nn.functional.cosine_similarity(*pooled).mean())}
    losses, divergence = [[], []], []
    for part in tokens.split(32):
        logs = [shrink.answer(model, part)[:, :-1].double().log_softmax(dim=-1) for model in models]
        for kept, log in zip(losses, logs, strict=True):
            kept.append(-log.gather(-1, part[:, 1:, None]).flatten())
        divergence.append((logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1).flatten())
    before, after = (float(torch.cat(kept).mean().exp()) for kept in losses)
    return {"float perplexity": before, "perplexity": after, "kl": float(torch.cat(divergence).mean())}


def linears(folder: Path) -> int:
    """Weights that multiply activations: all of two dimensions or more but embeddings, head and convolutions."""
    model = shrink.loaded(folder)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    apart = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    others = {id(each.weight) for each in model.modules() if isinstance(each, apart) or each is head}
    found = {id(each): each.numel() for each in model.parameters() if each.dim() > 1 and id(each) not in others}
    return sum(found.values())


def said(bundle: Any, folder: Path) -> tuple[float, bool]:
    """The share of linear weights that was quantized, and whether the manifest leaves nobody in doubt about the rest."""
    quantized = sum(entry.elements for entry in bundle.manifest.weights if entry.state == "quantized")
    left = sum(each.elements for each in bundle.manifest.weights if each.linear and each.state != "quantized")
    whole = max(linears(folder), 1)
    return round(quantized / whole, 3), abs(left - (whole - quantized)) / whole < _UNSAID


def first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]


def place(problem: BaseException) -> str:
    """Where it was raised, and the last line of quantkit on the way there."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if "/quantkit/" in frame.filename]
    shown = dict.fromkeys(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in [*ours[-1:], frames[-1]]
    )
    return f"({' <- '.join(reversed(shown))})"
