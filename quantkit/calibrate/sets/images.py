"""A calibration set's name or path -> the images that a network's passes see and its measures score.

    a shipped set, or a folder with card.yaml    has its splits, and says under `preprocess` what becomes of bytes
    .npz, .npy                                   arrays; floats are taken as preprocessed
    a folder of image files, a .zip of them      bytes

A user's own files have no splits: the last 10 % are kept for `eval` and the 5 % before for `tune`, class by class where
there are labels, else by their order; images that are alike (`clusters`) stay in one split, and are parted as one. What
becomes of a user's own bytes is said by a `preprocess.yaml` beside them (the card's keys: mean, std, and if
wanted resize, crop, layout), or known of the model.

    load_images("fashion-mnist", "eval", samples=None, seed=0, shape=(None, 1, 28, 28), dtype="float32", where="images")
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import content
from quantkit.calibrate.sets import image_sources, own
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.calibrate.sets.image_sources import Images
from quantkit.errors import InputError
from quantkit.model.preprocess import Preprocess

PREPROCESS = "preprocess.yaml"
_FLOATS = ("float16", "float32", "float64", "bfloat16")
# how far beyond what bytes can become a float may lie: the rounding of another program
_SLACK = 0.05


@dataclass(frozen=True, eq=False)
class ImageSet:
    """What a network is calibrated or scored on.

    Args:
        images: [n, C, H, W] or [n, H, W, C], as the model takes them, float32, preprocessed.
        labels: [n], the class of each; None where the set has none.
        name: of the set: the folder or file name.
        split: `calib`, `tune` or `eval`.
        notes: what was decided on the way, one sentence each; for the manifest.
        clusters: [n], images of one number are alike, such as crops of one photograph; None: each was drawn alone.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64] | None
    name: str
    split: Split
    notes: tuple[str, ...] = ()
    clusters: NDArray[np.int64] | None = None


def load_images(
    reference: str,
    split: Split,
    *,
    samples: int | None,
    seed: int,
    shape: tuple[int | None, ...],
    dtype: str,
    where: str,
    preprocess: Preprocess | None = None,
) -> ImageSet:
    """Read, draw, preprocess and check images for a model's input.

    Args:
        reference: a shipped name, or a path; see the module.
        split: which part; only `tune` may guide a choice, `eval` is for scoring.
        samples: at most so many, drawn from all over the split; None takes all, in their order.
        seed: of the recipe. It moves what `calib` draws; `tune` and `eval` stay, or no two runs could be compared.
        shape: of the model's input with the batch first; None where a size is free.
        dtype: of the model's input, numpy's name.
        preprocess: what becomes of bytes where the set does not say; known of shipped models.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `suffix`, `empty`, `short`, `mixed`, `unreadable`, `pickle`, `fields`, `labels`,
            `clusters`, `dtype`, `shape`, `preprocess`, `nonfinite`, `range`, `constant`.
        MissingDependency: Pillow, where images must be decoded or resized.
    """
    if dtype not in _FLOATS:
        raise InputError(
            "calibration-dtype",
            where=reference,
            value="a set of images",
            rule=f"{where} takes {dtype}, and images are floats when they reach a model",
            remedy="use a set of the model's own kind",
        )
    part = _open(reference, split)
    how = part.preprocess or preprocess
    chosen = drawn(part.members, part.sampling, split, samples, seed)
    images = _read(part.images, chosen, how, shape, where)
    _check_values(images, None if part.images.bytes_ else how, part.images.where)
    labels, clusters = (
        None if array is None else array[chosen] for array in (part.images.labels, part.images.clusters)
    )
    notes = part.notes
    if samples is not None and len(chosen) < samples:
        notes = (*notes, f"{part.name} has {len(chosen)} images to {split}, {samples} were asked for")
    return ImageSet(images, labels, part.name, split, notes, clusters)


