"""Inputs of a graph from a calibration set, sample by sample.

    one input of floats      images, in any form; see `images.py`
    any other graph          a .npz with an array [n, ...] for each input, by the input's name, and optional `labels`,
    and
                             `clusters` if samples are alike; a .npy for a single input

Floats must be preprocessed; other types (token ids, masks, positions) stay as they are. Arrays are split like a user's
own images. A graph with a fixed batch gets that many samples at a time, and the remainder is dropped.
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
from quantkit.calibrate.sets import card as cards
from quantkit.calibrate.sets.card import SetSampling, Split
from quantkit.calibrate.sets.images import (
    check_range,
    class_numbers,
    cluster_numbers,
    demand_arrays,
    drawn,
    load_images,
    opened_arrays,
    own_split,
)
from quantkit.errors import InputError
from quantkit.model.source.packaged import Preprocess

Array = NDArray[Any]
Feed = Mapping[str, Array]
LABELS, CLUSTERS, _IMAGES = "labels", "clusters", "images"
# largest shift of a view: one part in so many of the image's sides
_REACH = 8


class GraphInput(Protocol):
    """Interface of a graph's input: numpy's name of its type, and its sizes, samples first, None for a free one."""

    @property
    def name(self) -> str:
        """Name in a feed."""
        ...

    @property
    def dtype(self) -> str:
        """Numpy's name of its type."""
        ...

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Sizes, samples first."""
        ...


@dataclass(frozen=True, eq=False)
class InputSet:
    """Samples for calibrating or scoring a graph.

    Args:
        arrays: name of an input -> [n, ...], in the input's type.
        labels: [n], class of each sample; None without labels.
        name: name of the set.
        split: its split.
        sha256: hash over names, types, shapes and little-endian bytes.
        batch: samples of a feed, if the graph has a fixed batch.
        notes: decisions, one sentence each.
        clusters: [n]; samples with the same number are alike: crops of one photograph, `views` of one image; None if
            all are independent.
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
        """Return the number of samples."""
        return len(next(iter(self.arrays.values())))

    def feeds(self, size: int) -> Iterator[Feed]:
        """Yield all samples in feeds of at most `size`, or of the graph's own batch."""
        step = self.batch or size
        for first in range(0, len(self), step):
            yield {name: np.ascontiguousarray(array[first : first + step]) for name, array in self.arrays.items()}

    def first(self, size: int) -> Feed:
        """Return the first feed of this size."""
        return next(self.feeds(size))

    def first_of(self, count: int) -> InputSet:
        """Return the first samples; whole feeds for a fixed batch."""
        step = self.batch or 1
        return self._kept(max(step, count - count % step))

    def _kept(self, count: int) -> InputSet:
        labels, clusters = (None if array is None else array[:count] for array in (self.labels, self.clusters))
        arrays = {name: array[:count] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, labels=labels, clusters=clusters)

    @property
    def channels(self) -> int | None:
        """Axis of one or three channels, if the samples are images; else None."""
        first, *others = self.arrays.values()
        axis = next((axis for axis in (1, 3) if first.ndim == 4 and first.shape[axis] in (1, 3)), None)
        return None if others else axis

    def views(self, count: int, seed: int) -> InputSet:
        """Return the samples with views of them (`views`), if they are images."""
        (name, images), *_ = self.arrays.items()
        channels = self.channels
        if count == 1 or channels is None or self.batch is not None:
            return self
        seen, numbers = views(np.moveaxis(images, channels, 1), count, seed)
        labels = None if self.labels is None else self.labels[numbers]
        clusters = numbers if self.clusters is None else self.clusters[numbers]
        return replace(self, arrays={name: np.moveaxis(seen, 1, channels)}, labels=labels, clusters=clusters)


