"""What a gate writes for other programs: JUnit XML, GitHub's step summary, GitLab's code-quality report.

JUnit: a suite a build, a test a decision; worse is a failure, failed an error, inconclusive and missing are skipped. It
has what the schemas of Ant (windyroad/JUnit-Schema) and Jenkins (junit-10.xsd) ask for. GitLab:
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format. GitHub's file is appended to, as GitHub
asks for; the other two are replaced in one step.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from quantkit import limits
from quantkit.bundle.disk import write_atomic, writing
from quantkit.nightly.config import builds
from quantkit.nightly.gating.gate import Gated, count, title
from quantkit.nightly.records import Answer, NightCell, StoredDecision
from quantkit.report.kit import words

# GitHub refuses a step's summary of more than a megabyte
_MOST = 100
_LONGEST = 1000
_TAGS: dict[Answer, str] = {"worse": "failure", "failed": "error", "inconclusive": "skipped", "missing": "skipped"}
_SEVERITIES: dict[Answer, str] = {"failed": "critical", "worse": "major", "missing": "minor", "inconclusive": "info"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()!|~@#])")


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
    for row in rows[:_MOST]:
        cell = NightCell.of(row.cell)
        parts = (cell.model, cell.recipe, cell.target, cell.runtime, str(cell.batch), row.what, row.answer, row.because)
        lines.append(f"| {' | '.join(_markdown(part) for part in parts)} |")
    more = len(rows) - _MOST
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
