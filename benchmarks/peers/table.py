"""The tables of docs/comparisons.md, from the records in `results/peers/`.

    python benchmarks/peers/table.py            write them
    python benchmarks/peers/table.py --check    say which file differs, and exit 1

Between `<!-- comparisons NAME -->` and `<!-- end -->` nothing is written by hand. Of each row the latest record counts.
Intervals are 95 % by Student's t over the scored sequences; a figure is bold where its sequences show it to be lower
than every other of its row, pair by pair.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "peers"
PAGE = ROOT / "docs" / "comparisons.md"
LEVEL = 0.95
# sequences that calibrate every side; rows of more text stand apart
SAMPLES = 8
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
# scheme, whether the sides saw text (None: both kinds), what a table calls it
SECTIONS: list[tuple[str, bool | None, str]] = [
    ("int4-g64", True, "int4, group 64, zero points"),
    ("int4-g64", False, "int4, group 64, zero points, no data"),
    ("int4-g64-symmetric", None, "int4, group 64, symmetric"),
    ("int3-g64", None, "int3, group 64, zero points"),
    ("int2-g32", None, "int2, group 32, zero points"),
    ("int4-channel", None, "int4, per channel, symmetric"),
    ("nf4-b64", None, "nf4, block 64"),
    ("int8-w8a8", None, "int8 weights and activations"),
    ("fp8-w8a8", None, "fp8 weights and activations"),
]
BLOCK = re.compile(r"(<!-- comparisons ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One record: who made which scheme of which model, how, and what became of it."""

    model: str
    date: str
    commit: str
    place: str
    samples: int
    found: dict[str, Any]

    @property
    def ours(self) -> bool:
        """Whether quantkit made it."""
        return bool(self.found["side"] == "quantkit")

    @property
    def who(self) -> str:
        """As a table names it."""
        side, method = self.found["side"], self.found["method"]
        return f"`{method}`" if self.ours else named(side, method)

    @property
    def failed(self) -> str | None:
        """Why there are no figures."""
        return self.found.get("failed")

    def kl(self, text: str | None = None) -> dict[str, Any]:
        """The figures on a text, the first by default."""
        texts: dict[str, Any] = self.found["texts"]
        return texts[text] if text else next(iter(texts.values()))  # type: ignore[no-any-return]


def named(side: str, method: str) -> str:
    """A peer that has one method is called by its name alone."""
    return side if side == method else f"{side} {method}"


def records(folder: Path = RECORDS) -> list[Row]:
    """The latest record of each side, method, scheme and model."""
    latest: dict[tuple[str, str, str, str], Row] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for found in content["rows"]:
            # processor seconds compare where these are equal
            place = f"{content['machine']['device']['name']}, threads: {content['settings']['threads']}"
            row = Row(
                content["settings"]["model"],
                content["date"],
                content["commit"],
                place,
                content["settings"]["samples"],
                found,
            )
            key = (row.model, found["scheme"], found["side"], found["method"])
            if key not in latest or latest[key].date <= row.date:
                latest[key] = row
    return list(latest.values())


def half(figures: dict[str, Any]) -> float:
    """Half the width of the interval."""
    count = figures["sequences"]
    return float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * float(figures["kl_se"])


