"""Reads images of any accepted kind, and makes of bytes what a network takes.

    .npz            an array `images`, `labels` where there are some, and `clusters` where images are alike
    .npy            an array of images
    .zip            image files, by their names
    .jpg .png …     one image; a folder of them

An array is [n, height, width] or [n, height, width, channels] of uint8, or floats of the model's own shape that are
preprocessed already. Images of one number in `clusters` were not drawn one by one, such as crops of one photograph:
they are parted together, and intervals count them together. Of bytes x, in this order:

    resize      the shorter side becomes `resize` pixels (bilinear, over all pixels that fall together)
    crop        `crop` x `crop` from the middle
    normalise   (x / 255 - mean) / std, channel by channel

An image of exactly crop x crop is taken as cut, and then nothing but numpy is needed. Nothing is ever unpickled, an
archive is never unpacked to disk, and an image is decoded when it is drawn.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import errors, limits
from quantkit.calibrate.sets import own
from quantkit.calibrate.sets.card import read_bytes
from quantkit.errors import InputError, MissingDependency
from quantkit.model.preprocess import Preprocess

ARRAYS = (".npz", ".npy")
PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SUFFIXES = (*ARRAYS, ".zip", *PICTURES)
# what a picture inside an archive may claim to unpack to
_PICTURE_LIMIT = 1 << 28
# by the content, not the name: Pillow would open PostScript too, and hand it to Ghostscript
_FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP")


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one file or folder, none of them decoded.

    Args:
        labels: [count], of each image its class; None where there are none.
        bytes_: whether they are bytes that need preprocessing, rather than floats that had it.
        read: number -> the image: uint8 [height, width] or [height, width, channels], or float32 as the model takes it.
        clusters: [count], images of one number are alike; None where nothing is said of it.
        names: [count], of their files; None where they are of arrays.
    """

    count: int
    labels: NDArray[np.int64] | None
    bytes_: bool
    read: Callable[[int], NDArray[Any]]
    where: str
    clusters: NDArray[np.int64] | None = None
    names: tuple[str, ...] | None = None


def parse(file: Path | bytes, *, suffix: str, where: str) -> Images:
    """The images of one file.

    Args:
        file: its path, or its bytes where they were read to be checked.
        suffix: lower case.

    Raises:
        InputError: `calibration-suffix`, `calibration-unreadable`, `calibration-pickle`, `calibration-fields`,
            `calibration-dtype`, `calibration-shape`, `calibration-empty`, `calibration-labels`,
            `calibration-clusters`.
    """
    if suffix in ARRAYS:
        return _arrays(file, where)
    if suffix == ".zip":
        return _archive(file, where)
    if suffix in PICTURES:
        return pictures([where], lambda _: file if isinstance(file, bytes) else read_bytes(file), where=where)
    raise own.suffix(where, suffix, f"images come as {', '.join(SUFFIXES)}, or as a folder of such")


def is_picture(name: str) -> bool:
    """Whether a file is an image by its name; the hidden ones that file managers leave behind are not."""
    path = Path(name)
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")


def pictures(names: Sequence[str], read: Callable[[str], bytes], *, where: str) -> Images:
    """Image files by name. Raises InputError (`calibration-empty`, with no name at all)."""
    if not names:
        raise own.empty(where, "no image in it", f"image files are {', '.join(PICTURES)}")
    kept = tuple(names)
    return Images(len(kept), None, True, lambda number: _decode(read(kept[number]), kept[number]), where, names=kept)


def together(parts: Sequence[Images], where: str) -> Images:
    """Several files as one; of labels, and of clusters, all have some or none has.

    Raises:
        InputError: `calibration-mixed`.
    """
    if len(parts) == 1:
        return parts[0]
    kinds = {(part.bytes_, part.labels is None, part.clusters is None) for part in parts}
    if len(kinds) > 1:
        raise InputError(
            "calibration-mixed",
            where=where,
            value="files with and without labels, with and without clusters, or of bytes and of floats",
            rule="the files of a split are of one kind",
            remedy="write them alike, or leave some out",
        )
    ends = np.cumsum([part.count for part in parts])

    def read(number: int) -> NDArray[Any]:
        place = int(np.searchsorted(ends, number, side="right"))
        return parts[place].read(number - int(ends[place] - parts[place].count))

    labels, clusters = (_joined([getattr(part, name) for part in parts]) for name in ("labels", "clusters"))
    named = [part.names for part in parts if part.names is not None]
    names = tuple(name for names in named for name in names) if len(named) == len(parts) else None
    return Images(int(ends[-1]), labels, parts[0].bytes_, read, where, clusters, names)


