"""Figures of a bundle as table lines: before, after, and the uncertainty, for terminal, page and card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.bundle import AdapterEntry, Check, Decision, Manifest, PromptVerdict, WeightsEntry
from quantkit.bundle.manifest import CalibrationEntry
from quantkit.measurement.accuracy.outputs import NOTHING
from quantkit.measurement.load import LoadVerdict, outcome
from quantkit.measurement.rows import Data, Row
from quantkit.measurement.timing.schedule import LARGEST
from quantkit.measurement.verdict import speed_up
from quantkit.model.source.alias import ALIASES
from quantkit.planning import matrix
from quantkit.planning.assigned import FLOATS_LIMIT, TOWER
from quantkit.report.kit import words
from quantkit.report.kit.tree import Line, Sheet, Styled
from quantkit.report.kit.words import by
from quantkit.runtimes import timed as in_order

_BITS = {"float32": "32", "float16": "16", "bfloat16": "16"}
_GATE = "gate."
# shares of right answers; their differences to the original are paired
RECALL = {f"accuracy.recall_at_{k}": f"recall at {k}" for k in (1, 5, 10)} | {"accuracy.ndcg_at_10": "nDCG at 10"}
SHARES = {"accuracy.top1": "top-1 accuracy", "accuracy.top5": "top-5 accuracy", **RECALL}
# beginnings of the names of rows about accuracy
SCORES = ("accuracy.", "across.kl", "across.top1_agreement")
# line of a table: label, original's figure ("" if it is about both sides), this model's figure, remark
Figures = tuple[str, str, str, str]


def tables(rows: Sequence[Row], *, layers: int = 0, dtype: str = "") -> list[tuple[str, list[Figures]]]:
    """Return (export, its lines); sizes and memory come first, with an empty export: they describe the whole bundle."""
    by_export = by(rows, lambda row: variant(row) if row.name.startswith(SCORES) else "")
    by_name = [(name, _lines(group, layers, dtype)) for name, group in by_export.items()]
    return [(name, group) for name, group in sorted(by_name, key=lambda pair: pair[0] != "") if group]


def _lines(rows: Sequence[Row], layers: int, dtype: str) -> list[Figures]:
    exports = {export(row) for row in rows if row.name == "size.bytes"}
    lines: list[Figures] = []
    for name, make in _MAKERS.items():
        for row in rows:
            if row.name != name or (row.value is None and NOTHING not in row.flags):
                continue
            label, before, after, remark = make(row, row.value or 0.0)
            if name == "size.bits_per_weight":
                before, remark = _BITS.get(dtype, ""), f"in {words.plural(layers, 'quantized layer')}"
            elif name == "size.bytes" and len(exports) > 1:
                label = f"{label}, {export(row)}"
            if (line := (label, before, after, remark)) not in lines:  # several exports hold the same weights
                lines.append(line)
    return lines


def _smaller(row: Row, value: float) -> tuple[str, str, str]:
    if row.baseline is None:
        return "", words.size(value), ""
    ratio, remark = row.baseline.ratio, ""
    if ratio is not None:
        remark = f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / ratio:.2f}× larger"
        remark = "the same" if f"{ratio:.2f}" == "1.00" else remark
    return words.size(row.baseline.value), words.size(value), remark


def _peak(row: Row, value: float) -> Figures:
    before, after, remark = _smaller(row, value)
    return "peak memory", before, after, words.joined(remark, row.runtime or "", where(row))


def _perplexity(row: Row, value: float) -> Figures:
    if row.baseline is None:
        return "perplexity", "", words.figure(value), words.between(row.ci95, words.figure)
    remark = ""
    if row.baseline.ratio:
        # a row's ratio is above 1 for the better side; perplexity is shown the other way round
        remark = f"{1 / row.baseline.ratio:.3f} times"
        if row.baseline.ratio_ci95 and row.baseline.ratio_ci95[0] > 0:
            low, high = row.baseline.ratio_ci95
            remark += f" ({1 / high:.3f} to {1 / low:.3f})"
    return "perplexity", words.figure(row.baseline.value), words.figure(value), remark


def _next_word(row: Row, value: float) -> Figures:
    if row.baseline is None:
        return "next word right", "", words.percent(value), words.between(row.ci95, words.percent)
    points = f"{100 * (value - row.baseline.value):+.1f} points".replace("-", "−")
    return "next word right", words.percent(row.baseline.value), words.percent(value), points


def _kl(row: Row, value: float) -> Figures:
    sure = words.between(row.ci95, words.short)
    return f"KL divergence{_across(row)}", "", words.short(value), f"{sure} nats".strip()


def _across(row: Row) -> str:
    """Name the other runtime of a row that compares a model with itself."""
    if not row.name.startswith("across."):
        return ""
    return (
        f"{' of the original' if row.settings.get('floor') else ''} from itself in {row.settings['baseline_runtime']}"
    )


def _right(row: Row, value: float) -> Figures:
    form = share_form(row)
    before = form(row.baseline.value) if row.baseline is not None else ""
    return SHARES[row.name], before, form(value), words.joined(words.between(row.ci95, form), lost(row), by="; ")


def _wrong_words(row: Row, value: float) -> Figures:
    before = words.percent(row.baseline.value) if row.baseline is not None else ""
    heard = f"{(row.shape or {}).get('words', 0):,} words"
    remark = words.joined(words.between(row.ci95, words.percent), lost(row), heard, by="; ")
    return "word error rate", before, words.percent(value), remark


def _alone(label: str | Callable[[Row], str], form: words.Form | None = None) -> Callable[[Row, float], Figures]:
    def line(row: Row, value: float) -> Figures:
        shown, name = form or share_form(row), label if isinstance(label, str) else label(row)
        return name, "", shown(value), words.between(row.ci95, shown)

    return line


def _five(value: float) -> str:
    return words.figure(value, 5)


def _cosine(row: Row, value: float) -> Figures:
    least = (row.quantiles or {}).get("p0")
    remark = words.joined(words.between(row.ci95, _five), f"least {_five(least)}" if least is not None else "", by="; ")
    return "cosine to the original", "", _five(value), remark


def same(row: Row, value: float) -> Figures:
    """Format the share of overlapping boxes, or equal values, with the counts of both sides."""
    label = "same boxes" if row.settings.get("by") == "boxes" else "same values"
    if row.value is None:
        return label, "", "–", "neither side has any in a sample"
    before, after = ((row.shape or {}).get(side) for side in ("original", "candidate"))
    counts = "" if before is None else f"{after:,} against {before:,}"
    return label, "", words.percent(value), words.joined(words.between(row.ci95, words.percent), counts, by="; ")


def agreement(row: Row) -> str:
    """Name the agreeing items of a row: words, classes, or classes with a confident original."""
    if not of_classes(row):
        return "same most likely word"
    sure = row.settings.get("surer_than")
    if not isinstance(sure, float):
        return "same class as the original"
    return f"same class, original over {words.whole(sure)} sure"


# in the order they are shown
_MAKERS: dict[str, Callable[[Row, float], Figures]] = {
    "size.bytes": lambda row, value: ("weights on disk", *_smaller(row, value)),
    "size.bytes_read": lambda row, value: (f"weights read by {row.settings.get('way')}", "", words.size(value), ""),
    "size.bits_per_weight": _alone("bits per weight", words.short),
    **dict.fromkeys(SHARES, _right),
    "accuracy.perplexity": _perplexity,
    "accuracy.kl": _kl,
    "accuracy.top1_agreement": _alone(agreement),
    "accuracy.next_word": _next_word,
    "accuracy.wer": _wrong_words,
    "across.kl": _kl,
    "across.top1_agreement": _alone(lambda row: f"same most likely word{_across(row)}", words.percent),
    "accuracy.cosine": _cosine,
    "accuracy.relative_error": _alone("error relative to the original", lambda value: words.percent(value, 2)),
    "accuracy.same": same,
    "memory.peak": _peak,
}


def of_classes(row: Row) -> bool:
    """Tell if a row scores a classifier."""
    return "classes" in (row.shape or {})


def share_form(row: Row) -> words.Form:
    """Return the format of a share: a tenth of a percent, or a hundredth from a thousand items on."""
    places = 2 if (of_classes(row) or row.name in RECALL) and (row.n or 0) >= 1000 else 1
    return lambda value: words.percent(value, places)


def points_form(row: Row) -> words.Form:
    """Return the format of percentage points, with as many digits as `share_form`."""
    return lambda value: words.points(value, 2 if (row.n or 0) >= 1000 else 1)


def lost(row: Row) -> str:
    """Format the change against the original: `−0.2 points (−0.5 to 0.1), McNemar p 0.30`; "" if unknown."""
    base = row.baseline
    if base is None or base.difference is None:
        return ""
    form = points_form(row)
    test = f", McNemar p {words.chance(base.p_value)}" if base.p_value is not None else ""
    sure = words.bracketed(words.between(base.difference_ci95, form))
    return f"{form(base.difference)} points{sure}{test}"


def variant(row: Row) -> str:
    """Name the export of a row, to distinguish several exports; "" without a runtime."""
    level, cache, output = (row.settings.get(name) for name in ("accuracy_level", "kv_cache", "output"))
    cached = f"context {(row.shape or {}).get('context', 0):,}, {cache} cache" if cache is not None else ""
    leveled, named = f"level {level}" if level is not None else "", f"output {output}" if output is not None else ""
    return words.joined(row.runtime or "", leveled, cached, named, str(row.settings.get("way", "")))


def sizes(rows: Sequence[Row]) -> list[tuple[str, str, Row]]:
    """List (export or "", times smaller, row) of the first export, and of any on the other side of the original."""
    known = [row for row in rows if row.name == "size.bytes" and row.value and row.baseline and row.baseline.ratio]
    smaller = [bool(row.baseline and (row.baseline.ratio or 0) >= 1) for row in known]
    shown = [row for i, row in enumerate(known) if i == 0 or smaller[i] != smaller[0]]
    names = (export(row) if "export" in row.settings else "" for row in shown)
    return [(name, _smaller(row, row.value or 0.0)[2], row) for name, row in zip(names, shown, strict=True)]


def export(row: Row) -> str:
    """Name the folder of a row of sizes: `checkpoint` for `model`, `ONNX` for `onnx`."""
    folder = str(row.settings.get("export") or "this bundle")
    return {"model": "checkpoint", "onnx": "ONNX"}.get(folder, folder)


def where(row: Row) -> str:
    """Format `batch 1, context 128` or `batch 1, 256 tokens`; "" for a row without a shape."""
    shape = row.shape or {}
    return words.joined(
        f"batch {row.batch}" if row.batch else "",
        f"context {shape['context']:,}" if shape.get("context") else "",
        f"{shape['new_tokens']:,} tokens" if shape.get("new_tokens", 1) > 1 else "",
    )


def flags(row: Row) -> str:
    """Format a row's flags as words."""
    return ", ".join(flag.replace("-", " ") for flag in row.flags)