@dataclass(frozen=True)
class _Part:
    """The images of one split, and which of them belong to it."""

    images: Images
    members: NDArray[np.int64]
    sampling: SetSampling
    preprocess: Preprocess | None
    name: str
    notes: tuple[str, ...] = ()


def _open(reference: str, split: Split) -> _Part:
    path = content.find("calibration", reference)
    if (card := Card.at(path)) is not None:
        return _from_card(card, split)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        names = sorted(
            entry.name for entry in path.iterdir() if entry.is_file() and image_sources.is_picture(entry.name)
        )
        found = image_sources.pictures(names, lambda name: read_bytes(folder / name), where=reference)
    else:
        found = image_sources.parse(path, suffix=path.suffix.lower(), where=reference)
    stated, beside = None, folder / PREPROCESS
    if beside.is_file():
        data = content.read_yaml(beside)
        stated = content.validated(Preprocess, data, where=str(beside), code="calibration-preprocess")
    name = path.resolve().name
    members, parted = own_split(found.count, found.labels, split, found.clusters)
    if not len(members):
        count = f"{found.count} image{'' if found.count == 1 else 's'}"
        raise own.short(reference, f"{count}, none of them left for {split}", "images")
    note = f"{name} has no splits: {split} is {len(members)} of its {found.count} images, parted {parted}"
    return _Part(found, members, SetSampling(), stated, name, (note,))


def _from_card(card: Card, split: Split) -> _Part:
    card.demand_kind("images", rule="this model takes images")
    parts = [image_sources.parse(data, suffix=path.suffix.lower(), where=str(path)) for path, data in card.read(split)]
    if card.alike is not None:
        parts = _alike(parts, card.alike, card.where)
    found = image_sources.together(parts, card.where)
    return _Part(found, np.arange(found.count), card.sampling, card.preprocess, card.name)


def _alike(parts: Sequence[Images], pattern: str, where: str) -> list[Images]:
    """Files of images, which of them are alike told by their names; arrays say it themselves. See `Card.alike`."""
    numbers: dict[str, int] = {}
    found = []
    for part in parts:
        if part.names is None and part.clusters is None:
            raise _unlike(where, "arrays, whose images have no names", pattern)
        of = []
        for name in part.names or ():
            match = re.search(pattern, Path(name).stem)
            if match is None:
                raise _unlike(where, f"an image {Path(name).stem!r}", pattern)
            of.append(numbers.setdefault(match[0], len(numbers)))
        found.append(replace(part, clusters=np.array(of)) if of else part)
    return found


def _unlike(where: str, value: str, pattern: str) -> InputError:
    return InputError(
        "card-invalid",
        where=f"{where}: alike",
        value=value,
        rule=f"every image file has {pattern} in its name, and every .npz an array `clusters`",
        remedy="mend `alike`, or leave it out",
    )


def own_split(
    count: int, labels: NDArray[Any] | None, split: Split, clusters: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], str]:
    """The numbers of the samples of a split of what has none, ascending, and by what they were parted.

    Of samples that are alike (`clusters`) the first decides for all: none is scored on what its like was calibrated on.
    """
    if clusters is not None:
        _, firsts, place = np.unique(clusters, return_index=True, return_inverse=True)
        # in the order in which they come, not in that of their numbers
        order = np.argsort(firsts)
        kept, parted = own_split(firsts.size, None if labels is None else labels[firsts[order]], split)
        return np.flatnonzero(np.isin(place, order[kept])), f"{parted}, those that are alike together"
    classes = [np.arange(count)]
    if labels is not None:
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members = [numbers[slice(*own.bounds(split, len(numbers)))] for numbers in classes]
    return np.sort(np.concatenate(members)), "by their order" if labels is None else "class by class"


def drawn(
    members: NDArray[np.int64], sampling: SetSampling, split: Split, samples: int | None, seed: int
) -> NDArray[np.int64]:
    """At most so many of a split's members; see `load_images`."""
    generator = sampling.generator(split, seed)
    if samples is None or generator is None:
        return members[:samples]
    # one permutation, so that asking for 8 gives the first 8 of what 16 would be
    return members[generator.permutation(len(members))[:samples]]


