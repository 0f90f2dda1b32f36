"""Is quantkit right about a model? Held against plain transformers, which knows nothing of quantkit.

Four verdicts: right, refused (by an `InputError`, whose code and line are kept), WRONG (figures that differ), CRASH
(anything else: an internal error, a failed check, a traceback).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zoo import shrink
from zoo.exceptions import LEFT_OUT

if TYPE_CHECKING:
    from quantkit.bundle import Bundle, Check

# of the truth's spread: far above float32's rounding, far below what a wrong mask or a lost bias does
TOLERANCE = 1e-3


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
_LAYOUTS = ("pack-quantized", "dense")


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
        """For a line of a file."""
        return asdict(self)

    @classmethod
    def on(cls, architecture: shrink.Architecture, part: str, verdict: str, **more: Any) -> Verdict:
        """A verdict on a class."""
        return cls(architecture.table, architecture.model_type, architecture.name, part, verdict, **more)


def float_stream(architecture: shrink.Architecture) -> Verdict:
    """The stream of a tiny model against the model's own forward, position by position."""
    return _judged(architecture, "stream", _stream)


def whole_compile(architecture: shrink.Architecture, dtype: torch.dtype = torch.float32) -> Verdict:
    """A whole compile, verified: its manifest's figures against what plain transformers makes of source and bundle."""
    return _judged(architecture, "compile", _compile, dtype)


def half(architecture: shrink.Architecture) -> Verdict:
    """The same of a model whose weights are stored in bfloat16, as most are."""
    return whole_compile(architecture, torch.bfloat16)


def both(architecture: shrink.Architecture) -> Verdict:
    """A whole compile; where that is right, the stream too, of whose answers a compile compares a few."""
    found = whole_compile(architecture)
    if found.verdict != "right":
        return found
    stream = float_stream(architecture)
    return found if stream.verdict == "right" else stream


