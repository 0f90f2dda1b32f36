"""Decide which of two versions of one model is better, A (the baseline) or B.

Every compared quantity (KL, size, a time, ...) has an effect with a 95 % interval; above zero, B is worse. The verdict:

    mixed           B is worse in one quantity and better in another
    A better        B is worse in a quantity, and no interval allows B to be better by more than the margin
    B better        B is better in a quantity, and no interval allows B to be worse by more than the margin
    same            every difference lies within its margin
    inconclusive    anything else: more data could change the answer

Exchanging A and B exchanges the verdict. The exit code answers a simpler question for a gate: 0, B is nowhere worse
than the margin or the gates of its recipe allow; 1, B is worse in a quantity; 3, neither is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from math import isfinite
from typing import Any, Literal

from quantkit.bundle import LayerEntry
from quantkit.measurement.rows import Row
from quantkit.stats.decision import Answer, CellDecision, decide
from quantkit.stats.evidence import EACH_WAY, Doubt, Evidence, Interval

What = Literal["accuracy", "latency", "size"]
Verdict = Literal["A better", "same", "B better", "mixed", "inconclusive"]
# the way of comparing: paired = item by item; interleaved = alternating steps in one run; apart = by both rows'
# intervals; ratio of ratios = each by its ratio to one baseline in its own run; counted = exact numbers
How = Literal["paired", "interleaved", "apart", "ratio of ratios", "counted"]


@dataclass(frozen=True)
class _ComparedQuantity:
    """One compared quantity.

    Args:
        what: kind of quantity.
        name: name of its rows: `accuracy.kl`, `latency.decode_step`, `size.bytes`.
        a, b: values of both sides in `unit`; None if only the difference is known.
        unit: unit of the values.
        how: way of comparing.
        n: number of items or timed steps.
        runtime: runtime of the measurements.
        batch, shape, device: batch, sizes (`{"new_tokens": 1, "context": 128}`) and device of a time.
        output: name of a graph's output.
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
class Quantity(_ComparedQuantity):
    """A compared quantity before the decision, with the evidence on its difference."""

    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class DecidedCell(_ComparedQuantity):
    """A decided quantity; other attributes are those of `_ComparedQuantity` and `CellDecision`.

    Args:
        answer: answer for B.
        effect: loss of B: a share (0.05: 5 % slower or larger; 0.01: one item in a hundred lost), or nats.
        no_worse, no_better: True if B is shown to be worse (better) by no more than the margin.
        confirmed: True if a second run gave the same answer for a time; None without a second run.
        allowed: largest `effect` that the gates of B's recipe allow; None without a gate or with a margin of the user.
        shipped: reason for which B's own verdict accepts a loss of time; "" if it does not.
        doubt: reason to call neither side better in spite of the interval.
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
        """Return True if B's gates or B's verdict accept its loss."""
        return bool(self.shipped) or (self.allowed is not None and self.effect <= self.allowed)

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form, with null for an infinite limit."""
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
    """Decide all quantities, in order: measured ones as one family of tests, counted ones exactly."""
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
    """A position at which only one side's next word is right.

    Args:
        sequence, position: place in the text, counted from 0.
        right: the side that is right.
        rise: rise of the true word's negative log-likelihood from A to B, nats.
        before: text before the position; None if unavailable.
        follows: true next word.
        a, b: most likely next word of each side; a token id without a tokenizer.
        a_chance, b_chance: probability of that word.
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
    """Counts of next words that only one side gets right.

    Args:
        lost, gained: number of words that only A gets right, and only B.
        n: number of scored words.
        p: p-value of McNemar's two-sided test with sequences as clusters.
        agree: share of positions at which both have the same most likely word.
        examples: flips with the largest change, lost ones first.
    """

    lost: int
    gained: int
    n: int
    p: float
    agree: float
    examples: Sequence[WordFlip] = ()


@dataclass(frozen=True)
class LayerPair:
    """A layer that A or B quantizes.

    Args:
        name: name of the layer.
        a, b: entry of the layer on each side; None if it is in floats there.
        outputs: relative output errors of both from `accuracy.harm`; None if one is unknown.
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
        """Return True if the sides store its weights or inputs differently."""
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
    """Pair all layers quantized on either side, in A's order, then B's other layers.

    `outputs` holds the relative output error by layer, for A and for B.
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
    """The name and figures of one side.

    Args:
        name: name for people.
        content_sha256: hash of the bundle, or of a float model.
        recipe: name of the recipe; `float` for a float model.
        bytes: bytes of the weights that the runtime loads.
        bits: bits per weight of the quantized layers.
        runtime: runtime of the scores.
    """

    name: str
    content_sha256: str
    recipe: str
    bytes: int | None
    bits: float | None
    runtime: str | None


@dataclass(frozen=True)
class Compared:
    """A finished comparison.

    Args:
        model: name of the model.
        kind: `decoder`, `encoder` or `network`.
        a, b: both sides.
        verdict, exit: verdict and exit code, see the module.
        because: reasons for the verdict, a sentence each.
        cells: decided quantities.
        data: scoring data: `prose-en (eval), 6,132 positions`.
        flips: flipped next words; None for a model without next words.
        layers: layers that either side quantizes.
        notes: quantities that were not compared, with the command that compares them.
        load: rows of B's load beside A's (`load.beside`), if both have one of the same requests.
        tasks: rows of B's scores of tasks against A's, over the items that both answered; the verdict is without them.
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
    load: Sequence[Row] = ()
    tasks: Sequence[Row] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        data = {name: getattr(self, name) for name in ("model", "kind", "data")}
        data |= {"a": asdict(self.a), "b": asdict(self.b)}
        data["verdict"] = {"answer": self.verdict, "exit": self.exit, "because": list(self.because)}
        data["cells"] = [cell.as_dict() for cell in self.cells]
        data["flips"] = None if self.flips is None else asdict(self.flips)
        data["layers"] = [pair.as_dict() for pair in self.layers]
        for name, rows in (("load", self.load), ("tasks", self.tasks)):
            data |= {name: [row.as_dict() for row in rows]} if rows else {}
        return {**data, "notes": list(self.notes)}
