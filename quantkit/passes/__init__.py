"""Passes, one a file: torch-free at import, with `PASS`; their mathematics is in `solvers/` as functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel

from quantkit.bundle import Decision
from quantkit.bundle import decision as decision
from quantkit.plugins import Kind
from quantkit.scheme import WeightScheme as WeightScheme

if TYPE_CHECKING:  # the words of a pass's signatures: passes take them from here
    from torch import Tensor as Tensor

    from quantkit.calibrate.statistics.collected import Stats as Stats
    from quantkit.calibrate.statistics.sums import InputStats as InputStats
    from quantkit.formats import QuantTensor as QuantTensor
    from quantkit.model.streaming.stream import Whole
    from quantkit.model.streaming.transforms import Transform
    from quantkit.model.structure.block import Block as Block
    from quantkit.model.structure.traced import SharedInput as SharedInput
    from quantkit.passes.solvers.moments import Moments as Moments

# a decision with this code tells how an input was read; it is no fallback
NOTE = "note"


@dataclass
class Outcome:
    """What a pass did to a block.

    Args:
        decisions: what was done otherwise than asked, or not at all, each with its reason.
        errors: linear -> relative squared weight error, [] on the block's device, from the pass that assigned codes.
    """

    changed: bool
    decisions: list[Decision] = field(default_factory=list)
    errors: dict[str, Tensor] = field(default_factory=dict)

    def note(self, name: str, code: str, where: str, reason: str, *values: Any) -> None:
        """Add a decision of a pass; `values`: what was requested and what was applied."""
        self.decisions.append(decision(name, code, where, reason, *values))


@dataclass
class ModelOutcome:
    """What a pass of scope `model` will do.

    Args:
        transform: applied to each part as it loads; None where the pass declined.
        unties: a head that shares its weight with the embedding will not be equal to it any more.
    """

    transform: Transform | None
    decisions: list[Decision] = field(default_factory=list)
    unties: bool = False


class Pass(Protocol):
    """One transformation of the model; a pass inherits what it does not declare.

    Attributes:
        scope: `block`, or `model` for what reaches every block: its `transform` is then applied to each block, and to
            the rest of the model, as they load.
        needs: statistics: "hessian", "mean_square", "absmax", "mean", "original_inputs", "original_outputs";
            "weight_errors": what codes lose of the weights of linears with a bias. `needs_with` says what
            settings add.
        requires, ensures: facts about a block: "codes" (assigned), "unassigned", "folded", "moved" (inputs, before they
            are quantized).
        on_graphs: why it has nothing to do on a float ONNX graph; "" where it works there.
        for_blocks: whether a recipe for both may have it for the sake of transformers alone: then `--strict` takes it
            on a graph, too.
    """

    name: str
    paper: str = ""
    scope: Literal["block", "model"] = "block"
    needs: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()
    on_graphs: str = "this pass supports transformers only"
    for_blocks: bool = False
    Settings: type[BaseModel]

    def needs_with(self, settings: Any) -> frozenset[str]:
        """Return the statistics that it needs with these settings."""
        return self.needs

    def run(self, block: Block, stats: Stats, settings: Any) -> Outcome:
        """Change the block in place. Of scope `block`."""
        raise AssertionError(f"{self.name} is of scope {self.scope}")

    def transform(self, model: Whole, settings: Any, seed: int) -> ModelOutcome:
        """Return what to do to each block and to the rest as they load, seeded or in closed form. Of scope `model`."""
        raise AssertionError(f"{self.name} is of scope {self.scope}")

    def product(self, weight: Tensor, moments: Moments | None, scheme: WeightScheme, settings: Any) -> QuantTensor:
        """Return codes [N, K] of a graph's product; `moments` is None where nothing is known of its input.

        Of passes that require "unassigned" and ensure "codes".
        """
        raise AssertionError(f"{self.name} assigns no codes")

    def accepts(self, columns: Mapping[str, int], settings: Any) -> None:
        """Refuse, before any work, settings that do not fit a model: linear of its blocks -> K. Raises InputError."""
        return

    def brought(self, head: str, columns: int, settings: Any) -> Moments | None:
        """What its settings bring on a head's inputs [.., K = columns], instead of calibration; None: nothing."""
        return None


def unkept(found: Pass) -> str:
    """Return the method that a pass declares to have and has not; "" where it has all."""
    needed = "unassigned" in found.requires and "codes" in found.ensures and not found.on_graphs
    if needed and getattr(type(found), "product", None) is Pass.product:
        return "product, which assigns codes on graphs and to heads; or say in on_graphs why not"
    return ""


load_pass = Kind[Pass]("passes").load
# of a step of a recipe
pass_of = Kind[Pass]("passes").of


def declined(name: str, block: str, reason: str, code: str = "nothing-to-do") -> Outcome:
    """Return a pass that found nothing to do, with its reason."""
    return Outcome(False, [decision(name, code, block, reason)])
