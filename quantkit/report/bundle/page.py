"""The report: `report.html` of a bundle, one file that needs no network.

It is made from the manifest and the measurements alone, so the same two give the same page. The data of every figure is
also there as a table, for those who cannot see the figures or run no scripts.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.bundle import Manifest
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import Inspected
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up
from quantkit.report import on_devices as device_sections
from quantkit.report.bundle import accuracy as accuracy_sections
from quantkit.report.bundle import curves, figures, sections, speed, usage
from quantkit.report.bundle import engine as engine_sections
from quantkit.report.bundle import harm as harm_sections
from quantkit.report.bundle.figures import DecisionLine
from quantkit.report.kit import shares, shell, words
from quantkit.report.kit.parts import FigureTile, Sheet
from quantkit.report.on_devices import DeviceRows


def page(
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str],
    *,
    harm: Harm | None = None,
    engines: Sequence[Inspected] = (),
    devices: Sequence[DeviceRows] = (),
) -> str:
    """The page as HTML.

    Args:
        notes: what a reader must know about the figures; stands beside them.
        harm: where it is hurt, if that was looked for.
        engines: what was found out about each of its engines.
        devices: what was measured on each that was reached from elsewhere.

    Raises:
        MissingDependency: plotly, extra `report`.
    """
    answer, because = figures.verdict(manifest, rows)
    timed = curves.series(manifest, rows)
    gates, checks = figures.gates(manifest.checks), figures.other_checks(manifest.checks)
    files = [[entry.path, words.size(entry.bytes), entry.role, entry.sha256] for entry in manifest.files]
    return shell.rendered(
        "bundle.html.j2",
        title=f"{manifest.model.name}, {manifest.recipe.get('name', 'quantized')}",
        manifest=manifest,
        origin=figures.origin(manifest),
        schemes=figures.schemes(manifest),
        tone=figures.tone(manifest),
        answer=words.sentence(answer),
        because=because,
        timed=figures.timed(rows),
        tiles=_tiles(manifest, rows),
        speed=[*speed.overview(timed), *speed.sections(manifest, rows)],
        beware=curves.shared_cautions(timed),
        explained=speed.explained(rows, timed),
        accuracy=accuracy_sections.accuracy(manifest, rows),
        tables=accuracy_sections.accuracy_tables(rows),
        scored=figures.scored(rows),
        notes=[note.rstrip(".") for note in [*notes, *accuracy_sections.traps(rows, notes)]],
        harm=[*harm_sections.sections(harm), *sections.weights(manifest)],
        hurts=harm_sections.said(harm),
        worst=harm_sections.worst(harm),
        engines=engine_sections.sections(engines),
        devices=device_sections.tabs(manifest, devices),
        together=device_sections.together(manifest, rows, devices),
        sizes=sections.sizes(manifest, rows),
        groups=figures.grouped(manifest.decisions),
        every=[DecisionLine.of(each) for each in manifest.decisions],
        failed=[f"{figures.short(check)} {figures.relation(check)}" for check in gates if not check.ok],
        checks=[
            (check.ok, figures.short(check), figures.relation(check), kind)
            for found, kind in ((gates, "gate of the recipe"), (checks, "every bundle"))
            for check in found
        ],
        unjudged=figures.unjudged(manifest),
        failing=sum(not check.ok for check in manifest.checks),
        files=Sheet(["file", "size", "role", "sha256"], files, remarks=2),
        commands=usage.commands(manifest),
        judge="\n".join(usage.measure(manifest)),
        again=usage.again(manifest),
        facts=_facts(manifest, rows),
        recipe=usage.recipe(manifest),
    )


# --- verdict ---------------------------------------------------------------------------------------------------------


def _speed_tile(manifest: Manifest, row: Row) -> FigureTile:
    """How many times as fast; a loss looks like one, and what was not decided is not a large number."""
    base = row.baseline
    ratio, sure = (base and base.ratio) or 0.0, base.ratio_ci95 if base else None
    kind = {"latency.decode_step": "decode", "latency.prefill": "prefill"}.get(row.name, "one operation")
    kind = "a pass" if row.name == "latency.prefill" and curves.tokens(row) == 1 else kind
    shown = f"95\u00a0% {words.between(sure, words.times)}" if sure else ""
    detail = ", ".join(part for part in (figures.where(row), row.runtime, shown) if part)
    undecided = manifest.verdict is not None and manifest.verdict.answer == "inconclusive"
    speed = speed_up(row)
    if undecided or speed is None or speed.doubt or speed.interval[0] <= 1 <= speed.interval[1]:
        measured = f"{words.times(ratio)} measured, {detail}"
        return FigureTile("not decided", f"the speed in {kind}", measured, "inconclusive")
    label = f"the speed in {kind}{'' if ratio > 1 else ': slower'}"
    return FigureTile(words.times(ratio), label, detail, _loss(ratio < 1))


def _loss(lost: bool) -> str:
    return "bad" if lost else ""


def _tiles(manifest: Manifest, rows: Sequence[Row]) -> list[FigureTile]:
    """Speed, size and accuracy, as far as they were measured."""
    found = []
    timed = [row for row in rows if row.name.startswith("latency.") and row.baseline and row.baseline.ratio]
    if timed:
        # decode before prefill, then the smallest
        row = min(timed, key=lambda r: (r.name, (r.shape or {}).get("context", 0), r.batch or 0, curves.tokens(r)))
        found.append(_speed_tile(manifest, row))
    sized = [row for row in rows if row.name == "size.bytes" and row.value and row.baseline and row.baseline.ratio]
    if sized:
        row = sized[-1]
        before, ratio = (row.baseline.value, row.baseline.ratio or 0.0) if row.baseline else (0.0, 0.0)
        label = "smaller on disk" if ratio >= 1 else "larger on disk"
        number = words.times(ratio if ratio >= 1 else 1 / ratio)
        detail = f"{words.size(before)} to {words.size(row.value or 0.0)}"
        found.append(FigureTile(number, label, detail, _loss(ratio < 1)))
    scored = {row.name: row for row in rows if row.value is not None and "surer_than" not in row.settings}
    if (best := scored.get("accuracy.perplexity")) and best.baseline and best.baseline.ratio:
        change = f"{words.figure(best.baseline.value)} to {words.figure(best.value or 0.0)}"
        more, between = words.signed(100 / best.baseline.ratio - 100, 1), best.baseline.ratio_ci95
        # a ratio says how many times better: a loss is one whose whole interval lies below 1
        lost = bool(between and between[1] < 1)
        label, detail = f"perplexity{', worse' if lost else ''}", f"{change}, {figures.variant(best)}"
        found.append(FigureTile(f"{more}\u00a0%", label, detail, _loss(lost)))
    elif best := next((scored[name] for name in ("accuracy.top1", "accuracy.recall_at_1") if name in scored), None):
        detail = ", ".join(part for part in (shares.changed(best), figures.variant(best)) if part)
        found.append(FigureTile(shares.form(best)(best.value or 0.0), shares.NAMES[best.name], detail))
    elif (best := scored.get("accuracy.top1_agreement")) and shares.of_classes(best):
        form = shares.form(best)
        detail = f"95\u00a0% {words.between(best.ci95, form)}, {figures.variant(best)}"
        found.append(FigureTile(form(best.value or 0.0), shares.agreement(best), detail))
    elif best := scored.get("accuracy.cosine"):
        sure = words.between(best.ci95, lambda value: words.figure(value, 5))
        detail = ", ".join(part for part in (f"95\u00a0% {sure}" if sure else "", figures.variant(best)) if part)
        found.append(FigureTile(words.figure(best.value or 0.0), "cosine to the original", detail))
    elif best := scored.get("accuracy.same"):
        line = figures.same(best, best.value or 0.0)
        found.append(
            FigureTile(line.after, line.label, ", ".join(part for part in (line.remark, figures.variant(best))))
        )
    return found


# --- where it is from ------------------------------------------------------------------------------------------------


def _facts(manifest: Manifest, rows: Sequence[Row]) -> list[tuple[str, str]]:
    source, seen = manifest.model.source, manifest.calibration
    found = [("source", f"{source.ref}, {source.dtype}{f', converted from {source.was}' if source.was else ''}")]
    found.append(("sha256 of the source", source.sha256))
    if seen is not None:
        found.append(("calibrated on", figures.calibrated(seen)))
        found.append((figures.hash_of(seen.tokens > 0), seen.ids_sha256))
    else:
        found.append(("calibrated on", "nothing: no pass of the recipe looks at data"))
    data = next((row.data for row in rows if row.data is not None), None)
    if data is not None:
        sequences = figures.begins(data.begins).replace("each", "sequences")
        found.append(("scored on", f"{data.set} ({data.split}), {data.items:,} items{sequences}"))
        found.append((figures.hash_of(manifest.model.kind == "decoder"), data.sha256))
    found.append(("target", str((manifest.target or {}).get("name") or "none")))
    device = manifest.device.get("name") or "an unnamed machine"
    found.append(("made on", f"{device}, {manifest.isa}, {words.plural(manifest.threads, 'thread')}"))
    for row in rows:
        if row.device is not None and row.device.name != device:
            found.append(("measured on", row.device.name))
            break
    found += [("made at", manifest.created), ("seed", str(manifest.seed)), ("content_sha256", manifest.content_sha256)]
    versions = {"quantkit": manifest.quantkit, **manifest.versions}
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))))
    return found
