"""Score a candidate against its original on held-out text, both streamed block by block."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quantkit import content
from quantkit.calibrate.sets import TokenSet
from quantkit.measure.accuracy import Accuracy, Items, data_of
from quantkit.measure.rows import Device, Row
from quantkit.plan import machine

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from quantkit.model.stream import StreamedModel


# logits of one model that are in memory at one time
_LOGITS = 1 << 23


def original_states(model: StreamedModel, tokens: TokenSet) -> Tensor:
    """The original's last hidden states, [samples, tokens, width], computed once and kept in the user's cache.

    The cache key is all they depend on: source, token ids, versions, instruction set and threads.
    """
    import torch

    key = {
        "source": model.source.sha256,
        "ids": tokens.sha256,
        "versions": machine.versions(),
        "isa": machine.isa(),
        "threads": torch.get_num_threads(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = content.cache_dir() / "states" / f"{name}.safetensors"
    kept = _read(path)
    if kept is not None and kept.shape[:2] == tokens.ids.shape:
        model.learn_calls(tokens.ids[:1, :8])
        return kept
    hidden = model.run(tokens.ids)
    _write(path, hidden)
    return hidden


def _read(path: Path) -> Tensor | None:
    """Cached states; None where there are none, or where the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: Tensor | None = load_file(path).get("hidden")
    except (OSError, SafetensorError):
        return None
    return found


def _write(path: Path, hidden: Tensor) -> None:
    """Keep states; a cache that cannot be written costs time, not the result."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"hidden": hidden}, temporary)
            temporary.replace(path)
        except (OSError, SafetensorError):  # the library says so of a full disk
            temporary.unlink(missing_ok=True)


def vocabulary(model: nn.Module) -> int:
    """How many logits a position has."""
    return int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]


def score(
    original: StreamedModel, candidate: StreamedModel, tokens: TokenSet, progress: Callable[[float], None] | None = None
) -> Items:
    """Every position of `tokens` under both models; memory is one block, two heads and a few positions of logits."""
    tell = progress or (lambda done: None)
    from quantkit.model.stream import Head

    before = original_states(original, tokens)
    tell(0.3)
    after = candidate.run(tokens.ids)
    tell(0.6)
    heads = [Head(model.rest(), model.path, as_tuple=model.as_tuple) for model in (original, candidate)]
    accuracy = Accuracy()
    # final norm and head look at one position at a time, so a few at a time is enough
    few = max(1, _LOGITS // vocabulary(heads[0].model))
    for index in range(tokens.ids.shape[0]):
        ids = tokens.ids[index : index + 1]
        for start in range(0, ids.shape[1] - 1, few):
            part = slice(start, min(start + few, ids.shape[1] - 1))
            logits = [
                head(hidden[index : index + 1, part], ids[:, part])[0]
                for head, hidden in zip(heads, (before, after), strict=True)
            ]
            accuracy.add_positions(index, ids[0, part.start + 1 : part.stop + 1], logits[0], logits[1])
        tell(0.6 + 0.4 * (index + 1) / tokens.ids.shape[0])
    return accuracy.items()


def cosine(original: StreamedModel, candidate: StreamedModel, tokens: TokenSet) -> Tensor:
    """For encoders, which have no next word: the cosine between both models' mean-pooled outputs, [samples]."""
    import torch

    before, after = original_states(original, tokens), candidate.run(tokens.ids)
    return torch.nn.functional.cosine_similarity(before.mean(dim=1).double(), after.mean(dim=1).double())


def flagged(rows: list[Row], was: str | None) -> list[Row]:
    """Rows that say what the source was before it was converted, if it was."""
    if was is None:
        return rows
    flag = f"source-was-{was.replace(' ', '-').lower()}"
    return [row.model_copy(update={"flags": [*row.flags, flag]}) for row in rows]


def rows(
    original: StreamedModel,
    candidate: StreamedModel,
    tokens: TokenSet,
    *,
    subject: str,
    runtime: str,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[list[Row], Items | None]:
    """The accuracy rows of a candidate, and what was found at each position (None for encoders)."""
    device = Device.model_validate(machine.device())
    if original.source.kind == "decoder":
        items = score(original, candidate, tokens, progress)
        found = items.rows(
            subject=subject,
            baseline=original.source.sha256,
            runtime=runtime,
            data=data_of(tokens),
            device=device,
            versions=machine.versions(),
            settings=settings,
        )
        return found, items
    values = cosine(original, candidate, tokens)
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    mean = float(values.mean())
    row = Row(
        name="accuracy.cosine",
        value=mean,
        unit="1",
        stat="mean",
        better="higher",
        quantiles={"p50": float(values.median())},
        ci95=(mean - half, mean + half),
        n=len(values),
        subject=subject,
        runtime=runtime,
        settings=dict(settings or {}),
        device=device,
        versions=machine.versions(),
        data=data_of(tokens),
    )
    return [row], None