def scored(rows: Sequence[Row]) -> str:
    """Describe the data and the intervals of the accuracy; "" without accuracy."""
    row = next((row for row in rows if row.data is not None), None)
    if row is None or row.data is None:
        return ""
    sequences, groups = ((row.shape or {}).get(name) for name in ("sequences", "clusters"))
    data = {one.runtime: one.data for one in rows if one.name == "accuracy.kl" and one.data is not None}
    start = begins(row.data.begins).replace("each", "each sequence")
    if len({(one.set, one.split) for one in data.values()}) > 1:
        sets = (f"{words.plural(one.items, counted(row))} of {one.set} ({one.split})" for one in data.values())
        what = ", ".join(f"{text} in {runtime}" for text, runtime in zip(sets, data, strict=True)) + start
    elif len({one.items for one in data.values()}) > 1:
        by_runtime = (f"{words.plural(one.items, counted(row))} in {runtime}" for runtime, one in data.items())
        what = f"{', '.join(by_runtime)}, all of {row.data.set} ({row.data.split}){start}"
    else:
        what = f"{words.plural(row.data.items, counted(row))} of {row.data.set} ({row.data.split})"
        what += f" in {words.plural(sequences, 'sequence')}{begins(row.data.begins)}" if sequences else ""
    over = "" if groups is None else f" over {words.plural(groups, 'group')} of similar {counted(row)}s"
    paired = any(row.baseline is not None and row.baseline.difference is not None for row in rows)
    how = ""
    if paired:
        exact = "McNemar's exact test" if groups is None else "McNemar's test"
        how = f"; changes are paired, {counted(row)} by {counted(row)}, with {exact}"
    return f"{what}; intervals 95 %{over}{how}"


