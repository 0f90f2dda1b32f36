"""Manage the folder of bundles: one bundle each, named after its content and its inputs.

    CONTENT-INPUTS/         a bundle; both are the first 20 digits of a sha256
    .making-INPUTS/         an unfinished bundle, perhaps of a killed night; the next night continues it

INPUTS hashes everything that decides the numbers: the model's files, recipe and target after `set`, the calibration
set, instruction set and threads, versions of the libraries, and quantkit's own code. Equal inputs reuse the bundle.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import quantkit
from quantkit import content, machine
from quantkit._version import __version__
from quantkit.bundle import Bundle
from quantkit.bundle.disk import alone
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError
from quantkit.model.source.files import file_sha256
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request

_DIGITS = 20
_MAKING = ".making-"
# packages whose code affects no number of a bundle
_ABOVE = ("cli", "nightly", "tuning", "report")
# seconds; a younger bundle may belong to a night that has not committed it yet
_YOUNG = 2 * 86400.0


@dataclass(frozen=True)
class Bundles:
    """The folder of bundles; see the module."""

    root: Path

    def make(self, request: Request, progress: Progress) -> tuple[Bundle, bool]:
        """Make or find the bundle of a request; return it, and True if it was found. One process makes it, others wait.

        Raises InputError, GateError, Stopped: those of `compile_model`.
        """
        inputs = inputs_sha256(request)[:_DIGITS]
        self.root.mkdir(parents=True, exist_ok=True)
        with alone(self.root / f"{_MAKING}{inputs}.lock"):
            for path in self._named(f"*-{inputs}"):
                if (bundle := _intact(path)) is not None:
                    return bundle, True
                progress.note(f"{path}: damaged; making it again")
                shutil.rmtree(path)
            return self._made(request, inputs, progress), False

    def holding(self, content_sha256: str, *, besides: Path | None = None) -> Path | None:
        """Return the newest bundle of that content, preferably not `besides`."""
        paths = self._named(f"{content_sha256[:_DIGITS]}-*")
        return next((path for path in paths if path != besides), paths[0] if paths else None)

    def prune(self, keep: Collection[str]) -> list[Path]:
        """Delete bundles of other contents, and remains of killed nights, unless they are young."""
        kept = {content[:_DIGITS] for content in keep}
        old = time.time() - _YOUNG
        gone = [path for path in self._named("*-*") if path.name[:_DIGITS] not in kept and path.stat().st_mtime < old]
        # unfinished bundles of inputs that no night uses any more
        gone += [path for path in self.root.glob(f"{_MAKING}*/") if path.stat().st_mtime < old]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return gone

    def _named(self, pattern: str) -> list[Path]:
        paths = [path for path in self.root.glob(pattern) if path.name[0] != "." and (path / MANIFEST).is_file()]
        return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)

    def _made(self, request: Request, inputs: str, progress: Progress) -> Bundle:
        from quantkit.pipeline import compile_model

        making = self.root / f"{_MAKING}{inputs}"
        asked = replace(request, out=making, resume=True)
        try:
            bundle = compile_model(asked, progress).bundle
        except InputError as problem:
            if problem.code != "resume-mismatch":
                raise
            progress.note(problem.line())
            shutil.rmtree(making.with_name(f"{making.name}.partial"))
            bundle = compile_model(asked, progress).bundle
        final = self.root / f"{bundle.manifest.content_sha256[:_DIGITS]}-{inputs}"
        if final.is_dir():  # it lacks a manifest: half deleted, or half restored
            shutil.rmtree(final)
        making.rename(final)
        return Bundle.load(final)


def inputs_sha256(request: Request) -> str:
    """Hash all inputs of a compile. Raises InputError as opening the model and the set."""
    recipe = request.recipe.as_dict()
    chosen = recipe["calibration"].pop("set")
    known = {
        "quantkit": __version__,
        "code": _code(),
        "model": _model_sha256(request),
        "recipe": recipe,
        "outside": request.recipe.outside(),
        "target": request.target.as_dict(),
        "calibration": _set_sha256(content.find("calibration", chosen)),
        "threads": machine.cores(),
        "isa": machine.isa(),
        "versions": machine.versions(),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _model_sha256(request: Request) -> str:
    from quantkit.graph.open import open_graph
    from quantkit.pipeline.request import located, takes_graph

    if takes_graph(request.model):
        return open_graph(located(request).path).sha256
    from quantkit.model.source.merged import open_merged

    return open_merged(request.model, request.adapters).sha256


def _set_sha256(path: Path) -> str:
    """Hash a file, or the files of a card's folder."""
    folder = path.parent if path.name == "card.yaml" else path
    if folder.is_file():
        return file_sha256(folder)
    return _files_sha256(folder, (file for file in sorted(folder.rglob("*")) if file.is_file()))


def _code() -> str:
    """Hash the code: in a clone it changes while the version stays."""
    root = Path(quantkit.__file__).parent
    files = (path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in _ABOVE)
    return _files_sha256(root, files)


def _files_sha256(root: Path, files: Iterator[Path]) -> str:
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _intact(path: Path) -> Bundle | None:
    try:
        bundle = Bundle.load(path)
        bundle.demand_intact()
    except InputError:
        return None
    return bundle
