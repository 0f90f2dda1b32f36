"""Texts as vectors: what retrieval is scored on, of a model in torch or in a session.

A text's vector is the mean of the last hidden states of its tokens, those that the tokenizer adds included (mean
pooling; Reimers and Gurevych, Sentence-BERT, 2019). Texts of equally many tokens run together, so none is padded: what
padding would do to a model with quantized inputs is not in the figures, and no mask is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import cached
from quantkit.calibrate.sets.pairs import PairSet
from quantkit.calibrate.tokens.ids import LONGEST, token_ids
from quantkit.measurement.accuracy.labelled import About, retrieval
from quantkit.measurement.rows import Data, Row

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Candidate

Array = NDArray[Any]

_TOGETHER = 32


def pair_rows(
    original: StreamedModel,
    candidate: Candidate,
    pairs: PairSet,
    *,
    tokenizer: Any,
    about: About,
    longest: int = LONGEST,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[Row]:
    """Recall and cosine (`labelled.retrieval`) of a candidate beside its original.

    Args:
        tokenizer: of both, from transformers.
        about: what the rows share; its `data` is replaced by what says which pairs these are.
        longest: tokens of a text that count; less where the model has fewer positions.
        progress: told the share that is done.

    Raises:
        InputError, GateError: of `labelled.retrieval`.
    """
    tell = progress or (lambda done: None)
    ids = texts_of(pairs, tokenizer, longest)
    _original(original, ids)
    tell(0.5)
    after = embeddings(candidate, ids)
    tell(1.0)
    return vector_rows(original, after, ids, pairs, about=about, seed=seed)


def texts_of(pairs: PairSet, tokenizer: Any, longest: int = LONGEST) -> list[list[int]]:
    """The token ids of all texts: of the left sides, then of the right ones."""
    return token_ids([*pairs.left, *pairs.right], tokenizer, longest)


def vector_rows(
    original: StreamedModel, after: Array, ids: Sequence[Sequence[int]], pairs: PairSet, *, about: About, seed: int = 0
) -> list[Row]:
    """`pair_rows` of a candidate whose vectors [n, width] of `ids` are there already: from another machine.

    Raises:
        InputError, GateError: of `labelled.retrieval`. ValueError: vectors of another shape than the original's.
    """
    count = len(pairs.left)
    sides = [part for vectors in (_original(original, ids), after) for part in (vectors[:count], vectors[count:])]
    data = Data(set=pairs.name, split=pairs.split, sha256=pairs.sha256, items=max(1, count))
    return retrieval(*sides, about=replace(about, data=data), seed=seed)


def _original(model: StreamedModel, ids: Sequence[Sequence[int]]) -> Array:
    """The original's vectors, computed once and kept in the user's cache."""
    import torch

    from quantkit.measurement.accuracy import states

    place = states.place(model, hashlib.sha256(b"pooled" + json.dumps(ids).encode()).hexdigest())
    kept = cached.read_tensor(place)
    if kept is not None and kept.shape[0] == len(ids):
        return np.asarray(kept.numpy())
    found = embeddings(model, ids)
    cached.keep_tensor(place, torch.from_numpy(found))
    return found


def embeddings(model: Candidate, ids: Sequence[Sequence[int]]) -> Array:
    """The mean-pooled last hidden states of texts, [n, width] float32; no length is taken out."""
    by_length: dict[int, list[int]] = {}
    for place, text in enumerate(ids):
        by_length.setdefault(len(text), []).append(place)
    found: Array | None = None
    for places in by_length.values():
        vectors = _pooled(model, np.asarray([ids[place] for place in places], dtype=np.int64))
        if found is None:
            found = np.empty((len(ids), vectors.shape[1]), np.float32)
        found[places] = vectors
    return np.empty((0, 0), np.float32) if found is None else found


def _pooled(model: Candidate, ids: Array) -> Array:
    """Of texts of one length, ids [m, T]: [m, width]."""
    import torch

    from quantkit.model.streaming.stream import StreamedModel

    if isinstance(model, StreamedModel):
        with torch.inference_mode():
            states = model.answers(torch.from_numpy(ids), chunk=_TOGETHER).all()
            pooled: Array = states.mean(dim=1).float().cpu().numpy()
        return pooled
    parts = np.array_split(ids, -(-len(ids) // _TOGETHER))
    return np.concatenate([model.encode(part).mean(axis=1) for part in parts])
