"""A calibration set's name or path -> what every input of a graph is fed, sample by sample.

    one input of floats      images, however they come; see `calibrate.images`
    any other graph          a .npz with an array [n, ...] for each input, by the input's name, `labels` where there are
                             some, and `clusters` where samples are alike; a .npy where there is one input

Floats are taken as preprocessed. What is no float (token ids, masks, positions) stays as it is. Arrays have no splits:
they are parted as a user's own images are. A graph whose batch is fixed is fed that many samples at a time, and what is
left over is not used.

More of the same images, to compare two models on: each moved a little, mirrored or not.

Two models can be held against each other on any image of the kind that they are for: nothing need be known of it. What
moves in at an edge is the image reflected there, and nothing is resized: parts of photographs, enlarged, are smoother
than photographs, and EfficientNet-Lite0 in 8 bits differs from itself five times as much on them (KL 0.019 where the
images as they are give 0.003, and moved ones 0.004). Views of one image are alike, so intervals are taken by image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit import content
from quantkit.calibrate.sets import own
from quantkit.calibrate.sets.card import SetSampling, Split
from quantkit.calibrate.sets.image_sources import class_numbers, cluster_numbers, demand_arrays, opened_arrays
from quantkit.calibrate.sets.images import check_range, drawn, load_images, own_split
from quantkit.errors import InputError
from quantkit.model.preprocess import Preprocess

Array = NDArray[Any]
Feed = Mapping[str, Array]
LABELS = "labels"
CLUSTERS = "clusters"
_IMAGES = "images"


class GraphInput(Protocol):
    """An input of a graph; samples come first."""

    @property
    def name(self) -> str:
        """By which it is fed."""
        ...

    @property
    def dtype(self) -> str:
        """Numpy's name of its type."""
        ...

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Its sizes, None where one is free."""
        ...


@dataclass(frozen=True, eq=False)
class InputSet:
    """What a graph is calibrated or scored on.

    Args:
        arrays: input's name -> [n, ...], in the input's type.
        labels: [n], the class of each sample; None where the set has none.
        sha256: over names, types, shapes and little-endian bytes.
        batch: samples of a feed, where the graph takes no other number.
        clusters: [n], samples of one number are alike: crops of one photograph, `views` of one image; None: each was
            drawn alone.
    """

    arrays: Feed
    labels: NDArray[np.int64] | None
    name: str
    split: Split
    sha256: str
    batch: int | None = None
    notes: tuple[str, ...] = ()
    clusters: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Samples."""
        return len(next(iter(self.arrays.values())))

    def feeds(self, size: int) -> Iterator[Feed]:
        """All samples in feeds of `size` at most, or of the graph's own batch."""
        step = self.batch or size
        for first in range(0, len(self), step):
            yield {name: np.ascontiguousarray(array[first : first + step]) for name, array in self.arrays.items()}

    @property
    def channels(self) -> int | None:
        """Which axis of the samples has the channels, one or three, where they are images; else None."""
        first, *others = self.arrays.values()
        found = next((axis for axis in (1, 3) if first.ndim == 4 and first.shape[axis] in (1, 3)), None)
        return None if others else found

    def views(self, count: int, seed: int) -> InputSet:
        """The samples and views of them (`calibrate.views`), where they are images."""
        (name, images), *_ = self.arrays.items()
        channels = self.channels
        if count == 1 or channels is None or self.batch is not None:
            return self
        found, numbers = views(np.moveaxis(images, channels, 1), count, seed)
        labels = None if self.labels is None else self.labels[numbers]
        clusters = numbers if self.clusters is None else self.clusters[numbers]
        return replace(self, arrays={name: np.moveaxis(found, 1, channels)}, labels=labels, clusters=clusters)

    def first_of(self, count: int) -> InputSet:
        """So many samples; whole feeds of them, where a graph takes no others."""
        step = self.batch or 1
        kept = slice(max(step, count - count % step))
        labels, clusters = (None if each is None else each[kept] for each in (self.labels, self.clusters))
        arrays = {name: array[kept] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, labels=labels, clusters=clusters)

    def first(self, size: int) -> Feed:
        """The first feed of these."""
        return next(self.feeds(size))


