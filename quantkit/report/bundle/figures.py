"""The figures of a bundle as lines: before, after, and how sure one can be. Terminal and card share them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quantkit.bundle import Check, Decision, Manifest, PromptVerdict, WeightsEntry
from quantkit.bundle.manifest import CalibrationEntry
from quantkit.errors import MissingDependency
from quantkit.measurement.accuracy.outputs import NOTHING
from quantkit.measurement.accuracy.positions import standard_error
from quantkit.measurement.rows import Row
from quantkit.model.sizes.assigned import FLOATS_LIMIT
from quantkit.model.source.alias import ALIASES
from quantkit.report.kit import shares, words
from quantkit.report.kit.tree import Line, Sheet, Styled

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_GATE = "gate."

T = TypeVar("T")
_Maker = Callable[[Row, float], "FigureLine"]


@dataclass(frozen=True)
class FigureLine:
    """One line of the table: `before` is the original's, empty where the figure is about both."""

    label: str
    before: str
    after: str
    remark: str


def tables(rows: Sequence[Row], *, layers: int = 0, dtype: str = "") -> list[tuple[str, list[FigureLine]]]:
    """(export, its lines), first sizes and memory, whose export is empty: they stand for the bundle."""
    by_export = by(rows, lambda row: variant(row) if row.name.startswith("accuracy.") else "")
    found = [(name, lines(group, layers=layers, dtype=dtype)) for name, group in by_export.items()]
    found.sort(key=lambda pair: pair[0] != "")
    return [(name, group) for name, group in found if group]


def lines(rows: Sequence[Row], *, layers: int = 0, dtype: str = "") -> list[FigureLine]:
    """Size, accuracy and memory of one export; see `tables`."""
    exports = {export(row) for row in rows if row.name == "size.bytes"}
    found: list[FigureLine] = []
    for name, make in _MAKERS.items():
        for row in rows:
            if row.name != name or (row.value is None and NOTHING not in row.flags):
                continue
            line = make(row, row.value or 0.0)
            if name == "size.bits_per_weight":
                original = str(_BITS.get(dtype, ""))
                line = FigureLine(line.label, original, line.after, f"in {words.plural(layers, 'quantized layer')}")
            elif name == "size.bytes" and len(exports) > 1:
                line = FigureLine(f"{line.label}, {export(row)}", line.before, line.after, line.remark)
            if line not in found:  # several exports hold the same weights in the same bits
                found.append(line)
    return found


def _bytes(row: Row, value: float) -> FigureLine:
    return FigureLine("weights on disk", *_smaller(row, value))


def _peak(row: Row, value: float) -> FigureLine:
    before, after, remark = _smaller(row, value)
    return FigureLine(
        "peak memory", before, after, ", ".join(part for part in (remark, row.runtime, where(row)) if part)
    )


def _smaller(row: Row, value: float) -> tuple[str, str, str]:
    before, remark = "", ""
    if row.baseline is not None:
        before = words.size(row.baseline.value)
        ratio = row.baseline.ratio
        if ratio is not None:
            remark = f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / ratio:.2f}× larger"
            remark = "the same" if f"{ratio:.2f}" == "1.00" else remark
    return before, words.size(value), remark


def _bytes_read(row: Row, value: float) -> FigureLine:
    return FigureLine(f"weights read by {row.settings.get('way')}", "", words.size(value), "")


def _bits(row: Row, value: float) -> FigureLine:
    return FigureLine("bits per weight", "", words.figure(value, 3), "")


def _perplexity(row: Row, value: float) -> FigureLine:
    if row.baseline is None:
        return FigureLine("perplexity", "", words.figure(value), words.between(row.ci95, words.figure))
    remark = ""
    if row.baseline.ratio:
        # a row's ratio says how many times better it is; perplexity is read the other way round
        remark = f"{1 / row.baseline.ratio:.3f} times"
        if row.baseline.ratio_ci95 and row.baseline.ratio_ci95[0] > 0:
            low, high = row.baseline.ratio_ci95
            remark += f" ({1 / high:.3f} to {1 / low:.3f})"
    return FigureLine("perplexity", words.figure(row.baseline.value), words.figure(value), remark)


