"""What a command prints: results in, rich renderables out. Nothing here prints, computes or reads files.

Text from outside (names, reasons, paths) never passes through rich's markup. Everything fits 80 columns by wrapping;
paths and commands, which are there to be copied, are never broken.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantkit.bundle import Check, Decision, Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, figures, usage
from quantkit.report.bundle.curves import Series
from quantkit.report.catalog import Entry
from quantkit.report.kit import words

_MARK = {True: ("✓", "green"), False: ("✗", "bold red")}
_DIM = "dim"


def write(renderables: Iterable[RenderableType], file: IO[str]) -> None:
    """Print renderables: in colour on a terminal, plain elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for renderable in renderables:
            # text that must not be wrapped is to be copied: it may run over the edge
            console.print(renderable, soft_wrap=isinstance(renderable, Text) and bool(renderable.no_wrap))
    # tables fill their lines up with spaces
    file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().split("\n")[:-1]))


def summary(
    path: Path,
    manifest: Manifest,
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    seconds: Mapping[str, float | None] | None = None,
    memory_peak_bytes: int | None = None,
) -> list[RenderableType]:
    """A bundle on one screen: the verdict, what it costs, how fast it is, what held, what was decided, what to do next.

    Args:
        path: of the bundle.
        manifest: its.
        rows: its measurements.
        notes: what a reader must know about the figures; stands right under them.
        seconds: `quantize_cpu` and `total`, where it has just been made.
        memory_peak_bytes: of the process that made it.
    """
    ok = manifest.state == "complete"
    mark, style = _MARK[ok]
    recipe = str(manifest.recipe.get("name", ""))
    target = str((manifest.target or {}).get("name", ""))
    title = Text.assemble((f"{mark} ", style), (manifest.model.name, "bold"), f", {recipe}, for {target}")
    if not ok:
        title.append(": a gate failed", "bold red")
    found: list[RenderableType] = [Text(), title, _copied(f"  {path}"), *_verdict(path, manifest, rows), Text()]
    found += _results(manifest, rows, notes)
    found += [Text(), Padding(_facts(manifest, seconds, memory_peak_bytes), (0, 0, 0, 2)), Text()]
    return found + _next(path, manifest)


def _verdict(path: Path, manifest: Manifest, rows: Sequence[Row]) -> list[RenderableType]:
    """The verdict as a sentence with its reasons; where speed was not measured, what does it."""
    answer, because = figures.verdict(manifest, rows)
    sentence = Text.assemble(("verdict: ", _DIM), (answer, "bold" if manifest.verdict else ""))
    shown: list[RenderableType] = [Padding(sentence, (0, 0, 0, 2))]
    shown += [Padding(_marked("·", _DIM, reason), (0, 0, 0, 4)) for reason in because]
    if manifest.layers and not figures.timed(rows):
        commands = usage.measure(manifest, shlex.quote(_near(path)))
        shown += [Text("  its speed has not been measured; this does:", _DIM)] if manifest.verdict else []
        shown += [_copied(f"    {command}") for command in commands]
    return shown


