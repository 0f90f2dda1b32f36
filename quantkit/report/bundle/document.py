"""A bundle as a tree: its verdict, what it costs, how fast it is, where it hurts, what was decided, how to run it.

It is made from the manifest and the measurements alone, so the same two give the same page, card and screen. The data
of every figure is also there as a table, for those who cannot see the figures or run no scripts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.bundle import Manifest
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import Inspected
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up
from quantkit.model.source.alias import ALIASES
from quantkit.report import on_devices
from quantkit.report.bundle import accuracy as accuracy_sections
from quantkit.report.bundle import curves, figures, sections, speed, usage
from quantkit.report.bundle import engine as engine_sections
from quantkit.report.bundle import harm as harm_sections
from quantkit.report.bundle.figures import DecisionLine
from quantkit.report.kit import markdown, shares, words
from quantkit.report.kit.tree import (
    MARK,
    Cell,
    Code,
    Conclusion,
    Document,
    Facts,
    FigureTile,
    Line,
    On,
    Part,
    Remark,
    Section,
    Sheet,
    Styled,
    Tiles,
)
from quantkit.report.on_devices import DeviceRows

_BRIEF, _FILES = On.SCREEN | On.CARD, On.PAGE | On.CARD


def document(
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    harm: Harm | None = None,
    engines: Sequence[Inspected] = (),
    devices: Sequence[DeviceRows] = (),
    path: Path | None = None,
    took: str = "",
    files: usage.Files | None = None,
    whole: bool = True,
) -> Document:
    """Build the tree of a bundle.

    Args:
        notes: what a reader must know about the figures; stands beside them.
        harm: where it is hurt, if that was looked for.
        engines: findings about each of its engines.
        devices: rows of each that was reached from elsewhere.
        path: folder of the bundle, for a screen.
        took: time and memory of the compile, where it has just been made.
        files: where the model and the set lie, where that is known.
        whole: whether decisions, checks and what to do next are shown on a screen.
    """
    everywhere = On.ALL if whole else _FILES
    chapters: list[tuple[str, str, On, list[Part]]] = [
        ("run", "Run it", On.CARD, _run(manifest)),
        ("stored", "How the numbers are stored", On.CARD, _stored(manifest)),
        ("costs", "What it costs", _BRIEF, _costs(manifest, rows, notes)),
        ("speed", "Speed", On.ALL, _speed(manifest, rows)),
        ("accuracy", "Accuracy", On.PAGE, _accuracy(manifest, rows, notes)),
        ("harm", "Where it hurts", On.PAGE, _harm(manifest, harm)),
        ("engine", "What the engine does", On.PAGE, list(engine_sections.sections(engines))),
        ("devices", "Devices", On.PAGE, on_devices.parts(manifest, rows, devices)),
        ("size", "Size", On.PAGE, list(sections.sizes(manifest, rows))),
        ("decisions", "Decisions and checks", everywhere, _decisions(manifest, took)),
        ("run", "Run it", On.PAGE, _run(manifest)),
        ("next", "Next", On.SCREEN if whole and path is not None else On.PAGE & On.CARD, _next(path, manifest)),
        ("origin", "Where it comes from", On.CARD, _origin(manifest, rows)),
    ]
    ok, name = manifest.state == "complete", str(manifest.recipe.get("name", "quantized"))
    # where gates are set and none of them was judged, nothing says that it is good
    judged = None if ok and figures.unjudged(manifest) and not figures.gates(manifest.checks) else ok
    target = str((manifest.target or {}).get("name", ""))
    return Document(
        (
            MARK[judged],
            " ",
            Styled(manifest.model.name, "strong"),
            f", {name}, for {target}" if target else f", {name}",
        ),
        [_about(manifest)],
        _head(manifest, rows, path, files),
        [Section(title, parts, place, on=on) for place, title, on, parts in chapters if parts],
        _facts(manifest, rows),
        f"Made by quantkit {manifest.quantkit} from the bundle's manifest and measurements.",
        provenance=_whole_recipe(manifest),
    )


def _about(manifest: Manifest) -> str:
    origin = figures.origin(manifest)
    if not manifest.layers:
        return f"{origin} as it is, the baseline that quantized bundles are held against"
    many = "; ".join(f"{words.plural(count, 'layer')} in {text}" for count, text in figures.schemes(manifest))
    return f"{origin}, quantized: {many}"


def _head(manifest: Manifest, rows: Sequence[Row], path: Path | None, files: usage.Files | None) -> list[Part]:
    answer, because = figures.verdict(manifest, rows)
    parts: list[Part] = [Remark(str(path), on=On.SCREEN)] if path is not None else []
    if manifest.state == "gate_failed":
        failed = [check for check in figures.gates(manifest.checks) if not check.ok]
        which = ", ".join(f"{figures.short(check)} {figures.relation(check)}" for check in failed)
        text = f" This model does not hold what its recipe asks of it: {which}"
        parts.append(Remark((Styled("A gate failed.", "bad"), text), "note"))
    commands = []
    if manifest.layers and not figures.timed(rows):
        place = "." if path is None else shlex.quote(near(path))
        text = "\n".join(usage.measure(manifest, place, files or usage.Files()))
        commands = [Code("its speed has not been measured; this does:", text, on=On.SCREEN | On.PAGE)] if text else []
    elif manifest.layers and manifest.verdict is None:
        commands = [Code("this judges it:", "\n".join(usage.measure(manifest)), on=On.PAGE)]
    tone = figures.tone(manifest) if manifest.verdict or manifest.state == "gate_failed" else ""
    return [
        *parts,
        Conclusion(answer, tone, because, label="verdict", commands=commands),
        Tiles(_tiles(manifest, rows)),
    ]


def _costs(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[Part]:
    quantized, dtype = bool(manifest.layers), manifest.model.source.dtype
    scored = figures.scored(rows)
    return [
        figures.results_table(rows, layers=len(manifest.layers), dtype=dtype, quantized=quantized),
        *([Remark(f"Scored on {scored}.", "caption")] if scored else []),
        *([Remark(_RELOADED, on=On.CARD)] if scored else []),
        *(Remark(note.rstrip("."), "note") for note in notes),
    ]


_RELOADED = "It is the reloaded export that was scored, each in its own runtime, against the original."


def _speed(manifest: Manifest, rows: Sequence[Row]) -> list[Part]:
    timed = curves.series(manifest, rows)
    if not timed:
        return []
    shared = curves.shared_cautions(timed)
    brief = [
        Section(f"{curve.title}, {curve.other} → {curve.this}", _curve(curve, shared), on=_BRIEF) for curve in timed
    ]
    this, other = curves.names(manifest)
    sides = f"Times are {other} → {this}, in the same runtime with the same threads, interleaved."
    explained = [Remark(text, "caption") for text in speed.explained(rows, timed)]
    return [
        *(Remark(text, "caution") for text in shared),
        Remark(sides, on=On.CARD),
        *brief,
        *(Remark(f"{text}.", "caption", _BRIEF) for text in curves.conditions(timed, rows)),
        *speed.overview(timed),
        *speed.sections(manifest, rows),
        Section("How it was measured, and how to read the figures", explained, folded=True, on=On.PAGE),
    ]


def _curve(curve: curves.Series, told: Sequence[str]) -> list[Part]:
    """Build one curve: a line a size, what follows from it, what to beware of beyond what is `told`."""
    head, body = curves.brief(curve)
    # what is slower is no win, and what noise swamps is neither
    tones = ["strong" if cell.ratio and cell.ratio > 1 else "bad" for cell in curve.cells]
    tones = ["dim" if cell.doubtful else tone for cell, tone in zip(curve.cells, tones, strict=True)]
    at = head.index("speed-up")
    styled = [
        [Styled(cell, tone) if i == at else cell for i, cell in enumerate(line)]
        for line, tone in zip(body, tones, strict=True)
    ]
    cautions = [Remark(text, "caution") for text in curves.cautions(curve) if text not in told]
    how = [Remark(f"{text}.", "caption")] if (text := curves.how(curve)) else []
    return [Sheet(head, styled, words=0), Remark(" ".join(curves.results(curve))), *cautions, *how]


def _accuracy(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[Part]:
    drawn, scored = (
        accuracy_sections.accuracy(manifest, rows),
        [row for row in rows if row.name.startswith("accuracy.")],
    )
    if not scored:
        return []
    known = [*notes, *accuracy_sections.traps(rows, notes)]
    about = figures.scored(rows)
    how = [Remark(f"Scored on {about}.", "caption"), Remark(_RELOADED, "caption")] if about else []
    return [
        *(Remark(note.rstrip("."), "note") for note in known),
        *drawn,
        figures.results_table(scored),
        *([Section("How it was scored", how, folded=True)] if how else []),
    ]


def _harm(manifest: Manifest, harm: Harm | None) -> list[Part]:
    said = harm_sections.said(harm)
    drawn = [*harm_sections.sections(harm), *sections.weights(manifest)]
    loss = [Remark((Styled(said[0], "strong"), " ", " ".join(said[1:])))] if said else []
    return [*loss, *drawn, *harm_sections.worst(harm)]


def _stored(manifest: Manifest) -> list[Part]:
    rows = [[f"{count:,}", text] for count, text in figures.schemes(manifest)]
    rest = Remark(f"Everything else is as in the source ({manifest.model.source.dtype}).")
    return [Sheet(["layers", "scheme"], rows, 1, words=0), rest] if rows else []


def _decisions(manifest: Manifest, took: str) -> list[Part]:
    grouped = figures.grouped(manifest.decisions)
    parts: list[Part] = []
    if grouped:
        parts.append(Remark("What was done otherwise than the recipe says, and why. Each stands in manifest.json."))
        parts.append(figures.decisions_table(grouped))
        if len(grouped) < len(manifest.decisions):
            every = figures.decisions_table([DecisionLine.of(decision) for decision in manifest.decisions])
            title = f"Every one of the {len(manifest.decisions)} decisions"
            parts.append(replace(every, title=title, folded=True, on=On.PAGE))
    else:
        parts.append(Remark("Everything was done as the recipe says."))
    rows: list[list[Line]] = []
    for checks, kind in ((figures.gates(manifest.checks), "gate"), (figures.other_checks(manifest.checks), "check")):
        for check in checks:
            outcome = (MARK[check.ok], " holds" if check.ok else Styled(" failed", "bad"))
            rows.append([f"{kind} {figures.short(check)}", outcome, figures.relation(check)])
    rows += [[f"gate {gate}", (MARK[None], " not judged"), ""] for gate in figures.unjudged(manifest)]
    if rows:
        parts.append(Sheet(["", "outcome", "value and limit"], rows, words=3, title="Checks"))
    facts: list[tuple[Line, Cell]] = []
    if manifest.weights:
        facts.append(("weights", list(figures.weights(manifest.weights))))
    facts += [("took", took)] if took else []
    return [*parts, *([Facts(facts, on=On.SCREEN)] if facts else [])]


def _run(manifest: Manifest) -> list[Part]:
    here = "In the folder that holds this file."
    here += " `model/` is a plain Hugging Face folder." if usage.has(manifest, "model/") else ""
    commands = [
        Code(command.label, command.text, command.language, folded=i > 0)
        for i, command in enumerate(usage.commands(manifest))
    ]
    link = Styled("report.html", href="report.html")
    page = ("The figures and every decision stand in ", link, ", one page that needs no network.")
    return [Remark(here), *([Remark(page, on=On.CARD)] if usage.has(manifest, "report.html") else []), *commands]


def _next(path: Path | None, manifest: Manifest) -> list[Part]:
    """Build the commands that one would type next; all relative to where one is."""
    if path is None:
        return []
    place, checkpoint = shlex.quote(near(path)), usage.has(manifest, "model/")
    commands = [f"quantkit verify {place}"]
    if manifest.model.kind == "decoder":
        graph = usage.has(manifest, "onnx/")
        alone = usage.file_runtime(manifest) or usage.engine_runtime(manifest)
        commands.append(usage.generate(place, None if checkpoint else "onnxruntime" if graph else alone))
    if checkpoint:
        auto = usage.auto_class(manifest)
        commands.append(f"{auto}.from_pretrained({str(Path(near(path)) / 'model')!r})  # Python, transformers")
    page = [Code("report", str(Path(near(path)) / "report.html"))] if usage.has(manifest, "report.html") else []
    return [Code("", "\n".join(commands)), *page]


def near(path: Path) -> str:
    """Write a path as one would type it here: relative where it lies below the current folder."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd().resolve())}"
    except (ValueError, OSError):
        return str(path)


