"""Views of images: as they are first, moved and mirrored after it, alike on every run."""

from __future__ import annotations

import numpy as np

from quantkit.calibrate.sets.inputs import InputSet, views


def images(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, 10, 12)).astype(np.float32)


def test_views_show_their_own_image() -> None:
    whole = images() + 100 * np.arange(3, dtype=np.float32)[:, None, None, None]
    found, numbers = views(whole, 4, seed=1)
    assert found.shape == (12, 3, 10, 12)
    assert found.dtype == np.float32
    assert np.array_equal(found[:3], whole)
    assert numbers.tolist() == [0, 1, 2] * 4
    assert np.array_equal(np.rint(found.mean(axis=(1, 2, 3)) / 100), numbers), "nothing of another image"
    assert not np.array_equal(found[3:6], found[6:9])
    assert np.array_equal(found, views(whole, 4, seed=1)[0])
    assert set(found.ravel()) == set(whole.ravel()), "no value is made up"


def test_a_set_brings_its_labels_and_says_which_samples_are_alike() -> None:
    given = InputSet({"x": images()}, np.array([4, 5, 6]), "set", "tune", "0" * 64)
    found = given.views(2, seed=0)
    assert (len(found), found.labels.tolist(), found.clusters.tolist()) == (6, [4, 5, 6] * 2, [0, 1, 2] * 2)
    crops = InputSet({"x": images()}, None, "set", "tune", "0" * 64, clusters=np.array([7, 7, 9]))
    assert crops.views(2, seed=0).clusters.tolist() == [7, 7, 9] * 2, "views of crops of one photograph are alike too"
    last = InputSet({"x": np.moveaxis(images(), 1, 3)}, None, "set", "tune", "0" * 64).views(2, seed=0)
    assert np.array_equal(np.moveaxis(last.arrays["x"], 3, 1), found.arrays["x"]), "channels may come last"


def test_what_is_no_image_stays_as_it_is() -> None:
    rows = InputSet({"x": images().reshape(3, -1)}, None, "set", "tune", "0" * 64)
    assert rows.views(8, seed=0) is rows and rows.channels is None
    fixed = InputSet({"x": images()}, None, "set", "tune", "0" * 64, batch=3)
    assert fixed.views(8, seed=0) is fixed
