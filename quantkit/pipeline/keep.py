"""What was measured of a bundle goes into it: rows of their kind are replaced, verdict, page and card follow."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, plugins
from quantkit.bundle import Bundle, Check, Decision, Manifest, inventory
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import stored
from quantkit.measurement.rows import Row, read_rows
from quantkit.passes import decision
from quantkit.pipeline.finished import engine
from quantkit.pipeline.gates import judge, still_unjudged
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import runs_here
from quantkit.pipeline.verdict import by_device, decide, is_timing, of_original, target_of
from quantkit.planning.bound import efficiency
from quantkit.recipe import Gates
from quantkit.report.on_devices import DeviceRows

if TYPE_CHECKING:
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.engine_layers import Inspected

HARM, REPORT = "harm.json", "report.html"


def keep(
    bundle: Bundle,
    rows: Sequence[Row],
    items: Items | None,
    runtime: str,
    against: str,
    progress: Progress,
    looked: Inspected | None = None,
    *,
    more: bool = False,
) -> None:
    """Put new rows into a bundle; those against the model that it was made from decide anew, on page and card too.

    Args:
        more: others follow: verdict, page and card wait for the last.

    Raises:
        InputError: `bundle-changed` meanwhile.
    """
    bundle, measured = Bundle.load(bundle.path), bundle.manifest.content_sha256
    manifest = bundle.manifest
    if manifest.content_sha256 != measured:
        raise InputError(
            "bundle-changed",
            where=str(bundle.path),
            value=manifest.content_sha256,
            rule=f"what was measured is {measured}",
            remedy="measure again, with nothing else at work on the bundle",
        )
    if not more:
        efficiency.keep([row.as_dict() for row in rows if "emulated" not in row.flags])
    if looked is not None:
        bundle = _with_engine(bundle, looked)
        manifest = bundle.manifest
    original = manifest.model.source.sha256
    if against != original:
        # rows that do not say what they are set against would pass for those of the original
        rows = [row for row in rows if row.baseline is not None]
    path = bundle.path / MEASUREMENTS
    new = {_kind(row, against) for row in rows}
    stored = read_rows(path) if path.is_file() else []
    together = [*(row for row in stored if _kind(row, original) not in new), *rows]
    files: dict[str, bytes | None] = {MEASUREMENTS: "".join(f"{row.line()}\n" for row in together).encode()}
    if against != original or more:
        bundle.put_all(files)
        return
    if items is not None:
        name = "items.safetensors" if runtimes_of(manifest)[:1] == [runtime] else f"items-{runtime}.safetensors"
        with tempfile.TemporaryDirectory() as temporary:
            items.save(Path(temporary) / "items")
            files[name] = limits.read(Path(temporary) / "items", limits.DATA)
    shown = of_original(together, original)
    manifest = _judged(manifest, shown)
    with contextlib.suppress(InputError):
        target = target_of(manifest)
        timed, here = any(row.name.startswith("latency.") and row.on is None for row in rows), runs_here(target)
        if timed and not here:
            progress.note(f"{target.name} is another machine: no verdict follows from what was timed here")
        # what was timed before stands as it was judged then
        counts = here if timed else manifest.verdict is not None
        exports = manifest.recipe.get("export") or []
        judged = decide(shown if counts else [], manifest.checks, manifest.layers, target, exports)
        # where it was timed on devices alone, the verdict is that of the last
        on_devices = [each.verdict for each in by_device(manifest, together) if each.verdict]
        manifest = manifest.model_copy(update={"verdict": judged or next(reversed(on_devices), None)})
    written, decisions = documents(manifest, shown, bundle.path, by_device(manifest, together))
    for each in decisions:
        progress.note(f"{each.where}: {each.reason}")
    bundle.put_all({**files, **written}, verdict=manifest.verdict, checks=manifest.checks, state=manifest.state)


def _with_engine(bundle: Bundle, found: Inspected) -> Bundle:
    """With what an engine says of its layers, in place of what was known before."""
    manifest = bundle.manifest
    return bundle.put_all(
        {engine.place(found): engine.data(found)},
        checks=[*(each for each in manifest.checks if each.name != found.check.name), found.check],
        decisions=[*engine.without(manifest.decisions), *found.decisions()],
    )


def _judged(manifest: Manifest, rows: Sequence[Row]) -> Manifest:
    """With the gates held against what is measured now; a gate that has no row stands as it was judged."""
    order = runtimes_of(manifest)
    known = [row for row in rows if row.runtime in order]
    ordered = sorted(known, key=lambda row: order.index(str(row.runtime))) + [row for row in rows if row not in known]
    checks, _ = judge(Gates.model_validate(manifest.recipe.get("gates") or {}), ordered)
    named: dict[str, Check] = {check.name: check for check in [*manifest.checks, *checks]}
    failed = any(not check.ok for name, check in named.items() if name.startswith("gate."))
    state = "gate_failed" if failed else "complete"
    decisions = still_unjudged(manifest.decisions, checks)
    return manifest.model_copy(update={"checks": list(named.values()), "state": state, "decisions": decisions})


def export_of(runtime: str) -> str:
    """What a runtime runs."""
    return next(name for name in _exporters() if runtime in load_exporter(name).runtimes)


def _exporters() -> list[str]:
    """All there are: those that ship first, the others only where none of these will do."""
    return [*plugins.EXPORTERS.shipped(), *plugins.EXPORTERS.offers()]


def runtimes_of(manifest: Manifest) -> list[str]:
    """That run the exports of a bundle, in the order of its recipe."""
    return [reader(name, options or {}) for step in manifest.recipe.get("export", []) for name, options in step.items()]


def options_of(bundle: Bundle, exporter: str) -> dict[str, Any]:
    """What an exporter was told of a bundle; nothing where it was not asked."""
    for step in bundle.manifest.recipe.get("export", []):
        if exporter in step:
            return dict(step[exporter] or {})
    return {}


def _kind(row: Row, against: str) -> tuple[Any, ...]:
    """Rows of one kind replace each other; those against another baseline, in another runtime, or timed on another
    machine stand beside each other. A row without baseline is one against `against`."""
    told = ("export", "kv_cache", "output", "surer_than", "way", "baseline_runtime")
    export = tuple(row.settings.get(key) for key in told)
    baseline = row.baseline.subject if row.baseline else against
    device = row.device.id if row.device and is_timing(row) else None
    return row.on, row.name, baseline, row.runtime, export, device, row.batch, tuple(sorted((row.shape or {}).items()))


def page(
    manifest: Manifest, rows: Sequence[Row], notes: Sequence[str], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[bytes | None, list[Decision]]:
    """`report.html`; None, with the reason, where plotly is missing."""
    from quantkit.report.bundle.document import document
    from quantkit.report.kit import html

    try:
        harm, engines = read_harm(folder), stored(folder)
        tree = document(manifest, rows, notes, harm=harm, engines=engines, devices=devices)
        return html.page(tree).encode(), []
    except QuantkitError as problem:
        return None, [decision("report", "page-not-made", REPORT, problem.line())]


def documents(
    manifest: Manifest, rows: Sequence[Row], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[dict[str, bytes | None], list[Decision]]:
    """Page and card of a finished bundle; the page is None where it cannot be made, so that no old one stays."""
    from quantkit.report.bundle import figures
    from quantkit.report.bundle.document import card

    notes = figures.notes(manifest)
    made, missing = page(manifest, rows, notes, folder, devices)
    return {REPORT: made, "README.md": card(manifest, rows, notes).encode()}, missing


def read_harm(folder: Path) -> Harm | None:
    """What `measurement.accuracy.harm` found, as it is kept in a bundle."""
    from pydantic import ValidationError

    try:
        return Harm.model_validate_json(limits.read(folder / HARM))
    except (OSError, ValidationError):
        return None


def with_documents(manifest: Manifest, rows: list[Row], notes: Sequence[str], folder: Path) -> Manifest:
    """Write page and card into a bundle; the manifest that lists them."""
    from quantkit.report.bundle.document import card

    if manifest.layers or manifest.verdict is not None or any(row.runtime == "onnxruntime" for row in rows):
        made, missing = page(manifest, rows, notes, folder)
        manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
        if made is not None:
            (folder / REPORT).write_bytes(made)
            manifest = manifest.model_copy(update={"files": inventory(folder)})
    (folder / "README.md").write_text(card(manifest, rows, notes), encoding="utf-8")
    return manifest.model_copy(update={"files": inventory(folder)})