def _judged(
    architecture: shrink.Architecture,
    part: str,
    look: Callable[[Path], dict[str, Any]],
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    from quantkit.errors import InputError

    verdict = partial(Verdict.on, architecture, part)
    if architecture.name in LEFT_OUT:
        return verdict("not here", line=LEFT_OUT[architecture.name])
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        folder = Path(home) / architecture.cls
        try:
            shrink.tiny(architecture, folder, dtype=dtype)
            shrink.tokenizer().save_pretrained(folder)
        except Exception as problem:
            return verdict("not here", line=_first_line(problem))
        try:
            found = look(folder)
        except InputError as problem:
            return verdict("refused", code=problem.code, line=str(problem))
        except Exception as problem:
            code = getattr(problem, "code", type(problem).__name__)
            return verdict("CRASH", code=code, line=f"{_first_line(problem)} {place(problem)}")
    return verdict("WRONG" if found.get("code") else "right", **found)


def _stream(folder: Path) -> dict[str, Any]:
    """Sequences of different content, in chunks of which the last is smaller than the others."""
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel

    source, tokens = open_model(str(folder)), shrink.ids()
    found = StreamedModel(source).answers(tokens, chunk=2).all()
    error = apart(found, shrink.truth(folder, tokens, source.kind))
    return {"code": "" if error < TOLERANCE else "stream", "error": error}


def apart(found: Tensor, true: Tensor) -> float:
    """The largest difference, in standard deviations of the truth; infinite where shapes differ or a value is none."""
    if found.shape != true.shape or not found.isfinite().all():
        return float("inf")
    return float((found - true).abs().max() / true.std())


def _compile(folder: Path) -> dict[str, Any]:
    scored = shrink.ids(_SCORED, seed=2)
    bundle = _compiled(folder, _token_set(folder.parent / "ids", scored))
    stated = figures(bundle.measurements)
    true = plain_figures(folder, bundle.model_folder, scored, bundle.manifest.model.kind)
    off = {name: abs(stated.get(name, float("inf")) - value) / max(abs(value), 1e-3) for name, value in true.items()}
    worst = max(off, key=lambda name: off[name])
    share, told = said(bundle, folder)
    failed = [check.name for check in verified(bundle) if not check.ok]
    wrong = {worst: off[worst] >= TOLERANCE, "weights-unsaid": not told, "verify": failed}
    return {
        "code": next((code for code, is_so in wrong.items() if is_so), ""),
        "line": "; ".join(failed)
        or ", ".join(f"{name} {stated.get(name)!s:.8} (plain {value:.6g})" for name, value in true.items()),
        "error": off[worst],
        "share": share,
    }


def _compiled(folder: Path, tokens: Path) -> Bundle:
    """By the first layout that does not refuse the model's linears: `dense` is what the others' refusals advise."""
    import quantkit
    from quantkit.errors import InputError

    for layout in _LAYOUTS:
        recipe = folder.parent / f"{layout}.yaml"
        recipe.write_text(_RECIPE % (tokens, shrink.TOKENS, layout))
        try:
            with patch("quantkit.pipeline.blocks.tokens.SCORED", _SCORED * (shrink.TOKENS - 1)):
                return quantkit.compile(str(folder), recipe, out=folder.parent / layout, speed=False)
        except InputError as problem:
            if problem.code != "layout-unsupported" or layout == _LAYOUTS[-1]:
                raise
    raise AssertionError


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


def verified(bundle: Bundle) -> list[Check]:
    """What `quantkit verify` looks at, of the bundle as it is on disk."""
    import quantkit
    from quantkit.pipeline.reload import reload

    opened = quantkit.load(bundle.path)
    return [*opened.verify(), *reload(opened)[0]]


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What a bundle says of the accuracy of its first export, the checkpoint."""
    # rows of long contexts are about the cache
    found = {row["name"]: row for row in reversed(rows) if "context" not in (row["shape"] or {})}
    stated = {}
    if (row := found.get("accuracy.perplexity")) is not None:
        stated = {"float perplexity": row["baseline"]["value"], "perplexity": row["value"]}
    for name in ("kl", "cosine"):
        if (row := found.get(f"accuracy.{name}")) is not None:
            stated[name] = row["value"]
    return stated


_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def _classes(model: Any, part: Tensor) -> Tensor:
    """Logits of what a head decides on: a text's classes, a token's, or the tokens where an answer begins and ends."""
    if not type(model).__name__.endswith("ForQuestionAnswering"):
        return shrink.answer(model, part).flatten(0, -2)
    output = model(input_ids=part)
    return torch.cat([output.start_logits, output.end_logits])


@torch.no_grad()
def plain_figures(source: Path, made: Path, tokens: Tensor, kind: str) -> dict[str, float]:
    """The same by two forwards of transformers, in float64 from the logits on."""
    models = [shrink.loaded(source), shrink.loaded(made)]
    if kind != "decoder" and type(models[0]).__name__.endswith(_CLASSIFIERS):
        before, after = (
            torch.cat([_classes(model, part) for part in tokens.split(32)]).double().log_softmax(dim=-1)
            for model in models
        )
        return {"kl": float((before.exp() * (before - after)).sum(dim=-1).mean())}
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
    # tables that are no `nn.Embedding`: the classes that hold them say what they are
    tables = [each for each in model.modules() if type(each).__name__.endswith("Embedding")]
    others |= {id(value) for each in tables for value in each.parameters(recurse=False)}
    found = {
        id(each): each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and id(each) not in others and not name.endswith("bias")
    }
    return sum(found.values())


def said(bundle: Any, folder: Path) -> tuple[float, bool]:
    """The share of linear weights that was quantized, and whether the manifest says what became of the rest."""
    quantized = sum(entry.elements for entry in bundle.manifest.weights if entry.state == "quantized")
    left = sum(each.elements for each in bundle.manifest.weights if each.linear and each.state != "quantized")
    whole = max(linears(folder), 1)
    return round(quantized / whole, 3), abs(left - (whole - quantized)) / whole < _UNSAID


def _first_line(problem: BaseException) -> str:
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