def load_inputs(
    reference: str,
    split: Split,
    inputs: Sequence[GraphInput],
    *,
    samples: int | None,
    seed: int,
    preprocess: Preprocess | None = None,
    where: str = "the graph",
) -> InputSet:
    """Read, draw and check what a graph's inputs are fed.

    Args:
        reference, split, samples, seed: as of `load_images`.
        preprocess: what becomes of images of bytes where the set does not say.

    Raises:
        InputError: those of `load_images`; `onnx-inputs`, a graph that takes no samples; of arrays,
            `calibration-fields`, `-dtype`, `-shape`, `-range`, `-labels`, `-clusters`, `-nonfinite`, `-constant`,
            `-short`, `-pickle`, `-unreadable`, `-kind`.
    """
    batch = _batch(inputs, where)
    path = content.find("calibration", reference)
    only = inputs[0]
    if len(inputs) == 1 and np.dtype(only.dtype).kind == "f" and not _holds(path, only.name):
        found = load_images(
            reference,
            split,
            samples=samples,
            seed=seed,
            shape=only.shape,
            dtype=only.dtype,
            where=only.name,
            preprocess=preprocess,
        )
        arrays = {only.name: found.images.astype(only.dtype, copy=False)}
        return _whole(arrays, found.labels, found.clusters, batch, found.name, split, found.notes)
    everything = _read(path, inputs)
    named = {each.name for each in inputs}
    labels, clusters = (None if name in named else everything.pop(name, None) for name in (LABELS, CLUSTERS))
    count = _count(everything, reference)
    if labels is not None:
        labels = class_numbers(labels, count, reference)
    if clusters is not None:
        clusters = cluster_numbers(clusters, count, reference)
    members, parted = own_split(count, labels, split, clusters)
    chosen = drawn(members, SetSampling(), split, samples, seed)
    if not len(chosen):
        raise own.short(reference, f"{count} samples, none of them left for {split}", "samples")
    arrays = {each.name: _fitting(everything[each.name][chosen], each, reference) for each in inputs}
    _check_constant([array for array in arrays.values() if array.dtype.kind == "f"], reference)
    name = path.resolve().name
    notes = [f"{name} has no splits: {split} is {len(members)} of its {count} samples, parted {parted}"]
    if samples is not None and len(chosen) < samples:
        notes.append(f"{name} has {len(chosen)} samples to {split}, {samples} were asked for")
    labels, clusters = (None if each is None else each[chosen] for each in (labels, clusters))
    return _whole(arrays, labels, clusters, batch, name, split, tuple(notes))


def _batch(inputs: Sequence[GraphInput], where: str) -> int | None:
    """The one number of samples that a graph takes; None where it is free. Raises InputError `onnx-inputs`."""
    wrong = "" if inputs else "no inputs"
    for each in inputs:
        if not each.shape:
            wrong = f"{each.name} is one number"
        elif np.dtype(each.dtype).kind not in "fiub":
            wrong = f"{each.name} takes {'text' if each.dtype == 'object' else each.dtype}"
    fixed = {each.shape[0]: each.name for each in inputs if each.shape and each.shape[0] is not None}
    if len(fixed) > 1:
        wrong = ", ".join(f"{name} takes {size} samples" for size, name in fixed.items())
    if wrong:
        raise InputError(
            "onnx-inputs",
            where=where,
            value=wrong,
            rule="every input takes numbers, and as many samples as the others along its first axis",
            remedy="export it with samples first, and constants inside the graph",
        )
    return next(iter(fixed), None)


def _holds(path: Path, name: str) -> bool:
    """Whether a .npz has an array of this name, and it is not `images` that are meant by it."""
    if path.suffix.lower() != ".npz" or name == _IMAGES or not path.is_file():
        return False
    with suppress(InputError), opened_arrays(path, name) as loaded:
        return name in loaded.files
    return False  # `load_images` says what is wrong with it


def _read(path: Path, inputs: Sequence[GraphInput]) -> dict[str, Array]:
    where, suffix = path.name, path.suffix.lower()
    names = [each.name for each in inputs]
    wanted = f"an array for each input ({', '.join(names)}), and `labels` and `clusters` where there are some"
    remedy = f"numpy.savez(path, {', '.join(f'{name}=...' for name in names)})"
    if suffix not in (".npz", ".npy") or not path.is_file() or (suffix == ".npy" and len(inputs) > 1):
        raise InputError(
            "calibration-kind", where=where, value="no .npz", rule=f"this graph takes {wanted}", remedy=remedy
        )
    with opened_arrays(path, where) as loaded:
        if isinstance(loaded, np.ndarray):
            return {names[0]: loaded}
        missing = [name for name in names if name not in loaded.files]
        if missing:
            given = ", ".join(map(repr, loaded.files[:6])) or "none"
            value = f"arrays {given}, no {missing[0]!r}"
            raise InputError("calibration-fields", where=where, value=value, rule=wanted, remedy=remedy)
        found = {name: loaded[name] for name in [*names, LABELS, CLUSTERS] if name in loaded.files}
        demand_arrays(found.values(), where)
        return found


