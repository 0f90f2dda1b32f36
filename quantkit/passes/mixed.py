"""Mixed precision in a graph: keep as few products in floats as the gates need; needs assigned codes.

Wu et al., "Integer Quantization for Deep Learning Inference", 2020, arXiv 2004.09602, section 5.2 (partial
quantization). The harm of quantizing only one layer, at the model's output, is divided by its savings:

    rank = harm / (its share of all weights' bytes + its share of all multiply-accumulates)

Harms do not add up, so a number of kept products is compiled and scored on the `tune` split. The smallest number that
meets all gates of the recipe is searched by doubling and bisection. Without gates nothing is kept.
`pipeline/graphs/mixed.py` does this; `quantkit tune` mixes the formats of a transformer's blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats


class Mixed(Pass):
    """Pass `mixed`."""

    name = "mixed"
    paper = "arXiv 2004.09602"
    requires = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """Data for the choice.

        Args:
            samples: largest number of samples of the `tune` split for scoring a number of kept products.
            views: views of every image, if samples are images and the model is a classifier: shifted a little, and
                every other one mirrored. A share of 18 images has a resolution of 5.6 points, of 8 views each a finer
                one; intervals count images, or the set's groups of similar ones.
            alone: samples for measuring the harm of one product alone.
        """

        samples: int = Field(default=256, ge=1)
        views: int = Field(default=8, ge=1)
        alone: int = Field(default=32, ge=1)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Decline: a block is no graph."""
        return declined(self.name, block.name, "it works on graphs; `quantkit tune` mixes the formats of a transformer")


PASS: Pass = Mixed()
