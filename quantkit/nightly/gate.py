"""Decide whether a night passes, and write files for other programs: JUnit XML, GitHub's summary, GitLab's report.

    1   a comparison is worse, or a cell failed
    3   neither, but a comparison is inconclusive or missing
    0   otherwise; a cell's first night, without a baseline, is reported and passes

JUnit: a suite for each build, a test for each decision; worse is a failure, failed an error, inconclusive and missing
are skipped. It satisfies the schemas of Ant (windyroad/JUnit-Schema) and Jenkins (junit-10.xsd). GitLab:
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format. GitHub's file is appended to, as GitHub
requires; the other two are replaced in one step.

Only the store is read. A night that began and was never decided has no answers: its cells are missing.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import re
import shutil
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from quantkit import limits
from quantkit.bundle.disk import write_atomic, writing
from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError
from quantkit.nightly.config import builds
from quantkit.nightly.evidence import is_first
from quantkit.nightly.records import Answer, Night, NightCell, Result, StoredDecision, What
from quantkit.nightly.store import QueryRows, Store, plain
from quantkit.report.kit import words
from quantkit.report.kit.tree import Cell, Facts, Line, Part, Remark, Section, Sheet, Styled

ALARMS: tuple[Answer, ...] = ("failed", "worse")
OPEN: tuple[Answer, ...] = ("missing", "inconclusive")
_UNDECIDED = "the night was not decided: continue with `quantkit nightly run --resume`"
# most decisions in the one line of an error
_NAMED = 3
# GitHub refuses a step's summary above one megabyte
_LISTED = 100
_LONGEST = 1000
_TAGS: dict[Answer, str] = {"worse": "failure", "failed": "error", "inconclusive": "skipped", "missing": "skipped"}
_SEVERITIES: dict[Answer, str] = {"failed": "critical", "worse": "major", "missing": "minor", "inconclusive": "info"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()!|~@#])")
# most rows on a terminal; `--out` and `--json` have all
MOST = 100
_TOLD = ("cell", "what", "answer", "value", "low", "high", "margin", "smallest", "confirmed", "because")


@dataclass(frozen=True)
class Gated:
    """A night at the gate.

    Args:
        decisions: decisions of all cells, in the order of the matrix; a cell without any is missing.
        first: keys of cells without a baseline yet.
        seconds: seconds that each cell took, where known.
    """

    night: Night
    decisions: Sequence[StoredDecision]
    first: frozenset[str]
    seconds: dict[str, float]

    @property
    def alarms(self) -> list[StoredDecision]:
        """Worse and failed decisions."""
        return [decision for decision in self.decisions if decision.answer in ALARMS]

    @property
    def open(self) -> list[StoredDecision]:
        """Inconclusive and missing decisions, except for first nights."""
        return [decision for decision in self.decisions if decision.answer in OPEN and not self.is_first(decision)]

    @property
    def exit(self) -> int:
        """Exit code; see the module."""
        return 1 if self.alarms else 3 if self.open else 0

    @property
    def counts(self) -> Counter[str]:
        """Answer -> count; `first` for those of first nights."""
        return Counter("first" if self.is_first(decision) else decision.answer for decision in self.decisions)

    def is_first(self, decision: StoredDecision) -> bool:
        """Tell whether a decision is inconclusive for lack of a baseline."""
        return decision.cell in self.first and decision.what != "drift" and decision.answer == "inconclusive"

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form; NaN and infinity become null."""
        alarms, open_ = (
            [{name: plain(getattr(row, name)) for name in _TOLD} for row in rows] for rows in (self.alarms, self.open)
        )
        known = {"night": self.night.night, "exit": self.exit, "counts": dict(self.counts)}
        return {**known, "alarms": alarms, "open": open_, "first": sorted(self.first)}


