"""Results of an encoder for texts, in torch or in a session, and the rows of accuracy that follow from them.

What that is, `purpose.py` says: vectors, which retrieval is scored on, or logits. Texts of equally many tokens run
together, so none is padded: what padding would do to a model with quantized inputs is not in the figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import content, machine
from quantkit.bundle import cached
from quantkit.calibrate.tokens.ids import TokenSet
from quantkit.measurement.accuracy.labelled import About, classification, outputs, retrieval
from quantkit.measurement.accuracy.labelled.about import Drawn, cosine_row
from quantkit.measurement.accuracy.purpose import TextResults, pooled
from quantkit.measurement.rows import Data, Row

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Scored

Array = NDArray[Any]

# a logit that no chance is left of, of places that a shorter text has not
_NOWHERE = -1e9


def result_rows(
    original: StreamedModel,
    candidate: Scored,
    tokens: TokenSet,
    result: TextResults,
    about: About,
    progress: Callable[[float], None] | None = None,
) -> list[Row]:
    """Rows of a candidate beside its original.

    Args:
        result: of the original, and of these tokens.
        about: what the rows share.
        progress: told the share that is done.

    Raises:
        InputError, GateError: of `labelled`.
    """
    tell = progress or (lambda done: None)
    _original(original, result)
    tell(0.5)
    after = results(candidate, result.ids, result)
    tell(1.0)
    return rows_of(original, after, tokens, result, about)


def rows_of(
    original: StreamedModel, after: Sequence[Array], tokens: TokenSet, result: TextResults, about: About
) -> list[Row]:
    """`result_rows` of a candidate whose results are there already, from another machine: of each text [N] or [T, N].

    Raises:
        InputError, GateError: of `labelled`. ValueError: results of another shape than the original's.
    """
    before, pairs = _original(original, result), tokens.pairs
    count = len(before) if pairs is None else len(pairs.left)
    if pairs is not None:
        data = Data(set=pairs.name, split=pairs.split, sha256=pairs.sha256, items=max(1, count))
        about = replace(about, data=data)
    else:
        about = replace(about, data=about.data.model_copy(update={"items": count}))
    if [one.shape for one in before] != [other.shape for other in after]:
        raise ValueError(f"results of shape {after[0].shape if len(after) else ()}")
    if result.purpose.gives == "vectors":
        one, other = np.stack(before), np.stack(after)
        if pairs is not None:
            return retrieval(one[:count], one[count:], other[:count], other[count:], about=about)
        one, other = one.astype(np.float64), other.astype(np.float64)
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return [cosine_row((one * other).sum(axis=1) / lengths, Drawn(count, "sequence"), about)]
    if result.purpose.gives == "text":
        return _of_texts(np.stack(before), np.stack(after), result.purpose.problem, about)
    texts = np.repeat(np.arange(len(before)), [len(each) for each in before])
    if result.purpose.gives == "tokens":
        sides = np.concatenate(before), np.concatenate(after)
        return classification(sides[0], sides[1], None, about=about, unit="token", clusters=texts)
    places = max(len(each) for each in before)
    filled = [np.concatenate([_filled(each, places) for each in side]) for side in (before, after)]
    return classification(
        filled[0], filled[1], None, about=about, unit="place", clusters=np.repeat(np.arange(len(before)), 2)
    )


def _filled(logits: Array, places: int) -> Array:
    """Logits [T, N] of a text's places as [N, places]."""
    return np.pad(logits.T, ((0, 0), (0, places - len(logits))), constant_values=_NOWHERE)


