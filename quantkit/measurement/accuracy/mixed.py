"""Mixed precision by sensitivity: what each layer harms alone, and what keeping the worst ones high costs in bytes.

Layers are quantized one at a time and the harm of each is measured at the model's output. Kept high in the order of
that harm for what quantizing them saves, they give a curve from "all quantized" towards "all as they were"; each point
of it is compiled and scored, because harms do not quite add up. The choice is the first point that meets the gate.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from quantkit.content import Closed
from quantkit.measurement.rows import Finite, Interval

Bytes = Annotated[int, Field(ge=0)]


class Alone(Closed):
    """One layer quantized with all others left high: its harm, and the bytes that quantizing it saves."""

    name: str
    harm: Finite
    bytes: Bytes


class MixedPoint(Closed):
    """One point of the curve: the layers that are kept high there, the weights' bytes, the measured harm."""

    kept: list[str]
    bytes: Bytes
    harm: Finite
    ci95: Interval | None = None


class MixedSearch(Closed):
    """The search and its choice.

    Args:
        what: the harm of a step is, with its unit: `KL, nats an image`. Lower is better, 0 is none.
        alone: what that of a layer is, where it is another; "" where it is not.
        scored: on what, in words: `256 images of fashion-mnist (tune)`.
        layers: each alone, the worst first.
        steps: by rising bytes; the first keeps nothing high that the recipe does not.
        chosen: which step was taken; None where none meets the limit.
        limit: the most harm that the gate allows; None without a gate.
    """

    what: str
    alone: str = ""
    scored: str
    layers: list[Alone]
    steps: list[MixedPoint] = Field(min_length=1)
    chosen: int | None = Field(default=None, ge=0)
    limit: Finite | None = None

    @model_validator(mode="after")
    def _chosen_is_one(self) -> Self:
        if self.chosen is not None and self.chosen >= len(self.steps):
            raise ValueError(f"step {self.chosen} was chosen of {len(self.steps)}")
        if [step.bytes for step in self.steps] != sorted(step.bytes for step in self.steps):
            raise ValueError("steps stand by rising bytes")
        return self
