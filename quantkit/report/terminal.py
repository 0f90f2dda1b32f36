"""What a command prints: results in, rich renderables out. Nothing here prints, computes or reads files.

Text from outside (names, reasons, paths) never passes through rich's markup. Everything fits 80 columns by wrapping;
paths and commands, which are there to be copied, are never broken.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from quantkit.bundle import Check, Decision, Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, figures, usage
from quantkit.report.bundle.curves import Series
from quantkit.report.catalog import CatalogEntry
from quantkit.report.kit import words
from quantkit.report.kit.screen import DIM, MARK, STYLES, copied, grid, indented, lines, marked, pairs, table, titled


def summary(
    path: Path,
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    seconds: Mapping[str, float | None] | None = None,
    memory_peak_bytes: int | None = None,
    files: usage.Files | None = None,
) -> list[RenderableType]:
    """A bundle on one screen: the verdict, what it costs, how fast it is, what held, what was decided, what to do next.

    Args:
        notes: what a reader must know about the figures; stands right under them.
        seconds: `quantize_cpu` and `total`, where it has just been made.
        memory_peak_bytes: of the process that made it.
        files: where the model and the set lie, where that is known.
    """
    ok, open_ = manifest.state == "complete", figures.unjudged(manifest)
    # where gates are set and none of them was judged, nothing says that it is good
    mark, style = MARK[None if ok and open_ and not figures.gates(manifest.checks) else ok]
    recipe = str(manifest.recipe.get("name", ""))
    target = str((manifest.target or {}).get("name", ""))
    title = Text.assemble((f"{mark} ", style), (manifest.model.name, "bold"), f", {recipe}, for {target}")
    if not ok:
        title.append(": a gate failed", "bold red")
    found: list[RenderableType] = [Text(), title, copied(f"  {path}"), *_verdict(path, manifest, rows, files), Text()]
    found += _results(manifest, rows, notes)
    found += [Text(), *indented(_facts(manifest, seconds, memory_peak_bytes)), Text()]
    return found + _next(path, manifest)


def _verdict(
    path: Path, manifest: Manifest, rows: Sequence[Row], files: usage.Files | None = None
) -> list[RenderableType]:
    """The verdict as a sentence with its reasons; where speed was not measured, what does it."""
    answer, because = figures.verdict(manifest, rows)
    style = f"bold {STYLES.get(figures.tone(manifest), '')}".strip() if manifest.verdict else ""
    sentence = Text.assemble(("verdict: ", DIM), (answer, style))
    shown = indented(sentence) + indented(*(marked(reason, "·", DIM) for reason in because), by=4)
    if manifest.layers and not figures.timed(rows):
        commands = usage.measure(manifest, shlex.quote(_near(path)), files or usage.Files())
        shown += [Text("  its speed has not been measured; this does:", DIM)] if manifest.verdict else []
        shown += [copied(f"    {command}") for command in commands]
    return shown


def _results(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[RenderableType]:
    """Size and accuracy, what they were scored on, speed, and what a reader must know about all of it."""
    about, timed = figures.scored(rows), curves.series(manifest, rows)
    found = indented(_figures(manifest, rows), *([Text(f"scored on {about}", DIM)] if about else []))
    found += indented(*map(marked, notes))
    shared = curves.shared_cautions(timed)
    for curve in timed:
        found += [Text(), *indented(_speed(curve, shared))]
    found += [Text(), *indented(*map(marked, shared))] if shared else []
    said = [Text(text, DIM) for text in curves.conditions(timed, rows)]
    return [*found, *([Text()] if said else []), *indented(*said)]


def _figures(manifest: Manifest, rows: Sequence[Row]) -> RenderableType:
    made = table(["", "original", "quantized" if manifest.layers else "bundle", ""], numbers=2)
    for export, found in figures.tables(rows, layers=len(manifest.layers), dtype=manifest.model.source.dtype):
        if export:
            made.add_row(Text(export, DIM), "", "", "")
        for line in found:
            made.add_row(line.label, line.before, Text(line.after, "bold"), Text(line.remark))
    return made


def _speed(curve: Series, told: Sequence[str]) -> RenderableType:
    """One curve: a line a size, what follows from it, what to beware of beyond what is `told`, how it was measured."""
    head, body = curves.brief(curve)
    # what is slower is no win, and what noise swamps is neither
    tones = ["bold" if cell.ratio and cell.ratio > 1 else "red" for cell in curve.cells]
    tones = [DIM if cell.doubtful else tone for cell, tone in zip(curve.cells, tones, strict=True)]
    styled = [
        [Text(cell, tone if name == "speed-up" else "") for name, cell in zip(head, line, strict=True)]
        for line, tone in zip(body, tones, strict=True)
    ]
    title = Text.assemble((curve.title, "bold"), f", {curve.other} → {curve.this}")
    follows = [curves.break_even(curve), curves.first_tax(curve), *curves.skipped(curve)]
    said = " ".join([*curves.outcomes(curve), *(sentence for sentence in follows if sentence)])
    warned = (marked(text) for text in curves.cautions(curve) if text not in told)
    return Group(title, table(head, styled, left=0, whole=False), Text(said), *warned, Text(curves.how(curve), DIM))


def _facts(manifest: Manifest, seconds: Mapping[str, float | None] | None, memory: int | None) -> RenderableType:
    """Gates, checks, decisions, cost: a heading and what is to be said under it."""
    shown = pairs()
    said = [_check(check) for check in figures.gates(manifest.checks)]
    said += [Text.assemble(MARK[None], f" {gate} not judged") for gate in figures.unjudged(manifest)]
    shown.add_row("gates", lines(said) if said else Text("none set", DIM))
    others = figures.other_checks(manifest.checks)
    if others:
        shown.add_row("checks", lines(map(_check, others)))
    if manifest.weights:
        shown.add_row("weights", lines(map(Text, figures.weights(manifest.weights))))
    shown.add_row("decisions", decisions(manifest.decisions))
    if seconds is not None:
        parts = []
        if seconds.get("total") is not None:
            parts.append(f"{words.duration(seconds['total'] or 0)} in all")
        if seconds.get("quantize_cpu"):
            parts.append(f"{words.duration(seconds['quantize_cpu'] or 0)} of processor time to quantize")
        if memory:
            parts.append(f"peak memory {words.size(memory)}")
        shown.add_row("took", ", ".join(parts))
    return shown


def decisions(taken: Sequence[Decision]) -> RenderableType:
    """What was done otherwise than asked, grouped, each group with its first example and its reason."""
    if not taken:
        return Text("none: everything was done as the recipe says", DIM)
    shown = []
    for group in figures.grouped(taken):
        text = Text.assemble((f"{group.count} × {group.code}", "yellow"), f" ({group.pass_}), ")
        text.append(f"{'first ' if group.count > 1 else ''}{group.where}: ")
        text.append(f"{group.change}; " if group.change else "")
        shown.append(text.append(group.reason))
    return lines(shown)


def checks(found: Sequence[Check]) -> list[RenderableType]:
    """Checks one under the other, with what is wrong where one fails."""
    return indented(
        grid((Text(*MARK[each.ok]), each.name, figures.relation(each), Text(each.where, DIM)) for each in found)
    )


def verified(
    path: Path, manifest: Manifest, found: Sequence[Check], notes: Sequence[str], seals: Sequence[str] = ()
) -> list[RenderableType]:
    """What `verify` found; `seals`: lines about the bundle's seal and who signed it."""
    failed = [check for check in found if not check.ok]
    mark, style = MARK[not failed]
    outcome = f"{len(failed)} of {len(found)} checks failed" if failed else f"all {len(found)} checks hold"
    head = Text.assemble((f"{mark} ", style), (manifest.model.name, "bold"), f": {outcome}")
    identity = Text(f"  content_sha256 {manifest.content_sha256}", DIM, no_wrap=True)
    sealed = [Text(f"  {line}", DIM, no_wrap=True) for line in seals]
    shown: list[RenderableType] = [head, copied(f"  {path}"), identity, *sealed, *checks(found)]
    return shown + indented(*map(marked, notes))


