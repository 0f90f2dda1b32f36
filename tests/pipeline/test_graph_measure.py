"""What a graph's answers are worth on crops of few photographs: as much as so many photographs, not as many crops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quantkit.calibrate.sets.inputs import load_inputs
from quantkit.graph.open import FloatGraphInput
from quantkit.graph.outputs import OutputKinds
from quantkit.pipeline.graphs.answers import agreement
from quantkit.report.bundle import figures
from quantkit.stats.shares import wilson


def test_480_crops_of_five_photographs_are_five_draws(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    photograph = np.tile(np.arange(5), 96)
    images = generator.standard_normal((480, 3, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", images=images, clusters=photograph)
    samples = load_inputs(str(tmp_path / "eval.npz"), "calib", [FloatGraphInput("x", "float32", (None, 3, 4, 4))],
                          samples=None, seed=0)  # fmt: skip
    assert len(samples) == 96 * 4, "of five photographs without splits four calibrate"
    expected = generator.standard_normal((len(samples), 10))
    # rounding turns over more of one photograph's crops than of another's
    lost = generator.random(len(samples)) < np.array([0.0, 0.02, 0.04, 0.10, 0.0])[samples.clusters]
    given = np.where(lost[:, None], -expected, expected)
    said = OutputKinds(classes=frozenset({"y"}))
    rows = agreement({"y": expected}, {"y": given}, samples, said, subject="a", baseline="b")
    row = next(each for each in rows if each.name == "accuracy.top1_agreement" and "surer_than" not in each.settings)
    shares = np.array([1 - lost[samples.clusters == number].mean() for number in range(4)])
    reach = stats.t.ppf(0.975, 3) * stats.sem(shares)
    assert row.value == pytest.approx(shares.mean())
    assert row.shape == {"classes": 10, "clusters": 4}
    assert row.ci95 is not None
    assert np.ptp(row.ci95) > 1.3 * reach, "no narrower than four numbers that differ as much"
    alone = wilson(int((~lost).sum()), lost.size)
    assert row.ci95[0] < alone[0] - 0.02
    kl = next(each for each in rows if each.name == "accuracy.kl")
    assert kl.flags == row.flags == ["ci95-by-cluster"]
    assert figures.scored(rows).endswith("intervals 95 % over 4 groups of images that are alike")