def _of_texts(before: Array, after: Array, problem: str, about: About) -> list[Row]:
    """Of logits [n, C]: the class that texts get; of labels, which do not exclude each other, each yes or no; of a
    single number, which of two texts comes first; of numbers how far they have moved."""
    if problem == "multi_label_classification":
        # a logit x and a sigmoid are the two classes of 0 and x
        both = [np.stack([np.zeros(side.size, side.dtype), side.ravel()], axis=1) for side in (before, after)]
        texts = np.repeat(np.arange(len(before)), before.shape[1])
        return classification(both[0], both[1], None, about=about, unit="label", clusters=texts)
    if before.shape[1] == 1:
        both = [side[: len(side) // 2 * 2].reshape(-1, 2) for side in (before, after)]
        ranked = classification(both[0], both[1], None, about=about, unit="pair")
        # numbers are no chances: only which is larger counts
        order = [row for row in ranked if row.name != "accuracy.kl" and "surer_than" not in row.settings]
        return [*order, *outputs({"logits": before}, {"logits": after}, about=about)]
    if problem == "regression":
        return outputs({"logits": before}, {"logits": after}, about=about)
    return classification(before, after, None, about=about, unit="text")


def _original(model: StreamedModel, result: TextResults) -> Sequence[Array]:
    """Return what the original gives, computed once and kept in the user's cache."""
    import torch

    key = json.dumps([result.key, result.ids]).encode()
    place = kept_at(model, hashlib.sha256(b"result" + key).hexdigest())
    kept = cached.read_tensor(place)
    lengths = [1 if result.purpose.gives in ("vectors", "text") else len(text) for text in result.ids]
    if kept is None or kept.shape[0] != sum(lengths):
        found = results(model, result.ids, result)
        flat = [each.reshape(length, -1) for each, length in zip(found, lengths, strict=True)]
        kept = torch.from_numpy(np.concatenate(flat))
        cached.keep_tensor(place, kept)
    parts = np.split(np.asarray(kept.numpy()), np.cumsum(lengths)[:-1])
    return [part[0] if result.purpose.gives in ("vectors", "text") else part for part in parts]


def results(model: Scored, ids: Sequence[Sequence[int]], of: Callable[[Array, Array], Array]) -> list[Array]:
    """Return what becomes of the last hidden states of texts, one after the other.

    Args:
        of: states [m, T, width] and ids [m, T] of texts of one length -> [m, ...].
    """
    by_length: dict[int, list[int]] = {}
    for place, text in enumerate(ids):
        by_length.setdefault(len(text), []).append(place)
    found: dict[int, Array] = {}
    for places in by_length.values():
        # a stream reads all its blocks each time
        step = model.together or len(places)
        for start in range(0, len(places), step):
            some = places[start : start + step]
            same = np.asarray([ids[place] for place in some], dtype=np.int64)
            own = _logits(model, same) if isinstance(of, TextResults) and of.purpose.gives != "vectors" else None
            found |= zip(some, of(model.encode(same), same) if own is None else own, strict=True)
    return [found[place] for place in range(len(ids))]


def embeddings(model: Scored, ids: Sequence[Sequence[int]], pooling: Sequence[str] = ("mean",), skip: int = 0) -> Array:
    """The pooled last hidden states of texts, [n, width] float32; no length is taken out."""
    found = results(model, ids, lambda states, _: pooled(states, pooling, skip))
    return np.stack(found) if found else np.empty((0, 0), np.float32)


def _logits(model: Scored, ids: Array) -> Array | None:
    """Return what a candidate's own head gives for texts of one length; None of one that gives states alone."""
    return model.logits(ids) if model.headed else None


# of how models are run block by block: another number, and what was kept before is not read again. Until 2, classes
# that share a cache or arguments between chunks gave other states than their own forward
_STREAM = 2


def kept_at(model: StreamedModel, digest: str) -> Path:
    """Where an original's states are kept, by all that they depend on; `digest` is of the ids."""
    import torch

    key = {
        "source": model.source.sha256,
        "ids": digest,
        "stream": _STREAM,
        "versions": machine.versions(),
        "isa": machine.isa(),
        "threads": torch.get_num_threads(),
    }
    if model.device.type != "cpu":
        key["device"] = [torch.cuda.get_device_name(model.device), torch.get_float32_matmul_precision()]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "states" / f"{name}.safetensors"