def scored_on(rows: Sequence[Row]) -> list[Data]:
    """List the data of the scores: the largest sample of each set and split."""
    largest = sorted((row.data for row in rows if row.data is not None), key=lambda data: -data.items)
    order = dict.fromkeys((row.data.set, row.data.split) for row in rows if row.data is not None)
    first = {key: own[0] for key, own in by(largest, lambda data: (data.set, data.split)).items()}
    return [first[key] for key in order]


def counted(row: Row) -> str:
    """Name the unit of a row's count."""
    if of_classes(row):
        return next((unit for unit in ("sample", "text", "pair") if f"ci95-by-{unit}" in row.flags), "image")
    if row.name in RECALL or "ci95-by-pair" in row.flags:
        return "pair"
    if "output" in row.settings:
        return "item"
    return "sequence" if row.name == "accuracy.cosine" else "position"


def calibrated(seen: CalibrationEntry) -> str:
    """Describe the calibration data: `prose-en (calib), 16 sequences of 512 tokens`, or `16 items` without tokens."""
    of = f"sequences of {seen.tokens} tokens" if seen.tokens else "items"
    return f"{seen.set} ({seen.split}), {seen.samples} {of}{written(seen.generated)}{begins(seen.begins)}"


def written(samples: int | None) -> str:
    """Count the sequences written by the model itself, as an addition to the number of sequences."""
    return f", {samples} of them written by the model itself" if samples else ""


