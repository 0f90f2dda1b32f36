"""What a build is set against: the bundles of its baseline and of the last release, found and opened.

One that is gone, damaged or of another model is no end of a build: its reason is told, and the candidate is measured
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.bundle import Bundle, Manifest
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError, QuantkitError
from quantkit.nightly.config import Nightly
from quantkit.nightly.records import BaselineKind, NightCell, Result, Side
from quantkit.nightly.running.bundles import Bundles


@dataclass(frozen=True)
class Against:
    """What one cell is set against.

    Args:
        bundles: of the sides that there are: `baseline`, `release`.
        kind: of the baseline; None where there is none yet.
        missing: of a side that there should be and is not: why.
    """

    bundles: Mapping[Side, Bundle]
    kind: BaselineKind | None
    missing: Mapping[Side, str]


def against(
    config: Nightly, cell: NightCell, candidate: Bundle, accepted: Mapping[str, Result], bundles: Bundles
) -> Against:
    """Find and open them.

    Args:
        accepted: cell -> its result of the last night that passed.
        bundles: where those lie.
    """
    found: dict[Side, Bundle] = {}
    missing: dict[Side, str] = {}
    baseline = config.baseline_of(cell)
    last = accepted.get(cell.key)
    places: dict[Side, Path | None] = {}
    try:
        if baseline.bundle is not None:
            places["baseline"] = config.at(baseline.bundle)
        elif baseline.kind == "release":
            places["baseline"] = _release(config, candidate.manifest)
        elif last is not None and last.content_sha256 is not None:
            places["baseline"] = bundles.holding(last.content_sha256, besides=candidate.path)
            if places["baseline"] is None:
                missing["baseline"] = f"the bundle {last.content_sha256[:12]} of night {last.night} is gone"
    except InputError as problem:
        missing["baseline"] = problem.line()
    if config.release is not None and baseline.kind != "release":
        try:
            places["release"] = _release(config, candidate.manifest)
        except InputError as problem:
            missing["release"] = problem.line()
    for side, path in places.items():
        if path is None:
            continue
        try:
            found[side] = _opened(path, candidate.manifest)
        except QuantkitError as problem:
            missing[side] = problem.line()
    kind = baseline.kind if "baseline" in found or "baseline" in missing else None
    return Against(found, kind, missing)


def _opened(path: Path, candidate: Manifest) -> Bundle:
    """A bundle whose files are whole, of the candidate's model.

    Raises:
        InputError: those of `Bundle.load`, `hash-mismatch`, `models-differ`.
    """
    bundle = Bundle.load(path)
    bundle.demand_intact()
    ours, theirs = candidate.model.source.sha256, bundle.manifest.model.source.sha256
    if ours != theirs:
        rule = f"the candidate was made from {ours[:12]}, and what is compared are versions of one model"
        raise InputError("models-differ", where=str(path), value=f"made from {theirs[:12]}", rule=rule)
    return bundle


def _release(config: Nightly, candidate: Manifest) -> Path:
    """The bundle of the last release that was made by the candidate's recipe for its target.

    Raises:
        InputError: `release-missing`; those of `Bundle.load`.
    """
    assert config.release is not None
    place = config.at(config.release)
    if (place / MANIFEST).is_file():
        return place
    asked = _made_by(candidate)
    for path in sorted(place.glob(f"*/{MANIFEST}")):
        if _made_by(Manifest.read(path)) == asked:
            return path.parent
    raise InputError(
        "release-missing",
        where=str(place),
        value=f"no bundle of {' | '.join(map(str, asked))}",
        rule="the release holds a bundle of each build, by model, recipe and target",
        remedy="compile it there from the release, or leave `release` out",
    )


def _made_by(manifest: Manifest) -> tuple[str, object, object]:
    return manifest.model.name, manifest.recipe.get("name"), (manifest.target or {}).get("name")
