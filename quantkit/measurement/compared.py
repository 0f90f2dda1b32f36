"""Two versions of one model, A and B, held against each other: what was decided of each thing, and the verdict.

A is what B is set against; effects above zero are for the worse of B. Of all that was compared

    mixed           B is worse in one thing and better in another
    A better        B is worse in something, and nowhere can it be better by more than the margin
    B better        B is better in something, and nowhere can it be worse by more than the margin
    same            every difference lies within its margin
    inconclusive    anything else: what is not known could turn the answer

*Can* is the 95 % interval. Exchange A and B, and the verdict is exchanged. What a gate has to know is another question,
with an answer more often: 0, B is no worse in anything than the margin or than the gates of its recipe allow; 1, it is
worse in something; 3, neither is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from math import isfinite
from typing import Any, Literal

from quantkit.bundle import LayerEntry
from quantkit.stats.decision import Answer, CellDecision, decide
from quantkit.stats.evidence import EACH_WAY, Doubt, Evidence, Interval

What = Literal["accuracy", "latency", "size"]
Verdict = Literal["A better", "same", "B better", "mixed", "inconclusive"]
# how sides were set against each other: item by item, in one run of alternating steps, each by the interval of its own
# row, each by its ratio to one baseline in a run of its own, or by counting
How = Literal["paired", "interleaved", "apart", "ratio of ratios", "counted"]


@dataclass(frozen=True)
class _Thing:
    """One thing that is compared.

    Args:
        name: of the rows that it is about: `accuracy.kl`, `latency.decode_step`, `size.bytes`.
        a, b: values of both, in `unit`; None where only the difference is known.
        n: items or timed steps that it rests on.
        batch, shape, device: of times; `{"new_tokens": 1, "context": 128}`, the device's name.
        output: of a graph's output, its name.
    """

    what: What
    name: str
    a: float | None
    b: float | None
    unit: str
    how: How
    _: KW_ONLY
    n: int | None = None
    runtime: str | None = None
    batch: int | None = None
    shape: Mapping[str, int] | None = None
    device: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Quantity(_Thing):
    """One thing before it is decided; `evidence` is what is known of the difference."""

    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class DecidedCell(_Thing):
    """What was decided of one thing; see `_Thing`, and `CellDecision` for what is not named here.

    Args:
        answer: of B.
        effect: how much worse B is: a share (0.05: 5 % slower or larger, 0.01: one item in a hundred lost), or nats.
        no_worse, no_better: B is shown to be no worse than the margin; nor better.
        confirmed: whether a second run said the same of a time; None where there was none.
        allowed: how much worse the gates of B's recipe allow it to be, in the unit of `effect`; None where they do not
            say, or the margin was asked for.
        shipped: why a loss of time is none to B's own verdict; empty where it is one.
        doubt: why neither side is called better, whatever the interval says.
    """

    answer: Answer
    effect: float
    ci95: Interval
    margin: float
    p_worse: float
    p_better: float
    detectable: float
    no_worse: bool
    no_better: bool
    confirmed: bool | None = None
    allowed: float | None = None
    shipped: str = ""
    doubt: Doubt = ""

    @property
    def is_allowed(self) -> bool:
        """Tell if B's loss is within its gates, or accepted by its verdict."""
        return bool(self.shipped) or (self.allowed is not None and self.effect <= self.allowed)

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form; an infinite limit becomes null, and `is_allowed` tells."""
        limit = self.allowed if self.allowed is not None and isfinite(self.allowed) else None
        return {**asdict(self), "allowed": limit, "is_allowed": self.is_allowed}

    @classmethod
    def of(
        cls,
        asked: Quantity,
        decision: CellDecision,
        confirmed: bool | None = None,
        *,
        allowed: float | None = None,
        shipped: str = "",
    ) -> DecidedCell:
        """Make the cell of a decision."""
        low, high = asked.evidence.interval(1 - 2 * EACH_WAY)
        same = {name: getattr(asked, name) for name in asked.__dataclass_fields__ if name != "evidence"}
        told = {name: getattr(decision, name) for name in decision.__dataclass_fields__ if name != "first"}
        return cls(
            **same,
            **told,
            no_worse=high < asked.evidence.margin and asked.evidence.doubt != "ceiling",
            no_better=low > -asked.evidence.margin and asked.evidence.doubt != "ceiling",
            doubt=asked.evidence.doubt,
            confirmed=confirmed,
            allowed=allowed,
            shipped=shipped,
        )


def decided(asked: Sequence[Quantity]) -> list[CellDecision]:
    """Decide every comparison, in order: measured ones as one family, counted ones, which are certain, alone."""
    counted = [one.how == "counted" for one in asked]
    measured = iter(decide([one.evidence for one, exact in zip(asked, counted, strict=True) if not exact]))
    return [decide([one.evidence])[0] if exact else next(measured) for one, exact in zip(asked, counted, strict=True)]


def verdict(cells: Sequence[DecidedCell]) -> Verdict:
    """Return the better side; see the module."""
    worse, better = (any(cell.answer == answer for cell in cells) for answer in ("worse", "better"))
    if worse and better:
        return "mixed"
    if worse and all(cell.no_better or cell.answer == "worse" for cell in cells):
        return "A better"
    if better and all(cell.no_worse or cell.answer == "better" for cell in cells):
        return "B better"
    return "same" if cells and all(cell.answer == "same" for cell in cells) else "inconclusive"


def exit_code(cells: Sequence[DecidedCell]) -> int:
    """Return 0: B is no worse than allowed; 1: B is worse; 3: undecided."""
    judged = [cell for cell in cells if not cell.is_allowed]
    if any(cell.answer == "worse" for cell in judged):
        return 1
    return 0 if cells and all(cell.no_worse or cell.answer in ("same", "better") for cell in judged) else 3


@dataclass(frozen=True)
class WordFlip:
    """A position at which one side's next word is right and the other's is wrong.

    Args:
        rise: of the negative log-likelihood of what follows, from A to B, nats.
        before: the text that ends there; None where it is not at hand.
        follows: what really comes next.
        a, b: what each holds most likely to come next; a token's number where no tokenizer is at hand.
        a_chance, b_chance: how likely each holds that.
    """

    sequence: int
    position: int
    right: Literal["A", "B"]
    rise: float
    before: str | None
    follows: str | None
    a: str
    a_chance: float
    b: str
    b_chance: float


@dataclass(frozen=True)
class WordFlips:
    """What flipped among n next words.

    Args:
        lost, gained: A alone has them right; B alone.
        p: McNemar's test, two-sided; sequences as clusters.
        agree: share of the positions at which both hold the same word most likely.
        examples: those that moved most, the lost ones first.
    """

    lost: int
    gained: int
    n: int
    p: float
    agree: float
    examples: Sequence[WordFlip] = ()


@dataclass(frozen=True)
class LayerPair:
    """A layer that A or B has quantized; None of the side where it is in floats.

    Args:
        outputs: relative output errors of both, as `accuracy.harm` measured them; None where one is not known.
    """

    name: str
    a: LayerEntry | None
    b: LayerEntry | None
    outputs: tuple[float, float] | None = None

    @property
    def errors(self) -> tuple[float, float] | None:
        """Relative squared weight errors of A and B, ‖W − Ŵ‖² / ‖W‖²; 0 for floats. None if one is unknown."""
        errors = [0.0 if layer is None else layer.error for layer in (self.a, self.b)]
        return None if errors[0] is None or errors[1] is None else (errors[0], errors[1])

    @property
    def differs(self) -> bool:
        """Tell if its weights or inputs are stored differently."""
        if self.a is None or self.b is None:
            return True
        return (self.a.scheme, self.a.activations) != (self.b.scheme, self.b.activations)

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        sides = {"a": self.a, "b": self.b}
        kept = {"scheme", "activations", "bits_per_weight", "error"}
        shown = {
            key: None if layer is None else layer.model_dump(mode="json", include=kept) for key, layer in sides.items()
        }
        return {"name": self.name, **shown, "output_errors": self.outputs}


def layer_pairs(
    a: Sequence[LayerEntry],
    b: Sequence[LayerEntry],
    outputs: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> list[LayerPair]:
    """Pair every layer quantized on either side, in A's order, then B's other layers.

    `outputs`: layer -> relative output error, of A and of B.
    """
    ours, theirs = ({layer.name: layer for layer in side} for side in (a, b))
    pairs = []
    for name in {**ours, **theirs}:
        known = [
            error.get(name, None if name in side else 0.0) for side, error in zip((ours, theirs), outputs, strict=True)
        ]
        both = None if known[0] is None or known[1] is None else (known[0], known[1])
        pairs.append(LayerPair(name, ours.get(name), theirs.get(name), both))
    return pairs


@dataclass(frozen=True)
class NamedSide:
    """One of the two, as people know it.

    Args:
        content_sha256: of the bundle; of a float model, the model's own hash.
        recipe: `float` of a float model.
        bytes: of the weights that the runtime loads.
        bits: a weight of the quantized layers.
        runtime: that it was scored in.
    """

    name: str
    content_sha256: str
    recipe: str
    bytes: int | None
    bits: float | None
    runtime: str | None


@dataclass(frozen=True)
class Compared:
    """A comparison as it is reported.

    Args:
        kind: `decoder`, `encoder` or `network`.
        a, b: what B is set against, and B.
        verdict, exit: see the module.
        because: its reasons, a sentence each.
        data: what was scored: `prose-en (eval), 6,132 positions`.
        flips: next words; None of models that have none.
        layers: every layer that is quantized in one of the two.
        notes: what a reader must know: what was not compared, and what does it.
    """

    model: str
    kind: str
    a: NamedSide
    b: NamedSide
    verdict: Verdict
    exit: int
    because: Sequence[str]
    cells: Sequence[DecidedCell]
    data: str = ""
    flips: WordFlips | None = None
    layers: Sequence[LayerPair] = ()
    notes: Sequence[str] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        data = {name: getattr(self, name) for name in ("model", "kind", "data")}
        data |= {"a": asdict(self.a), "b": asdict(self.b)}
        data["verdict"] = {"answer": self.verdict, "exit": self.exit, "because": list(self.because)}
        data["cells"] = [cell.as_dict() for cell in self.cells]
        data["flips"] = None if self.flips is None else asdict(self.flips)
        data["layers"] = [pair.as_dict() for pair in self.layers]
        return {**data, "notes": list(self.notes)}
