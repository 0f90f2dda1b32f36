"""The record of a run: one JSON file in `results/` with the figures and all that they depend on."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import quantkit
from quantkit import machine

RESULTS = Path(__file__).resolve().parent.parent / "results"


def parsing(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script: its docstring is the help; `--no-record`, which `record` looks for, and `--note`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leaves no file in results/")
    parser.add_argument("--note", default="", help="goes into the record: what else ran on the machine")
    return parser


def record(
    name: str, claim: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, write: bool = True
) -> Path | None:
    """Write `results/NAME-YYYYMMDD.json`; a later run of the same day takes its place. Not with `--no-record`.

    Args:
        name: of the script, and what sets this run apart.
        claim: what the figures are for, with the target.
        rows: the figures.
        settings: of the run.
        write: False for a trial run of another kind.
    """
    if not write or "--no-record" in sys.argv:
        return None
    today = datetime.datetime.now(datetime.UTC).date()
    path = RESULTS / f"{name}-{today:%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = (
        {"schema": 1, "benchmark": name, "claim": claim, "date": today.isoformat()}
        | {"command": command(), "quantkit": quantkit.__version__, "commit": commit()}
        | {"machine": machine.describe(), "settings": dict(settings), "rows": list(rows)}
    )
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    Console(stderr=True).print(f"recorded in benchmarks/results/{path.name}", soft_wrap=True)
    return path


def command() -> str:
    """The command line, with files by their names alone."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    return " ".join(words + [Path(word).name if "/" in word else word for word in sys.argv[1:]])


def commit() -> str:
    """The commit that was measured; `+` if the working tree differs from it in code or content."""
    root = RESULTS.parent.parent
    watched = ["quantkit", "recipes", "calibration"]
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *watched)
    except OSError:  # no git
        return ""
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def sha256(path: Path) -> str:
    """Of a file that a figure depends on."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print rows as a table.

    Args:
        title: above it.
        rows: the figures.
        columns: key of a row -> heading and format, as `"KL:.4f"`.
    """
    table = Table(title=title, title_justify="left")
    forms = {key: head.rpartition(":") if ":" in head else (head, "", "") for key, head in columns.items()}
    for key in columns:
        table.add_column(forms[key][0], justify="left" if forms[key][2] == "" else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(key), forms[key][2]) for key in columns))
    console = Console(width=max(140, Console().width))
    console.print(table)


def _cell(value: Any, form: str) -> str:
    """A figure; both ends of an interval; of a figure that stands with its interval, the figure."""
    if isinstance(value, list):
        return "–".join(format(each, form) for each in (value if len(value) == 2 else value[:1]))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def layout(columns: str) -> dict[str, str]:
    """Columns of a table: `"name | kl=KL:.4f"` -> `{"name": "name", "kl": "KL:.4f"}`."""
    parts = (part.partition("=") for part in columns.split(" | "))
    return {key if sign else key.partition(":")[0]: head if sign else key for key, sign, head in parts}


def verdicts(checks: Mapping[str, bool]) -> int:
    """Print which targets hold; the exit status."""
    for claim, holds in checks.items():
        print(f"{'holds ' if holds else 'MISSED'}  {claim}")
    return 0 if all(checks.values()) else 1
