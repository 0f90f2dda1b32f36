"""The two that are compared: opened, checked, and what was measured of each.

A side is a bundle, or the float model that the other side's bundle was made from. Of the float model nothing is opened:
whatever is known of the bundle is known against it, position by position and batch by batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.bundle import Bundle, Manifest
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.content import is_path
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Items, load_items
from quantkit.measurement.rows import Data, Row, read_rows
from quantkit.measurement.size import bits_per_weight, folder_of, weight_bytes
from quantkit.pipeline.keep import export_of, runtimes_of
from quantkit.report.bundle import usage

_ITEMS = "items.safetensors"
# rows of one name that are about something else: a longer context, or some of the items; of two ways to multiply, the
# positions that a bundle keeps are those of prompts
_OTHER = {"kv_cache", "surer_than"}


@dataclass(frozen=True)
class BundleSide:
    """One of the two.

    Args:
        name: as it was given.
        bundle: whose measurements count: of the float model, the other side's.
        floating: whether this is the float model.
        rows: of `measurements.jsonl`, the bundle's own as it is now.
    """

    name: str
    bundle: Bundle
    floating: bool
    rows: tuple[Row, ...]

    @property
    def manifest(self) -> Manifest:
        """The bundle's."""
        return self.bundle.manifest

    @property
    def subject(self) -> str:
        """What it is called in the rows."""
        return self.original if self.floating else self.manifest.content_sha256

    @property
    def original(self) -> str:
        """The float model's hash."""
        return self.manifest.model.source.sha256

    def items(self) -> dict[str, str]:
        """Runtime -> the file with what was found at each position."""
        found: dict[str, str] = {}
        scored = [row.runtime for row in self.rows if row.name == "accuracy.kl" and row.runtime]
        for path in sorted(entry.path for entry in self.manifest.files):
            if path == _ITEMS:
                own = runtimes_of(self.manifest)[:1]
                # what was exported first may not run where it was compiled: then its values were scored in torch
                runtime = next((name for name in [*own, *scored] if name in scored), "torch")
                found = {runtime: path, **found}
            elif match := re.fullmatch(r"items-(.+)\.safetensors", path):
                found[match[1]] = path
        return found

    def read(self, runtime: str) -> Items:
        """What was found at each position in a runtime.

        Raises:
            InputError: `items-invalid`.
        """
        items = load_items(self.bundle.path / self.items()[runtime])
        if not self.floating:
            return items
        return replace(
            items,
            nll_candidate=items.nll_original,
            kl=items.kl * 0.0,
            agree=items.agree | True,
            right_candidate=items.right_original,
            best_candidate=items.best_original,
            chance_candidate=items.chance_original,
        )

    def accuracy(self, runtime: str | None = None) -> list[Row]:
        """The rows about the original, of all that was scored; of one runtime."""
        return [
            row
            for row in self.rows
            if row.name.startswith("accuracy.")
            and row.data is not None
            and row.value is not None
            and (runtime is None or row.runtime == runtime)
            and (row.baseline is None or row.baseline.subject == self.original)
            and not _OTHER & set(row.settings)
            and row.settings.get("way") != "steps"
        ]

    def data(self, runtime: str) -> Data | None:
        """What was scored in a runtime."""
        return next((row.data for row in self.accuracy(runtime) if row.name == "accuracy.kl"), None)

    def size(self, runtime: str) -> tuple[int | None, float | None]:
        """(bytes of the weights that a runtime loads, bits a weight of the quantized layers)."""
        if not self.floating:
            # what was scored by its values alone is what was exported first
            exports = [export_of(runtime), *(next(iter(step)) for step in self.manifest.recipe.get("export", []))]
            sizes = (weight_bytes(self.manifest.files, folder=folder_of(name)) for name in exports)
            return next((size for size in sizes if size), None), bits_per_weight(self.manifest.layers)
        given = (row.baseline for row in self.rows if row.name == "size.bytes" and row.baseline is not None)
        return next((int(each.value) for each in given if each.subject == self.original), None), None

    def measure(self, *options: str) -> str:
        """The command that measures it."""
        return " ".join(["quantkit measure", _near(self.bundle.path), *options, *usage.against(self.manifest)])


def open_sides(a: Bundle | str | Path, b: Bundle | str | Path) -> tuple[BundleSide, BundleSide]:
    """Both sides, every hash of their bundles verified.

    Raises:
        InputError: `not-a-bundle`, `unfinished-build`, `manifest-invalid`, `hash-mismatch`, `measurements-invalid`;
            `bundle-needed`, two models; `models-differ`.
    """
    first, second = (_bundle(each) for each in (a, b))
    if first is None and second is None:
        raise InputError(
            "bundle-needed",
            where=f"{a} and {b}",
            value="two models",
            rule="at least one is a bundle: a float model is compared by what was measured against it",
            remedy=f"quantkit compile {a}",
        )
    for bundle in (first, second):
        if bundle is not None:
            bundle.demand_intact("")
    one = _side(a, first, second)
    other = _side(b, second, first)
    _demand_one_model(one, other)
    return one, other


def _bundle(reference: Bundle | str | Path) -> Bundle | None:
    """The bundle that is meant; None where it is a model."""
    if isinstance(reference, Bundle):
        return Bundle.load(reference.path)
    path = Path(reference).expanduser()
    if not (path / MANIFEST).is_file() and _is_model(str(reference), path):
        return None
    return Bundle.load(path)


def _is_model(reference: str, path: Path) -> bool:
    if reference.startswith(("hf:", "alias:", "path:")):
        return True
    if path.exists() or is_path(reference):
        return (path / "config.json").is_file() or (path.suffix.lower() in (".onnx", ".gguf") and path.is_file())
    from quantkit.model.source.alias import ALIASES

    return reference in ALIASES


def _side(reference: Bundle | str | Path, own: Bundle | None, other: Bundle | None) -> BundleSide:
    bundle = own or other
    assert bundle is not None
    if own is None:
        _demand_original(str(reference), bundle)
    path = bundle.path / MEASUREMENTS
    rows = read_rows(path) if path.is_file() else []
    subject = bundle.manifest.content_sha256
    name = str(reference.path) if isinstance(reference, Bundle) else str(reference)
    return BundleSide(name, bundle, own is None, tuple(row for row in rows if row.subject == subject))


def _demand_original(reference: str, bundle: Bundle) -> None:
    """Refuse a float model that the bundle was not made from; only one whose name does not say it is hashed."""
    source = bundle.manifest.model.source
    if reference in (source.ref, source.ref.removeprefix("alias:")):
        return
    if reference.lower().endswith(".onnx"):
        from quantkit.graph.open import open_graph

        found = open_graph(Path(reference).expanduser()).sha256
    else:
        from quantkit.model.source.open import open_model

        found = open_model(reference).sha256
    if found != source.sha256:
        raise _other_model(reference, found, str(bundle.path), source.sha256)


def _demand_one_model(a: BundleSide, b: BundleSide) -> None:
    if a.original != b.original:
        mine, other = a.manifest.model, b.manifest.model
        raise _other_model(f"{b.name} ({other.name})", b.original, f"{a.name} ({mine.name})", a.original)


def _other_model(where: str, found: str, of: str, expected: str) -> InputError:
    return InputError(
        "models-differ",
        where=where,
        value=f"made from {found[:12]}",
        rule=f"{of} was made from {expected[:12]}, and what is compared are versions of one model",
        remedy="compile both from the same model",
    )


def _near(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