def _results(manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[RenderableType]:
    """Size and accuracy, what they were scored on, speed, and what a reader must know about all of it."""
    found: list[RenderableType] = [Padding(_figures(manifest, rows), (0, 0, 0, 2))]
    if about := figures.scored(rows):
        found.append(Padding(Text(f"scored on {about}", _DIM), (0, 0, 0, 2)))
    found += [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in notes]
    timed = curves.series(manifest, rows)
    for curve in timed:
        found += [Text(), Padding(_speed(curve), (0, 0, 0, 2))]
    said = curves.conditions(timed, rows)
    found += [Text()] if said else []
    return found + [Padding(Text(text, _DIM), (0, 0, 0, 2)) for text in said]


def _figures(manifest: Manifest, rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("")
    table.add_column("original", justify="right", no_wrap=True)
    table.add_column("quantized" if manifest.layers else "bundle", justify="right", no_wrap=True)
    table.add_column("")
    tables = figures.tables(rows, layers=len(manifest.layers), dtype=manifest.model.source.dtype)
    for export, lines in tables:
        if export:
            table.add_row(Text(export, _DIM), "", "", "")
        for line in lines:
            table.add_row(line.label, line.before, Text(line.after, "bold"), Text(line.remark))
    return table


def _speed(curve: Series) -> RenderableType:
    """One curve: a line a size, what follows from it, and how it was measured."""
    head, body = curves.brief(curve)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    for name in head:
        table.add_column(name, justify="right")
    for line in body:
        table.add_row(
            *(Text(cell, "bold" if name == "speed-up" else "") for name, cell in zip(head, line, strict=True))
        )
    title = Text.assemble((curve.title, "bold"), f", {curve.other} → {curve.this}")
    follows = [curves.break_even(curve), curves.first_tax(curve), *curves.skipped(curve)]
    said = " ".join([*curves.outcomes(curve), *(sentence for sentence in follows if sentence)])
    warned = [_marked("!", "bold yellow", caution) for caution in curves.cautions(curve)]
    return Group(title, table, Text(said), *warned, Text(curves.how(curve), _DIM))


def _facts(manifest: Manifest, seconds: Mapping[str, float | None] | None, memory: int | None) -> Table:
    """Gates, checks, decisions, cost: a heading and what is to be said under it."""
    table = _pairs()
    said = [_check(check) for check in figures.gates(manifest.checks)]
    said += [Text.assemble(("–", "yellow"), f" {gate} not judged") for gate in figures.unjudged(manifest)]
    table.add_row("gates", _lines(said) if said else Text("none set", _DIM))
    others = figures.other_checks(manifest.checks)
    if others:
        table.add_row("checks", _lines([_check(check) for check in others]))
    if manifest.weights:
        table.add_row("weights", _lines([Text(line) for line in figures.weights(manifest.weights)]))
    table.add_row("decisions", decisions(manifest.decisions))
    if seconds is not None:
        parts = []
        if seconds.get("total") is not None:
            parts.append(f"{words.duration(seconds['total'] or 0)} in all")
        if seconds.get("quantize_cpu"):
            parts.append(f"{words.duration(seconds['quantize_cpu'] or 0)} of processor time to quantize")
        if memory:
            parts.append(f"peak memory {words.size(memory)}")
        table.add_row("took", ", ".join(parts))
    return table


def decisions(taken: Sequence[Decision]) -> RenderableType:
    """What was done otherwise than asked, grouped, each group with its first example and its reason."""
    if not taken:
        return Text("none: everything was done as the recipe says", _DIM)
    shown = []
    for group in figures.grouped(taken):
        text = Text.assemble((f"{group.count} × {group.code}", "yellow"), f" ({group.pass_}), ")
        text.append(f"{'first ' if group.count > 1 else ''}{group.where}: ")
        text.append(f"{group.change}; " if group.change else "")
        shown.append(text.append(group.reason))
    return _lines(shown)


def checks(found: Sequence[Check]) -> list[RenderableType]:
    """Checks one under the other, with what is wrong where one fails."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in found:
        mark, style = _MARK[check.ok]
        table.add_row(Text(mark, style), check.name, figures.relation(check), Text(check.where, _DIM))
    return [Padding(table, (0, 0, 0, 2))]


def verified(path: Path, manifest: Manifest, found: Sequence[Check], notes: Sequence[str]) -> list[RenderableType]:
    """What `verify` found."""
    failed = [check for check in found if not check.ok]
    mark, style = _MARK[not failed]
    outcome = f"{len(failed)} of {len(found)} checks failed" if failed else f"all {len(found)} checks hold"
    head = Text.assemble((f"{mark} ", style), (manifest.model.name, "bold"), f": {outcome}")
    identity = Text(f"  content_sha256 {manifest.content_sha256}", _DIM, no_wrap=True)
    shown: list[RenderableType] = [head, _copied(f"  {path}"), identity, *checks(found)]
    return shown + [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in notes]


def measured(path: Path, manifest: Manifest, rows: Sequence[Row], notes: Sequence[str]) -> list[RenderableType]:
    """What `measure` found."""
    head = Text.assemble((manifest.model.name, "bold"), f", {manifest.recipe.get('name', '')}")
    shown: list[RenderableType] = [head, _copied(f"  {path}"), *_verdict(path, manifest, rows), Text()]
    return shown + _results(manifest, rows, notes)


def planned(plan: Mapping[str, Any]) -> list[RenderableType]:
    """What a compile would do; `plan` is the result of `--dry-run` as the envelope has it."""
    model = plan["model"]
    head = Text.assemble(("would compile ", _DIM), (str(model["name"]), "bold"), f" with {plan['recipe']}")
    table = _pairs()
    was = f", converted from {model['was']}" if model["was"] else ""
    weights = words.size(model["bytes"])
    table.add_row("model", f"{model['ref']}, a {model['kind']}, {weights} of {model['dtype']}{was}")
    table.add_row("target", str(plan["target"]))
    lines = []
    for scheme in plan["schemes"]:
        what = f"{words.plural(scheme['layers'], 'layer')}, {words.figure(scheme['bits_per_weight'], 3)} bits a weight"
        lines.append(Text(f"{what}: {scheme['scheme']}"))
    if plan["kept"]:
        more = f" and {len(plan['kept']) - 3} more" if len(plan["kept"]) > 3 else ""
        lines.append(Text(f"{len(plan['kept'])} kept as they are: {', '.join(plan['kept'][:3])}{more}"))
    table.add_row("layers", _lines(lines) if lines else Text("none is quantized", _DIM))
    if macs := plan.get("macs"):
        share = words.percent(macs["quantized"] / macs["all"])
        table.add_row("products", f"{macs['all']:,} multiply-accumulates a sample, {share} of them in integers")
    table.add_row("passes", _lines([Text(_call(step)) for step in plan["passes"]]) if plan["passes"] else "none")
    seen = plan["calibration"]
    table.add_row("calibrates on", _tokens(seen) if seen else "nothing: no pass looks at data")
    table.add_row("scores on", _tokens(plan["scoring"]))
    table.add_row("exports", ", ".join(_call(step) for step in plan["export"]))
    if plan["decisions"]:
        table.add_row("decisions", decisions([Decision.model_validate(entry) for entry in plan["decisions"]]))
    total = sum(plan["seconds"].values())
    stages = ", ".join(f"{name} {words.duration(value)}" for name, value in plan["seconds"].items())
    table.add_row("takes", f"{words.about(total)} ({stages})")
    disk = plan["disk_bytes"]
    kept = f", {words.size(disk['cache'])} for the float baseline" if disk["cache"] else ""
    building = words.size(disk["bundle"] + disk["work"])
    table.add_row("needs", f"about {words.size(plan['memory_bytes'])} of memory, {building} of disk while it is built")
    table.add_row("leaves", f"about {words.size(disk['bundle'])}{kept}")
    shown: list[RenderableType] = [head, Text(), Padding(table, (0, 0, 0, 2))]
    shown += [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in plan["notes"]]
    return [*shown, Text(), _copied(f"  would write {plan['out']}"), Text("  nothing was written", _DIM)]


def listing(kinds: Mapping[str, Mapping[str, str]]) -> list[RenderableType]:
    """What there is of each kind: names and summaries."""
    width = max((len(name) for found in kinds.values() for name in found), default=1)
    shown: list[RenderableType] = []
    for kind, found in kinds.items():
        if len(kinds) > 1:
            shown += [Text(kind, "bold")]
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=width, no_wrap=True)
        table.add_column()
        for name, about in found.items():
            table.add_row(Text(name, "cyan"), Text(about))
        shown += [Padding(table, (0, 0, 0, 2 if len(kinds) > 1 else 0)), *([Text()] if len(kinds) > 1 else [])]
    return shown[:-1] if len(kinds) > 1 else shown


def entry(found: Entry) -> list[RenderableType]:
    """One thing: what it is, its facts one under the other, and the text that defines it."""
    head = Text.assemble((found.name, "bold"), (f"  {found.kind}", _DIM))
    shown: list[RenderableType] = [head, Text(found.summary)]
    if found.facts:
        table = _pairs()
        for label, value in found.facts:
            table.add_row(label, Text(value))
        shown += [Text(), Padding(table, (0, 0, 0, 2))]
    if found.source:
        shown += [Text(), *(_copied(line) for line in found.source.rstrip().splitlines())]
    return shown


def machine(report: Mapping[str, Any]) -> list[RenderableType]:
    """What the doctor found."""
    about = report["machine"]
    table = _pairs()
    table.add_row("processor", f"{about['device']['name']}, {words.plural(about['cores'], 'core')}")
    table.add_row("instructions", ", ".join(about["isa"]))
    table.add_row("memory", f"{words.size(about['memory_limit'])} for this process")
    if about.get("last_level_cache"):
        table.add_row("last-level cache", words.size(about["last_level_cache"]))
    gpus = about.get("gpus") or []
    table.add_row(
        "GPUs", ", ".join(str(gpu.get("name", gpu)) for gpu in gpus) or str(about.get("gpus_absent") or "none")
    )
    packages = about.get("packages", {})
    missing = [name for name, version in packages.items() if version is None]
    table.add_row("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version))
    if missing:
        table.add_row("not installed", Text(", ".join(missing), _DIM))
    for each in report.get("tensorrt", []):
        table.add_row(each["library"], _library(each))
    ceilings = Table.grid(padding=(0, 2, 0, 0))
    for row in report["measurements"]:
        value = words.rate(row["value"], row["unit"]) if row["value"] is not None else "not measured"
        kind = row["settings"].get("compute_type")
        ceilings.add_row(f"{row['name'].removeprefix('ceiling.')}{f' {kind}' if kind else ''}", Text(value, "bold"))
    shown: list[RenderableType] = [Text("this machine", "bold"), Padding(table, (0, 0, 0, 2))]
    if report["measurements"]:
        shown += [Text(), Text("measured ceilings", "bold"), Padding(ceilings, (0, 0, 0, 2))]
    shown += [Text(), Text.assemble(("target ", _DIM), (str(report["target"]), "bold"))]
    if report["written"]:
        shown.append(_copied(f"  figures written to {report['written']}"))
    elif report["figures"]:
        shown.append(Text(f"  {words.plural(len(report['figures']), 'figure')} measured; `--write` keeps them", _DIM))
    if report["unmeasured"]:
        shown.append(Padding(Text(f"not measured: {', '.join(report['unmeasured'])}", _DIM), (0, 0, 0, 2)))
    return shown + [Padding(_marked("!", "bold yellow", note), (0, 0, 0, 2)) for note in report["warnings"]]


def _library(found: Mapping[str, Any]) -> Text:
    """One of the TensorRT libraries: what it builds for, and what is missing."""
    able = f"{found['version']}, builds for SM {', '.join(found['builds_for'])}" if found["builds_for"] else ""
    missing = "; ".join(found["missing"])
    return Text.assemble(able, "; " if able and missing else "", (missing, _DIM))


def _next(path: Path, manifest: Manifest) -> list[RenderableType]:
    near = _near(path)
    place, checkpoint = shlex.quote(near), usage.has(manifest, "model/")
    commands = [f"quantkit verify {place}"]
    if manifest.model.kind == "decoder":
        graph = usage.has(manifest, "onnx/")
        commands.append(
            usage.generate(place, None if checkpoint else "onnxruntime" if graph else usage.engine_runtime(manifest))
        )
    if checkpoint:
        auto = usage.auto_class(manifest)
        commands.append(f"{auto}.from_pretrained({str(Path(near) / 'model')!r})  # Python, transformers")
    found = [Text("  next", "bold"), *(_copied(f"    {command}") for command in commands)]
    if usage.has(manifest, "report.html"):
        found += [Text("  report", "bold"), _copied(f"    {Path(near) / 'report.html'}")]
    return list(found)


def _near(path: Path) -> str:
    """A path as one would type it here: relative where it lies below the current folder."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd().resolve())}"
    except (ValueError, OSError):
        return str(path)


def _check(check: Check) -> Text:
    mark, style = _MARK[check.ok]
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
    return f"{tokens['set']} ({tokens['split']}), {tokens['samples']} {what}{figures.begins(tokens.get('begins'))}"


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column()
    return table


def _marked(mark: str, style: str, text: str) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text(mark, style), Text(text))
    return table


def _lines(texts: Sequence[Text]) -> Table:
    table = Table.grid()
    for text in texts:
        table.add_row(text)
    return table


def _copied(text: str) -> Text:
    return Text(text, no_wrap=True)