def took(seconds: Mapping[str, float | None], memory: int | None) -> str:
    """Say what a compile took: seconds by `total` and `quantize_cpu`, and the peak of its memory in bytes."""
    total, cpu = seconds.get("total"), seconds.get("quantize_cpu")
    parts = [f"{words.duration(total)} in all"] if total is not None else []
    parts += [f"{words.duration(cpu)} of processor time to quantize"] if cpu else []
    return ", ".join(parts + ([f"peak memory {words.size(memory)}"] if memory else []))


def _whole_recipe(manifest: Manifest) -> list[Part]:
    files = [[entry.path, words.size(entry.bytes), entry.role, entry.sha256] for entry in manifest.files]
    again = usage.again(manifest)
    title = f"{words.plural(len(files), 'file')} with their hashes"
    recipe = [Code("recipe.yaml", usage.recipe(manifest), "yaml"), Code(again.label, again.text, again.language)]
    made: list[Part] = [Section("The recipe, whole: as recipe.yaml it makes this model again", recipe, folded=True)]
    return [*made, *([Sheet(["file", "size", "role", "sha256"], files, 2, title=title, folded=True)] if files else [])]


def _origin(manifest: Manifest, rows: Sequence[Row]) -> list[Part]:
    stored = [entry for entry in manifest.files if entry.role in {"weights", "onnx", "engine", "gguf"}]
    files = [[entry.path, str(entry.bytes), entry.sha256] for entry in stored]
    table = [Sheet(["file", "bytes", "sha256"], files, 1)] if files else []
    return [Facts(_facts(manifest, rows)), *table, *_whole_recipe(manifest)[:1]]


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


