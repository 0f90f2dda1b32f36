"""Score a candidate against its original on held-out text, both streamed block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import cached
from quantkit.calibrate.tokens.ids import TokenSet
from quantkit.measurement.accuracy import states
from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.accuracy.positions import Accuracy, Items, data_of
from quantkit.measurement.rows import Device, Row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.model.streaming.stream import Answers, StreamedModel
    from quantkit.runtimes import Candidate
    from quantkit.runtimes.llama_cpp.session import LlamaModel
    from quantkit.runtimes.onnxruntime.session import OnnxModel
    from quantkit.runtimes.openvino.session import OpenvinoModel
    from quantkit.runtimes.tensorrt import decode


# logits of one model that are in memory at one time
_LOGITS, _ON_GPU = 1 << 23, 1 << 25


def original_answers(model: StreamedModel, tokens: TokenSet) -> Answers:
    """What the original gives; its last hidden states are computed once and kept in the user's cache.

    The cache key is all they depend on: source, token ids, versions, instruction set and threads.
    """
    from quantkit.model.streaming.stream import Answers

    place = states.place(model, tokens.sha256)
    kept = cached.read_tensor(place)
    if kept is None or kept.shape[:2] != tokens.ids.shape:
        calls = model.through(tokens.ids)
        if calls.live:  # what its blocks leave for each other cannot be kept
            return Answers(calls, tokens.ids)
        kept = calls.hidden
        cached.keep_tensor(place, kept)
    return model.answers(tokens.ids, hidden=kept)


def vocabulary(model: nn.Module) -> int:
    """How many logits a position has."""
    return int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]


def counted(original: StreamedModel, tokens: TokenSet) -> tuple[int, str]:
    """How many items there are to score, and what one is; an encoder has no next word, so it is a sequence."""
    if original.source.kind == "decoder" or tokens.pairs is not None:
        return tokens.items, tokens.unit
    return len(tokens.ids), "sequence"


def score(
    original: StreamedModel,
    candidate: Candidate,
    tokens: TokenSet,
    progress: Callable[[float], None] | None = None,
    *,
    at_once: int | None = None,
) -> Items:
    """Every position of `tokens` under both models.

    Memory is one block, two heads and a few positions of logits; of a candidate in a session, the session.

    Args:
        at_once: tokens that such a candidate is fed at a time, at most; None: as many as fit.
    """
    tell = progress or (lambda done: None)
    before = original_answers(original, tokens)
    tell(0.3)
    found = _positions(candidate, tokens, at_once)
    tell(0.6)
    accuracy = Accuracy()
    # final norm and head look at one position at a time, so a few at a time is enough
    few = max(1, (_LOGITS if original.device.type == "cpu" else _ON_GPU) // vocabulary(original.skeleton))
    for index in range(tokens.ids.shape[0]):
        ids = tokens.ids[index : index + 1]
        for start in range(0, ids.shape[1] - 1, few):
            part = slice(start, min(start + few, ids.shape[1] - 1))
            logits = before(index, part), found(index, part, ids[:, part])
            accuracy.add_positions(index, ids[0, part.start + 1 : part.stop + 1], *logits)
        tell(0.6 + 0.4 * (index + 1) / tokens.ids.shape[0])
    return accuracy.items()


def _positions(candidate: Candidate, tokens: TokenSet, at_once: int | None) -> Callable[[int, slice, Tensor], Tensor]:
    """Logits [P, V] of consecutive positions of a sequence."""
    from quantkit.model.streaming.stream import StreamedModel

    if isinstance(candidate, StreamedModel):
        answers = candidate.answers(tokens.ids)
        return lambda index, part, ids: answers(index, part)
    return _Session(candidate, tokens.ids.shape[1], at_once)


class _Session:
    """A model with a cache: each part of a sequence goes on where the last one ended."""

    def __init__(
        self, model: OnnxModel | LlamaModel | OpenvinoModel | decode.EngineModel, length: int, at_once: int | None
    ) -> None:
        self.model = model
        self.length = length
        self.at_once = at_once
        self.state: Any = None

    def __call__(self, index: int, part: slice, ids: Tensor) -> Tensor:
        import torch

        if part.start == 0 or self.state is None:
            self.state = self.model.state(1, self.length)
        few = ids.split(self.at_once or ids.shape[1], dim=1)
        return torch.cat([torch.from_numpy(self.model.run(self.state, part.numpy())[0]) for part in few])  # type: ignore[arg-type]


def _ways(candidate: Candidate) -> dict[str, int | None]:
    """Of a graph that multiplies in two ways: each, and how many tokens at a time go it at most; else empty."""
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    if not isinstance(candidate, OnnxModel):
        return {}
    return {way: candidate.prompt_rows - 1 if way == "steps" else None for way in candidate.ways}


def _part(tell: Callable[[float], None], number: int, count: int, done: float) -> None:
    tell((number + done) / count)


def settings(candidate: Candidate) -> dict[str, Any]:
    """Of the runtime a candidate is in, for its rows."""
    from quantkit.model.streaming.stream import StreamedModel

    return {"dtype": "float32"} if isinstance(candidate, StreamedModel) else candidate.settings


def device_of(candidate: Candidate) -> dict[str, Any]:
    """The `device` of rows of a candidate: where it is run."""
    import torch

    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.tensorrt import decode

    if isinstance(candidate, StreamedModel) and candidate.device.type == "cuda":
        return dict(machine.gpu(torch.cuda.get_device_name(candidate.device)))
    if isinstance(candidate, decode.EngineModel):
        return dict(machine.gpu(candidate.engine.file.gpu))
    return machine.device()


def flagged(rows: list[Row], was: str | None) -> list[Row]:
    """Rows that say what the source was before it was converted, if it was."""
    if was is None:
        return rows
    flag = f"source-was-{was.replace(' ', '-').lower()}"
    return [row.model_copy(update={"flags": [*row.flags, flag]}) for row in rows]


def rows(
    original: StreamedModel,
    candidate: Candidate,
    tokens: TokenSet,
    *,
    subject: str,
    runtime: str,
    progress: Callable[[float], None] | None = None,
) -> tuple[list[Row], Items | None]:
    """The accuracy rows of a candidate, and what was found at each position (None for encoders).

    A graph that multiplies in two ways has rows for each, told apart by `settings.way`: first of whole sequences, as
    prompts are, whose positions are what is given back, then of a few tokens at a time, as steps are.
    """
    about = About(
        subject=subject,
        baseline=original.source.sha256,
        runtime=runtime,
        data=data_of(tokens),
        device=Device.model_validate(device_of(candidate)),
        versions=machine.versions(),
        settings=settings(candidate),
    )
    if original.source.kind == "decoder":
        ways = _ways(candidate)
        if not ways:
            items = score(original, candidate, tokens, progress)
            return items.rows(about), items
        found, scored = [], []
        for number, (way, at_once) in enumerate(ways.items()):
            tell = partial(_part, progress or (lambda done: None), number, len(ways))
            scored.append(score(original, candidate, tokens, tell, at_once=at_once))
            found += scored[-1].rows(replace(about, settings={**about.settings, "way": way}))
        return found, scored[0]
    from quantkit.measurement.accuracy.embed import result_rows
    from quantkit.measurement.accuracy.purpose import TextResults

    return result_rows(original, candidate, tokens, TextResults(original, tokens), about, progress), None
