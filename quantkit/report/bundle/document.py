"""Report of a bundle as a tree: verdict, size and accuracy, speed, harm, decisions, and commands.

It depends on the manifest and the measurements only, so equal inputs give equal pages, cards and screens. The data of
every figure is also a table, for readers who cannot see the figures or run no scripts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.bundle import Manifest
from quantkit.content import near
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import Inspected
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up
from quantkit.model.source.alias import ALIASES
from quantkit.report.bundle import accuracy as accuracies
from quantkit.report.bundle import curves, engine, figures, speed, tasks, usage
from quantkit.report.bundle import harm as harms
from quantkit.report.bundle import load as loads
from quantkit.report.bundle.speed import DeviceRows
from quantkit.report.bundle.summary import closing
from quantkit.report.kit import markdown, tree, words
from quantkit.report.kit.tree import MARK, Cell, Code, FigureTile, Line, On, Part, Remark, Section, Sheet, Styled

_BRIEF, _FILES = On.SCREEN | On.CARD, On.PAGE | On.CARD
_RELOADED = "Each export was loaded again and scored in its own runtime, against the original."


def document(
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    harm: Harm | None = None,
    engines: Sequence[Inspected] = (),
    devices: Sequence[DeviceRows] = (),
    path: Path | None = None,
    files: usage.Files | None = None,
    whole: bool = True,
) -> tree.Document:
    """Build the report of a bundle.

    Args:
        notes: important notes on the figures.
        harm: harm by layer, if it was measured.
        engines: findings for each engine.
        devices: rows of each remote device.
        path: folder of the bundle, for a screen.
        files: places of the model and the calibration set; None on a screen is what the cache knows.
        whole: True to show decisions, checks and the next commands on a screen.
    """
    files = files or (usage.Files() if path is None else usage.here(manifest))
    chapters: list[tuple[str, str, On, list[Part]]] = [
        ("run", "Run it", On.CARD, _run(manifest)),
        ("stored", "How the numbers are stored", On.CARD, _stored(manifest)),
        ("costs", "What it costs", _BRIEF, _costs(manifest, rows, notes)),
        ("speed", "Speed", On.ALL, _speed(manifest, rows)),
        ("load", "Under load", On.ALL, loads.parts(manifest, rows)),
        ("accuracy", "Accuracy", On.PAGE, _accuracy(manifest, rows, notes)),
        ("tasks", "Tasks", On.ALL, tasks.parts(rows)),
        ("harm", "Where the harm is", On.PAGE, harms.parts(manifest, harm)),
        ("engine", "What the engine does", On.PAGE, list(engine.sections(engines))),
        ("devices", "Devices", On.PAGE, speed.on_devices(manifest, rows, devices)),
        ("size", "Size", On.PAGE, list(harms.sizes(manifest, rows))),
        ("decisions", "Decisions and checks", On.ALL if whole else _FILES, _decisions(manifest)),
        ("run", "Run it", On.PAGE, _run(manifest)),
        ("short", "", On.SCREEN, closing(manifest, rows, near(path), files) if whole and path is not None else []),
        ("origin", "Where it comes from", On.CARD, _origin(manifest, rows)),
    ]
    return tree.Document(
        _title(manifest),
        [_about(manifest)],
        _head(manifest, rows, path, files),
        [Section(title, parts, place, on=on) for place, title, on, parts in chapters if parts],
        _facts(manifest, rows),
        f"Made by quantkit {manifest.quantkit} from the bundle's manifest and measurements.",
        provenance=_whole_recipe(manifest),
    )


def brief(
    manifest: Manifest, rows: Sequence[Row], notes: Sequence[str], *, path: Path, files: usage.Files, took: str
) -> tree.Document:
    """Build the screen of a finished compile: notes, deviations and failed checks, one line each; then the summary.

    Args:
        notes: important notes on the figures; a deviation with the same reason is not repeated.
        path: folder of the bundle.
        files: places of the model and the calibration set.
        took: time and memory of the compile.
    """
    place = near(path)
    parts: list[Part] = [Remark(note.rstrip("."), "note") for note in notes]
    for group in figures.grouped(manifest.decisions):
        new = [taken for taken in group if not any(taken.reason in note for note in notes)]
        parts += [Remark(figures.deviation(new), "note")] if new else []
    for check in (check for check in manifest.checks if not check.ok):
        kind = "gate" if check in figures.gates(manifest.checks) else "check"
        why = words.joined(figures.relation(check), check.where, by="; ")
        told = words.joined(f"{kind} {figures.short(check)} failed", why, by=": ")
        parts.append(Remark((MARK[False], " ", Styled(told, "bad"))))
    parts += [Remark(f"took {took}", "caption")] if took else []
    parts += [Code("", f"all figures and checks: quantkit show {shlex.quote(place)}")]
    return tree.Document(_title(manifest), [], parts, [Section("", closing(manifest, rows, place, files))])


def _title(manifest: Manifest) -> tuple[str, ...]:
    ok, name = manifest.state == "complete", str(manifest.recipe.get("name", "quantized"))
    # a model with gates is not marked as good before one was judged
    judged = None if ok and figures.unjudged(manifest) and not figures.gates(manifest.checks) else ok
    target = str((manifest.target or {}).get("name", ""))
    about = f", {name}, for {target}" if target else f", {name}"
    return (MARK[judged], " ", Styled(manifest.model.name, "strong"), about)


def _about(manifest: Manifest) -> str:
    origin = figures.origin(manifest)
    if not manifest.layers:
        return f"{origin}, not quantized: the baseline of quantized bundles"
    many = "; ".join(f"{words.plural(count, 'layer')} in {text}" for count, text in figures.schemes(manifest))
    return f"{origin}, quantized: {many}"


def _head(manifest: Manifest, rows: Sequence[Row], path: Path | None, files: usage.Files) -> list[Part]:
    place = "." if path is None else shlex.quote(near(path))
    answer, because = figures.verdict(manifest, rows)
    # a verdict does not know where its bundle lies
    because = [reason.replace("measure BUNDLE", f"measure {place}") for reason in because]
    parts: list[Part] = [Remark(str(path), on=On.SCREEN)] if path is not None else []
    if manifest.state == "gate_failed":
        failed = [check for check in figures.gates(manifest.checks) if not check.ok]
        which = ", ".join(f"{figures.short(check)} {figures.relation(check)}" for check in failed)
        text = f" This model misses a limit of its recipe: {which}"
        parts.append(Remark((Styled("A gate failed.", "bad"), text), "note"))
    commands = []
    if manifest.layers and not figures.timed(rows):
        label, lines = "its speed is not measured yet; to measure it:", usage.measure(manifest, place, files)
        label, lines = (label, lines) if lines else ("to serve it:", usage.on_target(manifest, place))
        commands = [Code(label, "\n".join(lines), on=On.SCREEN | On.PAGE)] if lines else []
    elif manifest.layers and manifest.verdict is None and (lines := usage.measure(manifest)):
        commands = [Code("to get a verdict:", "\n".join(lines), on=On.PAGE)]
    if figures.is_refused(manifest) and (text := usage.recommend(manifest, files)):
        commands.append(Code("which recipe to try instead:", text, on=On.SCREEN | On.PAGE))
    tone = figures.tone(manifest) if manifest.verdict or manifest.state == "gate_failed" else ""
    conclusion = tree.Conclusion(answer, tone, because, label="verdict", commands=commands)
    return [*parts, conclusion, tree.Tiles(_tiles(manifest, rows))]


def _costs(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[Part]:
    many, dtype = len(manifest.layers), manifest.model.source.dtype
    table = figures.results_table(rows, layers=many, dtype=dtype, quantized=many > 0)
    scored = figures.scored(rows)
    about = [Remark(f"Scored on {scored}.", "caption"), Remark(_RELOADED, on=On.CARD)] if scored else []
    return [table, *about, *(Remark(note.rstrip("."), "note") for note in notes)]


def _speed(manifest: Manifest, rows: Sequence[Row]) -> list[Part]:
    timed = curves.series(manifest, rows)
    if not timed:
        return []
    this, other = curves.names(manifest)
    sides = f"Times are {other} → {this}, in the same runtime with the same threads, interleaved."
    explained = [Remark(text, "caption") for text in speed.explained(rows, timed)]
    return [
        *(Remark(text, "caution") for text in curves.shared_cautions(timed)),
        Remark(sides, on=On.CARD),
        *(Section(f"{own.title}, {own.other} → {own.this}", _curve(own), on=_BRIEF) for own in timed),
        *(Remark(f"{text}.", "caption", _BRIEF) for text in curves.conditions(timed, rows)),
        *speed.overview(timed),
        *speed.sections(manifest, rows),
        Section("How it was measured, and how to read the figures", explained, folded=True, on=On.PAGE),
    ]


def _curve(curve: curves.Series) -> list[Part]:
    """Build one curve: its table, results and method."""
    head, body = curves.brief(curve)
    at = head.index("speed-up")
    for line, cell in zip(body, curve.cells, strict=True):
        # strong for a win, bad for a loss, dim within noise
        tone = "dim" if cell.doubtful else "strong" if cell.ratio and cell.ratio > 1 else "bad"
        line[at] = Styled(line[at], tone)
    how = [Remark(f"{text}.", "caption")] if (text := curves.how(curve)) else []
    return [Sheet(head, body, words=0), Remark(" ".join(curves.results(curve))), *how]


def _accuracy(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[Part]:
    scored = [row for row in rows if row.name.startswith(figures.SCORES)]
    if not scored:
        return []
    about = figures.scored(rows)
    how = [Remark(f"Scored on {about}.", "caption"), Remark(_RELOADED, "caption")] if about else []
    return [
        *(Remark(note.rstrip("."), "note") for note in [*notes, *accuracies.traps(rows, notes)]),
        *accuracies.accuracy(manifest, rows),
        figures.results_table(scored),
        *([Section("How it was scored", how, folded=True)] if how else []),
    ]


def _stored(manifest: Manifest) -> list[Part]:
    rows = [[f"{count:,}", text] for count, text in figures.schemes(manifest)]
    rest = Remark(f"All other weights are stored as in the source ({manifest.model.source.dtype}).")
    return [Sheet(["layers", "scheme"], rows, 1, words=0), rest] if rows else []


def _decisions(manifest: Manifest) -> list[Part]:
    groups, every = figures.grouped(manifest.decisions), [[decision] for decision in manifest.decisions]
    parts: list[Part] = [Remark("The recipe was followed without a deviation.")]
    if groups:
        about = "Deviations from the recipe, with reasons; manifest.json lists each of them."
        parts = [Remark(about), figures.decisions_table(groups)]
    if len(groups) < len(every):
        title = f"All {len(every)} decisions"
        parts.append(replace(figures.decisions_table(every), title=title, folded=True, on=On.PAGE))
    rows: list[list[Line]] = []
    gates = figures.gates(manifest.checks)
    for check in [*gates, *(check for check in manifest.checks if check not in gates)]:
        outcome = (MARK[check.ok], " holds" if check.ok else Styled(" failed", "bad"))
        kind = "gate" if check in gates else "check"
        rows.append([f"{kind} {figures.short(check)}", outcome, figures.relation(check)])
    rows += [[f"gate {gate}", (MARK[None], " not judged"), ""] for gate in figures.unjudged(manifest)]
    parts += [Sheet(["", "outcome", "value and limit"], rows, words=3, title="Checks")] if rows else []
    facts: list[tuple[Line, Cell]] = [("weights", list(figures.weights(manifest.weights)))] if manifest.weights else []
    return [*parts, *([tree.Facts(facts, on=On.SCREEN)] if facts else [])]


def _run(manifest: Manifest) -> list[Part]:
    here = "Run these commands in the folder of this file."
    here += " `model/` is a plain Hugging Face folder." if usage.has(manifest, "model/") else ""
    commands = [replace(command, folded=i > 0) for i, command in enumerate(usage.commands(manifest))]
    link = Styled("report.html", href="report.html")
    page = ("All figures and decisions are in ", link, ", a page that needs no network.")
    return [Remark(here), *([Remark(page, on=On.CARD)] if usage.has(manifest, "report.html") else []), *commands]


def took(seconds: Mapping[str, float | None], memory: int | None) -> str:
    """Describe the cost of a compile: seconds by `total` and `quantize_cpu`, peak memory in bytes."""
    total, cpu = seconds.get("total"), seconds.get("quantize_cpu")
    return words.joined(
        f"{words.duration(total)} in all" if total is not None else "",
        f"{words.duration(cpu)} of processor time to quantize" if cpu else "",
        f"peak memory {words.size(memory)}" if memory else "",
    )


def _whole_recipe(manifest: Manifest) -> list[Part]:
    files = [[entry.path, words.size(entry.bytes), entry.role, entry.sha256] for entry in manifest.files]
    title = f"{words.plural(len(files), 'file')} with their hashes"
    recipe = [Code("recipe.yaml", usage.recipe(manifest), "yaml"), usage.again(manifest)]
    parts: list[Part] = [Section("The whole recipe: as recipe.yaml it makes this model again", recipe, folded=True)]
    return [*parts, *([Sheet(["file", "size", "role", "sha256"], files, 2, title=title, folded=True)] if files else [])]


def _origin(manifest: Manifest, rows: Sequence[Row]) -> list[Part]:
    stored = [entry for entry in manifest.files if entry.role in {"weights", "onnx", "engine", "gguf"}]
    files = [[entry.path, str(entry.bytes), entry.sha256] for entry in stored]
    table = [Sheet(["file", "bytes", "sha256"], files, 1)] if files else []
    return [tree.Facts(_facts(manifest, rows)), *table, *_whole_recipe(manifest)[:1]]


# --- numbers to remember ---------------------------------------------------------------------------------------------


def _tiles(manifest: Manifest, rows: Sequence[Row]) -> list[FigureTile]:
    tiles = []
    timed = [row for row in rows if row.name.startswith("latency.") and row.baseline and row.baseline.ratio]
    if timed:
        # decode before prefill, then the smallest size
        row = min(timed, key=lambda r: (r.name, (r.shape or {}).get("context", 0), r.batch or 0, curves.tokens(r)))
        tiles.append(_speed_tile(manifest, row))
    for export, _, sized in figures.sizes(rows):
        base = sized.baseline
        assert base is not None
        ratio = base.ratio or 1.0
        label, number = ("smaller on disk", ratio) if ratio >= 1 else ("larger on disk", 1 / ratio)
        detail = words.joined(export, f"{words.size(base.value)} to {words.size(sized.value or 0.0)}")
        tiles.append(FigureTile(words.times(number), label, detail, "bad" if ratio < 1 else ""))
    scored = {row.name: row for row in rows if row.value is not None and "surer_than" not in row.settings}
    first = ("accuracy.perplexity", "accuracy.top1", "accuracy.recall_at_1", "accuracy.top1_agreement")
    for name in (*first, "accuracy.cosine", "accuracy.same"):
        if name in scored and (tile := _accuracy_tile(scored[name])) is not None:
            return [*tiles, tile]
    return tiles


def _accuracy_tile(row: Row) -> FigureTile | None:
    value, base, form, variant = row.value or 0.0, row.baseline, figures.share_form(row), figures.variant(row)
    if row.name == "accuracy.perplexity" and base is not None and base.ratio:
        more, sure = words.signed(100 / base.ratio - 100, 1), base.ratio_ci95
        # a ratio below 1 is a loss, if its whole interval is
        label, tone = ("perplexity, worse", "bad") if sure and sure[1] < 1 else ("perplexity", "")
        return FigureTile(
            f"{more}\u00a0%", label, f"{words.figure(base.value)} to {words.figure(value)}, {variant}", tone
        )
    if row.name in figures.SHARES:
        return FigureTile(form(value), figures.SHARES[row.name], words.joined(figures.lost(row), variant))
    if row.name == "accuracy.top1_agreement" and figures.of_classes(row):
        detail = f"95\u00a0% {words.between(row.ci95, form)}, {variant}"
        return FigureTile(form(value), figures.agreement(row), detail)
    if row.name == "accuracy.cosine":
        sure_ = words.between(row.ci95, lambda value: words.figure(value, 5))
        detail = words.joined(f"95\u00a0% {sure_}" if sure_ else "", variant)
        return FigureTile(words.figure(value), "cosine to the original", detail)
    if row.name == "accuracy.same":
        label, _, shown, remark = figures.same(row, value)
        return FigureTile(shown, label, f"{remark}, {variant}")
    return None


def _speed_tile(manifest: Manifest, row: Row) -> FigureTile:
    ratio, speed_ = row.baseline.ratio or 0.0 if row.baseline else 0.0, speed_up(row)
    kind = {"latency.decode_step": "decode", "latency.prefill": "prefill"}.get(row.name, "one operation")
    kind = "a pass" if row.name == "latency.prefill" and curves.tokens(row) == 1 else kind
    shown = f"95\u00a0% {words.between(speed_.interval, words.times)}" if speed_ is not None else ""
    detail = words.joined(figures.where(row), row.runtime or "", shown)
    undecided = manifest.verdict is not None and manifest.verdict.answer == "inconclusive"
    if undecided or speed_ is None or speed_.doubt or speed_.interval[0] <= 1 <= speed_.interval[1]:
        measured = f"{words.times(ratio)} measured, {detail}"
        return FigureTile("not decided", f"the speed in {kind}", measured, "inconclusive")
    label = f"the speed in {kind}{'' if ratio > 1 else ': slower'}"
    return FigureTile(words.times(ratio), label, detail, "bad" if ratio < 1 else "")


# --- where it is from ------------------------------------------------------------------------------------------------


def _facts(manifest: Manifest, rows: Sequence[Row]) -> list[tuple[str, str]]:
    source, seen = manifest.model.source, manifest.calibration
    hashed = {True: "sha256 of its token ids", False: "sha256 of its items"}
    facts = [("source", f"{source.ref}, {source.dtype}{f', converted from {source.was}' if source.was else ''}")]
    facts += [("adapter", figures.adapter(entry)) for entry in source.adapters]
    facts.append(("sha256 of the source", source.sha256))
    if seen is not None:
        facts += [("calibrated on", figures.calibrated(seen)), (hashed[seen.tokens > 0], seen.ids_sha256)]
    else:
        facts.append(("calibrated on", "nothing: no pass of the recipe needs data"))
    for data in figures.scored_on(rows):
        sequences = figures.begins(data.begins).replace("each", "sequences")
        facts.append(("scored on", f"{data.set} ({data.split}), {data.items:,} items{sequences}"))
        facts.append((hashed[manifest.model.kind == "decoder"], data.sha256))
    facts.append(("target", str((manifest.target or {}).get("name") or "none")))
    device = manifest.device.get("name") or "an unnamed machine"
    facts.append(("made on", f"{device}, {manifest.isa}, {words.plural(manifest.threads, 'thread')}"))
    elsewhere = (row.device.name for row in rows if row.device is not None and row.device.name != device)
    facts += [("measured on", name) for name in [next(elsewhere, "")] if name]
    facts += [("made at", manifest.created), ("seed", str(manifest.seed)), ("content_sha256", manifest.content_sha256)]
    versions = {"quantkit": manifest.quantkit, **manifest.versions}
    return [*facts, ("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())))]


def card(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Write the model card; `notes` are important notes on the figures."""
    front = usage.as_yaml(_front_matter(manifest, rows))
    return f"---\n{front}\n---\n\n{markdown.document(document(manifest, rows, notes))}\n"


