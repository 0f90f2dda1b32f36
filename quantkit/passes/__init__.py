"""Passes, one a file: no torch at import, constant `PASS`; their mathematics is in `solvers/`, functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel

from quantkit.bundle import Decision
from quantkit.bundle import decision as decision
from quantkit.plugins import Kind
from quantkit.scheme import WeightScheme as WeightScheme

if TYPE_CHECKING:  # types in the signatures of passes, which import them from here
    from torch import Tensor as Tensor

    from quantkit.calibrate.statistics.collected import Stats as Stats
    from quantkit.calibrate.statistics.sums import InputStats as InputStats
    from quantkit.formats import QuantTensor as QuantTensor
    from quantkit.model.streaming.stream import Whole
    from quantkit.model.streaming.transforms import Transform
    from quantkit.model.structure.block import Block as Block
    from quantkit.model.structure.traced import SharedInput as SharedInput
    from quantkit.passes.solvers.moments import Moments as Moments

# need of a pass whose settings have `gradients`, a number of sequences: `Stats.gradients`
GRADIENTS = "output_gradients"
# need of a pass of scope `answers`: the original's answers on sequences of its own
ANSWERS = "answers"
# decision: a pass weighs no outputs by gradients
UNGRADED = "gradients-unavailable"
# a decision with this code reports how an input was read; it is no fallback
NOTE = "note"


@dataclass
class Outcome:
    """Result of a pass on a block.

    Args:
        decisions: deviations from what was asked, each with its reason.
        errors: linear -> relative squared weight error, [] on the block's device, from the pass that assigned codes.
    """

    changed: bool
    decisions: list[Decision] = field(default_factory=list)
    errors: dict[str, Tensor] = field(default_factory=dict)

    def note(self, name: str, code: str, where: str, reason: str, *values: Any) -> None:
        """Add a decision of a pass; `values`: the requested one and the applied one."""
        self.decisions.append(decision(name, code, where, reason, *values))


@dataclass
class ModelOutcome:
    """Plan of a pass of scope `model`.

    Args:
        transform: function applied to every part when it loads; None if the pass declined.
        unties: whether a head that shares its weight with the embedding will differ from it.
    """

    transform: Transform | None
    decisions: list[Decision] = field(default_factory=list)
    unties: bool = False


class Pass(Protocol):
    """Interface of a pass, a transformation of the model, with defaults.

    Attributes:
        scope: `block`, or `model` for a pass that changes every block: its `transform` is then applied to every block,
            and to the rest of the model, when they load; `answers` for one that trains the finished model on answers
            of the original, after all others.
        needs: statistics: "hessian", "mean_square", "absmax", "mean", "original_inputs", "original_outputs";
            "weight_errors": loss by the codes in weights of linears with a bias. `needs_with` depends on settings.
        requires, ensures: facts about a block: "codes" (assigned), "unassigned", "folded", "moved" (inputs).
        on_graphs: reason why it has nothing to do on a float ONNX graph; "" if it works there.
        for_blocks: whether a recipe for both kinds may list it for transformers: `--strict` then accepts it on a graph.
    """

    name: str
    paper: str = ""
    scope: Literal["block", "model", "answers"] = "block"
    needs: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()
    on_graphs: str = "this pass supports transformers only"
    for_blocks: bool = False
    Settings: type[BaseModel]

    def needs_with(self, settings: Any) -> frozenset[str]:
        """Return the statistics needed with these settings."""
        return self.needs

    def run(self, block: Block, stats: Stats, settings: Any) -> Outcome:
        """Change the block in place. For scope `block`."""
        raise AssertionError(f"{self.name} is of scope {self.scope}")

    def transform(self, model: Whole, settings: Any, seed: int) -> ModelOutcome:
        """Return the change to every block and the rest when they load, seeded or in closed form. For scope `model`."""
        raise AssertionError(f"{self.name} is of scope {self.scope}")

    def product(self, weight: Tensor, moments: Moments | None, scheme: WeightScheme, settings: Any) -> QuantTensor:
        """Return codes [N, K] for a graph's product; `moments` is None if nothing is known about its input.

        For passes that require "unassigned" and ensure "codes".
        """
        raise AssertionError(f"{self.name} assigns no codes")

    def accepts(self, columns: Mapping[str, int], settings: Any) -> None:
        """Refuse, before any work, settings that do not fit a model: linear of its blocks -> K. Raises InputError."""
        return

    def brought(self, head: str, columns: int, settings: Any) -> Moments | None:
        """Return moments of a head's inputs [.., K = columns] from the settings, instead of calibration; None: none."""
        return None


def unkept(subject: Pass) -> str:
    """Describe the method missing from a pass despite its declarations; "" if none is missing."""
    needed = "unassigned" in subject.requires and "codes" in subject.ensures and not subject.on_graphs
    if needed and getattr(type(subject), "product", None) is Pass.product:
        return "product, which assigns codes on graphs and to heads; or a reason in on_graphs"
    return ""


load_pass = Kind[Pass]("passes").load
# pass of a recipe's step
pass_of = Kind[Pass]("passes").of


def declined(name: str, block: str, reason: str, code: str = "nothing-to-do") -> Outcome:
    """Make the outcome of a pass without anything to do, with its reason."""
    return Outcome(False, [decision(name, code, block, reason)])