def begins(tokens: str | None) -> str:
    """Describe the start of the sequences, as an addition: `, each beginning with <bos>`."""
    return f", each beginning with {tokens}" if tokens else ""


# --- checks and decisions --------------------------------------------------------------------------------------------


def gates(checks: Sequence[Check]) -> list[Check]:
    """Return the checks of the recipe's gates."""
    return [check for check in checks if check.name.startswith(_GATE)]


def unjudged(manifest: Manifest) -> list[str]:
    """List the recipe's gates without a score."""
    judged = {check.name.rpartition(".")[2] for check in gates(manifest.checks)}
    asked: dict[str, Any] = manifest.recipe.get("gates") or {}
    names = [name for name, limit in asked.items() if limit is not None and not isinstance(limit, dict)]
    names += [f"{task} {name}" for name, tasks in asked.items() if isinstance(tasks, dict) for task in tasks]
    return [name for name in names if name not in judged]


def relation(check: Check) -> str:
    """Format a check: `0.143 ≤ 0.5`."""
    if check.value is None or check.limit is None:
        return ""
    if check.limit == 0 and not check.name.startswith(_GATE):  # a count of errors
        return "" if check.ok else f"{check.value:g} wrong"
    at_least = check.name.endswith("_min") or check.name.startswith("integer.")
    sign = ("≥" if at_least else "≤") if check.ok else ("<" if at_least else ">")
    unit = " points" if "_drop_" in check.name else ""
    return f"{words.short(check.value)} {sign} {check.limit:g}{unit}"


def short(check: Check) -> str:
    """Shorten a check's name: `kl_max`, or `kl_max in onnxruntime`."""
    if not check.name.startswith(_GATE):
        return check.name
    runtime, _, gate = check.name.removeprefix(_GATE).rpartition(".")
    return f"{gate} in {runtime}" if runtime else gate