def _read(
    images: Images, chosen: NDArray[np.int64], how: Preprocess | None, shape: tuple[int | None, ...], where: str
) -> NDArray[np.float32]:
    if images.bytes_ and how is None:
        raise InputError(
            "calibration-preprocess",
            where=images.where,
            value="images of bytes",
            rule="a model takes them as it was trained: normalised, and resized and cropped if it wants that",
            remedy=f"write {PREPROCESS} beside them: {{mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}, with "
            "`resize: 256`, `crop: 224`, `layout: NHWC` where it wants them, or give floats",
        )
    found: NDArray[np.float32] | None = None
    for place, number in enumerate(chosen):
        image = images.read(int(number))
        if images.bytes_ and how is not None:
            image = image_sources.preprocess(image, how, where=images.where)
        if found is None:
            _check_shape(image.shape, shape, images.where, where)
            found = np.empty((len(chosen), *image.shape), dtype=np.float32)
        if image.shape != found.shape[1:]:
            raise InputError(
                "calibration-shape",
                where=images.where,
                value=f"images of {list(found.shape[1:])} and of {list(image.shape)}",
                rule="all images have one shape",
            )
        found[place] = image
    assert found is not None  # a part without images was refused
    return found


def _check_shape(found: tuple[int, ...], shape: tuple[int | None, ...], images: str, where: str) -> None:
    if len(found) == len(shape) - 1 and all(
        want is None or have == want for have, want in zip(found, shape[1:], strict=True)
    ):
        return
    wanted = ", ".join("any" if size is None else str(size) for size in shape[1:])
    remedy = "cut and resize them to that shape, or use another set"
    if sorted(found) == sorted(size for size in shape[1:] if size is not None):
        remedy = "transpose them"
    raise InputError(
        "calibration-shape",
        where=images,
        value=f"images of [{', '.join(map(str, found))}]",
        rule=f"{where} takes [batch, {wanted}]",
        remedy=remedy,
    )


def _check_values(images: NDArray[np.float32], how: Preprocess | None, where: str) -> None:
    flat = images.reshape(len(images), -1)
    bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(bad):
        raise InputError(
            "calibration-nonfinite",
            where=where,
            value=f"NaN or infinity in {len(bad)} of {len(images)} images",
            rule="values are finite",
            remedy="leave those images out, or find what made them so",
        )
    if (flat == flat[:, :1]).all():
        raise InputError(
            "calibration-constant",
            where=where,
            value=f"all {len(images)} images have one value everywhere",
            rule="ranges come from what images differ in",
            remedy="check how they were read and preprocessed",
        )
    low, high = float(flat.min()), float(flat.max())
    if how is None:
        check_range(images, where)
        return
    ends = [(value - mean) / std for mean, std in zip(how.mean, how.std, strict=True) for value in (0.0, 1.0)]
    slack = _SLACK * (max(ends) - min(ends))
    if low < min(ends) - slack or high > max(ends) + slack:
        raise InputError(
            "calibration-range",
            where=where,
            value=f"floats from {low:g} to {high:g}",
            rule=f"preprocessed as this model's images are, they lie in {min(ends):g} to {max(ends):g}",
            remedy="normalise with the model's mean and std, or give bytes (uint8)",
        )


def check_range(images: NDArray[Any], where: str) -> None:
    """Refuse floats that look like bytes: of others nothing is known. Raises InputError `calibration-range`."""
    low, high = float(images.min()), float(images.max())
    if high > 1 and low >= 0 and high <= 255 and bool((images == np.rint(images)).all()):
        raise InputError(
            "calibration-range",
            where=where,
            value=f"floats that are whole numbers from {low:g} to {high:g}",
            rule="floats are taken as preprocessed, and these are bytes still",
            remedy=f"normalise them, or store uint8 with a {PREPROCESS}; where the model takes bytes, with "
            "mean 0 and std 1/255",
        )
