"""Images of a calibration set, for a network's passes and measurements.

    a shipped set, or a folder with card.yaml    has its splits, and the preprocessing of bytes under `preprocess`
    .npz                                         an array `images`, and optional `labels` and `clusters`
    .npy                                         an array of images
    .jpg .png …, a folder or a .zip of them      bytes

An array is [n, height, width] or [n, height, width, channels] of uint8, or preprocessed floats of the model's shape.
Images with the same number in `clusters` are alike, such as crops of one photograph: they go to one split, and count
once in intervals. Bytes x are preprocessed in this order:

    resize      the shorter side becomes `resize` pixels (bilinear, antialiased)
    crop        `crop` x `crop` from the middle
    normalise   (x / 255 - mean) / std, channel by channel

A user's own files have no splits: the last 10 % are for `eval` and the 5 % before for `tune`, class by class if there
are labels, else in order. Preprocessing of a user's own bytes comes from a `preprocess.yaml` beside them, or from the
model. An image of exactly crop x crop needs only numpy. Nothing is unpickled, no archive is unpacked to disk, and an
image is decoded when it is drawn.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import content, errors, limits
from quantkit.calibrate.sets import card as cards
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.errors import InputError, MissingDependency
from quantkit.model.source.packaged import Preprocess

ARRAYS = (".npz", ".npy")
PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SUFFIXES = (*ARRAYS, ".zip", *PICTURES)
PREPROCESS = "preprocess.yaml"
# most bytes of an unpacked picture in an archive
_PICTURE_LIMIT = 1 << 28
# formats by content, not by name: Pillow would also pass PostScript to Ghostscript
_FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP")
_FLOATS = ("float16", "float32", "float64", "bfloat16")
# tolerance of floats beyond the range of preprocessed bytes, for rounding in another program
_SLACK = 0.05


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images for calibrating or scoring a network.

    Args:
        images: [n, C, H, W] or [n, H, W, C], as for the model, float32, preprocessed.
        labels: [n], class of each image; None without labels.
        name: name of the set.
        split: its split.
        notes: decisions, one sentence each, for the manifest.
        clusters: [n]; images with the same number are alike; None if all are independent.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64] | None
    name: str
    split: Split
    notes: tuple[str, ...] = ()
    clusters: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one file or folder, not decoded.

    Args:
        count: number of images.
        labels, clusters: [count], as for `ImageSet`.
        bytes_: True for bytes to preprocess, False for preprocessed floats.
        read: function from a number to the image: uint8 [height, width] or [height, width, channels], or float32 for
            the model.
        where: place for errors.
        names: [count], names of their files; None for arrays.
    """

    count: int
    labels: NDArray[np.int64] | None
    bytes_: bool
    read: Callable[[int], NDArray[Any]]
    where: str
    clusters: NDArray[np.int64] | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Part:
    """Images of one split, and the numbers of its members."""

    images: Images
    members: NDArray[np.int64]
    sampling: SetSampling
    preprocess: Preprocess | None
    name: str
    notes: tuple[str, ...] = ()


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
        reference: shipped name, or path; see the module.
        split: part of the set; only `tune` may guide a choice, `eval` is for scoring.
        samples: most images, drawn from the whole split; None for all, in order.
        seed: seed of the recipe. It only affects `calib`; `tune` and `eval` stay the same, so that runs can be
            compared.
        shape: shape of the model's input with the batch first; None for a free size.
        dtype: numpy's name of the input's type.
        where: name of the input, for errors.
        preprocess: preprocessing of bytes, unless the set has its own.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `suffix`, `empty`, `short`, `mixed`, `unreadable`, `pickle`, `fields`, `labels`,
            `clusters`, `dtype`, `shape`, `preprocess`, `nonfinite`, `range`, `constant`.
        MissingDependency: without Pillow, if images must be decoded or resized.
    """
    if dtype not in _FLOATS:
        rule = f"{where} takes {dtype}, and images are floats when they reach a model"
        raise InputError("calibration-dtype", reference, "a set of images", rule, "use a set of the model's own kind")
    part = _open(reference, split)
    how = part.preprocess or preprocess
    chosen = drawn(part.members, part.sampling, split, samples, seed)
    images = _read(part.images, chosen, how, shape, where)
    _check_values(images, None if part.images.bytes_ else how, part.images.where)
    held = (part.images.labels, part.images.clusters)
    labels, clusters = (None if array is None else array[chosen] for array in held)
    notes = part.notes
    if samples is not None and len(chosen) < samples:
        notes = (*notes, f"{part.name} has {len(chosen)} images to {split}, {samples} were asked for")
    return ImageSet(images, labels, part.name, split, notes, clusters)


def demand_bytes(reference: str) -> _Part:
    """Open images to calibrate on. Raises as `load_images`, and `calibration-dtype` for floats."""
    part = _open(reference, "calib")
    if not part.images.bytes_:
        rule, remedy = "a model's own processor takes images of bytes", "give image files, or arrays of uint8"
        raise InputError("calibration-dtype", part.images.where, "preprocessed floats", rule, remedy)
    return part


def drawn_bytes(reference: str, samples: int, seed: int) -> tuple[str, list[NDArray[np.uint8]]]:
    """Return the name of a set, and up to `samples` images to calibrate on, uint8 [height, width, ...], not resized.

    Raises as `demand_bytes`.
    """
    part = demand_bytes(reference)
    chosen = drawn(part.members, part.sampling, "calib", samples, seed)
    return part.name, [part.images.read(int(number)) for number in chosen]


def _open(reference: str, split: Split) -> _Part:
    path = content.find("calibration", reference)
    if (card := Card.at(path)) is not None:
        return _from_card(card, split)
    folder, classes = path if path.is_dir() else path.parent, ""
    if path.is_dir():
        images, classes = _folder(path, reference)
    else:
        images = parse(path, suffix=path.suffix.lower(), where=reference)
    stated, beside = None, folder / PREPROCESS
    if beside.is_file():
        data = content.read_yaml(beside)
        stated = content.validated(Preprocess, data, where=str(beside), code="calibration-preprocess")
    name = path.resolve().name
    members, parted = own_split(images.count, images.labels, split, images.clusters)
    if not len(members):
        count = f"{images.count} image{'' if images.count == 1 else 's'}"
        raise cards.short(reference, f"{count}, none of them left for {split}", "images")
    note = f"{name} has no splits: {split} is {len(members)} of its {images.count} images, parted {parted}"
    return _Part(images, members, SetSampling(), stated, name, (note, *([f"{name}: {classes}"] if classes else [])))


def _folder(folder: Path, where: str) -> tuple[Images, str]:
    """Return the image files of a folder, or those of its folders with a label each, and which label is which."""

    def listed(place: Path) -> list[str]:
        within = place.relative_to(folder)
        return sorted(
            str(within / entry.name) for entry in place.iterdir() if entry.is_file() and _is_picture(entry.name)
        )

    names = listed(folder)
    by_class = {} if names else {entry.name: listed(entry) for entry in sorted(folder.iterdir()) if entry.is_dir()}
    by_class = {name: files for name, files in by_class.items() if files and not name.startswith(".")}
    names = names or [file for files in by_class.values() for file in files]
    images = _pictures(names, lambda name: read_bytes(folder / name), where=where)
    if len(by_class) < 2:
        return images, ""
    numbered = all(name.isdecimal() for name in by_class)
    numbers = [int(name) if numbered else number for number, name in enumerate(by_class)]
    labels = np.repeat(np.array(numbers, dtype=np.int64), [len(files) for files in by_class.values()])
    shown = ", ".join(f"{number} is {name}" for number, name in list(zip(numbers, by_class, strict=True))[:3])
    more = ", ..." if len(by_class) > 3 else ""
    return replace(images, labels=labels), f"labels are its {len(by_class)} folders: {shown}{more}"


def _from_card(card: Card, split: Split) -> _Part:
    card.demand_kind("images", rule="this model takes images")
    parts = [parse(data, suffix=path.suffix.lower(), where=str(path)) for path, data in card.read(split)]
    if card.alike is not None:
        parts = _alike(parts, card.alike, card.where)
    images = _together(parts, card.where)
    return _Part(images, np.arange(images.count), card.sampling, card.preprocess, card.name)


def _alike(parts: Sequence[Images], pattern: str, where: str) -> list[Images]:
    """Set the clusters of image files from their names; arrays must have them. See `Card.alike`."""

    def unlike(value: str) -> InputError:
        rule = f"every image file has {pattern} in its name, and every .npz an array `clusters`"
        remedy = "correct `alike`, or leave it out"
        return InputError("card-invalid", f"{where}: alike", value, rule, remedy)

    numbers: dict[str, int] = {}
    marked = []
    for part in parts:
        if part.names is None and part.clusters is None:
            raise unlike("arrays, whose images have no names")
        of = []
        for name in part.names or ():
            match = re.search(pattern, Path(name).stem)
            if match is None:
                raise unlike(f"an image {Path(name).stem!r}")
            of.append(numbers.setdefault(match[0], len(numbers)))
        marked.append(replace(part, clusters=np.array(of)) if of else part)
    return marked


def _together(parts: Sequence[Images], where: str) -> Images:
    """Join several files; all must have labels, and clusters, or none."""
    if len(parts) == 1:
        return parts[0]
    if len({(part.bytes_, part.labels is None, part.clusters is None) for part in parts}) > 1:
        value = "files with and without labels, with and without clusters, or of bytes and of floats"
        rule = "the files of a split are of one kind"
        raise InputError("calibration-mixed", where, value, rule, "write them alike, or leave some out")
    ends = np.cumsum([part.count for part in parts])

    def read(number: int) -> NDArray[Any]:
        place = int(np.searchsorted(ends, number, side="right"))
        return parts[place].read(number - int(ends[place] - parts[place].count))

    def joined(arrays: list[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
        held = [array for array in arrays if array is not None]
        return np.concatenate(held) if held else None

    labels, clusters = joined([part.labels for part in parts]), joined([part.clusters for part in parts])
    named = [part.names for part in parts if part.names is not None]
    names = tuple(name for names in named for name in names) if len(named) == len(parts) else None
    return Images(int(ends[-1]), labels, parts[0].bytes_, read, where, clusters, names)


def own_split(
    count: int, labels: NDArray[Any] | None, split: Split, clusters: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], str]:
    """Return the numbers of a split's samples in a set without splits, ascending, and the way of splitting in words.

    The first of alike samples (`clusters`) decides for all: no sample is scored if a similar one calibrated.
    """
    if clusters is not None:
        _, firsts, place = np.unique(clusters, return_index=True, return_inverse=True)
        # clusters in the order of their first samples
        order = np.argsort(firsts)
        kept, parted = own_split(firsts.size, None if labels is None else labels[firsts[order]], split)
        return np.flatnonzero(np.isin(place, order[kept])), f"{parted}, those that are alike together"
    classes = [np.arange(count)]
    if labels is not None:
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members = [numbers[slice(*cards.bounds(split, len(numbers)))] for numbers in classes]
    return np.sort(np.concatenate(members)), "by their order" if labels is None else "class by class"


def drawn(
    members: NDArray[np.int64], sampling: SetSampling, split: Split, samples: int | None, seed: int
) -> NDArray[np.int64]:
    """Draw members of a split; see `load_images`."""
    generator = sampling.generator(split, seed)
    if samples is None or generator is None:
        return members[:samples]
    # one permutation, so that 8 samples are the first 8 of 16
    return members[generator.permutation(len(members))[:samples]]


def _read(
    images: Images, chosen: NDArray[np.int64], how: Preprocess | None, shape: tuple[int | None, ...], where: str
) -> NDArray[np.float32]:
    if images.bytes_ and how is None:
        rule = "a model needs images preprocessed as in its training: normalised, and maybe resized and cropped"
        remedy = f"write {PREPROCESS} beside them: {{mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}, with "
        remedy += "`resize: 256`, `crop: 224`, `layout: NHWC` as needed, or give floats"
        raise InputError("calibration-preprocess", images.where, "images of bytes", rule, remedy)
    taken: NDArray[np.float32] | None = None
    for place, number in enumerate(chosen):
        image = images.read(int(number))
        if images.bytes_ and how is not None:
            image = preprocess(image, how, where=images.where)
        if taken is None:
            _check_shape(image.shape, shape, images.where, where)
            taken = np.empty((len(chosen), *image.shape), dtype=np.float32)
        if image.shape != taken.shape[1:]:
            value = f"images of {list(taken.shape[1:])} and of {list(image.shape)}"
            raise InputError("calibration-shape", images.where, value, "all images have one shape")
        taken[place] = image
    assert taken is not None  # a part without images was refused
    return taken


def _check_shape(actual: tuple[int, ...], shape: tuple[int | None, ...], images: str, where: str) -> None:
    if len(actual) == len(shape) - 1 and all(map(lambda have, want: want in (None, have), actual, shape[1:])):
        return
    wanted = ", ".join("any" if size is None else str(size) for size in shape[1:])
    turned = sorted(actual) == sorted(size for size in shape[1:] if size is not None)
    rule = f"{where} takes [batch, {wanted}]"
    remedy = "transpose them" if turned else "cut and resize them to that shape, or use another set"
    raise InputError("calibration-shape", images, f"images of [{', '.join(map(str, actual))}]", rule, remedy)


def _check_values(images: NDArray[np.float32], how: Preprocess | None, where: str) -> None:
    flat = images.reshape(len(images), -1)
    bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(bad):
        value = f"NaN or infinity in {len(bad)} of {len(images)} images"
        remedy = "leave those images out, or find the cause"
        raise InputError("calibration-nonfinite", where, value, "values are finite", remedy)
    if (flat == flat[:, :1]).all():
        value, rule = f"all {len(images)} images have one value everywhere", "images must vary"
        remedy = "check how they were read and preprocessed"
        raise InputError("calibration-constant", where, value, rule, remedy)
    if how is None:
        check_range(images, where)
        return
    low, high = float(flat.min()), float(flat.max())
    ends = [(value - mean) / std for mean, std in zip(how.mean, how.std, strict=True) for value in (0.0, 1.0)]
    slack = _SLACK * (max(ends) - min(ends))
    if low < min(ends) - slack or high > max(ends) + slack:
        rule = f"with this model's preprocessing, values lie in {min(ends):g} to {max(ends):g}"
        remedy = "normalise with the model's mean and std, or give bytes (uint8)"
        raise InputError("calibration-range", where, f"floats from {low:g} to {high:g}", rule, remedy)


def check_range(images: NDArray[Any], where: str) -> None:
    """Refuse floats with the values of bytes. Raises InputError `calibration-range`."""
    low, high = float(images.min()), float(images.max())
    if high > 1 and low >= 0 and high <= 255 and bool((images == np.rint(images)).all()):
        value = f"floats that are whole numbers from {low:g} to {high:g}"
        rule = "floats must be preprocessed, and these look like bytes"
        remedy = f"normalise them, or store uint8 with a {PREPROCESS}; if the model takes bytes, with mean 0, std 1/255"
        raise InputError("calibration-range", where, value, rule, remedy)


def parse(file: Path | bytes, *, suffix: str, where: str) -> Images:
    """Return the images of one file.

    Args:
        file: its path, or its bytes if they were read already.
        suffix: its suffix, lower case.
        where: place for errors.

    Raises:
        InputError: `calibration-` followed by `suffix`, `unreadable`, `pickle`, `fields`, `dtype`, `shape`, `empty`,
            `labels`, `clusters`.
    """
    if suffix in ARRAYS:
        return _arrays(file, where)
    if suffix == ".zip":
        return _archive(file, where)
    if suffix in PICTURES:
        return _pictures([where], lambda _: file if isinstance(file, bytes) else read_bytes(file), where=where)
    raise cards.suffix(where, suffix, f"images come as {', '.join(SUFFIXES)}, or as a folder of such")


def _is_picture(name: str) -> bool:
    """Tell whether a file is an image by its name; hidden files of file managers are not."""
    path = Path(name)
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")


def _pictures(names: Sequence[str], read: Callable[[str], bytes], *, where: str) -> Images:
    if not names:
        raise cards.empty(where, "no image in it", f"image files are {', '.join(PICTURES)}")
    kept = tuple(names)
    return Images(len(kept), None, True, lambda number: _decode(read(kept[number]), kept[number]), where, names=kept)


@contextmanager
def opened_arrays(file: Path | bytes, where: str) -> Iterator[Any]:
    """Yield the contents of a .npy, mapped so that only drawn images are read, or of a .npz.

    Raises:
        InputError: `calibration-pickle`, `calibration-unreadable`, also for reads from it in the block.
    """

    def source() -> Any:
        return io.BytesIO(file) if isinstance(file, bytes) else file

    def damaged(reason: str) -> InputError:
        if "allow_pickle" not in reason:
            return cards.unreadable(where, reason)
        value = "it holds Python objects, or is no file of arrays"
        rule = "reading Python objects can run code, so only plain arrays are read"
        remedy = "save plain arrays: numpy.savez_compressed(path, images=..., labels=...)"
        return InputError("calibration-pickle", where, value, rule, remedy)

    try:
        with errors.reading(damaged):
            if zipfile.is_zipfile(source()):
                with zipfile.ZipFile(source()) as archive:
                    limits.UNPACKED.demand(sum(entry.file_size for entry in archive.infolist()), where)
            loaded = np.load(source(), mmap_mode=None if isinstance(file, bytes) else "r", allow_pickle=False)
            with nullcontext(loaded) if isinstance(loaded, np.ndarray) else loaded:
                yield loaded
    except MemoryError as error:  # a header that claims more than the memory
        raise cards.unreadable(where, error) from None


def demand_arrays(members: Iterable[Any], where: str) -> None:
    """Refuse members of an archive other than numpy's arrays: `calibration-unreadable`."""
    if not all(isinstance(member, np.ndarray) for member in members):
        raise cards.unreadable(where, "a member that is no array")


