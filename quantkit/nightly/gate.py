"""Whether a night passes, and the files that other programs read: JUnit XML, GitHub's summary, GitLab's report.

    1   something is worse, or a cell failed
    3   nothing is, but something is inconclusive or missing
    0   otherwise; a cell's first night, which had nothing to be set against, is said and passes

JUnit: a suite a build, a test a decision; worse is a failure, failed an error, inconclusive and missing are skipped. It
has what the schemas of Ant (windyroad/JUnit-Schema) and Jenkins (junit-10.xsd) ask for. GitLab:
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format. GitHub's file is appended to, as GitHub
asks for; the other two are replaced in one step.

Reads the store alone. A night that has begun and was never decided has no answer for any cell: they are missing.
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
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from quantkit import limits
from quantkit.bundle.disk import write_atomic, writing
from quantkit.errors import GateError, Inconclusive, InputError, QuantkitError
from quantkit.nightly.config import builds
from quantkit.nightly.evidence import is_first
from quantkit.nightly.records import Answer, Night, NightCell, Result, StoredDecision, What
from quantkit.nightly.store import QueryRows, Store, plain
from quantkit.report.kit import words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

ALARMS: tuple[Answer, ...] = ("failed", "worse")
OPEN: tuple[Answer, ...] = ("missing", "inconclusive")
_UNDECIDED = "the night was not decided: `quantkit nightly run --resume` goes on"
# that the one line of an error names
_NAMED = 3

# GitHub refuses a step's summary of more than a megabyte
_LISTED = 100
_LONGEST = 1000
_TAGS: dict[Answer, str] = {"worse": "failure", "failed": "error", "inconclusive": "skipped", "missing": "skipped"}
_SEVERITIES: dict[Answer, str] = {"failed": "critical", "worse": "major", "missing": "minor", "inconclusive": "info"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()!|~@#])")
# rows that a terminal shows; `--out` and `--json` have all
MOST = 100
_GAP = 2


@dataclass(frozen=True)
class Gated:
    """A night at the gate.

    Args:
        night: which.
        decisions: of all its cells, in the order of the matrix; a cell without any is missing.
        first: keys of cells that had nothing yet to be set against.
        seconds: that each cell took, where known.
    """

    night: Night
    decisions: Sequence[StoredDecision]
    first: frozenset[str]
    seconds: dict[str, float]

    @property
    def alarms(self) -> list[StoredDecision]:
        """What is worse or failed."""
        return [each for each in self.decisions if each.answer in ALARMS]

    @property
    def open(self) -> list[StoredDecision]:
        """What is inconclusive or missing, first nights apart."""
        return [each for each in self.decisions if each.answer in OPEN and not self.is_first(each)]

    @property
    def exit(self) -> int:
        """See the module."""
        return 1 if self.alarms else 3 if self.open else 0

    @property
    def counts(self) -> Counter[str]:
        """Answer -> how many; `first` for those of first nights."""
        return Counter("first" if self.is_first(each) else each.answer for each in self.decisions)

    def is_first(self, decision: StoredDecision) -> bool:
        """Whether it is inconclusive because there was nothing yet to compare with."""
        first = decision.cell in self.first and decision.what != "drift"
        return first and decision.answer == "inconclusive"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has neither NaN nor infinity: they are null."""

        def told(rows: Sequence[StoredDecision]) -> list[dict[str, Any]]:
            kept = ("cell", "what", "answer", "value", "low", "high", "margin", "smallest", "confirmed", "because")
            return [{name: plain(getattr(row, name)) for name in kept} for row in rows]

        return {
            "night": self.night.night,
            "exit": self.exit,
            "counts": dict(self.counts),
            "alarms": told(self.alarms),
            "open": told(self.open),
            "first": sorted(self.first),
        }