def lower(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one has a lower KL than the other: pair by pair, or, without the pairs, by intervals that do not meet."""
    a, b = one.get("kl_by_sequence"), other.get("kl_by_sequence")
    if not a or not b:
        return bool(one["kl"] + half(one) < other["kl"] - half(other))
    apart = [y - x for x, y in zip(a, b, strict=True)]
    bound = float(stats.t.ppf((1 + LEVEL) / 2, len(apart) - 1)) * stdev(apart) / math.sqrt(len(apart))
    return mean(apart) > bound


def of(
    rows: Sequence[Row], model: str, scheme: str, calibrated: bool | None, samples: int | None = SAMPLES
) -> list[Row]:
    """The rows of a section, those with figures, the lowest KL first; `samples` None: of any amount of text."""
    found = [row for row in rows if row.model == model and row.found["scheme"] == scheme and row.failed is None]
    found = [row for row in found if samples in (None, row.samples)]
    if calibrated is not None:
        found = [row for row in found if row.found["calibrated"] == calibrated]
    return sorted(found, key=lambda row: row.kl()["kl"])


def amount(row: Row, others: Sequence[Row], text: str | None = None) -> str:
    """`0.0550 ± 0.0040`, bold where it is the lowest beyond doubt."""
    figures = row.kl(text)
    value = f"{figures['kl']:.3f}"
    if all(lower(figures, other.kl(text)) for other in others if other is not row):
        value = f"**{value}**"
    return f"{value} ± {half(figures):.3f}"


def summary(rows: Sequence[Row]) -> str:
    """The first table: ours against the best of the others, and who else ran."""
    lines = ["| scheme | quantkit | the best of the others | who else ran |", "|---|---|---|---|"]
    for model, title in MODELS.items():
        for scheme, calibrated, name in SECTIONS:
            found = of(rows, model, scheme, calibrated)
            mine, theirs = [row for row in found if row.ours], [row for row in found if not row.ours]
            if not mine or not theirs:
                continue
            pair = [mine[0], theirs[0]]
            cells = [f"{row.who} {amount(row, pair)}" for row in pair]
            if pair[0].place == pair[1].place and pair[0].date == pair[1].date:
                cells = [f"{cell}, {row.found['cpu_seconds']:.0f} s" for cell, row in zip(cells, pair, strict=True)]
            rest = ", ".join(f"{row.who} {row.kl()['kl']:.3f}" for row in theirs[1:]) or "nobody"
            label = name if model == next(iter(MODELS)) else f"{title}: {name}"
            lines.append(f"| {label} | {cells[0]} | {cells[1]} | {rest} |")
    return "\n".join(lines)


def page(rows: Sequence[Row], model: str) -> str:
    """The tables of a model: every row that ran, and those that did not with the reason."""
    parts = []
    sections = [
        (scheme, calibrated, name, samples)
        for scheme, calibrated, name in SECTIONS
        for samples in sorted({row.samples for row in of(rows, model, scheme, calibrated, None)})
    ]
    for scheme, calibrated, name, samples in sections:
        found = of(rows, model, scheme, calibrated, samples)
        title = name if samples == SAMPLES else f"{name}, {samples} sequences"
        texts = list(dict.fromkeys(text for row in found for text in row.found["texts"]))
        heads = [f"KL, {text}" for text in texts]
        parts += [f"**{title}**", ""]
        parts.append("| who | " + " | ".join(heads) + " | top-1 | bits | CPU s | recorded | how | loaded again by |")
        parts.append("|" + "---|" * (len(texts) + 7))
        for row in found:
            figures = [amount(row, [r for r in found if text in r.found["texts"]], text) for text in texts]
            bits = row.found.get("bits_per_weight")
            cells = [
                row.who if not row.ours else f"quantkit {row.who}",
                *figures,
                f"{row.kl()['top1']:.3f}",
                f"{bits:.2f}" if bits else "",
                f"{row.found['cpu_seconds']:.0f}",
                row.date,
                row.found["how"],
                row.found["reader"],
            ]
            parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    failed = [row for row in rows if row.model == model and row.failed is not None]
    if failed:
        parts += ["Did not run:", ""]
        parts += [f"- {row.who}, {row.found['scheme']}: {row.failed}" for row in failed]
        parts.append("")
    missing = pending(rows, model)
    if missing:
        parts += ["Not run yet:", ""]
        parts += [f"- {scheme}: {', '.join(names)}" for scheme, names in missing.items()]
        parts.append("")
    return "\n".join(parts).rstrip()


def pending(rows: Sequence[Row], model: str) -> dict[str, list[str]]:
    """What the sides offer and no record holds: scheme -> sides with their methods."""
    done = {(row.found["scheme"], row.found["side"], row.found["method"]) for row in rows if row.model == model}
    missing: dict[str, list[str]] = {}
    for scheme, _, _ in SECTIONS:
        if model != next(iter(MODELS)) and not scheme.startswith("int4-g64"):
            continue
        for path in sorted(RECORDS.parents[1].glob("peers/*_side.py")):
            side = path.stem.removesuffix("_side").replace("_", "-")
            for method in offered(path).get(scheme, []):
                name = named(side, method)
                if (scheme, side, method) not in done and name not in missing.get(scheme, []):
                    missing.setdefault(scheme, []).append(name)
    return missing


def offered(path: Path) -> dict[str, list[str]]:
    """The `SCHEMES` of a side, read without importing it: its imports live in its own environment."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SCHEMES":
            found: dict[str, list[str]] = ast.literal_eval(node.value)
            return found
    return {}


def versions(rows: Sequence[Row]) -> str:
    """Which versions made the figures, when and where."""
    lines = ["| side | recorded | on | versions |", "|---|---|---|---|"]
    told: dict[str, set[str]] = {}
    for row in rows:
        if row.failed is None:
            names = ", ".join(f"{name} {version}" for name, version in row.found["versions"].items())
            told.setdefault(row.found["side"], set()).add(f"{row.date} | {row.place} | {names}")
    lines += [f"| {side} | {entry} |" for side in sorted(told) for entry in sorted(told[side])]
    return "\n".join(lines)


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Name of a block -> what stands in it."""
    return {"summary": summary(rows), "versions": versions(rows), **{model: page(rows, model) for model in MODELS}}


def rendered(text: str, made: dict[str, str]) -> str:
    """A page with its blocks as the records have them."""
    return BLOCK.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made = blocks(records())
    text = PAGE.read_text(encoding="utf-8")
    new = rendered(text, made)
    if new != text and not options.check:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{'differs' if options.check else 'written'}: {PAGE.name if new != text else 'nothing'}")
    return int(options.check and new != text)


if __name__ == "__main__":
    sys.exit(main())