def _arrays(file: Path | bytes, where: str) -> Images:
    with opened_arrays(file, where) as loaded:
        if isinstance(loaded, np.ndarray):
            images, labels, clusters = loaded, None, None
        elif "images" not in loaded.files:
            value = f"arrays {', '.join(map(repr, list(loaded.files)[:6])) or 'none'}"
            rule = "an array `images`, and optionally `labels` and `clusters`"
            remedy = "numpy.savez_compressed(path, images=..., labels=...)"
            raise InputError("calibration-fields", where, value, rule, remedy)
        else:
            images = loaded["images"]
            labels, clusters = (loaded[name] if name in loaded.files else None for name in ("labels", "clusters"))
    demand_arrays([array for array in (images, labels, clusters) if array is not None], where)
    if images.ndim == 0 or images.size == 0:
        raise cards.empty(where, f"images {list(images.shape)}", "images are [n, …], n at least 1, and no size is 0")
    bytes_ = images.dtype == np.uint8
    if not bytes_ and images.dtype.kind != "f":
        value, rule = f"images of {images.dtype}", "bytes (uint8) to preprocess, or preprocessed floats"
        raise InputError("calibration-dtype", where, value, rule, "images.astype('uint8') or images.astype('float32')")
    if bytes_ and images.ndim not in (3, 4):
        rule = "bytes are [n, height, width] or [n, height, width, channels]"
        remedy = "transpose them, or give floats of the model's own shape"
        raise InputError("calibration-shape", where, f"uint8 {list(images.shape)}", rule, remedy)

    def read(number: int) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # values beyond float32 become infinity, and are refused
            return np.asarray(images[number], dtype=np.uint8 if bytes_ else np.float32)

    numbers = None if labels is None else class_numbers(labels, len(images), where)
    alike = None if clusters is None else cluster_numbers(clusters, len(images), where)
    return Images(len(images), numbers, bytes_, read, where, alike)