def views(images: Array, count: int, seed: int) -> tuple[Array, Array]:
    """Return `count` views of each image [n, C, H, W], [n · count, C, H, W], and the number of each view's image.

    The first view is the image itself; others are shifted a little, every second one mirrored. Two models can be
    compared on
    any images of their kind. Shifts reflect at the edge, and nothing is resized: enlarged parts of photographs are
    smoother
    than photographs, and on them EfficientNet-Lite0 in 8 bits differs five times as much from the original (a KL of
    0.019;
    0.003 on the images, 0.004 on shifted ones). Views of one image are alike, so intervals count images.
    """
    generator = np.random.default_rng(seed)
    height, width = images.shape[2:]
    tall, wide = height // _REACH, width // _REACH
    framed = np.pad(images, ((0, 0), (0, 0), (tall, tall), (wide, wide)), mode="reflect")
    seen = [images]
    for number in range(1, count):
        top, left = (int(generator.integers(0, 2 * reach + 1)) for reach in (tall, wide))
        moved = framed[:, :, top : top + height, left : left + width]
        seen.append(moved[..., ::-1] if number % 2 else moved)
    return np.concatenate(seen), np.tile(np.arange(len(images)), count)


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
    """Read, draw and check samples for a graph's inputs.

    Args:
        reference, split, samples, seed, preprocess: as for `load_images`.
        inputs: inputs of the graph.
        where: name of the graph, for errors.

    Raises:
        InputError: as `load_images`; `onnx-inputs` for a graph without samples.
    """
    batch = _batch(inputs, where)
    path = content.find("calibration", reference)
    only = inputs[0]
    if len(inputs) == 1 and np.dtype(only.dtype).kind == "f" and not _holds(path, only.name):
        asked: dict[str, Any] = {"samples": samples, "seed": seed, "preprocess": preprocess}
        images = load_images(reference, split, shape=only.shape, dtype=only.dtype, where=only.name, **asked)
        arrays = {only.name: images.images.astype(only.dtype, copy=False)}
        return _whole(InputSet(arrays, images.labels, images.name, split, "", batch, images.notes, images.clusters))
    everything = _read(path, inputs)
    named = {own.name for own in inputs}
    labels, clusters = (None if name in named else everything.pop(name, None) for name in (LABELS, CLUSTERS))
    count = _count(everything, reference)
    labels = None if labels is None else class_numbers(labels, count, reference)
    clusters = None if clusters is None else cluster_numbers(clusters, count, reference)
    members, parted = own_split(count, labels, split, clusters)
    chosen = drawn(members, SetSampling(), split, samples, seed)
    if not len(chosen):
        raise cards.short(reference, f"{count} samples, none of them left for {split}", "samples")
    arrays = {own.name: _fitting(everything[own.name][chosen], own, reference) for own in inputs}
    _check_constant([array for array in arrays.values() if array.dtype.kind == "f"], reference)
    name = path.resolve().name
    notes = [f"{name} has no splits: {split} is {len(members)} of its {count} samples, parted {parted}"]
    if samples is not None and len(chosen) < samples:
        notes.append(f"{name} has {len(chosen)} samples to {split}, {samples} were asked for")
    labels, clusters = (None if array is None else array[chosen] for array in (labels, clusters))
    return _whole(InputSet(arrays, labels, name, split, "", batch, tuple(notes), clusters))


def _batch(inputs: Sequence[GraphInput], where: str) -> int | None:
    """Return a graph's fixed number of samples; None if it is free. Raises InputError `onnx-inputs`."""
    wrong = "" if inputs else "no inputs"
    for own in inputs:
        if not own.shape:
            wrong = f"{own.name} is one number"
        elif np.dtype(own.dtype).kind not in "fiub":
            wrong = f"{own.name} takes {'text' if own.dtype == 'object' else own.dtype}"
    fixed = {own.shape[0]: own.name for own in inputs if own.shape and own.shape[0] is not None}
    if len(fixed) > 1:
        wrong = ", ".join(f"{name} takes {size} samples" for size, name in fixed.items())
    if wrong:
        rule = "every input takes numbers, and as many samples as the others along its first axis"
        remedy = "export it with samples first, and constants inside the graph"
        raise InputError("onnx-inputs", where, wrong, rule, remedy)
    return next(iter(fixed), None)


def _holds(path: Path, name: str) -> bool:
    """Tell whether a .npz has an array for this input, other than `images`."""
    if path.suffix.lower() != ".npz" or name == _IMAGES or not path.is_file():
        return False
    with suppress(InputError), opened_arrays(path, name) as loaded:
        return name in loaded.files
    return False  # `load_images` reports the error