def _front_matter(manifest: Manifest, rows: Sequence[Row]) -> dict[str, Any]:
    """Collect the metadata of the Hugging Face hub; unknown entries are left out."""
    source = manifest.model.source
    licence = ALIASES[name].licence.lower() if (name := source.ref.removeprefix("alias:")) in ALIASES else None
    formats = sorted({str(layer.scheme.get("format")) for layer in manifest.layers})
    checkpoint, graph = usage.has(manifest, "model/"), usage.has(manifest, "onnx/")
    library = "transformers" if checkpoint else "onnx" if graph else None
    forms = [form for form, there in (("onnx", graph), ("tensorrt", usage.has(manifest, "engine/"))) if there]
    front: dict[str, Any] = {
        "library_name": library,
        "base_model": markdown.on_one_line(figures.origin(manifest)),
        "base_model_relation": "quantized" if formats else None,
        "license": licence,
        "pipeline_tag": _task(manifest.model.kind, rows),
        "tags": ["quantkit", manifest.model.kind, *usage.libraries(manifest), *forms, *formats],
    }
    front = {key: value for key, value in front.items() if value}
    if formats:
        front["quantization"] = {
            "recipe": str(manifest.recipe.get("name", "")),
            "method": [name for step in manifest.recipe.get("passes", []) for name in step],
            "schemes": [text for _, text in figures.schemes(manifest)],
            "content_sha256": manifest.content_sha256,
        }
    return front


def _task(kind: str, rows: Sequence[Row]) -> str | None:
    """Return the hub's name of the model's task; None for a graph that was not scored as an image classifier."""
    if kind == "decoder":
        return "text-generation"
    if kind == "encoder" and any(row.name == "accuracy.top1" for row in rows):
        return "text-classification"
    if kind == "encoder":
        return "sentence-similarity" if any(row.name in figures.RECALL for row in rows) else "feature-extraction"
    return "image-classification" if any(figures.counted(row) == "image" for row in rows) else None
