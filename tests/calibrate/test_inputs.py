"""What every input of a graph is fed: arrays by the inputs' names, each as its input takes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.calibrate.sets.inputs import InputSet, load_inputs, views
from quantkit.errors import InputError


@dataclass(frozen=True)
class Given:
    name: str
    dtype: str
    shape: tuple[int | None, ...]


IMAGES, IDS = Given("x", "float32", (None, 3, 4, 4)), Given("ids", "int64", (None, 5))
MASK = Given("mask", "float32", (None, 5))
ALL = (IMAGES, IDS, MASK)
RNG = np.random.default_rng(0)


def arrays(count: int = 40, **changes: Any) -> dict[str, Any]:
    good = {
        "x": RNG.standard_normal((count, 3, 4, 4)),
        "ids": RNG.integers(0, 9, (count, 5), dtype=np.int32),
        "mask": np.ones((count, 5), np.float32),
    }
    return {name: array for name, array in {**good, **changes}.items() if array is not None}


def load(tmp_path: Path, split: Any = "calib", inputs: Any = ALL, samples: int | None = None, **held: Any) -> InputSet:
    np.savez(tmp_path / "set.npz", **held)
    return load_inputs(str(tmp_path / "set.npz"), split, inputs, samples=samples, seed=0)


def test_each_input_gets_its_array_in_its_type(tmp_path: Path) -> None:
    held = arrays()
    found = load(tmp_path, **held)
    assert {name: (array.dtype.name, array.shape) for name, array in found.arrays.items()} == {
        "x": ("float32", (34, 3, 4, 4)),
        "ids": ("int64", (34, 5)),
        "mask": ("float32", (34, 5)),
    }
    np.testing.assert_array_equal(found.arrays["ids"], held["ids"][:34])
    assert "34 of its 40 samples" in found.notes[0]
    assert [len(feed["x"]) for feed in found.feeds(8)] == [8, 8, 8, 8, 2]
    assert len(load(tmp_path, "eval", **held)) == 4


def test_samples_are_drawn_together_with_their_labels(tmp_path: Path) -> None:
    held = arrays(labels=np.repeat(np.arange(4), 10))
    held["ids"][:, 0] = held["labels"]
    found = load(tmp_path, samples=12, **held)
    assert found.labels is not None
    np.testing.assert_array_equal(found.labels, found.arrays["ids"][:, 0])
    assert len(found) == 12
    # a class at a time, so that each is in every split
    assert sorted(set(load(tmp_path, "eval", **held).labels.tolist())) == [0, 1, 2, 3]  # type: ignore[union-attr]
    moved = dict(held, ids=held["ids"] + 1)
    assert load(tmp_path, **moved).sha256 != load(tmp_path, **held).sha256


def test_samples_that_are_alike_stay_together(tmp_path: Path) -> None:
    clusters = np.repeat(np.arange(20)[::-1], 5)
    held = arrays(100, clusters=clusters)
    held["ids"][:, 0] = clusters
    parts = [load(tmp_path, split, **held) for split in ("calib", "tune", "eval")]
    for part in parts:
        assert part.clusters is not None
        np.testing.assert_array_equal(part.clusters, part.arrays["ids"][:, 0])
    assert [np.unique(part.clusters).tolist() for part in parts] == [list(range(3, 20)), [2], [0, 1]]
    assert "alike together" in parts[0].notes[0]
    images = load(tmp_path, "eval", inputs=[IMAGES], images=held["x"], clusters=clusters)
    np.testing.assert_array_equal(images.clusters, parts[2].clusters)
    first = parts[0].first_of(7)
    assert (len(first), first.clusters.tolist()) == (7, [19] * 5 + [18] * 2)  # type: ignore[union-attr]
    fixed = [Given(each.name, each.dtype, (8, *each.shape[1:])) for each in ALL]
    found = load(tmp_path, inputs=fixed, **held)
    assert found.clusters is not None and len(found) == found.clusters.size == 80
    assert len(found.first_of(20)) == 16


def test_an_input_may_be_called_clusters(tmp_path: Path) -> None:
    given = Given("clusters", "int64", (None, 5))
    found = load(tmp_path, inputs=[given], clusters=arrays()["ids"])
    assert found.clusters is None and found.arrays["clusters"].shape == (34, 5)


def test_a_fixed_batch_is_filled(tmp_path: Path) -> None:
    inputs = [Given(each.name, each.dtype, (8, *each.shape[1:])) for each in ALL]
    found = load(tmp_path, inputs=inputs, **arrays())
    assert [len(feed["mask"]) for feed in found.feeds(3)] == [8, 8, 8, 8]
    assert "2 of 34 samples to calib fill no feed of 8" in found.notes[-1]
    with pytest.raises(InputError, match="takes 8 at a time"):
        load(tmp_path, "eval", inputs=inputs, **arrays())


def test_one_input_of_floats_takes_images_or_an_array_of_its_name(tmp_path: Path) -> None:
    values = arrays()["x"]
    by_name, as_images = (load(tmp_path, inputs=[IMAGES], **{name: values}) for name in ("x", "images"))
    np.testing.assert_array_equal(by_name.arrays["x"], as_images.arrays["x"])
    np.save(tmp_path / "ids.npy", arrays()["ids"])
    assert load_inputs(str(tmp_path / "ids.npy"), "calib", [IDS], samples=None, seed=0).arrays["ids"].shape == (34, 5)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"mask": None}, "calibration-fields", "no 'mask'"),
        ({"ids": arrays()["x"]}, "calibration-shape", "[n, 3, 4, 4]"),
        ({"x": arrays()["x"][:, :2]}, "calibration-shape", "[batch, 3, 4, 4]"),
        ({"mask": np.ones((39, 5), np.float32)}, "calibration-shape", "mask of 39"),
        ({"x": RNG.integers(0, 255, (40, 3, 4, 4), dtype=np.uint8)}, "calibration-dtype", "uint8"),
        ({"ids": RNG.standard_normal((40, 5))}, "calibration-dtype", "int64"),
        ({"ids": np.full((40, 5), 2**63, np.uint64)}, "calibration-range", "int64 holds"),
        ({"x": RNG.integers(0, 255, (40, 3, 4, 4)).astype(np.float32)}, "calibration-range", "whole numbers"),
        ({"x": np.full((40, 3, 4, 4), 1e300)}, "calibration-nonfinite", "infinity"),
        ({"x": np.zeros((40, 3, 4, 4), np.float32)}, "calibration-constant", "one value everywhere"),
        ({"labels": np.arange(40.0)}, "calibration-labels", "float64"),
        ({"clusters": np.arange(39)}, "calibration-clusters", "[39]"),
        ({"clusters": np.arange(40.0)}, "calibration-clusters", "float64"),
        ({"ids": np.array([[None] * 5] * 40)}, "calibration-pickle", "objects"),
    ],
)
def test_samples_that_do_not_match_the_graph_are_refused(
    tmp_path: Path, changes: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, **arrays(**changes))
    line = caught.value.line()
    assert caught.value.code == code, line
    assert says in line
    assert caught.value.remedy and "\n" not in line


def test_a_graph_takes_samples(tmp_path: Path) -> None:
    for inputs in (
        [],
        [IMAGES, Given("scale", "float32", ())],
        [IMAGES, Given("text", "object", (None,))],
        [Given("x", "float32", (2, 3, 4, 4)), Given("ids", "int64", (3, 5))],
    ):
        with pytest.raises(InputError, match="onnx-inputs"):
            load(tmp_path, inputs=inputs, **arrays())
    with pytest.raises(InputError, match="calibration-kind"):
        load_inputs("fashion-mnist", "calib", ALL, samples=None, seed=0)


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