def gate(store: Store, night: str | None = None) -> Gated:
    """Read a night.

    Args:
        night: its name; None is the last that has begun.

    Raises:
        InputError: `night-missing`, `night-damaged`.
    """
    begun = {each.night: each for each in store.nights()}
    lost = {name for (name,) in store.query("SELECT DISTINCT night FROM results").rows} - begun.keys()
    if night in lost or (night is None and lost and max(lost) > max(begun, default="")):
        value = f"{night or max(lost)} has results, but the row that says what it was to measure is gone"
        raise InputError("night-damaged", where=str(store.path), value=value, remedy="run again, or --night ID")
    if not begun or night not in (None, *begun):
        value = f"no night {night}" if night else "no night has begun"
        remedy = f"the last is {max(begun)}" if begun else "run one first: `quantkit nightly run`"
        raise InputError("night-missing", where=str(store.path), value=value, remedy=remedy)
    chosen = begun[night or max(begun)]
    last: dict[str, Result] = {each.cell: each for each in store.results(chosen.night)}  # the second attempt wins
    decided: dict[str, list[StoredDecision]] = {}
    for each in store.decisions(chosen.night):
        decided.setdefault(each.cell, []).append(each)
    rows: list[StoredDecision] = []
    for key in chosen.matrix:
        missing = StoredDecision(chosen.night, key, "latency", "missing", because=_UNDECIDED)
        rows += decided.get(key, [missing])
    return Gated(
        night=chosen,
        decisions=rows,
        first=frozenset(key for key, result in last.items() if is_first(result)),
        seconds={key: result.seconds for key, result in last.items() if result.seconds is not None},
    )


def title(decision: StoredDecision) -> str:
    """`latency of smollm2-135m, awq-int4, cpu-x86, onnxruntime, batch 8`."""
    cell = NightCell.of(decision.cell)
    return f"{decision.what} of {cell.model}, {cell.recipe}, {cell.target}, {cell.runtime}, batch {cell.batch}"


def count(gated: Gated) -> str:
    """`2 worse, 1 failed, 37 same`, the gravest first."""
    order = ("failed", "worse", "missing", "inconclusive", "first", "better", "same")
    names = {"first": "of a first night"}
    return ", ".join(f"{gated.counts[each]} {names.get(each, each)}" for each in order if gated.counts[each])


def warnings(gated: Gated) -> list[str]:
    """What must be known of a night that passes."""
    if not gated.counts["first"]:
        return []
    cells = words.plural(len(gated.first), "cell")
    return [
        f"{cells} had no baseline yet: nothing was compared there, and this night becomes what the next is set against"
    ]


def error(gated: Gated, *, allow_inconclusive: bool = False) -> QuantkitError | None:
    """What the gate says of a night that does not pass."""
    rows = gated.alarms or gated.open
    if not rows or (allow_inconclusive and not gated.alarms):
        return None
    more = f"; and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    said = "; ".join(f"{each.answer}: {title(each)}: {words.visible(each.because)}" for each in rows[:_NAMED]) + more
    if gated.alarms:
        return GateError("worse", where=gated.night.night, value=said, remedy="`quantkit nightly page` shows all of it")
    remedy = "measure longer (`budget`), or let it pass: --allow-inconclusive"
    return Inconclusive("inconclusive", where=gated.night.night, value=said, remedy=remedy)


# --- files ---


