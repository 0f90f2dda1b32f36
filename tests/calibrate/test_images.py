"""Sets of images: drawn, preprocessed, and whatever does not fit the model refused in one line."""

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from test_card import write_card

from quantkit import content
from quantkit.calibrate.sets.card import Card
from quantkit.calibrate.sets.images import PREPROCESS, ImageSet, load_images
from quantkit.errors import InputError
from quantkit.model.source.packaged import Preprocess

HOW = {"resize": 12, "crop": 8, "mean": [0.5], "std": [0.25], "layout": "NCHW"}


def grey(count: int, size: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    images = np.random.default_rng(seed).integers(0, 256, (count, size, size), dtype=np.uint8)
    images[:, 0, 0] = np.arange(count)  # so that each can be told from the others
    return images


def npz(**arrays: Any) -> bytes:
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    return data.getvalue()


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8), form: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, form)
    return data.getvalue()


def load(reference: object, split: Any = "calib", **changes: Any) -> ImageSet:
    settings: dict[str, Any] = {"samples": None, "seed": 0, "shape": (None, 1, 8, 8), "dtype": "float32"}
    return load_images(str(reference), split, where="images", **(settings | changes))


def numbers(found: ImageSet) -> list[int]:
    """Which of `grey` they are."""
    return [round(float(value)) for value in (found.images[:, 0, 0, 0] * 0.25 + 0.5) * 255]


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A set with a card: 12 images to calibrate on, 5 with labels to score on."""
    write_card(
        tmp_path / "set",
        {
            "calib.npz": npz(images=grey(12)),
            "eval.npz": npz(images=grey(5, seed=1), labels=np.arange(5, dtype=np.uint8)),
        },
        kind="images",
        preprocess=HOW,
    )
    return tmp_path / "set"


def own(tmp_path: Path, **arrays: Any) -> Path:
    (tmp_path / "own.npz").write_bytes(npz(**arrays))
    return tmp_path / "own.npz"


def refused(code: str, reference: object, split: Any = "calib", **changes: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        load(reference, split, **changes)
    error = caught.value
    assert error.code == f"calibration-{code}", error
    assert error.remedy and "\n" not in error.line()
    return error


def test_bytes_are_normalised(shipped: Path) -> None:
    found = load(shipped, "eval")
    assert found.images.shape == (5, 1, 8, 8) and found.images.dtype == np.float32
    plain = [[(int(value) / 255 - 0.5) / 0.25 for value in row] for row in grey(5, seed=1)[3]]
    np.testing.assert_allclose(found.images[3, 0], plain, atol=1e-6)
    assert found.labels is not None and found.labels.tolist() == [0, 1, 2, 3, 4]
    assert (found.name, found.split, found.notes) == ("set", "eval", ())


def test_the_layout_is_the_cards(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    how = {**HOW, "mean": [0.5, 0.4, 0.3], "std": [1.0, 0.5, 0.25]}
    found = []
    for layout, shape in (("NCHW", (None, 3, 8, 8)), ("NHWC", (None, 8, 8, 3))):
        write_card(
            tmp_path / layout, {"calib.npz": npz(images=colours)}, kind="images", preprocess={**how, "layout": layout}
        )
        found.append(load(tmp_path / layout, shape=shape).images)
    assert np.array_equal(found[0].transpose(0, 2, 3, 1), found[1])
    assert found[1][2, 5, 1, 2] == pytest.approx((int(colours[2, 5, 1, 2]) / 255 - 0.3) / 0.25, abs=1e-6)


def test_the_seed_moves_calib_and_nothing_else(shipped: Path) -> None:
    first, again, other = (load(shipped, samples=6, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.images, again.images) and not np.array_equal(first.images, other.images)
    assert numbers(load(shipped, samples=3)) == numbers(first)[:3]
    assert len(set(numbers(first))) == 6
    evaluated = [load(shipped, "eval", samples=3, seed=seed).images for seed in (0, 1)]
    assert np.array_equal(*evaluated)
    drawn = load(shipped, "eval", samples=3)
    assert drawn.labels is not None and drawn.labels.tolist() == numbers(drawn)


def test_fewer_than_asked_for_are_all_and_said(shipped: Path) -> None:
    found = load(shipped, samples=40)
    assert sorted(numbers(found)) == list(range(12))
    assert "set has 12 images to calib, 40 were asked for" in found.notes


def test_an_image_is_resized_by_its_shorter_side_and_cut_from_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((1, 24, 48), dtype=np.uint8)
    wide[:, :, 16:32] = 255  # becomes columns 8 to 16 of 24
    write_card(tmp_path / "wide", {"calib.npz": npz(images=wide)}, kind="images", preprocess=HOW)
    found = load(tmp_path / "wide").images[0, 0]
    assert np.allclose(found[:, 1:-1], 2.0) and found.shape == (8, 8)
    assert found[:, 0].max() < 2.0, "the edge shares pixels with the dark beside it"


def test_own_floats_are_taken_as_they_are(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(40, 1, 8, 8))
    found = load(own(tmp_path, images=images))
    assert np.array_equal(found.images, images[:34].astype(np.float32))
    assert found.notes == ("own.npz has no splits: calib is 34 of its 40 images, parted by their order",)
    np.save(tmp_path / "own.npy", images)
    assert np.array_equal(load(tmp_path / "own.npy").images, found.images)
    parts = [load(tmp_path / "own.npy", split).images for split in ("calib", "tune", "eval")]
    assert np.array_equal(np.concatenate(parts), images.astype(np.float32))


def test_own_labels_part_class_by_class(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], 20)
    path = own(tmp_path, images=np.random.default_rng(0).normal(size=(60, 1, 8, 8)), labels=labels)
    for split, each in (("calib", 17), ("tune", 1), ("eval", 2)):
        found = load(path, split).labels
        assert found is not None and np.bincount(found).tolist() == [each] * 3


def test_own_images_that_are_alike_stay_in_one_split(tmp_path: Path) -> None:
    clusters = np.repeat([8, 3, 5, 0, 1, 2, 4, 6, 7, 9], 6)
    values = np.random.default_rng(0).normal(size=(60, 1, 8, 8))
    path = own(tmp_path, images=values, clusters=clusters)
    found = {split: load(path, split) for split in ("calib", "tune", "eval")}
    assert [np.unique(each.clusters).tolist() for each in found.values()] == [[0, 1, 2, 3, 4, 5, 6, 8], [7], [9]]
    assert "by their order, those that are alike together" in found["eval"].notes[0]
    # of classes, each has its groups in every split
    labels = np.repeat(np.arange(2), 120)
    path = own(tmp_path, images=np.tile(values, (4, 1, 1, 1)), clusters=np.arange(240) // 6, labels=labels)
    scored = load(path, "eval")
    assert (np.bincount(scored.labels).tolist(), np.unique(scored.clusters).tolist()) == ([12, 12], [18, 19, 38, 39])


def alike(folder: Path, pattern: str, **files: bytes) -> Path:
    how = {**HOW, "mean": [0.0] * 3, "std": [1.0] * 3}
    return write_card(folder, {name.replace("_", "."): data for name, data in files.items()}, kind="images",
                      preprocess=how, alike=pattern)  # fmt: skip


def archive(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for place, name in enumerate(names):
            file.writestr(name, picture((place, 0, 255)))
    return data.getvalue()


def test_a_card_says_which_files_are_alike(tmp_path: Path) -> None:
    files = archive("dog-1.png", "cat-1.png", "dog-2.png", "sub/cat-9.png")
    card = alike(tmp_path / "set", "^[a-z]+", calib_zip=files, eval_png=picture((1, 2, 3)))
    found = load(card.parent, shape=(None, 3, 8, 8))
    assert found.clusters is not None
    names = sorted(["dog-1.png", "cat-1.png", "dog-2.png", "sub/cat-9.png"])
    groups = {Path(name).name[:3]: number for name, number in zip(names, found.clusters, strict=True)}
    assert len(groups) == 2 and [groups[Path(name).name[:3]] for name in names] == found.clusters.tolist()
    # without a word about it each was drawn alone
    plain = write_card(tmp_path / "plain", {"calib.zip": files}, kind="images", preprocess={**HOW, "mean": [0.0] * 3, "std": [1.0] * 3})  # fmt: skip # noqa: E501
    assert load(plain.parent, shape=(None, 3, 8, 8)).clusters is None


def test_what_says_nothing_of_what_is_alike_is_refused(tmp_path: Path) -> None:
    for number, (pattern, data, says) in enumerate(
        [
            ("^[a-z]+-", {"calib_zip": archive("dog-1.png", "01.png")}, "'01'"),
            ("^[a-z]+", {"calib_npz": npz(images=np.zeros((4, 8, 8, 3), np.uint8))}, "no names"),
        ]
    ):
        card = alike(tmp_path / str(number), pattern, **data)
        with pytest.raises(InputError, match=says) as caught:
            load(card.parent, shape=(None, 3, 8, 8))
        assert caught.value.code == "card-invalid"
    for changes in ({"alike": "(", "kind": "images"}, {"alike": "a"}):
        with pytest.raises(InputError, match=r"alike|regular"):
            Card.load(write_card(tmp_path / "bad", **changes))


def test_arrays_in_a_set_bring_their_own_clusters(tmp_path: Path) -> None:
    grouped = npz(images=grey(6), clusters=np.array([4, 4, 4, 9, 9, 9]))
    path = write_card(tmp_path / "set", {"calib.npz": grouped}, kind="images", preprocess=HOW, alike="x")
    assert load(path.parent).clusters.tolist() == [4, 4, 4, 9, 9, 9]  # type: ignore[union-attr]
    path = write_card(
        tmp_path / "two", {"calib.1.npz": grouped, "calib.2.npz": npz(images=grey(4, seed=9))},
        kind="images", preprocess=HOW)  # fmt: skip
    assert "with and without clusters" in refused("mixed", path.parent).value


def test_own_bytes_need_a_word_about_them(tmp_path: Path) -> None:
    path = own(tmp_path, images=grey(20))
    assert PREPROCESS in refused("preprocess", path).remedy
    known = load(path, preprocess=Preprocess.model_validate(HOW))
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump(HOW))
    assert np.array_equal(load(path).images, known.images)
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump({**HOW, "means": [0.5]}))
    assert "did you mean 'mean'" in refused("preprocess", path).remedy


def test_the_file_that_the_refusal_shows_is_read_and_nothing_is_resized(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (20, 8, 14, 3), dtype=np.uint8)  # not square
    path = own(tmp_path, images=colours)
    remedy = refused("preprocess", path, shape=(None, 3, 8, 14)).remedy
    (shown,) = re.findall(r"\{.*?\}", remedy)
    (tmp_path / PREPROCESS).write_text(shown)
    found = load(path, shape=(None, 3, 8, 14)).images
    how = yaml.safe_load(shown)
    assert np.allclose(found[0, 1], (colours[0, :, :, 1] / 255 - how["mean"][1]) / how["std"][1], atol=1e-6)
    # cut without being resized, and what is too small to be cut
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump({**how, "crop": 6}))
    assert np.array_equal(load(path, shape=(None, 3, 6, 6)).images, found[:, :, 1:7, 4:10])
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump({**how, "crop": 9}))
    remedy = refused("shape", path, shape=(None, 3, 9, 9)).remedy
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump(how | {"crop": 9} | yaml.safe_load(remedy.partition(",")[0])))
    assert load(path, shape=(None, 3, 9, 9)).images.shape[1:] == (3, 9, 9)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_image_files_by_name(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    how = {**HOW, "mean": [0.0] * 3, "std": [1.0] * 3}
    files = {f"{number:02d}.png": picture((number, 0, 255)) for number in range(19)}
    files |= {"zz.jpg": picture((255, 255, 255), (20, 30), "JPEG"), ".hidden.png": b"junk", "notes.txt": b"words"}
    reference = folder
    if packed:
        reference = folder / "all.zip"
        with zipfile.ZipFile(reference, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        for name, data in files.items():
            (folder / name).write_bytes(data)
    (folder / PREPROCESS).write_text(yaml.safe_dump(how))
    found = load(reference, shape=(None, 3, 8, 8))
    assert np.allclose(found.images[:, 0, 4, 4] * 255, range(17)) and np.all(found.images[:, 2] == 1)
    assert np.allclose(load(reference, "eval", shape=(None, 3, 8, 8)).images[1], 1.0)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    trap = np.empty(1, dtype=object)
    trap[0] = Trap()
    path = own(tmp_path, images=trap)
    assert "savez" in refused("pickle", path).remedy
    (tmp_path / "own.npy").write_bytes(pickle.dumps(Trap()))
    refused("pickle", tmp_path / "own.npy")
    refused("pickle", own(tmp_path, images=np.ones((20, 1, 8, 8)), labels=trap))
    assert not (tmp_path / "sprung").exists()


FINE = np.random.default_rng(3).normal(size=(20, 1, 8, 8)).astype(np.float32)


@pytest.mark.parametrize(
    "code, arrays, message",
    [
        ("empty", {"images": np.empty((0, 1, 8, 8), np.float32)}, "n at least 1"),
        ("empty", {"images": np.float32(3)}, "n at least 1"),
        ("fields", {"x": FINE}, "'x'"),
        ("dtype", {"images": FINE.astype(np.int64)}, "int64"),
        ("dtype", {"images": np.array(["a"] * 20)}, "images of"),
        ("dtype", {"images": FINE.astype(np.complex64)}, "complex64"),
        ("shape", {"images": FINE.transpose(0, 2, 3, 1)}, r"\[8, 8, 1\].*images takes \[batch, 1, 8, 8\].*transpose"),
        ("shape", {"images": FINE[:, :, :4]}, r"\[1, 4, 8\]"),
        ("shape", {"images": FINE[:, 0]}, r"\[8, 8\]"),
        ("shape", {"images": np.ones((20, 8), np.uint8)}, "uint8"),
        ("nonfinite", {"images": np.where(FINE > 2, np.nan, FINE)}, "NaN"),
        ("nonfinite", {"images": FINE.astype(np.float64) * 1e300}, "infinity"),
        ("constant", {"images": np.ones((20, 1, 8, 8)) * np.arange(20).reshape(-1, 1, 1, 1)}, "all 17 images"),
        ("range", {"images": grey(20)[:, None].astype(np.float32)}, "look like bytes"),
        ("labels", {"images": FINE, "labels": np.zeros(19, np.int64)}, r"labels \[19\] of int64 for 20 samples"),
        ("labels", {"images": FINE, "labels": np.zeros(20)}, "float64"),
        ("labels", {"images": FINE, "labels": np.arange(20) - 1}, "label -1"),
        ("labels", {"images": FINE, "labels": np.eye(20, dtype=np.int64)}, r"\[20, 20\]"),
        ("clusters", {"images": FINE, "clusters": np.zeros((20, 1), np.int64)}, r"clusters \[20, 1\]"),
        ("short", {"images": FINE[:1]}, "none of them left for calib"),
    ],
)  # fmt: skip
def test_images_of_a_wrong_shape_type_or_range_are_refused(
    tmp_path: Path, code: str, arrays: dict[str, Any], message: str
) -> None:
    path = own(tmp_path, **arrays)
    error = refused(code, path)
    import re

    assert re.search(message, error.line()), error


def test_floats_that_were_normalised_otherwise(tmp_path: Path) -> None:
    path = own(tmp_path, images=FINE.clip(-2, 2))
    how = Preprocess.model_validate(HOW)
    assert load(path, preprocess=how).images.shape == (17, 1, 8, 8)
    assert "-2 to 2" in refused("range", own(tmp_path, images=FINE * 20), preprocess=how).rule


def test_models_that_take_no_images(shipped: Path) -> None:
    assert "int64" in refused("dtype", shipped, dtype="int64").rule
    refused("shape", shipped, shape=(None, 8))
    assert load(shipped, shape=(None, None, None, None), dtype="float16").images.dtype == np.float32


def test_sets_of_another_kind_and_broken_files(tmp_path: Path) -> None:
    assert "kind text" in refused("kind", "prose-en").value
    (tmp_path / "own.txt").write_text("words")
    refused("suffix", tmp_path / "own.txt")
    (tmp_path / "empty").mkdir()
    refused("empty", tmp_path / "empty")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("notes.txt", "words")
    refused("empty", tmp_path / "empty.zip")
    whole = npz(images=FINE)
    for name, data in (("cut.npz", whole[: len(whole) // 2]), ("cut.zip", whole[: len(whole) // 2]), ("no.npy", b"")):
        (tmp_path / name).write_bytes(data)
        refused("unreadable", tmp_path / name)
    (tmp_path / "bad.png").write_bytes(picture((1, 2, 3))[:40])
    write_card(tmp_path / "set", {"calib.png": picture((1, 2, 3))[:40]}, kind="images", preprocess=HOW)
    refused("unreadable", tmp_path / "set", shape=(None, 3, 8, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"std": [0.0]},
        {"std": [1.0, 1.0]},
        {"mean": [], "std": []},
        {"crop": 13},
        {"mean": [float("nan")]},
        {"resize": 0},
    ],
    ids=str,
)
def test_a_preprocess_makes_sense(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"\[card-invalid\]"):
        Card.load(write_card(tmp_path, kind="images", preprocess=HOW | change))


SHIPPED = [
    name for name in content.names("calibration") if Card.load(content.find("calibration", name)).kind == "images"
]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_images_load(name: str) -> None:
    """What a card promises is there: splits that share no image, all of one shape."""
    seen: set[bytes] = set()
    for split in ("calib", "tune", "eval"):
        found = load(name, split, samples=64, shape=(None, None, None, None))
        each = {image.tobytes() for image in found.images}
        assert len(each) >= 16 and not each & seen
        seen |= each


def test_crops_of_one_photograph_are_one_to_an_interval() -> None:
    """The shipped photographs say which crops are of one: 30 to score on are five, 64 to calibrate on six."""
    shape = (None, 3, 224, 224)
    counts = [
        np.unique(load("photos", split, shape=shape).clusters, return_counts=True)[1].tolist()
        for split in ("calib", "tune", "eval")
    ]
    assert [sorted(each) for each in counts] == [[10, 10, 11, 11, 11, 11], [3] * 6, [6] * 5]


@pytest.mark.parametrize("names, labels", [(["cat", "dog", "elk"], [0, 1, 2]), (["2", "10", "0"], [2, 10, 0])])
def test_folders_of_classes_give_labels(tmp_path: Path, names: list[str], labels: list[int]) -> None:
    files = {
        f"{name}/{number:02d}.png": picture((label, number, 0))
        for name, label in zip(names, labels, strict=True)
        for number in range(10)
    }
    for name, data in (files | {"notes/a.txt": b"words", ".hidden/a.png": b"junk"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump({"mean": [0.0] * 3, "std": [1.0] * 3}))
    held = load(tmp_path, "eval", shape=(None, 3, 8, 8))
    assert held.labels is not None and sorted(held.labels.tolist()) == sorted(labels), "one of each class to score"
    assert np.rint(held.images[:, 0, 0, 0] * 255).tolist() == held.labels.tolist()
    assert any("labels are its 3 folders: " in note for note in held.notes)


def test_one_folder_of_images_in_a_folder_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for number in range(10):
        (tmp_path / "all" / f"{number}.png").write_bytes(picture((number, 9, 9)))
    (tmp_path / PREPROCESS).write_text(yaml.safe_dump({"mean": [0.0] * 3, "std": [1.0] * 3}))
    held = load(tmp_path, shape=(None, 3, 8, 8))
    assert (held.labels, len(held.images)) == (None, 8)