def _next_word(row: Row, value: float) -> FigureLine:
    if row.baseline is None:
        return FigureLine("next word right", "", words.percent(value), words.between(row.ci95, words.percent))
    points = f"{100 * (value - row.baseline.value):+.1f} points".replace("-", "−")
    return FigureLine("next word right", words.percent(row.baseline.value), words.percent(value), points)


def _agreement(row: Row, value: float) -> FigureLine:
    form = shares.form(row)
    return FigureLine(shares.agreement(row), "", form(value), words.between(row.ci95, form))


def _kl(row: Row, value: float) -> FigureLine:
    try:
        error = standard_error(row)
    except MissingDependency:  # the interval is in the row; only the error behind it needs scipy
        error = None
    remark = (
        f"± {words.figure(error, 2)} nats"
        if error is not None
        else f"{words.between(row.ci95, lambda value: words.figure(value, 3))} nats".strip()
    )
    return FigureLine("KL divergence", "", words.figure(value, 3), remark)


def _share(label: str) -> _Maker:
    def line(row: Row, value: float) -> FigureLine:
        form = shares.form(row)
        before = form(row.baseline.value) if row.baseline is not None else ""
        remark = "; ".join(part for part in (words.between(row.ci95, form), shares.changed(row)) if part)
        return FigureLine(label, before, form(value), remark)

    return line


def _cosine(row: Row, value: float) -> FigureLine:
    least = (row.quantiles or {}).get("p0")
    parts = [words.between(row.ci95, _cosine_form), f"least {_cosine_form(least)}" if least is not None else ""]
    return FigureLine("cosine to the original", "", _cosine_form(value), "; ".join(part for part in parts if part))


def _cosine_form(value: float) -> str:
    return words.figure(value, 5)


def _relative_error(row: Row, value: float) -> FigureLine:
    def form(share: float) -> str:
        return words.percent(share, 2)

    return FigureLine("error relative to the original", "", form(value), words.between(row.ci95, form))


def same(row: Row, value: float) -> FigureLine:
    """Boxes that overlap, or values that are equal, and how many there are on either side."""
    label = "same boxes" if row.settings.get("by") == "boxes" else "same values"
    if row.value is None:
        return FigureLine(label, "", "–", "none in any sample, on either side")
    before, after = ((row.shape or {}).get(side) for side in ("original", "candidate"))
    counts = "" if before is None else f"{after:,} against {before:,}"
    parts = [words.between(row.ci95, words.percent), counts]
    return FigureLine(label, "", words.percent(value), "; ".join(part for part in parts if part))


# in the order they are shown
_MAKERS = {
    "size.bytes": _bytes,
    "size.bytes_read": _bytes_read,
    "size.bits_per_weight": _bits,
    **{name: _share(label) for name, label in shares.NAMES.items()},
    "accuracy.perplexity": _perplexity,
    "accuracy.kl": _kl,
    "accuracy.top1_agreement": _agreement,
    "accuracy.next_word": _next_word,
    "accuracy.cosine": _cosine,
    "accuracy.relative_error": _relative_error,
    "accuracy.same": same,
    "memory.peak": _peak,
}


def by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items by a key, in the order of their first appearance."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def variant(row: Row) -> str:
    """The export that a row is about, as a reader tells it from the others; empty for what no runtime is needed for."""
    level, cache = row.settings.get("accuracy_level"), row.settings.get("kv_cache")
    parts = [row.runtime or "", f"level {level}" if level is not None else ""]
    if cache is not None:
        parts += [f"context {(row.shape or {}).get('context', 0):,}", f"{cache} cache"]
    if (output := row.settings.get("output")) is not None:
        parts.append(f"output {output}")
    parts.append(str(row.settings.get("way", "")))
    return ", ".join(part for part in parts if part)


def export(row: Row) -> str:
    """The folder that a row of sizes is about, as a reader calls it."""
    folder = str(row.settings.get("export") or "this bundle")
    return {"model": "checkpoint", "onnx": "ONNX"}.get(folder, folder)