def measured(path: Path, manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[RenderableType]:
    """What `measure` found."""
    head = Text.assemble((manifest.model.name, "bold"), f", {manifest.recipe.get('name', '')}")
    shown: list[RenderableType] = [head, copied(f"  {path}"), *_verdict(path, manifest, rows), Text()]
    return shown + _results(manifest, rows, notes)


def planned(plan: Mapping[str, Any]) -> list[RenderableType]:
    """What a compile would do; `plan` is the result of `--dry-run` as the envelope has it."""
    model = plan["model"]
    head = Text.assemble(("would compile ", DIM), (str(model["name"]), "bold"), f" with {plan['recipe']}")
    facts = pairs()
    was = f", converted from {model['was']}" if model["was"] else ""
    weights = words.size(model["bytes"])
    facts.add_row("model", f"{model['ref']}, {words.article(model['kind'])}, {weights} of {model['dtype']}{was}")
    facts.add_row("target", str(plan["target"]))
    layers = []
    for scheme in plan["schemes"]:
        what = f"{words.plural(scheme['layers'], 'layer')}, {words.figure(scheme['bits_per_weight'], 3)} bits a weight"
        layers.append(Text(f"{what}: {scheme['scheme']}"))
    if plan["kept"]:
        more = f" and {len(plan['kept']) - 3} more" if len(plan["kept"]) > 3 else ""
        layers.append(Text(f"{len(plan['kept'])} kept as they are: {', '.join(plan['kept'][:3])}{more}"))
    facts.add_row("layers", lines(layers) if layers else Text("none is quantized", DIM))
    if macs := plan.get("macs"):
        share = words.percent(macs["quantized"] / macs["all"])
        said = f"{macs['all']:,} multiply-accumulates a sample, {share} of them in integers"
        if left := plan["floats"]:
            said += f", without those that cannot be: {words.percent(left)} of all products' weights stay in floats"
        facts.add_row("products", said)
    facts.add_row("passes", lines(Text(_call(step)) for step in plan["passes"]) if plan["passes"] else "none")
    seen = plan["calibration"]
    facts.add_row("calibrates on", _tokens(seen) if seen else "nothing: no pass looks at data")
    facts.add_row("scores on", _tokens(plan["scoring"]))
    facts.add_row("exports", ", ".join(_call(step) for step in plan["export"]))
    if plan["decisions"]:
        facts.add_row("decisions", decisions([Decision.model_validate(entry) for entry in plan["decisions"]]))
    facts.add_row("takes", "a time that is known after the first block")
    disk = plan["disk_bytes"]
    kept = f", {words.size(disk['cache'])} for the float baseline" if disk["cache"] else ""
    building = words.size(disk["bundle"] + disk["work"])
    facts.add_row("needs", f"about {words.size(plan['memory_bytes'])} of memory, {building} of disk while it is built")
    facts.add_row("leaves", f"about {words.size(disk['bundle'])}{kept}")
    shown: list[RenderableType] = [head, Text(), *indented(facts)]
    shown += indented(*map(marked, plan["notes"]))
    return [*shown, Text(), copied(f"  would write {plan['out']}"), Text("  nothing was written", DIM)]


def listing(kinds: Mapping[str, Mapping[str, str]]) -> list[RenderableType]:
    """What there is of each kind: names and summaries."""
    width = max((len(name) for found in kinds.values() for name in found), default=1)
    shown: list[RenderableType] = []
    for kind, found in kinds.items():
        names = pairs(((name.ljust(width), Text(about)) for name, about in found.items()), style="cyan")
        shown += [Text(kind, "bold"), *indented(names), Text()] if len(kinds) > 1 else [names]
    return shown[:-1] if len(kinds) > 1 else shown


def entry(found: CatalogEntry) -> list[RenderableType]:
    """One thing: what it is, its facts one under the other, and the text that defines it."""
    head = Text.assemble((found.name, "bold"), (f"  {found.kind}", DIM))
    shown: list[RenderableType] = [head, Text(found.summary)]
    if found.facts:
        shown += [Text(), *indented(pairs((label, Text(value)) for label, value in found.facts))]
    if found.source:
        shown += [Text(), *(copied(line) for line in found.source.rstrip().splitlines())]
    return shown


def machine(report: Mapping[str, Any]) -> list[RenderableType]:
    """What the doctor found."""
    from quantkit.measurement.doctor import place_of

    about = report["machine"]
    facts = pairs()
    facts.add_row("processor", f"{about['device']['name']}, {words.plural(about['cores'], 'core')}")
    facts.add_row("instructions", ", ".join(about["isa"]))
    facts.add_row("memory", f"{words.size(about['memory_limit'])} for this process")
    if about.get("last_level_cache"):
        facts.add_row("last-level cache", words.size(about["last_level_cache"]))
    gpus = about.get("gpus") or []
    facts.add_row(
        "GPUs", ", ".join(str(gpu.get("name", gpu)) for gpu in gpus) or str(about.get("gpus_absent") or "none")
    )
    packages = about.get("packages", {})
    missing = [name for name, version in packages.items() if version is None]
    facts.add_row("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version))
    if missing:
        facts.add_row("not installed", Text(", ".join(missing), DIM))
    for each in report.get("tensorrt", []):
        facts.add_row(each["library"], _library(each))
    ceilings = []
    for row in report["measurements"]:
        kind, name = row["settings"].get("compute_type"), row["name"].removeprefix("ceiling.")
        share = report["stated"].get(place_of(row))
        said = f", {share:.0%} of what the target states" if share else ""
        ceilings.append((f"{name}{f' {kind}' if kind else ''}", Text.assemble((_ceiling(row), "bold"), (said, DIM))))
    shown = titled("this machine", facts)[1:]
    if ceilings:
        of = f" of {report['measurements'][0]['device']['name']}" if report["stated"] else ""
        shown += titled(f"measured ceilings{of}", grid(ceilings))
    shown += [Text(), Text.assemble(("target ", DIM), (str(report["target"]), "bold"))]
    if report["written"]:
        shown.append(copied(f"  figures written to {report['written']}"))
    elif report["figures"]:
        shown.append(Text(f"  {words.plural(len(report['figures']), 'figure')} measured; `--write` keeps them", DIM))
    if report["unmeasured"]:
        shown += indented(Text(f"not measured: {', '.join(report['unmeasured'])}", DIM))
    return shown + indented(*map(marked, report["warnings"]))


def _ceiling(row: Mapping[str, Any]) -> str:
    """Its figure; of a launch seconds."""
    if row["value"] is None:
        return ", ".join(row["flags"]) or "not measured"
    return words.moment(row["value"]) if row["unit"] == "s" else words.rate(row["value"], row["unit"])


def _library(found: Mapping[str, Any]) -> Text:
    """One of the TensorRT libraries: what it builds for, and what is missing."""
    able = f"{found['version']}, builds for SM {', '.join(found['builds_for'])}" if found["builds_for"] else ""
    missing = "; ".join(found["missing"])
    return Text.assemble(able, "; " if able and missing else "", (missing, DIM))


def _next(path: Path, manifest: Manifest) -> list[RenderableType]:
    near = _near(path)
    place, checkpoint = shlex.quote(near), usage.has(manifest, "model/")
    commands = [f"quantkit verify {place}"]
    if manifest.model.kind == "decoder":
        graph = usage.has(manifest, "onnx/")
        alone = usage.file_runtime(manifest) or usage.engine_runtime(manifest)
        commands.append(usage.generate(place, None if checkpoint else "onnxruntime" if graph else alone))
    if checkpoint:
        auto = usage.auto_class(manifest)
        commands.append(f"{auto}.from_pretrained({str(Path(near) / 'model')!r})  # Python, transformers")
    found = [Text("  next", "bold"), *(copied(f"    {command}") for command in commands)]
    if usage.has(manifest, "report.html"):
        found += [Text("  report", "bold"), copied(f"    {Path(near) / 'report.html'}")]
    return list(found)


def _near(path: Path) -> str:
    """A path as one would type it here: relative where it lies below the current folder."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd().resolve())}"
    except (ValueError, OSError):
        return str(path)


def _check(check: Check) -> Text:
    mark, style = MARK[check.ok]
    return Text.assemble((mark, style), f" {figures.short(check)} {figures.relation(check)}".rstrip())


def _call(step: Mapping[str, Any]) -> str:
    name, settings = next(iter(step.items()))
    inner = ", ".join(f"{key}: {json.dumps(value)}" for key, value in (settings or {}).items()).replace(chr(34), "")
    return f"{name} ({inner})" if inner else str(name)


def _tokens(tokens: Mapping[str, Any]) -> str:
    if "pairs" in tokens:
        return f"{tokens['set']} ({tokens['split']}), {tokens['pairs']} pairs"
    # of a graph, samples are not cut into tokens
    what = f"sequences of {tokens['tokens']} tokens" if "tokens" in tokens else "samples"
    more = figures.written(tokens.get("generated")) + figures.begins(tokens.get("begins"))
    return f"{tokens['set']} ({tokens['split']}), {tokens['samples']} {what}{more}"
