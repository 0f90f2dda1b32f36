"""Bias correction: add to every bias the shift of the mean output by rounding; needs assigned codes.

    E[W x] - E[Ŵ x] = (W - Ŵ) E[x]

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, arXiv 1906.04721, section
4.2; here with means from calibration text, of inputs computed by corrected linears. A linear without a bias stays
unchanged: its class would not load one. It may help or not. Mean cosine of pooled sentence embeddings to the float
model's, all-MiniLM-L6-v2, int4 per channel, symmetric; 32 x 64 tokens of addresses to calibrate, 128 verses to score:

    rtn  0.9425, corrected 0.9377: worse        gptq 0.9680, corrected 0.9699: a little better

So it is in no recipe: try it on your own text, with the gate `cosine_min`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, InputStats, SharedInput, Stats, Tensor


def shift(error: Tensor, mean: Tensor) -> Tensor:
    """Return the shift [N] of a linear's mean output by a weight's rounding error [N, K], for inputs of mean [K]."""
    return (error.double() @ mean.double()).float()


class BiasCorrect(Pass):
    """Pass `bias_correct`."""

    name = "bias_correct"
    paper = "arXiv 1906.04721"
    needs = frozenset({"mean", "weight_errors"})
    requires = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """No settings."""

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Correct the bias of every linear with codes and a bias."""
        from torch import nn

        biased = [name for name in block.tensors if getattr(block.module.get_submodule(name), "bias", None) is not None]
        if not biased:
            return declined(self.name, block.name, "no linear with codes has a bias")
        outcome = Outcome(False)

        def visit(group: SharedInput, seen: InputStats) -> None:
            for name in group.members:
                if name in biased:
                    linear = block.module.get_submodule(name)
                    bias: Tensor = linear.bias.detach()  # type: ignore[union-attr, operator, assignment]
                    bias = bias + shift(block.weight_errors[name], seen.mean).to(bias.dtype)
                    linear.bias = nn.Parameter(bias, requires_grad=False)
                    outcome.changed = True

        stats.staged(visit, products=False, quantized=True)
        if without := [name for name in block.tensors if name not in biased]:
            outcome.note(self.name, "not-corrected", block.name, f"no bias: {', '.join(without)}")
        return outcome


PASS: Pass = BiasCorrect()
