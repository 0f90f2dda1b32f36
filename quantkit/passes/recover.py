"""Recover: distil scales and norm gains of the finished model on the original's answers; the codes stay.

Training scales alone, end to end, is the second half of Chen et al., "EfficientQAT", 2024, arXiv 2407.11062. The loss
here is the KL divergence from the original model's answers, as in Liu et al., "LLM-QAT", 2023, arXiv 2305.17888. The
work is in `pipeline/blocks/recover.py`.
"""

from __future__ import annotations

from pydantic import Field

from quantkit.content import Closed
from quantkit.passes import ANSWERS, Pass


class Recover(Pass):
    """Pass `recover`."""

    name = "recover"
    paper = "arXiv 2407.11062"
    scope = "answers"
    needs = frozenset({ANSWERS})
    requires = frozenset({"codes"})
    on_graphs = "it passes gradients through a transformer's blocks, and a graph has none"

    class Settings(Closed):
        """Settings of the training.

        Args:
            sequences: number of sequences of the calibration set to train on, those that calibrate first.
            held: number of sequences behind them, which neither calibrate nor score: what they do not show to be
                better is not kept.
            steps: number of steps.
            batch: sequences of a step.
            rate: size of the first steps, as a share of a scale or gain; falls to 0 along a cosine.
        """

        sequences: int = Field(default=96, ge=1)
        held: int = Field(default=8, ge=2)
        steps: int = Field(default=96, ge=1)
        batch: int = Field(default=4, ge=1)
        rate: float = Field(default=0.002, gt=0, lt=1)


PASS = Recover()