def gate(store: Store, night: str | None = None) -> Gated:
    """Read a night; None: the last one.

    Raises InputError: `night-missing`, `night-damaged`.
    """
    begun = {known.night: known for known in store.nights()}
    lost = {name for (name,) in store.query("SELECT DISTINCT night FROM results").rows} - begun.keys()
    if night in lost or (night is None and lost and max(lost) > max(begun, default="")):
        value = f"{night or max(lost)} has results, but its row in the table of nights is gone"
        raise InputError("night-damaged", where=str(store.path), value=value, remedy="run again, or --night ID")
    if not begun or night not in (None, *begun):
        value = f"no night {night}" if night else "the store has no night"
        remedy = f"the last is {max(begun)}" if begun else "run one first: `quantkit nightly run`"
        raise InputError("night-missing", where=str(store.path), value=value, remedy=remedy)
    chosen = begun[night or max(begun)]
    last = {result.cell: result for result in store.results(chosen.night)}  # the second attempt wins
    decided = words.by(store.decisions(chosen.night), lambda decision: decision.cell)
    rows: list[StoredDecision] = []
    for key in chosen.matrix:
        missing = StoredDecision(chosen.night, key, "latency", "missing", because=_UNDECIDED)
        rows += decided.get(key, [missing])
    first = frozenset(key for key, result in last.items() if is_first(result))
    seconds = {key: result.seconds for key, result in last.items() if result.seconds is not None}
    return Gated(chosen, rows, first, seconds)


def title(decision: StoredDecision) -> str:
    """Return a decision's title: `latency of smollm2-135m, awq-int4, cpu-x86, onnxruntime, batch 8`."""
    cell = NightCell.of(decision.cell)
    return f"{decision.what} of {cell.model}, {cell.recipe}, {cell.target}, {cell.runtime}, batch {cell.batch}"


def count(gated: Gated) -> str:
    """Return `2 worse, 1 failed, 37 same`, the gravest first."""
    named = {name: name for name in ("failed", "worse", "missing", "inconclusive")}
    named |= {"first": "of a first night", "better": "better", "same": "same"}
    return ", ".join(f"{gated.counts[name]} {text}" for name, text in named.items() if gated.counts[name])


def warnings(gated: Gated) -> list[str]:
    """Return the warnings about a night that passes."""
    cells = f"{words.plural(len(gated.first), 'cell')} had no baseline yet and compared nothing"
    return [f"{cells}; this night becomes the baseline of the next"] if gated.counts["first"] else []


def error(gated: Gated, *, allow_inconclusive: bool = False) -> QuantkitError | None:
    """Return the error of a night that does not pass."""
    rows = gated.alarms or gated.open
    if not rows or (allow_inconclusive and not gated.alarms):
        return None
    more = f"; and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    summary = "; ".join(f"{row.answer}: {title(row)}: {words.visible(row.because)}" for row in rows[:_NAMED]) + more
    if gated.alarms:
        return GateError(
            "worse", where=gated.night.night, value=summary, remedy="`quantkit nightly page` shows everything"
        )
    remedy = "measure longer (`budget`), or let it pass: --allow-inconclusive"
    return Inconclusive("inconclusive", where=gated.night.night, value=summary, remedy=remedy)


# --- files ---