def where(row: Row) -> str:
    """`batch 1, context 128` or `batch 1, 256 tokens`; empty where a row has neither."""
    shape = row.shape or {}
    parts = [f"batch {row.batch}"] if row.batch else []
    parts += [f"context {shape['context']:,}"] if shape.get("context") else []
    parts += [f"{shape['new_tokens']:,} tokens"] if shape.get("new_tokens", 1) > 1 else []
    return ", ".join(parts)


def flags(row: Row) -> str:
    """A row's flags in words."""
    return ", ".join(flag.replace("-", " ") for flag in row.flags)


def scored(rows: Sequence[Row]) -> str:
    """What accuracy was measured on and how its intervals are made; empty where none was."""
    row = next((row for row in rows if row.data is not None), None)
    if row is None or row.data is None:
        return ""
    sequences = (row.shape or {}).get("sequences")
    among = f" in {words.plural(sequences, 'sequence')}" if sequences else ""
    what = f"{words.plural(row.data.items, counted(row))} of {row.data.set} ({row.data.split}){among}"
    what += begins(row.data.begins) if sequences else ""
    groups = (row.shape or {}).get("clusters")
    over = "" if groups is None else f" over {words.plural(groups, 'group')} of {counted(row)}s that are alike"
    paired = any(row.baseline is not None and row.baseline.difference is not None for row in rows)
    if shares.of_classes(row) or paired:
        exact = "McNemar's exact test" if groups is None else "McNemar's test"
        test = f"; changes are paired, {counted(row)} by {counted(row)}, with {exact}" if paired else ""
        return f"{what}; intervals 95 %{over}{test}"
    return f"{what}; intervals 95 %{over}{', ± standard error' if sequences else ''}"


def counted(row: Row) -> str:
    """What is counted as one."""
    if shares.of_classes(row):
        return next((unit for unit in ("sample", "text", "pair") if f"ci95-by-{unit}" in row.flags), "image")
    if row.name in shares.RECALL or "ci95-by-pair" in row.flags:
        return "pair"
    if "output" in row.settings:
        return "item"
    return "sequence" if row.name == "accuracy.cosine" else "position"


def calibrated(seen: CalibrationEntry) -> str:
    """What the passes saw: `prose-en (calib), 16 sequences of 512 tokens`; images and pairs have no tokens."""
    of = f"sequences of {seen.tokens} tokens" if seen.tokens else "items"
    return f"{seen.set} ({seen.split}), {seen.samples} {of}{written(seen.generated)}{begins(seen.begins)}"


def written(samples: int | None) -> str:
    """How many sequences are the model's own, to be added to how many there are."""
    return f", {samples} of them written by the model itself" if samples else ""


def begins(tokens: str | None) -> str:
    """What sequences begin with, to be added to how many there are: `, each beginning with <bos>`."""
    return f", each beginning with {tokens}" if tokens else ""


def hash_of(tokens: bool) -> str:
    """What a hash of a set is over."""
    return "sha256 of its token ids" if tokens else "sha256 of its items"


def gates(checks: Sequence[Check]) -> list[Check]:
    """The checks that are gates of the recipe."""
    return [check for check in checks if check.name.startswith(_GATE)]


def unjudged(manifest: Manifest) -> list[str]:
    """The recipe's gates that nothing which was scored could judge."""
    judged = {check.name.rpartition(".")[2] for check in gates(manifest.checks)}
    asked: dict[str, Any] = manifest.recipe.get("gates") or {}
    return [gate for gate, limit in asked.items() if limit is not None and gate not in judged]


def other_checks(checks: Sequence[Check]) -> list[Check]:
    """The checks that every bundle has to pass."""
    return [check for check in checks if not check.name.startswith(_GATE)]


def relation(check: Check) -> str:
    """A check as it is read: `kl_max 0.143 ≤ 0.5`."""
    if check.value is None or check.limit is None:
        return ""
    if check.limit == 0 and not check.name.startswith(_GATE):  # a count of what is wrong
        return "" if check.ok else f"{check.value:g} wrong"
    sign = "≥" if check.name.endswith("_min") or check.name.startswith("integer.") else "≤"
    if not check.ok:
        sign = {"≥": "<", "≤": ">"}[sign]
    unit = " points" if "_drop_" in check.name else ""
    return f"{words.figure(check.value, 3)} {sign} {check.limit:g}{unit}"


