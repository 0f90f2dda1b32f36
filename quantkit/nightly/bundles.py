"""The folder of the bundles: each once, named after what it holds and what it was made from.

    CONTENT-INPUTS/         a bundle; both are the first 20 digits of a sha256
    .making-INPUTS/         one that is being made, or was when its night was killed: the next goes on with it

INPUTS is a hash of all that decides the numbers: the model's files, recipe and target as they are after `set`, the
calibration set, the instruction set and threads, the versions of the libraries, and quantkit's own code. A bundle of
the same inputs is not made again.
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
# floors whose code decides no number of a bundle
_ABOVE = ("cli", "nightly", "tuning", "report")
# seconds in which another night may be about to commit a bundle that no result names yet
_YOUNG = 2 * 86400.0


@dataclass(frozen=True)
class Bundles:
    """The folder; see the module."""

    root: Path

    def make(self, request: Request, progress: Progress) -> tuple[Bundle, bool]:
        """Make or find the bundle of a request, and tell whether it was there; one process makes it, others wait.

        Raises:
            InputError, GateError, Stopped: those of `compile_model`.
        """
        inputs = inputs_sha256(request)[:_DIGITS]
        self.root.mkdir(parents=True, exist_ok=True)
        with alone(self.root / f"{_MAKING}{inputs}.lock"):
            for path in self._named(f"*-{inputs}"):
                if (found := _intact(path)) is not None:
                    return found, True
                progress.note(f"{path}: damaged, made again")
                shutil.rmtree(path)
            return self._made(request, inputs, progress), False

    def holding(self, content_sha256: str, *, besides: Path | None = None) -> Path | None:
        """Find a bundle of that content, the newest; `besides` only if there is no other."""
        found = self._named(f"{content_sha256[:_DIGITS]}-*")
        return next((path for path in found if path != besides), found[0] if found else None)

    def prune(self, keep: Collection[str]) -> list[Path]:
        """Delete the bundles whose content is none of those, and what killed nights left; young ones stay."""
        kept = {each[:_DIGITS] for each in keep}
        old = time.time() - _YOUNG
        gone = [path for path in self._named("*-*") if path.name[:_DIGITS] not in kept and path.stat().st_mtime < old]
        # of inputs that nothing asks for any more: the night that does would have gone on with it
        gone += [path for path in self.root.glob(f"{_MAKING}*/") if path.stat().st_mtime < old]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return gone

    def _named(self, pattern: str) -> list[Path]:
        """Newest first."""
        found = [path for path in self.root.glob(pattern) if path.name[0] != "." and (path / MANIFEST).is_file()]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def _made(self, request: Request, inputs: str, progress: Progress) -> Bundle:
        from quantkit.pipeline import compile_model

        making = self.root / f"{_MAKING}{inputs}"
        asked = replace(request, out=making, resume=True)
        try:
            made = compile_model(asked, progress).bundle
        except InputError as problem:
            if problem.code != "resume-mismatch":
                raise
            progress.note(problem.line())
            shutil.rmtree(making.with_name(f"{making.name}.partial"))
            made = compile_model(asked, progress).bundle
        final = self.root / f"{made.manifest.content_sha256[:_DIGITS]}-{inputs}"
        if final.is_dir():  # without a manifest, or it would have been found: half deleted, or half restored
            shutil.rmtree(final)
        making.rename(final)
        return Bundle.load(final)


def inputs_sha256(request: Request) -> str:
    """Hash all that decides what a compile makes. Raises InputError: as opening the model and the set."""
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
    from quantkit.model.source.open import open_model

    return open_model(request.model).sha256


def _set_sha256(path: Path) -> str:
    """Of a file, or of the files of the folder that a card lies in."""
    folder = path.parent if path.name == "card.yaml" else path
    if folder.is_file():
        return file_sha256(folder)
    return _files_sha256(folder, (each for each in sorted(folder.rglob("*")) if each.is_file()))


def _code() -> str:
    """In a clone the version stays, and the code does not."""
    root = Path(quantkit.__file__).parent
    files = (path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in _ABOVE)
    return _files_sha256(root, files)


def _files_sha256(root: Path, files: Iterator[Path]) -> str:
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _intact(path: Path) -> Bundle | None:
    try:
        found = Bundle.load(path)
        found.demand_intact()
    except InputError:
        return None
    return found