def card(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Write the card's text; `notes` are what a reader must know about the figures."""
    front = usage.as_yaml(front_matter(manifest, rows))
    return f"---\n{front}\n---\n\n{markdown.document(document(manifest, rows, notes))}\n"


def front_matter(manifest: Manifest, rows: Sequence[Row]) -> dict[str, Any]:
    """What the hub reads: base model, licence if known, task, tags, quantization."""
    source = manifest.model.source
    licence = ALIASES[name].licence.lower() if (name := source.ref.removeprefix("alias:")) in ALIASES else None
    formats = sorted({str(layer.scheme.get("format")) for layer in manifest.layers})
    checkpoint, graph = usage.has(manifest, "model/"), usage.has(manifest, "onnx/")
    found: dict[str, Any] = {}
    if checkpoint or graph:
        found["library_name"] = "transformers" if checkpoint else "onnx"
    found["base_model"] = markdown.on_one_line(figures.origin(manifest))
    if formats:
        found["base_model_relation"] = "quantized"
    if licence:
        found["license"] = licence
    if task := _task(manifest.model.kind, rows):
        found["pipeline_tag"] = task
    forms = [form for form, there in (("onnx", graph), ("tensorrt", usage.has(manifest, "engine/"))) if there]
    found["tags"] = ["quantkit", manifest.model.kind, *usage.libraries(manifest), *forms, *formats]
    if formats:
        found["quantization"] = {
            "recipe": str(manifest.recipe.get("name", "")),
            "method": [name for step in manifest.recipe.get("passes", []) for name in step],
            "schemes": [text for _, text in figures.schemes(manifest)],
            "content_sha256": manifest.content_sha256,
        }
    return found


def _task(kind: str, rows: Sequence[Row]) -> str | None:
    """What the hub calls the model's task; None of a graph that was not scored as one that tells images apart."""
    if kind == "decoder":
        return "text-generation"
    if kind == "encoder" and any(row.name == "accuracy.top1" for row in rows):
        return "text-classification"
    if kind == "encoder":
        return "sentence-similarity" if any(row.name in shares.RECALL for row in rows) else "feature-extraction"
    return "image-classification" if any(figures.counted(row) == "image" for row in rows) else None