def junit(gated: Gated) -> bytes:
    """All decisions as JUnit XML."""
    root = ElementTree.Element("testsuites")
    started = gated.night.started.strftime("%Y-%m-%dT%H:%M:%S")
    for number, (build, cells) in enumerate(builds(NightCell.of(key) for key in gated.night.matrix).items()):
        keys = {cell.key for cell in cells}
        rows = [each for each in gated.decisions if each.cell in keys]
        tags = [_TAGS.get(each.answer, "") for each in rows]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            id=str(number),
            name=_text(build),
            package="quantkit.nightly",
            timestamp=started,
            hostname=_text(gated.night.host) or "localhost",
            tests=str(len(rows)),
            failures=str(tags.count("failure")),
            errors=str(tags.count("error")),
            skipped=str(tags.count("skipped")),
            time=_seconds(sum(gated.seconds.get(key, 0.0) for key in keys)),
        )
        about = {"night": gated.night.night, "commit": gated.night.commit or ""}
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in about.items():
            ElementTree.SubElement(properties, "property", name=name, value=_text(value))
        timed: set[str] = set()
        for row, tag in zip(rows, tags, strict=True):
            # a cell's seconds stand with its first test, so that they add up
            seconds = 0.0 if row.cell in timed else gated.seconds.get(row.cell, 0.0)
            timed.add(row.cell)
            name = f"{row.what}, batch {NightCell.of(row.cell).batch}"
            case = ElementTree.SubElement(suite, "testcase", classname=_text(build), name=name, time=_seconds(seconds))
            if tag:
                said = ElementTree.SubElement(case, tag, message=_text(row.because), type=row.answer)
                said.text = _text(f"{row.answer}: {title(row)}: {row.because}")
        for name in ("system-out", "system-err"):
            ElementTree.SubElement(suite, name)
    ElementTree.indent(root)
    found: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return found


def gitlab(gated: Gated, config: Path) -> bytes:
    """What is not fine as GitLab's code-quality JSON; an empty list where all is.

    Args:
        config: `nightly.yaml`: a finding stands at the first line of it that names its recipe. GitLab asks for a path
            from the root of the repository, which the working directory is taken for.
    """
    path = Path(os.path.relpath(config)).as_posix()
    text = limits.read(config).decode("utf-8") if config.is_file() else ""
    found = [
        {
            "description": _text(f"{row.answer}: {title(row)}: {row.because}"),
            "check_name": f"quantkit-nightly-{row.what}",
            # the same on every night, so that GitLab knows what is new
            "fingerprint": hashlib.sha256(f"{row.cell}#{row.what}".encode()).hexdigest(),
            "severity": _SEVERITIES[row.answer],
            "location": {"path": path, "lines": {"begin": _line(text, NightCell.of(row.cell).recipe)}},
        }
        for row in [*gated.alarms, *gated.open]
    ]
    return f"{json.dumps(found, ensure_ascii=False, indent=1)}\n".encode()


def github(gated: Gated) -> str:
    """The night in GitHub's Markdown: a table of what alarmed, one of what is open."""
    mark = {0: "✅", 1: "❌", 3: "⚠️"}[gated.exit]
    commit = f", commit {_markdown(gated.night.commit[:12])}" if gated.night.commit else ""
    lines = [f"## {mark} Night {_markdown(gated.night.night)}{commit}", "", _markdown(count(gated)) + "."]
    if gated.counts["first"]:
        lines += ["", f"{words.plural(len(gated.first), 'cell')} had no baseline yet: this night becomes it."]
    for heading, rows in (("Alarms", gated.alarms), ("Not decided", gated.open)):
        lines += _table(heading, rows) if rows else []
    return "\n".join(lines) + "\n"


def write(path: Path, data: bytes) -> None:
    """Replace a file, in one step; a device or a pipe, `/dev/stdout`, is written to.

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
    """Add to a file, in one step.

    Raises:
        InputError: `file-unwritable`.
        Stopped: `disk-full`.
    """
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
    """Text that means itself: no markup, no tag, no cell's end."""
    return _MARKDOWN.sub(lambda found: f"&#{ord(found[1])};", html.escape(_text(text), quote=False))


def _text(text: str) -> str:
    """One line, of a bounded length, that XML can hold: what does not print is escaped."""
    found = words.visible(" ".join(text.split()))
    return found if len(found) <= _LONGEST else f"{found[: _LONGEST - 1]}…"


def _seconds(value: float) -> str:
    """A decimal number: neither schema knows `1e-05` or `nan`."""
    return f"{value if math.isfinite(value) and value > 0 else 0.0:.3f}"


def _line(text: str, name: str) -> int:
    """The first line that has a word; 1 where none has."""
    word = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w-])")
    return next((number for number, line in enumerate(text.splitlines(), 1) if word.search(line)), 1)


# --- a terminal ---


