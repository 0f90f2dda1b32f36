"""Mixed precision in a graph: the few products that the gates need are kept in floats; needs assigned codes.

Wu et al., "Integer Quantization for Deep Learning Inference", 2020, arXiv 2004.09602, section 5.2 (partial
quantization). The harm of quantizing a layer alone, at the model's output, is set against what it saves:

    rank = harm / (its share of all weights' bytes + its share of all multiply-accumulates)

Harms do not add up, so each point is compiled and scored on the `tune` split as the graph would be. As many products
are kept as meet all gates of the recipe; points are doubled and then halved between, not all tried. Without gates
nothing is kept. `pipeline/graphs/mixed.py` does this; the blocks of a transformer are mixed by `quantkit tune`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats


class Mixed(Pass):
    """See the module."""

    name = "mixed"
    paper = "arXiv 2004.09602"
    requires = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """On what a choice rests.

        Args:
            samples: of the `tune` split, at most, that the points of the curve are scored on.
            views: of each image, where samples are images and the model tells classes apart: moved a little, and every
                other one mirrored. A share of 18 images is known to 5.6 points, of 8 views each to less; intervals are
                by image, or by what the set says is alike.
            alone: samples that the harm of each product alone is measured on.
        """

        samples: int = Field(default=256, ge=1)
        views: int = Field(default=8, ge=1)
        alone: int = Field(default=32, ge=1)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Declined: this is no graph."""
        return declined(self.name, block.name, "it knows graphs; `quantkit tune` mixes the formats of a transformer")


PASS: Pass = Mixed()