def junit(gated: Gated) -> bytes:
    """Return all decisions as JUnit XML."""
    root = ElementTree.Element("testsuites")
    for number, (build, cells) in enumerate(builds(NightCell.of(key) for key in gated.night.matrix).items()):
        keys = {cell.key for cell in cells}
        rows = [row for row in gated.decisions if row.cell in keys]
        tags = [_TAGS.get(row.answer, "") for row in rows]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            id=str(number),
            name=_text(build),
            package="quantkit.nightly",
            timestamp=gated.night.started.strftime("%Y-%m-%dT%H:%M:%S"),
            hostname=_text(gated.night.host) or "localhost",
            tests=str(len(rows)),
            failures=str(tags.count("failure")),
            errors=str(tags.count("error")),
            skipped=str(tags.count("skipped")),
            time=_seconds(sum(gated.seconds.get(key, 0.0) for key in keys)),
        )
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in (("night", gated.night.night), ("commit", gated.night.commit or "")):
            ElementTree.SubElement(properties, "property", name=name, value=_text(value))
        timed: set[str] = set()
        for row, tag in zip(rows, tags, strict=True):
            # a cell's seconds count once, with its first test
            seconds = 0.0 if row.cell in timed else gated.seconds.get(row.cell, 0.0)
            timed.add(row.cell)
            name = f"{row.what}, batch {NightCell.of(row.cell).batch}"
            case = ElementTree.SubElement(suite, "testcase", classname=_text(build), name=name, time=_seconds(seconds))
            if tag:
                outcome = ElementTree.SubElement(case, tag, message=_text(row.because), type=row.answer)
                outcome.text = _text(f"{row.answer}: {title(row)}: {row.because}")
        for name in ("system-out", "system-err"):
            ElementTree.SubElement(suite, name)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def gitlab(gated: Gated, config: Path) -> bytes:
    """Return the failed and open decisions as GitLab's code-quality JSON; an empty list if there are none.

    Args:
        config: `nightly.yaml`; a finding points to its first line that names the recipe. GitLab expects a path from the
            repository's root, which is taken to be the working directory.
    """
    path = Path(os.path.relpath(config)).as_posix()
    text = limits.read(config).decode("utf-8") if config.is_file() else ""
    findings = [
        {
            "description": _text(f"{row.answer}: {title(row)}: {row.because}"),
            "check_name": f"quantkit-nightly-{row.what}",
            # equal on every night, so that GitLab recognizes new findings
            "fingerprint": hashlib.sha256(f"{row.cell}#{row.what}".encode()).hexdigest(),
            "severity": _SEVERITIES[row.answer],
            "location": {"path": path, "lines": {"begin": _line(text, NightCell.of(row.cell).recipe)}},
        }
        for row in [*gated.alarms, *gated.open]
    ]
    return f"{json.dumps(findings, ensure_ascii=False, indent=1)}\n".encode()


def github(gated: Gated) -> str:
    """Return the night in GitHub Markdown: a table of alarms and a table of open decisions."""
    mark = {0: "✅", 1: "❌", 3: "⚠️"}[gated.exit]
    commit = f", commit {_markdown(gated.night.commit[:12])}" if gated.night.commit else ""
    lines = [f"## {mark} Night {_markdown(gated.night.night)}{commit}", "", _markdown(count(gated)) + "."]
    if gated.counts["first"]:
        lines += ["", f"{words.plural(len(gated.first), 'cell')} had no baseline yet: this night becomes the baseline."]
    for heading, rows in (("Alarms", gated.alarms), ("Not decided", gated.open)):
        lines += _table(heading, rows) if rows else []
    return "\n".join(lines) + "\n"


