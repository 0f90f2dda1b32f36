"""The shapes at which two models are timed: decode steps and prefills, by batch and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_Step = Callable[[], object]
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)
PREFILLS = (64, 256, 1024)
# errors of a model that speak of one shape; the others go on
TOO_LARGE = {"out-of-memory", "prompt-too-long", "shape-unsupported"}


class Timeable(Protocol):
    """A loaded model, ready to run. Both raise InputError for a shape that does not fit: `out-of-memory` for this
    machine, `prompt-too-long` for this model, `shape-unsupported` for this engine."""

    def decode(self, batch: int, context: int) -> _Step:
        """One prepared decode step with `context` tokens in the cache; each call repeats the same step."""
        ...

    def prefill(self, batch: int, tokens: int) -> _Step:
        """One prepared prefill of `tokens` tokens a sequence; each call repeats it."""
        ...


@dataclass(frozen=True)
class Shape:
    """What is timed.

    Args:
        kind: of step.
        batch: sequences, or samples of a graph.
        size: tokens in the cache of a decode step; of each sequence of a prefill, which is 1 of a graph.
    """

    kind: Literal["decode", "prefill"]
    batch: int
    size: int

    @property
    def name(self) -> str:
        """Of its rows of latency."""
        return "latency.decode_step" if self.kind == "decode" else "latency.prefill"

    @property
    def tokens(self) -> int:
        """New ones of each sequence."""
        return 1 if self.kind == "decode" else self.size

    @property
    def context(self) -> int:
        """Tokens in the cache."""
        return self.size if self.kind == "decode" else 0

    @property
    def sizes(self) -> dict[str, int]:
        """As rows have them beside the batch."""
        return {"new_tokens": self.tokens, "context": self.context}

    @property
    def words(self) -> str:
        """For progress and errors."""
        return f"{self.kind}, batch {self.batch}, {'context' if self.kind == 'decode' else 'tokens'} {self.size}"

    def step(self, model: Timeable) -> _Step:
        """Prepared. Raises InputError: the model's."""
        return (model.decode if self.kind == "decode" else model.prefill)(self.batch, self.size)


@dataclass(frozen=True)
class TimingPlan:
    """What is measured, and how long it may take.

    Args:
        batches: of the decode steps.
        contexts: tokens in the cache of the decode steps; empty for a model that does not decode.
        prefills: tokens a sequence of the prefills.
        prefill_batches: of the prefills.
        seconds: for all shapes together. One takes longer where its 30 steps a side (10 of a prefill) need it.
        cell_seconds: beyond this a shape makes do with fewer steps, five blocks at least, and is flagged `few-steps`.
        rounds: over all shapes; the interval of a time rests on how much its rounds differ, from four rounds on.
        seed: of the order of the steps and of the resamples.
    """

    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    prefills: Sequence[int] = PREFILLS
    prefill_batches: Sequence[int] = (1,)
    seconds: float = 300.0
    cell_seconds: float = 120.0
    rounds: int = 5
    seed: int = 0

    def shapes(self) -> list[Shape]:
        """Small ones first: what they leave of their time goes to the large ones."""
        decode = [Shape("decode", batch, context) for batch in self.batches for context in self.contexts]
        return decode + [Shape("prefill", batch, tokens) for batch in self.prefill_batches for tokens in self.prefills]
