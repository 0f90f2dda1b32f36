"""Summary of a bundle in ten lines: size, accuracy, speed, verdict, and the next commands.

It ends the screen of a compile. It therefore uses only terms of the glossary and fits into 80 columns. Every figure of
accuracy and speed has its 95 % interval, or the reason why it is not decided.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up, state
from quantkit.report.bundle import figures, usage
from quantkit.report.kit import words
from quantkit.report.kit.tree import Cell, Code, Facts, Line, Part, Section, Styled


def closing(manifest: Manifest, rows: Sequence[Row], place: str, files: usage.Files) -> list[Part]:
    """Build the summary; `place` is the bundle's folder as a user would type it, `files` are those of the model."""
    facts: list[tuple[Line, Cell]] = [("made", _made(manifest, place))]
    for label, lines in (("size", _size(rows)), ("accuracy", _accuracy(rows)), ("speed", _speed(manifest, rows))):
        facts += [(label, list(lines))] if lines else []
    answer, _ = figures.verdict(manifest, rows, prompts=False)
    left = figures.untimed(manifest, rows)
    batches = f"batches {left[0]} to {left[-1]}" if len(left) > 1 else f"batch {left[0]}" if left else ""
    more = f"; {batches} not timed yet" if left else ""
    judged: list[Line] = [(Styled(answer, figures.tone(manifest)), more)]
    judged += [manifest.verdict.instead] if manifest.verdict and manifest.verdict.instead else []
    facts.append(("verdict", judged))
    return [Facts(facts), Section("", [Code("", "\n".join(_next(manifest, rows, place, files)))])]


def _made(manifest: Manifest, place: str) -> str:
    many = (f"{words.plural(count, 'layer')} in {text.split(',')[0]}" for count, text in figures.schemes(manifest))
    return f"{place}{words.bracketed('; '.join(many))}"


def _size(rows: Sequence[Row]) -> list[str]:
    return [
        f"{export} {times}: {words.size(row.baseline.value)} → {words.size(row.value or 0.0)}".lstrip()
        for export, times, row in figures.sizes(rows)
        if row.baseline is not None
    ]


def _accuracy(rows: Sequence[Row]) -> list[str]:
    scored = {row.name: row for row in reversed(rows) if row.name.startswith("accuracy.") and row.value is not None}
    kl, perplexity = scored.get("accuracy.kl"), scored.get("accuracy.perplexity")
    if kl is None or perplexity is None or perplexity.baseline is None:
        tables = (group for export, group in figures.tables(rows) if export)
        return [
            f"{label} {words.joined(before, after, by=' → ')}{words.bracketed(remark)}"
            for label, before, after, remark in next(tables, [])[:2]
        ]
    times = (perplexity.value or 0.0) / perplexity.baseline.value
    ends = perplexity.baseline.ratio_ci95
    inverse = (1 / ends[1], 1 / ends[0]) if ends and ends[0] > 0 else None
    before, after = words.short(perplexity.baseline.value), words.short(perplexity.value or 0.0)
    sure = words.bracketed(words.between(inverse, lambda ratio: f"{ratio:.3f}"))
    return [
        f"KL divergence {words.short(kl.value or 0.0)} nats{_sure(kl.ci95)}",
        f"perplexity {before} → {after}: {times:.3f} times{sure}",
        *_heard(scored.get("accuracy.wer")),
    ]


def _heard(row: Row | None) -> list[str]:
    """Return the line of a word error rate."""
    if row is None or row.baseline is None:
        return []
    before, after = (words.percent(value) for value in (row.baseline.value, row.value or 0.0))
    return [f"word error rate {before} → {after}: {figures.lost(row)}"]


def _speed(manifest: Manifest, rows: Sequence[Row]) -> list[str]:
    lines = []
    for name in ("latency.decode_step", "latency.prefill"):
        timed = [row for row in rows if row.name == name and row.value is not None and row.baseline is not None]
        if timed:
            lines.append(_timed(min(timed, key=lambda row: (row.batch or 0, *(row.shape or {}).values())), manifest))
    return lines or (["not timed"] if manifest.layers else [])


def _timed(row: Row, manifest: Manifest) -> str:
    speed, tokens, where = speed_up(row), (row.shape or {}).get("new_tokens", 1), f"batch {row.batch}"
    assert speed is not None and row.baseline is not None and row.value
    what = "a pass" if row.name == "latency.prefill" else "a token"
    if row.name == "latency.prefill" and manifest.model.kind == "decoder":
        where, what = f"{tokens}-token prompt", ""
    factor, unit = words.time_unit(min(row.value, row.baseline.value))
    before, after = (words.figure(seconds * factor, 3) for seconds in (row.baseline.value, row.value))
    times = f"{where}: {before} → {after} {unit} {what}".rstrip()
    if state(row) == "open":
        ends = words.between(speed.interval, words.short)
        return f"{times}, not decided: {'the machine was busy' if speed.busy else f'noise ({ends})'}"
    (low, high), ratio, how = speed.interval, speed.ratio, "faster"
    if ratio < 1:
        (low, high), ratio, how = (1 / high, 1 / low), 1 / ratio, "slower"
    return f"{times}, {words.times(ratio)} {how}{_sure((low, high))}"


def _sure(interval: tuple[float, float] | None) -> str:
    return words.bracketed(words.between(interval, words.short))


def _next(manifest: Manifest, rows: Sequence[Row], place: str, files: usage.Files) -> list[str]:
    typed, instead = shlex.quote(place), usage.recommend(manifest, files) if figures.is_refused(manifest) else ""
    lines = [instead] if instead else []
    if manifest.model.kind == "decoder":
        alone = usage.file_runtime(manifest) or usage.engine_runtime(manifest)
        runtime = "onnxruntime" if usage.has(manifest, "onnx/") else alone
        runs = None if usage.has(manifest, "model/") else runtime
        lines += usage.generate(manifest, typed, runs)
    if manifest.layers and (figures.untimed(manifest, rows) or not figures.timed(rows)):
        lines += usage.measure(manifest, typed, files) or usage.on_target(manifest, typed)
    else:
        lines.append(f"quantkit verify {typed}")
    if usage.has(manifest, "report.html"):
        lines.append(f"{place}/report.html")
    return lines