def cluster_numbers(clusters: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Check an array `clusters`, and return it. Raises InputError (`calibration-clusters`)."""
    if clusters.dtype.kind not in "iu" or clusters.shape != (count,):
        value = f"clusters {list(clusters.shape)} of {clusters.dtype} for {count} samples"
        rule = "one whole number a sample; samples of one number are alike, such as crops of one photograph"
        raise InputError("calibration-clusters", where, value, rule, "correct `clusters`, or leave them out")
    return clusters.astype(np.int64)


def class_numbers(labels: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Check an array `labels`, and return it. Raises InputError (`calibration-labels`)."""
    if labels.dtype.kind in "iu" and labels.shape == (count,) and int(labels.min()) >= 0:
        return labels.astype(np.int64)
    value = f"labels {list(labels.shape)} of {labels.dtype} for {count} samples"
    if labels.dtype.kind == "i" and labels.size and int(labels.min()) < 0:
        value = f"a label {int(labels.min())}"
    rule = "one whole number a sample, the index of its class in the model's output, from 0"
    raise InputError("calibration-labels", where, value, rule, "correct `labels`, or leave them out")


def _archive(file: Path | bytes, where: str) -> Images:
    with cards.reading(where):
        archive = zipfile.ZipFile(io.BytesIO(file) if isinstance(file, bytes) else file)
        entries = [entry for entry in archive.infolist() if _is_picture(entry.filename)]
    for entry in entries:
        if entry.file_size > _PICTURE_LIMIT:
            raise cards.unreadable(f"{where}: {entry.filename}", f"an image file of {entry.file_size} bytes")

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except Exception as error:  # errors of zlib, RuntimeError for encryption, …
            raise cards.unreadable(f"{where}: {name}", error) from None

    return _pictures(sorted(entry.filename for entry in entries), read, where=where)


def read_picture(path: Path, code: str) -> NDArray[np.uint8]:
    """Read an image file, [height, width, 3]. Raises InputError `file-missing`, `file-unreadable`, `code`."""
    data = read_bytes(path)
    try:
        return _decode(data, str(path))
    except InputError as problem:
        rule = f"an image file of these: {', '.join(PICTURES)}"
        raise InputError(code, problem.where, problem.value, rule, problem.remedy) from None


def _decode(data: bytes, where: str) -> NDArray[np.uint8]:
    """Decode an image file to [height, width, 3], upright."""
    image, ops = _pillow()
    try:
        with image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            limits.PIXELS.demand(opened.width * opened.height, where)
            return np.asarray(ops.exif_transpose(opened).convert("RGB"), dtype=np.uint8)
    except InputError:
        raise
    except image.DecompressionBombError:  # Pillow has a limit of its own
        raise limits.PIXELS.exceeded(where) from None
    except image.UnidentifiedImageError:  # its text names an object of Python
        raise cards.unreadable(where, "no image file, or a damaged one") from None
    except Exception as error:  # Pillow's plugins may raise anything
        raise cards.unreadable(where, error) from None


def preprocess(image: NDArray[np.uint8], how: Preprocess, *, where: str) -> NDArray[np.float32]:
    """Preprocess one image, uint8 [height, width] or [height, width, channels], to float32 [C, H, W] or [H, W, C].

    Raises:
        InputError: `calibration-shape` if the channels do not match `mean`.
        MissingDependency: without Pillow.
    """
    if image.ndim == 2:
        image = image[:, :, None]
    channels = len(how.mean)
    if image.shape[2] != channels:
        if image.shape[2] not in (1, 3, 4) or channels not in (1, 3):
            rule = f"`preprocess` states {channels} means"
            remedy = "bytes are [n, height, width, channels], channels last"
            raise InputError("calibration-shape", where, f"images of {image.shape[2]} channels", rule, remedy)
        image = _converted(image, channels)
    if image.shape[:2] != (how.crop, how.crop):
        image = _cut(image, how, where)
    mean, std = (np.asarray(values, dtype=np.float32) for values in (how.mean, how.std))
    normal = (image.astype(np.float32) / np.float32(255) - mean) / std
    return np.ascontiguousarray(normal.transpose(2, 0, 1) if how.layout == "NCHW" else normal)


def _converted(image: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Convert grey, colour or colour with transparency to grey or colour."""
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    if channels == 3:
        return image[:, :, :3]
    module, _ = _pillow()
    return np.asarray(module.fromarray(image[:, :, :3]).convert("L"), dtype=np.uint8)[:, :, None]


def _cut(image: NDArray[np.uint8], how: Preprocess, where: str) -> NDArray[np.uint8]:
    if how.resize is not None:
        module, _ = _pillow()
        picture = module.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        scale = how.resize / min(picture.size)
        width, height = (max(how.resize, round(side * scale)) for side in picture.size)
        limits.PIXELS.demand(width * height, "preprocess")
        image = np.asarray(picture.resize((width, height), module.Resampling.BILINEAR), dtype=np.uint8)
        image = image[:, :, None] if image.ndim == 2 else image
    if how.crop is None:
        return image
    height, width = image.shape[:2]
    if how.crop > min(height, width):
        rule, remedy = f"`preprocess` cuts {how.crop} x {how.crop} from its middle", f"resize: {how.crop}, or no `crop`"
        raise InputError("calibration-shape", where, f"an image of {height} x {width}", rule, remedy)
    left, top = (width - how.crop) // 2, (height - how.crop) // 2
    return image[top : top + how.crop, left : left + how.crop]


def _pillow() -> tuple[Any, Any]:
    with MissingDependency.unless_found("PIL", extra="compile", purpose="reading and resizing image files (Pillow)"):
        from PIL import Image, ImageOps
    return Image, ImageOps