def _joined(arrays: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    held = [array for array in arrays if array is not None]
    return np.concatenate(held) if held else None


def preprocess(image: NDArray[np.uint8], how: Preprocess, *, where: str) -> NDArray[np.float32]:
    """One image, uint8 [height, width] or [height, width, channels], as the network takes it: float32 [C, H, W] or
    [H, W, C]; see the module.

    Raises:
        InputError: `calibration-shape` where the channels are not those of `mean`; MissingDependency: Pillow.
    """
    if image.ndim == 2:
        image = image[:, :, None]
    channels = len(how.mean)
    if image.shape[2] != channels:
        if image.shape[2] not in (1, 3, 4) or channels not in (1, 3):
            raise _channels(image.shape[2], channels, where)
        image = _converted(image, channels)
    if image.shape[:2] != (how.crop, how.crop):
        image = _cut(image, how, where)
    mean, std = (np.asarray(values, dtype=np.float32) for values in (how.mean, how.std))
    normal = (image.astype(np.float32) / np.float32(255) - mean) / std
    return np.ascontiguousarray(normal.transpose(2, 0, 1) if how.layout == "NCHW" else normal)


@contextmanager
def opened_arrays(file: Path | bytes, where: str) -> Iterator[Any]:
    """What numpy makes of a .npy, an array that is mapped so that only what is drawn is read, or of a .npz.

    Raises:
        InputError: `calibration-pickle`, `calibration-unreadable`, also of what is read from it meanwhile.
    """

    def source() -> Any:
        return io.BytesIO(file) if isinstance(file, bytes) else file

    try:
        with errors.reading(lambda said: _pickled(where) if "allow_pickle" in said else own.unreadable(where, said)):
            if zipfile.is_zipfile(source()):
                with zipfile.ZipFile(source()) as archive:
                    limits.UNPACKED.demand(sum(entry.file_size for entry in archive.infolist()), where)
            loaded = np.load(source(), mmap_mode=None if isinstance(file, bytes) else "r", allow_pickle=False)
            with nullcontext(loaded) if isinstance(loaded, np.ndarray) else loaded:
                yield loaded
    except MemoryError as error:  # a header that claims more than there is
        raise own.unreadable(where, error) from None


def demand_arrays(members: Iterable[Any], where: str) -> None:
    """Members of an archive that are not numpy's come back as their bytes: `calibration-unreadable`."""
    if not all(isinstance(each, np.ndarray) for each in members):
        raise own.unreadable(where, "a member that is no array")


def _arrays(file: Path | bytes, where: str) -> Images:
    with opened_arrays(file, where) as loaded:
        if isinstance(loaded, np.ndarray):
            images, labels, clusters = loaded, None, None
        elif "images" not in loaded.files:
            raise _fields(loaded.files, where)
        else:
            images = loaded["images"]
            labels, clusters = (loaded[name] if name in loaded.files else None for name in ("labels", "clusters"))
    demand_arrays([each for each in (images, labels, clusters) if each is not None], where)
    if images.ndim == 0 or images.size == 0:
        raise own.empty(where, f"images {list(images.shape)}", "images are [n, …], n at least 1, and no size is 0")
    bytes_ = images.dtype == np.uint8
    if not bytes_ and images.dtype.kind != "f":
        raise InputError(
            "calibration-dtype",
            where=where,
            value=f"images of {images.dtype}",
            rule="bytes (uint8) that get preprocessed, or floats that were",
            remedy="images.astype('uint8') or images.astype('float32')",
        )
    if bytes_ and images.ndim not in (3, 4):
        raise InputError(
            "calibration-shape",
            where=where,
            value=f"uint8 {list(images.shape)}",
            rule="bytes are [n, height, width] or [n, height, width, channels]",
            remedy="transpose them, or give floats of the model's own shape",
        )

    def read(number: int) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, and is refused
            return np.asarray(images[number], dtype=np.uint8 if bytes_ else np.float32)

    numbers = None if labels is None else class_numbers(labels, len(images), where)
    alike = None if clusters is None else cluster_numbers(clusters, len(images), where)
    return Images(len(images), numbers, bytes_, read, where, alike)


def cluster_numbers(clusters: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """An array `clusters`, checked. Raises InputError (`calibration-clusters`)."""
    if clusters.dtype.kind not in "iu" or clusters.shape != (count,):
        raise InputError(
            "calibration-clusters",
            where=where,
            value=f"clusters {list(clusters.shape)} of {clusters.dtype} for {count} samples",
            rule="one whole number a sample; samples of one number are alike, such as crops of one photograph",
            remedy="mend `clusters`, or leave them out",
        )
    return clusters.astype(np.int64)


def class_numbers(labels: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """An array `labels`, checked. Raises InputError (`calibration-labels`)."""
    wrong = ""
    if labels.dtype.kind not in "iu":
        wrong = f"labels of {labels.dtype}"
    elif labels.shape != (count,):
        wrong = f"labels {list(labels.shape)} for {count} samples"
    elif int(labels.min()) < 0:
        wrong = f"a label {int(labels.min())}"
    if wrong:
        raise InputError(
            "calibration-labels",
            where=where,
            value=wrong,
            rule="one whole number a sample, the index of its class in the model's output, from 0",
            remedy="mend `labels`, or leave them out",
        )
    return labels.astype(np.int64)


def _archive(file: Path | bytes, where: str) -> Images:
    with own.reading(where):
        archive = zipfile.ZipFile(io.BytesIO(file) if isinstance(file, bytes) else file)
        entries = [entry for entry in archive.infolist() if is_picture(entry.filename)]
    for entry in entries:
        if entry.file_size > _PICTURE_LIMIT:
            raise own.unreadable(f"{where}: {entry.filename}", ValueError(f"an image file of {entry.file_size} bytes"))

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except Exception as error:  # zlib's, RuntimeError where it is encrypted, …: one remedy
            raise own.unreadable(f"{where}: {name}", error) from None

    return pictures(sorted(entry.filename for entry in entries), read, where=where)


def _decode(data: bytes, where: str) -> NDArray[np.uint8]:
    """An image file as [height, width, 3], upright."""
    image, ops = _pillow()
    try:
        with image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            limits.PIXELS.demand(opened.width * opened.height, where)
            return np.asarray(ops.exif_transpose(opened).convert("RGB"), dtype=np.uint8)
    except InputError:
        raise
    except image.DecompressionBombError:  # Pillow has a limit of its own
        raise limits.PIXELS.exceeded(where) from None
    except Exception as error:  # Pillow's plugins raise what they like
        raise own.unreadable(where, error) from None


def _converted(image: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Grey, colour or colour with transparency to grey or colour."""
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
        raise InputError(
            "calibration-shape",
            where=where,
            value=f"an image of {height} x {width}",
            rule=f"`preprocess` cuts {how.crop} x {how.crop} from its middle",
            remedy=f"resize: {how.crop}, or no `crop`",
        )
    left, top = (width - how.crop) // 2, (height - how.crop) // 2
    return image[top : top + how.crop, left : left + how.crop]


def _pillow() -> tuple[Any, Any]:
    with MissingDependency.unless_found("PIL", extra="compile", purpose="reading and resizing image files (Pillow)"):
        from PIL import Image, ImageOps
    return Image, ImageOps


def _channels(found: int, wanted: int, where: str) -> InputError:
    return InputError(
        "calibration-shape",
        where=where,
        value=f"images of {found} channels",
        rule=f"`preprocess` states {wanted} means",
        remedy="bytes are [n, height, width, channels], channels last",
    )


def _fields(names: Sequence[str], where: str) -> InputError:
    return InputError(
        "calibration-fields",
        where=where,
        value=f"arrays {', '.join(map(repr, list(names)[:6])) or 'none'}",
        rule="an array `images`, and `labels` and `clusters` where there are some",
        remedy="numpy.savez_compressed(path, images=..., labels=...)",
    )


def _pickled(where: str) -> InputError:
    """Arrays of Python objects."""
    return InputError(
        "calibration-pickle",
        where=where,
        value="it holds Python objects, or is no file of arrays",
        rule="a file of objects runs code when it is read, so none is read",
        remedy="save plain arrays: numpy.savez_compressed(path, images=..., labels=...)",
    )