def grouped(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Group decisions by pass and code, in the order of their first appearance."""
    return list(by(decisions, lambda decision: (decision.pass_, decision.code)).values())


def decisions_table(groups: Sequence[Sequence[Decision]]) -> Sheet:
    """Build the table of decisions: the first of each group, with the group's size if any has several."""
    several = any(len(group) > 1 for group in groups)
    head = ["decision", *(["times"] if several else []), "first at" if several else "at", "change", "reason"]
    rows: list[list[Line]] = []
    for group in groups:
        first, count = group[0], [f"{len(group)}"] if several else []
        name = (Styled(first.code, "name"), f" ({first.pass_})")
        rows.append([name, *count, first.where, change(first), first.reason])
    return Sheet(head, rows, words=len(head), title="Decisions", stacked=True)


def deviation(group: Sequence[Decision]) -> str:
    """Describe decisions of one code in a line, by the first of them."""
    first, times = group[0], f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{first.code} ({first.pass_}) at {first.where}{times}: {words.joined(change(first), first.reason, by='; ')}"


def change(decision: Decision) -> str:
    """Format a decision's change: `0.01 → 0.1`; "" without one."""
    if decision.from_ is None and decision.to is None:
        return ""
    return f"instead of {decision.from_}" if decision.to is None else f"{decision.from_} → {decision.to}"


def results_table(rows: Sequence[Row], *, layers: int = 0, dtype: str = "", quantized: bool = True) -> Sheet:
    """Build the table of size, accuracy and memory before and after, with a heading for each export."""
    body: list[list[Line]] = []
    for export_, group in tables(rows, layers=layers, dtype=dtype):
        body += [[Styled(export_, "dim")]] if export_ else []
        body += [[label, before, Styled(after, "strong"), remark] for label, before, after, remark in group]
    return Sheet(["", "original", "quantized" if quantized else "bundle", ""], body, 1, title="Before and after")


def notes(manifest: Manifest) -> list[str]:
    """Return notes on the source, for the reader of a bundle's figures."""
    alias = ALIASES.get(manifest.model.source.ref.removeprefix("alias:"))
    if alias is not None:
        return [alias.note] if alias.note else []
    return [f"the source was converted from {manifest.model.source.was}"] if manifest.model.source.was else []


# --- the verdict -----------------------------------------------------------------------------------------------------

_ANSWERS = {
    "ship_it": "ship it",
    "ship_up_to": "ship it up to batch {batch}",
    "intervals": "ship it at some batches only",
    "do_not_quantize": "do not quantize here",
    "use_instead": "use {format} instead",
    "inconclusive": "not decided",
}


def is_refused(manifest: Manifest) -> bool:
    """Tell whether the verdict is not to quantize, or a gate failed."""
    answer = manifest.verdict.answer if manifest.verdict else ""
    return answer == "do_not_quantize" or manifest.state == "gate_failed"


def verdict(manifest: Manifest, rows: Sequence[Row], *, prompts: bool = True) -> tuple[str, list[str]]:
    """Return (the verdict in words, its reasons), or why there is no verdict.

    The verdict includes the share of quantized weights if it is unexpectedly low.

    Args:
        prompts: True to include the verdict on prompts.
    """
    answer, because = _answer(manifest, rows, prompts=prompts)
    share = _in_floats(manifest.weights)
    if manifest.layers and share is not None and share > FLOATS_LIMIT:
        answer += f"; {1 - share:.0%} of the linear weights are quantized"
    return answer, because


def _under_load(rows: Sequence[Row], loaded: LoadVerdict) -> str:
    """Put a decided load into words; "" for an undecided one."""
    if loaded.better is None:
        return ""
    how = "serves more" if any(row.name == "load.goodput" for row in rows) else "answers sooner"
    return f"; under load in vLLM {'it' if loaded.better else 'the original'} {how}"


def _timed_in(rows: Sequence[Row]) -> str:
    """Return the runtime of the deciding times, "" without any."""
    known = {row.runtime for row in rows if row.name.startswith("latency.") and row.runtime is not None}
    return next((name for name in in_order(known) if name in known), "")


def _linear(entries: Sequence[WeightsEntry]) -> list[WeightsEntry]:
    """List the linear weights without a tower of images, which is kept on purpose."""
    return [entry for entry in entries if entry.linear and entry.reason != TOWER]


def _in_floats(entries: Sequence[WeightsEntry]) -> float | None:
    linear = _linear(entries)
    whole = sum(entry.elements for entry in linear)
    return sum(entry.elements for entry in linear if entry.state != "quantized") / whole if whole else None


def _answer(manifest: Manifest, rows: Sequence[Row], *, prompts: bool) -> tuple[str, list[str]]:
    judged, loaded = manifest.verdict, outcome([row for row in rows if row.name.startswith("load.")])
    if judged is None:
        if not manifest.layers:
            return "none; nothing is quantized, the bundle is a baseline for others", []
        if timed(rows):
            return "not judged yet: its speed has been measured", []
        if loaded is not None:
            return f"not timed by steps{_under_load(rows, loaded) or '; its load in vLLM is not decided'}", [
                loaded.text
            ]
        return "not measured yet: nothing says whether it is faster", []
    text = _ANSWERS.get(judged.answer, judged.answer.replace("_", " "))
    if judged.answer == "ship_up_to" and judged.batch == 1:
        text = "ship it at batch 1"
    elif judged.answer == "do_not_quantize" and untimed(manifest, rows) and manifest.state == "complete":
        text += f" at batch {words.listed(_batches(rows))}"
    text = text.format(batch=judged.batch, format=judged.format)
    if judged.answer == "use_instead" and judged.batch is not None:
        text += f", up to batch {judged.batch}"
    if loaded is not None and (ran := _timed_in(rows)):
        text += f" in {matrix.title(ran)}"
    shown = judged.prompts if prompts else None
    text += _undecided(rows, shown) if judged.answer == "inconclusive" else _prompts(rows, shown)
    text += _under_load(rows, loaded) if loaded is not None else ""
    return (f"forecast: {text}" if judged.forecast else text), [reason.rstrip(". ") for reason in judged.because]


def _prompts(rows: Sequence[Row], prompts: PromptVerdict | None) -> str:
    """Format `; prompts of 64 tokens are faster`; "" without any."""
    if prompts is None:
        return ""
    states = [(prompts.faster, "are faster"), (prompts.slower, "are slower")]
    why = {length: why for length in prompts.open if (why := _doubted(rows, length))}
    states.append(([length for length in prompts.open if length not in why], "do not differ beyond noise"))
    states += [(list(lengths), f"are not decided: {text}") for text, lengths in by(why, lambda x: why[x]).items()]
    parts = ", ".join(f"of {words.listed(lengths)} tokens {verb}" for lengths, verb in states if lengths)
    return f"; prompts {parts}" if parts else ""


def _undecided(rows: Sequence[Row], prompts: PromptVerdict | None) -> str:
    """Format `, for steps and prompts: the machine was busy`; only `: noise` without prompts."""
    alone = prompts is not None and not prompts.faster and not prompts.slower
    also = ", for steps and prompts" if alone else ""
    return f"{also}: {_doubted(rows) or 'noise'}{'' if alone else _prompts(rows, prompts)}"


def _doubted(rows: Sequence[Row], length: int | None = None) -> str:
    """Explain why times decide nothing, of a prompt length or of all; "" if their intervals can decide."""
    timed_ = [row for row in rows if row.name.startswith("latency.")]
    if length is not None:
        timed_ = [row for row in timed_ if row.name == "latency.prefill" and (row.shape or {})["new_tokens"] == length]
    speeds = [speed for row in timed_ if (speed := speed_up(row)) is not None]
    if any(speed.busy for speed in speeds):
        return "the machine was busy"
    return "a time or a ceiling is wrong" if any(speed.doubt == "ceiling" for speed in speeds) else ""


def tone(manifest: Manifest) -> str:
    """Return the verdict's tone: `good`, `bad`, `open` or `inconclusive`."""
    if manifest.state == "gate_failed":
        return "bad"
    if manifest.verdict is None:
        return "open"
    tones = {"ship_it": "good", "ship_up_to": "good", "intervals": "open", "inconclusive": "inconclusive"}
    return tones.get(manifest.verdict.answer, "bad")


def _batches(rows: Sequence[Row]) -> list[int]:
    return sorted({row.batch for row in rows if row.name == "latency.decode_step" and row.value and row.batch})


def untimed(manifest: Manifest, rows: Sequence[Row]) -> list[int]:
    """List the target's batches above the largest timed one; none without any timed batch."""
    timed_ = _batches(rows)
    wanted: list[int] = (manifest.target or {}).get("batches") or [] if timed_ else []
    return [batch for batch in wanted if timed_[-1] < batch <= LARGEST]


def timed(rows: Sequence[Row]) -> bool:
    """Tell if the speed was measured."""
    return any(row.name.startswith("latency.") and row.value is not None for row in rows)


# --- the model -------------------------------------------------------------------------------------------------------


def origin(manifest: Manifest) -> str:
    """Name the source: `org/name` for a hub model, else the model's name."""
    ref = manifest.model.source.ref
    return ref.removeprefix("hf:").split("@", maxsplit=1)[0] if ref.startswith("hf:") else manifest.model.name


def adapter(entry: AdapterEntry) -> str:
    """Describe a merged adapter: `path:french, LoRA, rank 8, alpha 16, 24 weights, sha256 …`."""
    ranks = f"rank {' and '.join(map(str, entry.ranks))}, alpha {entry.alpha:g}" if entry.ranks and entry.alpha else ""
    count = words.plural(entry.weights, "weight") if entry.weights else ""
    replaced = f"{words.plural(entry.replaced, 'tensor')} replaced" if entry.replaced else ""
    return words.joined(entry.ref, entry.kind, ranks, count, replaced, f"sha256 {entry.sha256}")


def schemes(manifest: Manifest) -> list[tuple[int, str]]:
    """List (number of layers, scheme in words), the most frequent first."""
    counts = Counter(scheme_of(layer.scheme) for layer in manifest.layers)
    return sorted(((count, text) for text, count in counts.items()), key=lambda pair: (-pair[0], pair[1]))


def scheme_of(scheme: dict[str, object]) -> str:
    """Format a weight scheme: `int4, group 64, asymmetric, float16 scales`."""
    shared = f"group {group}" if (group := scheme.get("group")) else f"per {scheme.get('granularity')}"
    symmetric = "symmetric" if scheme.get("symmetric") else "asymmetric"
    return f"{scheme.get('format')}, {shared}, {symmetric}, {scheme.get('scale')} scales"


def place(name: str) -> tuple[str, str]:
    """Split a layer's name into (block, kind): `model.layers.3.mlp.experts.7.up_proj` is an `up_proj` of block 3."""
    # the first number is the block's; an expert's number follows it
    match = re.search(r"^.*?\.(\d+)\.(.+)$", f".{name}")
    if match is None:
        return "–", name[-24:]
    return match[1], match[2].split(".")[-1][-24:]


def weights(entries: Sequence[WeightsEntry]) -> list[str]:
    """Describe the source's tensors: quantized share of the linear weights, the rest with reasons, unused tensors."""
    linear = _linear(entries)
    whole = sum(entry.elements for entry in linear)
    left = sorted((entry for entry in linear if entry.state != "quantized"), key=lambda entry: -entry.elements)
    sentences, share = [], _in_floats(entries)
    if share is not None:
        parts = ((entry.elements / whole, entry.reason) for entry in left[:3])
        why = "; ".join(
            f"{part:.1%} {reason}" if part >= 0.001 else f"{words.share(part)} {reason}" for part, reason in parts
        )
        sentences.append(
            f"{1 - share:.1%} of the linear weights are quantized" + (f", in floats: {why}" if why else "")
        )
    beside = sum(entry.elements for entry in entries if entry.linear and entry.reason == TOWER)
    sentences += [f"{TOWER}: {beside:,} linear weights, not counted"] if beside else []
    unused = (entry for entry in entries if entry.state == "unused")
    return sentences + [
        f"{entry.tensors} tensors stay as they are ({entry.example}): {entry.reason}" for entry in unused
    ]