def _read(path: Path, inputs: Sequence[GraphInput]) -> dict[str, Array]:
    where, suffix = path.name, path.suffix.lower()
    names = [own.name for own in inputs]
    wanted = f"an array for each input ({', '.join(names)}), and `labels` and `clusters` where there are some"
    remedy = f"numpy.savez(path, {', '.join(f'{name}=...' for name in names)})"
    if suffix not in (".npz", ".npy") or not path.is_file() or (suffix == ".npy" and len(inputs) > 1):
        raise InputError("calibration-kind", where, "no .npz", f"this graph takes {wanted}", remedy)
    with opened_arrays(path, where) as loaded:
        if isinstance(loaded, np.ndarray):
            return {names[0]: loaded}
        if missing := [name for name in names if name not in loaded.files]:
            value = f"arrays {', '.join(map(repr, loaded.files[:6])) or 'none'}, no {missing[0]!r}"
            raise InputError("calibration-fields", where, value, wanted, remedy)
        arrays = {name: loaded[name] for name in [*names, LABELS, CLUSTERS] if name in loaded.files}
        demand_arrays(arrays.values(), where)
        return arrays


def _count(arrays: Feed, where: str) -> int:
    """Return the common number of samples. Raises InputError `calibration-shape`."""
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        value = ", ".join(f"{name} of {count}" for name, count in counts.items())
        rule = "every array has one row a sample, and there is at least one"
        raise InputError("calibration-shape", where, value, rule, "give them the same first size")
    return next(iter(counts.values()))


def _fitting(array: Array, own: GraphInput, where: str) -> Array:
    """Convert an array to its input's type. Raises InputError for another kind of data."""
    dtype = np.dtype(own.dtype)

    def refused(what: str, value: str, rule: str, remedy: str) -> InputError:
        place = f"{where}: {own.name}"
        return InputError(f"calibration-{what}", place, value, rule, remedy)

    if len(array.shape) != len(own.shape) or any(
        want not in (None, have) for have, want in zip(array.shape[1:], own.shape[1:], strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in own.shape[1:])
        value, rule = f"[{', '.join(map(str, ('n', *array.shape[1:])))}]", f"the graph takes [batch, {wanted}]"
        raise refused("shape", value, rule, "cut, pad or transpose it to that shape")
    if array.dtype.kind not in {"f": "f", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]:
        rule = f"the graph takes {dtype}" + (", preprocessed" if dtype.kind == "f" else "")
        raise refused("dtype", str(array.dtype), rule, f"{own.name}.astype('{dtype}'), if that is the meaning")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # values beyond the type become infinity, and are refused
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            remedy = "leave those samples out, or find the cause"
            raise refused("nonfinite", "NaN or infinity", "values are finite", remedy)
        if array.ndim == 4:
            check_range(array, f"{where}: {own.name}")
    elif dtype.kind in "iu":
        low, high, ends = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < ends.min or high > ends.max:
            rule = f"{dtype} holds {ends.min} to {ends.max}"
            raise refused("range", f"whole numbers from {low} to {high}", rule, "check what they are")
    return np.ascontiguousarray(array, dtype=dtype)


def _check_constant(floats: Sequence[Array], where: str) -> None:
    """Refuse floats if all of them are constant; a mask alone may be."""
    if floats and all((array == array.reshape(-1)[0]).all() for array in floats):
        value, rule = "one value everywhere", "samples must vary"
        raise InputError("calibration-constant", where, value, rule, "check how they were made")


def _whole(whole: InputSet) -> InputSet:
    """Drop samples beyond whole feeds of a fixed batch."""
    count, batch, name = len(whole), whole.batch, whole.name
    if batch and count < batch:
        value = f"{count} samples to {whole.split}, and the graph takes {batch} at a time"
        raise cards.short(name, value, "samples")
    if rest := count % batch if batch else 0:
        note = f"{name}: {rest} of {count} samples to {whole.split} fill no feed of {batch}, and are left out"
        whole = replace(whole._kept(count - rest), notes=(*whole.notes, note))
    digest = hashlib.sha256()
    for key, array in {**whole.arrays, **({} if whole.labels is None else {LABELS: whole.labels})}.items():
        little = array.dtype.newbyteorder("<")
        digest.update(f"{key} {little.str} {'x'.join(map(str, array.shape))}\n".encode())
        digest.update(np.ascontiguousarray(array, dtype=little).data)
    return replace(whole, sha256=digest.hexdigest())
