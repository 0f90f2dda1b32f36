"""Word error rate of a model of speech, against its original on the same recordings.

With S words replaced, D left out and I added, in the alignment with the fewest of them, and N words of all transcripts:

    WER = Σ (S + D + I) / Σ N

Both sides write greedily. Words are compared in small letters, without punctuation. The interval is a BCa bootstrap
over recordings; that of the change draws both sides of a recording together. If both sides have as many errors in every
recording, the change is 0 and its interval has no width: N then tells how much was heard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calibrate.tokens.heard import BEFORE, LONGEST, transcripts
from quantkit.measurement.accuracy.labelled import About, Drawn
from quantkit.measurement.rows import Baseline, Row
from quantkit.model.structure.kinds import positions
from quantkit.stats.clustered import ratio_interval

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Scored

NAME = "accuracy.wer"
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words_of(text: str) -> list[str]:
    """Split a text into words that are compared: small letters and digits, apostrophes inside of words."""
    return [word.replace("’", "'") for word in _WORD.findall(text.lower())]


def errors(spoken: Sequence[str], written: Sequence[str]) -> int:
    """Count the words replaced, left out and added, at the least."""
    before = np.arange(len(written) + 1)
    for number, word in enumerate(spoken, 1):
        replaced = before[:-1] + np.array([word != other for other in written], dtype=np.int64)
        row = np.concatenate([[number], np.minimum(replaced, before[1:] + 1)])
        # added words: each costs one more than the text before it
        before = np.minimum.accumulate(row - np.arange(len(row))) + np.arange(len(row))
    return int(before[-1])


def rows(original: StreamedModel, candidate: Scored, tokens: TokenSet, about: About) -> list[Row]:
    """Return `accuracy.wer` on the recordings with a transcript; none without, or for a side that no runtime runs."""
    from quantkit.calibrate.tokens.generated import fits
    from quantkit.model.source.places import quiet_loading
    from quantkit.model.streaming.calls import Pictures

    heard = tokens.pictures.rows if tokens.pictures is not None else {}
    pairs = [(text, heard[Pictures.key(ids)]) for text, ids in zip(tokens.spoken, tokens.ids, strict=False) if text]
    if not pairs or not fits(original.source):
        return []
    texts, features = [words_of(text) for text, _ in pairs], [one for _, one in pairs]
    most = (positions(original.source.config) or LONGEST) - BEFORE
    after = _written(original, candidate, features, most)
    if after is None:
        return []
    with quiet_loading():
        before = transcripts(original.source.load(), original.source.tokenizer(), features, most)
    return [row_of(texts, [words_of(text) for text in before], [words_of(text) for text in after], about)]


def _written(
    original: StreamedModel, candidate: Scored, features: Sequence[Mapping[str, Tensor]], most: int
) -> list[str] | None:
    """Return the transcripts of a candidate; None for values in memory, which no library runs."""
    from quantkit.model.source.places import quiet_loading
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.onnxruntime.encoder_decoder import OnnxPair
    from quantkit.runtimes.speech import written
    from quantkit.runtimes.torch import RUNTIME as TORCH

    tokenizer, path = original.source.tokenizer(), original.source.path
    if isinstance(candidate, OnnxPair):
        return written(candidate, tokenizer, path, features, most)
    if not isinstance(candidate, StreamedModel) or not (candidate.source.path / "config.json").is_file():
        return None
    if candidate.source.path == path:
        return None
    with quiet_loading():
        model = TORCH.network(candidate.source.path)
    return transcripts(model, tokenizer, features, most)


def row_of(
    texts: Sequence[Sequence[str]], before: Sequence[Sequence[str]], after: Sequence[Sequence[str]], about: About
) -> Row:
    """Return the row of transcripts: the words of each recording, of the original's text, and of the candidate's."""
    sizes = np.array([len(text) for text in texts], dtype=np.float64)
    wrong = [
        np.array([errors(text, written) for text, written in zip(texts, side, strict=True)], dtype=np.float64)
        for side in (before, after)
    ]
    value, least = (float(side.sum() / sizes.sum()) for side in (wrong[1], wrong[0]))
    change: dict[str, Any] = {"difference": value - least}
    interval = None
    if len(sizes) > 1:
        interval = ratio_interval(wrong[1], sizes)
        change["difference_ci95"] = _change(wrong[1] - wrong[0], sizes)
    baseline = Baseline(subject=about.baseline, value=least, **change)
    drawn, shape = Drawn(len(sizes), "recording"), {"words": int(sizes.sum())}
    more: dict[str, Any] = {"stat": "ratio", "better": "lower", "shape": shape, "held": (0.0, np.inf)}
    return about.row(NAME, value, drawn, against=baseline, ci95=interval, **more)


def _change(more: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float]:
    """Bound the change of the rate; without any change in a recording it is 0."""
    return ratio_interval(more, sizes) if more.any() else (0.0, 0.0)