def write(path: Path, data: bytes) -> None:
    """Replace a file in one step; a device or a pipe, `/dev/stdout`, is written to directly.

    Raises:
        InputError: `file-unwritable`.
        Stopped: `disk-full`.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write_atomic(path, data)


def append(path: Path, text: str) -> None:
    """Append to a file in one step. Raises as `write`."""
    with writing(path), path.open("ab", buffering=0) as stream:
        stream.write(text.encode())


def _table(heading: str, rows: Sequence[StoredDecision]) -> list[str]:
    lines = ["", f"### {heading}", "", "| model | recipe | target | runtime | batch | what | answer | why |"]
    lines.append("|---|---|---|---|--:|---|---|---|")
    for row in rows[:_LISTED]:
        cell = NightCell.of(row.cell)
        parts = (cell.model, cell.recipe, cell.target, cell.runtime, str(cell.batch), row.what, row.answer, row.because)
        lines.append(f"| {' | '.join(_markdown(part) for part in parts)} |")
    more = len(rows) - _LISTED
    return [*lines, *(["", f"And {more} more: the page has all of them."] if more > 0 else [])]


def _markdown(text: str) -> str:
    """Escape Markdown, tags and cell borders in a text."""
    return _MARKDOWN.sub(lambda match: f"&#{ord(match[1])};", html.escape(_text(text), quote=False))


def _text(text: str) -> str:
    """Return one line of limited length that XML can hold; unprintable characters are escaped."""
    line = words.visible(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _seconds(value: float) -> str:
    """Format a decimal number: neither schema accepts `1e-05` or `nan`."""
    return f"{value if math.isfinite(value) and value > 0 else 0.0:.3f}"


def _line(text: str, name: str) -> int:
    """Return the first line with a word; 1 without one."""
    word = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w-])")
    return next((number for number, line in enumerate(text.splitlines(), 1) if word.search(line)), 1)


# --- a terminal ---


def rows(answer: QueryRows, besides: str = "") -> list[Part]:
    """Build a table with its row count; one wider than the terminal becomes lines of `column  value`."""
    cells = [[words.visible(_shown(value)) for value in row] for row in answer.rows[:MOST]]
    widths = [max(map(len, column)) for column in zip(answer.columns, *cells, strict=True)]
    table: Part = Sheet(answer.columns, cells, words=len(widths))
    if sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        lines: list[tuple[Line, Cell]] = []
        for row in cells:
            lines += [("", ""), *zip(answer.columns, row, strict=True)]
        table = Facts(lines[1:])
    count = words.plural(len(answer.rows), "row")
    note = count if len(answer.rows) <= MOST else f"the first {MOST} of {count}; --out FILE and --json have all"
    return [*([table] if answer.rows else []), Remark(f"{note} {besides}".rstrip(), "caption")]


def warned(warnings: Sequence[str]) -> list[Part]:
    """Build notes on an answer, such as skipped files."""
    return [Remark(warning, "note") for warning in warnings]


def night(gated: Gated, results: Sequence[Result]) -> list[Part]:
    """Build a table with a row for each cell: answer and effect of each comparison. Values shared by all cells are
    stated once."""
    names = ("model", "recipe", "target", "runtime", "batch")
    parts = {name: [str(getattr(result, name)) for result in results] for name in names}
    apart = [name for name in names if len(set(parts[name])) > 1] or ["recipe"]
    shared = ", ".join(f"{name} {parts[name][0]}" for name in names if name not in apart)
    things = [what for what in typing.get_args(What) if any(row.what == what for row in gated.decisions)]
    answers = {(row.cell, row.what): row for row in gated.decisions}
    body: list[list[Line]] = []
    for result in results:
        told = [_answer(answers.get((result.cell, what)), gated) for what in things]
        took = "–" if result.seconds is None else words.duration(result.seconds)
        body.append([*(str(getattr(result, name)) for name in apart), *told, took])
    table = Sheet([*apart, *things, "took"], body, words=len(apart) + len(things))
    return [*([Remark(shared, "caption")] if shared else []), table, Remark("")]


def _answer(decision: StoredDecision | None, gated: Gated) -> str:
    if decision is None or gated.is_first(decision):
        return "–" if decision is None else "first"
    value = ""
    if decision.value is not None:
        value = f" {decision.value:+.4f}" if decision.what == "kl" else f" {decision.value:+.1%}"
    tones = {"better": "good", "worse": "bad", "failed": "bad", "inconclusive": "inconclusive"}
    return Styled(f"{decision.answer}{value}", tones.get(decision.answer, ""))


def shown(gated: Gated) -> list[Part]:
    """Build a night's result at the gate: counts, then failed and open decisions."""
    mark = {0: Styled("✓", "good"), 1: Styled("✗", "bad"), 3: Styled("?", "warning")}[gated.exit]
    lines = [
        Remark((Styled(row.answer, "strong"), f" {title(row)}: {words.visible(row.because)}"))
        for row in [*gated.alarms, *gated.open]
    ]
    head = Remark((mark, " ", Styled(gated.night.night, "strong"), f": {count(gated)}"))
    return [head, *([Section("", lines)] if lines else [])]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    known = plain(value)
    return json.dumps(known, ensure_ascii=False) if isinstance(known, dict | list) else str(known)