def short(check: Check) -> str:
    """A check's name without the part that its heading says already: `kl_max`, or `kl_max in onnxruntime`."""
    if not check.name.startswith(_GATE):
        return check.name
    runtime, _, gate = check.name.removeprefix(_GATE).rpartition(".")
    return f"{gate} in {runtime}" if runtime else gate


@dataclass(frozen=True)
class DecisionLine:
    """Decisions of one kind as they are read: how many (0: this one alone is meant), and the first of them."""

    count: int
    code: str
    pass_: str
    where: str
    change: str
    reason: str

    @classmethod
    def of(cls, each: Decision, count: int = 0) -> DecisionLine:
        """The line of a decision."""
        return cls(count, each.code, each.pass_, each.where, change(each), each.reason)


def grouped(decisions: Sequence[Decision]) -> list[DecisionLine]:
    """Decisions by pass and code, in the order of their first appearance."""
    groups = by(decisions, lambda each: (each.pass_, each.code)).values()
    return [DecisionLine.of(group[0], len(group)) for group in groups]


def decisions_table(lines: Sequence[DecisionLine]) -> Sheet:
    """Build decisions as a table; where any stands for several, with how many."""
    several = any(line.count > 1 for line in lines)
    head = ["decision", *(["times"] if several else []), "first at" if several else "at", "change", "reason"]
    rows: list[list[Line]] = []
    for line in lines:
        count = [f"{line.count}"] if several else []
        rows.append([(Styled(line.code, "name"), f" ({line.pass_})"), *count, line.where, line.change, line.reason])
    return Sheet(head, rows, words=len(head), title="Decisions", stacked=True)


def results_table(rows: Sequence[Row], *, layers: int = 0, dtype: str = "", quantized: bool = True) -> Sheet:
    """Build before and after: size, accuracy and memory, a heading for each export."""
    body: list[list[Line]] = []
    for export_, group in tables(rows, layers=layers, dtype=dtype):
        body += [[Styled(export_, "dim")]] if export_ else []
        body += [[line.label, line.before, Styled(line.after, "strong"), line.remark] for line in group]
    return Sheet(["", "original", "quantized" if quantized else "bundle", ""], body, 1, title="Before and after")


def change(decision: Decision) -> str:
    """What a decision changed: `0.01 → 0.1`; empty where it says nothing."""
    if decision.from_ is None and decision.to is None:
        return ""
    if decision.to is None:
        return f"instead of {decision.from_}"
    return f"{decision.from_} → {decision.to}"


def notes(manifest: Manifest) -> list[str]:
    """What a reader of a bundle's figures must know about its source, wherever they are shown."""
    alias = ALIASES.get(manifest.model.source.ref.removeprefix("alias:"))
    if alias is not None:
        return [alias.note] if alias.note else []
    return [f"the source was converted from {manifest.model.source.was}"] if manifest.model.source.was else []


_ANSWERS = {
    "ship_it": "ship it",
    "ship_up_to": "ship it up to batch {batch}",
    "intervals": "ship it at some batches only",
    "do_not_quantize": "do not quantize here",
    "use_instead": "use {format} instead",
    "inconclusive": "not decided",
}


