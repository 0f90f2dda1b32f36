"""A graph run piece by piece gives what it gives in one go, and holds no more than is still to be read."""

from __future__ import annotations

from pathlib import Path

import networks
import numpy as np
import pytest

from quantkit.graph.open import open_graph
from quantkit.graph.run import Runner, Stepwise
from quantkit.graph.sites import patches, sites


def test_every_value_is_that_of_the_whole_graph(tmp_path: Path) -> None:
    model = open_graph(networks.write(tmp_path / "tiny.onnx")).model
    inputs = [site.input for site in sites(model)]
    assert len(inputs) > 3
    feeds = [{"images": networks.images(4, seed)} for seed in range(2)]
    steps = Stepwise(feeds)
    for place, name in enumerate(inputs):
        found = steps.value(model, name, inputs[place + 1 :])
        for feed, value in zip(feeds, found, strict=True):
            expected = feed[name] if name in feed else Runner(model, [name])(feed)[name]
            assert np.allclose(value, expected, atol=1e-5), name
    # behind the last, nothing is waited for but itself
    assert set(steps._held[0]) == {inputs[-1]}


def test_a_value_can_be_asked_for_twice(tmp_path: Path) -> None:
    model = open_graph(networks.write(tmp_path / "tiny.onnx")).model
    name = sites(model)[2].input
    steps = Stepwise([{"images": networks.images(2)}])
    first = steps.value(model, name, [name])
    assert steps.value(model, name, [])[0] is first[0]


def test_fewer_patches_are_rows_of_all_of_them(tmp_path: Path) -> None:
    for site in sites(open_graph(networks.write(tmp_path / "tiny.onnx")).model):
        if not site.is_conv:
            continue
        x = np.random.default_rng(0).standard_normal((2, site.weight.shape[1] * site.group, 12, 12), np.float32)
        every, few = patches(site, x), patches(site, x, most=8)
        assert 4 <= few.shape[1] < every.shape[1]
        rows = {row.tobytes() for row in every[0]}
        assert all(row.tobytes() in rows for row in few[0])


@pytest.mark.parametrize("most", [1000, None])
def test_where_there_are_few_all_are_taken(tmp_path: Path, most: int | None) -> None:
    site = sites(open_graph(networks.write(tmp_path / "tiny.onnx")).model)[0]
    x = networks.images(2)
    assert np.array_equal(patches(site, x, most=most), patches(site, x))