def _count(arrays: Feed, where: str) -> int:
    """How many samples all arrays have. Raises InputError `calibration-shape`."""
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise InputError(
            "calibration-shape",
            where=where,
            value=", ".join(f"{name} of {count}" for name, count in counts.items()),
            rule="every array has one row a sample, and there is at least one",
            remedy="give them the same first size",
        )
    return next(iter(counts.values()))


def _fitting(array: Array, given: GraphInput, where: str) -> Array:
    """An array in the type of its input. Raises InputError where it is another kind of thing."""
    where, dtype = f"{where}: {given.name}", np.dtype(given.dtype)
    if len(array.shape) != len(given.shape) or any(
        want not in (None, have) for have, want in zip(array.shape[1:], given.shape[1:], strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in given.shape[1:])
        raise InputError(
            "calibration-shape",
            where=where,
            value=f"[{', '.join(map(str, ('n', *array.shape[1:])))}]",
            rule=f"the graph takes [batch, {wanted}]",
            remedy="cut, pad or transpose it to that shape",
        )
    kinds = {"f": "f", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]
    if array.dtype.kind not in kinds:
        raise InputError(
            "calibration-dtype",
            where=where,
            value=str(array.dtype),
            rule=f"the graph takes {dtype}" + (", preprocessed" if dtype.kind == "f" else ""),
            remedy=f"{given.name}.astype('{dtype}'), if that is what it means",
        )
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # what the type cannot hold becomes infinity, and is refused
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            raise InputError(
                "calibration-nonfinite",
                where=where,
                value="NaN or infinity",
                rule="values are finite",
                remedy="leave those samples out, or find what made them so",
            )
        if array.ndim == 4:
            check_range(array, where)
    elif dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise InputError(
                "calibration-range",
                where=where,
                value=f"whole numbers from {array.min()} to {array.max()}",
                rule=f"{dtype} holds {bounds.min} to {bounds.max}",
                remedy="check what they are",
            )
    return np.ascontiguousarray(array, dtype=dtype)


def _check_constant(floats: Sequence[Array], where: str) -> None:
    """A mask may well be constant, but not all floats there are."""
    if floats and all((array == array.reshape(-1)[0]).all() for array in floats):
        raise InputError(
            "calibration-constant",
            where=where,
            value="one value everywhere",
            rule="ranges come from what samples differ in",
            remedy="check how they were made",
        )


def _whole(
    arrays: dict[str, Array],
    labels: NDArray[np.int64] | None,
    clusters: NDArray[np.int64] | None,
    batch: int | None,
    name: str,
    split: Split,
    notes: tuple[str, ...],
) -> InputSet:
    """Of samples, as many as fill feeds of a fixed batch."""
    count = len(next(iter(arrays.values())))
    rest = count % batch if batch else 0
    if batch and count < batch:
        raise own.short(name, f"{count} samples to {split}, and the graph takes {batch} at a time", "samples")
    if rest:
        notes = (*notes, f"{name}: {rest} of {count} samples to {split} fill no feed of {batch}, and are left out")
        arrays = {key: array[: count - rest] for key, array in arrays.items()}
        labels, clusters = (None if each is None else each[: count - rest] for each in (labels, clusters))
    return InputSet(arrays, labels, name, split, _sha256(arrays, labels), batch, notes, clusters)


def _sha256(arrays: Feed, labels: NDArray[np.int64] | None) -> str:
    """The same on every machine."""
    digest = hashlib.sha256()
    for name, array in {**arrays, **({} if labels is None else {LABELS: labels})}.items():
        little = array.dtype.newbyteorder("<")
        digest.update(f"{name} {little.str} {'x'.join(map(str, array.shape))}\n".encode())
        digest.update(np.ascontiguousarray(array, dtype=little).data)
    return digest.hexdigest()


# of an image's sides, how far it is moved at most
_REACH = 8


def views(images: Array, count: int, seed: int) -> tuple[Array, Array]:
    """`count` views of each image, the one as it is among them.

    Args:
        images: [n, C, H, W].
        count: 1 leaves them as they are.
        seed: of how far each is moved.

    Returns:
        [n · count, C, H, W], and of each view the number of its image.
    """
    generator = np.random.default_rng(seed)
    height, width = images.shape[2:]
    tall, wide = height // _REACH, width // _REACH
    framed = np.pad(images, ((0, 0), (0, 0), (tall, tall), (wide, wide)), mode="reflect")
    found = [images]
    for number in range(1, count):
        top, left = (int(generator.integers(0, 2 * reach + 1)) for reach in (tall, wide))
        moved = framed[:, :, top : top + height, left : left + width]
        found.append(moved[..., ::-1] if number % 2 else moved)
    return np.concatenate(found), np.tile(np.arange(len(images)), count)