def verdict(manifest: Manifest, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """(the verdict in words, what decided it), or why there is none; and how much is quantized, where that is not most
    of what its recipe's name lets one expect."""
    answer, because = _answer(manifest, rows)
    share = _in_floats(manifest.weights)
    if manifest.layers and share is not None and share > FLOATS_LIMIT:
        answer += f"; {1 - share:.0%} of the linear weights are quantized"
    return answer, because


def _in_floats(entries: Sequence[WeightsEntry]) -> float | None:
    """The share of the linear weights that is not quantized; None where there are none."""
    linear = [entry for entry in entries if entry.linear]
    whole = sum(entry.elements for entry in linear)
    return sum(entry.elements for entry in linear if entry.state != "quantized") / whole if whole else None


def _answer(manifest: Manifest, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """(the verdict in words, what decided it), or why there is none."""
    given = manifest.verdict
    if given is None:
        if not manifest.layers:
            return "none; nothing in it is quantized, it is a baseline for other bundles", []
        if timed(rows):
            return "not judged yet: its speed has been measured", []
        return "not measured yet: nothing says whether it is faster", []
    text = _ANSWERS.get(given.answer, given.answer.replace("_", " "))
    text = text.format(batch=given.batch, format=given.format)
    if given.answer == "use_instead" and given.batch is not None:
        text += f", up to batch {given.batch}"
    text += "".join(f"; {said}" for said in _prompts(given.prompts))
    return (f"forecast: {text}" if given.forecast else text), [reason.rstrip(". ") for reason in given.because]


def _prompts(found: PromptVerdict | None) -> list[str]:
    """`prompts of 64 tokens are faster`, and so on, as far as there are any."""
    if found is None:
        return []
    states = ((found.faster, "are faster"), (found.slower, "are slower"), (found.open, "do not differ beyond noise"))
    said = [f"of {words.listed(lengths)} tokens {verb}" for lengths, verb in states if lengths]
    return [f"prompts {', '.join(said)}"] if said else []


def tone(manifest: Manifest) -> str:
    """How its verdict is shown: `good`, `bad`, `open`, or `inconclusive`, whose number is not shown large."""
    if manifest.state == "gate_failed":
        return "bad"
    if manifest.verdict is None:
        return "open"
    tones = {"ship_it": "good", "ship_up_to": "good", "intervals": "open", "inconclusive": "inconclusive"}
    return tones.get(manifest.verdict.answer, "bad")


def timed(rows: Sequence[Row]) -> bool:
    """Whether its speed was measured."""
    return any(row.name.startswith("latency.") and row.value is not None for row in rows)


def origin(manifest: Manifest) -> str:
    """The source as the hub names it: `org/name` of a hub model, else the model's name."""
    ref = manifest.model.source.ref
    return ref.removeprefix("hf:").split("@", maxsplit=1)[0] if ref.startswith("hf:") else manifest.model.name


def schemes(manifest: Manifest) -> list[tuple[int, str]]:
    """(how many layers, scheme in words), the most frequent first."""
    counts: dict[str, int] = {}
    for layer in manifest.layers:
        text = scheme_of(layer.scheme)
        counts[text] = counts.get(text, 0) + 1
    return sorted(((count, text) for text, count in counts.items()), key=lambda pair: (-pair[0], pair[1]))


def scheme_of(scheme: dict[str, object]) -> str:
    """A weight scheme in words: `int4, group 64, asymmetric, float16 scales`."""
    parts = [str(scheme.get("format"))]
    group = scheme.get("group")
    parts.append(f"group {group}" if group else f"per {scheme.get('granularity')}")
    parts.append("symmetric" if scheme.get("symmetric") else "asymmetric")
    parts.append(f"{scheme.get('scale')} scales")
    return ", ".join(parts)


def place(name: str) -> tuple[str, str]:
    """(block, kind) of a layer: `model.layers.3.mlp.experts.7.up_proj` is an `up_proj` of block 3."""
    # the first number is the block's: an expert's comes behind it
    match = re.search(r"^.*?\.(\d+)\.(.+)$", f".{name}")
    if match is None:
        return "–", name[-24:]
    return match[1], match[2].split(".")[-1][-24:]


def weights(entries: Sequence[WeightsEntry]) -> list[str]:
    """What became of the source's tensors: the share of linear weights in floats and why, and what no module uses."""
    linear = [entry for entry in entries if entry.linear]
    whole = sum(entry.elements for entry in linear)
    left = sorted((entry for entry in linear if entry.state != "quantized"), key=lambda entry: -entry.elements)
    found = []
    share = _in_floats(entries)
    if share is not None:
        why = "; ".join(f"{entry.elements / whole:.1%} {entry.reason}" for entry in left[:3])
        found.append(f"{1 - share:.1%} of the linear weights are quantized" + (f", in floats: {why}" if why else ""))
    unused = (entry for entry in entries if entry.state == "unused")
    return found + [f"{each.tensors} tensors stay as they are ({each.example}): {each.reason}" for each in unused]