def rows(found: QueryRows, besides: str = "") -> list[RenderableType]:
    """Show a table, and how many rows it has; one wider than the terminal as lines `column  value`."""
    from rich.text import Text

    from quantkit.report.kit.screen import pairs, table

    cells = [[words.visible(_said(value)) for value in row] for row in found.rows[:MOST]]
    widths = [max(map(len, column)) for column in zip(found.columns, *cells, strict=True)]
    fits = sum(widths) + _GAP * len(widths) <= shutil.get_terminal_size().columns
    shown: RenderableType
    if fits:
        shown = table([Text(name) for name in found.columns], (map(Text, row) for row in cells), left=len(widths))
    else:
        lines: list[tuple[Text, Text]] = []
        for row in cells:
            lines += [(Text(), Text())] if lines else []
            lines += [(Text(name), Text(value)) for name, value in zip(found.columns, row, strict=True)]
        shown = pairs(lines)
        shown.columns[1].overflow = "fold"
    count = words.plural(len(found.rows), "row")
    said = count if len(found.rows) <= MOST else f"the first {MOST} of {count}; --out FILE and --json have all"
    return [*([shown] if found.rows else []), Text(f"{said} {besides}".rstrip(), "dim")]


def warned(said: Sequence[str]) -> list[RenderableType]:
    """What a reader must know about an answer: what was passed over, what is odd."""
    from rich.text import Text

    return [Text.assemble(("! ", "bold yellow"), warning) for warning in said]


def night(found: Gated, results: Sequence[Result]) -> list[RenderableType]:
    """A row a cell: what was answered of each thing, and by how much. What all cells share is said once."""
    from rich.text import Text

    from quantkit.report.kit.screen import table

    names = ("model", "recipe", "target", "runtime", "batch")
    parts = {name: [str(getattr(each, name)) for each in results] for name in names}
    apart = [name for name in names if len(set(parts[name])) > 1] or ["recipe"]
    shared = ", ".join(f"{name} {parts[name][0]}" for name in names if name not in apart)
    things = [what for what in typing.get_args(What) if any(each.what == what for each in found.decisions)]
    shown = table((*apart, *things, "took"), left=len(apart) + len(things), whole=False)
    if apart[-1] == "batch":
        shown.columns[len(apart) - 1].justify = "right"
    answers = {(each.cell, each.what): each for each in found.decisions}
    for each in results:
        cells = [_answer(answers.get((each.cell, what)), found) for what in things]
        took = "–" if each.seconds is None else words.duration(each.seconds)
        shown.add_row(*(str(getattr(each, name)) for name in apart), *cells, took)
    return [*([Text(shared, "dim")] if shared else []), shown, Text("")]


def _answer(decision: StoredDecision | None, found: Gated) -> Text:
    from rich.text import Text

    if decision is None:
        return Text("–")
    if found.is_first(decision):
        return Text("first")
    value = ""
    if decision.value is not None:
        value = f" {decision.value:+.4f}" if decision.what == "kl" else f" {decision.value:+.1%}"
    style = {"better": "green", "worse": "bold red", "failed": "bold red", "inconclusive": "yellow"}
    return Text(f"{decision.answer}{value}", style.get(decision.answer, ""))


def shown(found: Gated) -> list[RenderableType]:
    """A night at the gate: how many of what, and what is not fine."""
    from rich.text import Text

    from quantkit.report.kit.screen import indented

    mark, style = {0: ("✓", "green"), 1: ("✗", "bold red"), 3: ("?", "bold yellow")}[found.exit]
    lines: list[RenderableType] = [Text.assemble((f"{mark} ", style), (found.night.night, "bold"), f": {count(found)}")]
    for each in [*found.alarms, *found.open]:
        said = Text.assemble((each.answer, "bold"), f" {title(each)}: {words.visible(each.because)}")
        lines += indented(said)
    return lines


def _said(value: Any) -> str:
    if value is None:
        return "–"
    found = plain(value)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict | list) else str(value)
