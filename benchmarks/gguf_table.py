"""The tables and the picture of docs/gguf.md, from the records of `gguf_peers.py`. No claim.

    python benchmarks/gguf_table.py            write them
    python benchmarks/gguf_table.py --check    say whether they differ, and exit 1

Between `<!-- peers -->` or `<!-- bits -->` and `<!-- end -->` nothing is written by hand. Of each row the latest record
counts. Bits are those of `quantkit plan`, which `plan_storage.py` compares with real files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.model.sizes import configs
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGE, PICTURE = ROOT / "docs" / "gguf.md", ROOT / "docs" / "gguf-peers.svg"
BLOCK = re.compile(r"(<!-- (peers|bits) -->\n).*?(<!-- end -->)", re.DOTALL)
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
# by zeros; not in the picture
WIDENED = {
    "smollm2-135m-768": "SmolLM2-135M, widened to 768",
    "qwen2.5-coder-0.5b-1024": "Qwen2.5-Coder, widened to 1,024",
}
NAMES = MODELS | WIDENED
PLANNED = [*MODELS, "qwen2.5-7b", "qwen3-8b"]
TYPES = ["q5_k_m", "q4_k_m", "q4_0", "iq4_nl", "iq4_xs", "q3_k_m", "iq3_s", "iq3_xxs", "iq2_m"]
TEXTS = {"speeches": "speeches", "fiction": "fiction", "code": "code"}
Row = dict[str, Any]
# of the picture, in pixels: a panel a model
WIDE, HIGH, LEFT, TOP, LOW = 330, 260, 52, 30, 44
COLOURS = {"kl": "#1a7f64", "kl_llama": "#8a8f98"}
SIDES = {"kl": "quantkit", "kl_llama": "llama-quantize"}


def records() -> list[Row]:
    """Rows of the latest record of each model, models and types in the order of their tables."""
    found: dict[tuple[str, str, str], Row] = {}
    for path in sorted(RECORDS.glob("gguf-peers-*-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            found[row["model"], row["type"], row["text"]] = row
    order = list(NAMES)
    return sorted(found.values(), key=lambda row: (order.index(row["model"]), row["bits"], row["type"]))


def tables(rows: Sequence[Row]) -> str:
    """Markdown: what each file loses, and how fast it is."""
    lines = [
        "| model, type | text | ours | llama-quantize | ratio | top-1, ours and theirs |",
        "|---|---|---|---|---|---|",
    ]
    before = ""
    for row in rows:
        place = f"{NAMES[row['model']]}, {row['type'].upper()}: {row['bits']:.2f} bits, {row['ours'] / 1e6:.1f} MB"
        low, high = row["ratio_ci95"]
        lines.append(
            f"| {place if place != before else ''} | {TEXTS[row['text']]} "
            f"| {row['kl']:.3f} ± {row['kl_half']:.3f} | {row['kl_llama']:.3f} ± {row['kl_llama_half']:.3f} "
            f"| **{row['ratio']:.2f}** ({low:.2f} to {high:.2f}) | {row['top1']:.3f}, {row['top1_llama']:.3f} |"
        )
        before = place
    timed = {(row["model"], row["type"]): row["times"] for row in rows if row["times"]}
    if timed:
        lines += [
            "",
            "| model, type | load, ms | a step, ms | a prompt of 256, ms | ours to theirs: load, step, prompt |",
            "|---|---|---|---|---|",
        ]
    for (model, name), times in timed.items():
        cells, ratios = [], []
        for what in ("load", "decode", "prefill"):
            ours, theirs = (f"{1e3 * each:.1f}" for each in times[what])
            cells.append(f"{ours}, {theirs}")
            low, high = times[f"{what}_ratio_ci95"]
            ratios.append(f"{times[f'{what}_ratio']:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {NAMES[model]}, {name.upper()} | {' | '.join(cells)} | {', '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def sizes() -> str:
    """Markdown: the bits of a weight of each type in each model, tables of tokens included."""
    models = {name: configs.read(name) for name in PLANNED}
    lines = ["| | " + " | ".join(f"{name}: {each.hidden:,}" for name, each in models.items()) + " |"]
    lines.append("|---" * (len(models) + 1) + "|")
    for name in TYPES:
        recipe, cells = Recipe.load(f"gguf-{name}"), []
        for model in models.values():
            parts = storage(model, recipe, "gguf").parts
            stored = sum(parts[part] for part in ("codes", "scales", "zeros", "head", "embeddings"))
            vectors = (parts["others"] + parts["unquantized"]) / 4  # in float32
            cells.append(f"{8 * stored / (model.parameters - vectors):.2f}")
        lines.append(f"| {name.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(rows: Sequence[Row]) -> str:
    """An SVG: KL against bytes, a panel a model; both axes by powers, the mean of the texts a point."""
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    width = WIDE * len(models)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HIGH}" viewBox="0 0 {width} {HIGH}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#3b3f46">',
        f'<rect width="{width}" height="{HIGH}" fill="#ffffff"/>',
    ]
    for number, (side, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * number
        parts.append(f'<circle cx="{x}" cy="{HIGH - 12}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{HIGH - 8}">{SIDES[side]}</text>')
    for number, model in enumerate(models):
        parts += _panel([row for row in rows if row["model"] == model], number * WIDE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[Row], begin: int) -> list[str]:
    points: dict[str, dict[str, tuple[float, float]]] = {side: {} for side in SIDES}
    for name in dict.fromkeys(row["type"] for row in rows):
        of = [row for row in rows if row["type"] == name]
        for side in SIDES:
            size = of[0]["ours" if side == "kl" else "bytes"]
            points[side][name] = size / 1e6, sum(row[side] for row in of) / len(of)
    every = [point for side in points.values() for point in side.values()]
    x, y = (_scale([point[axis] for point in every]) for axis in (0, 1))
    left, right, bottom = begin + LEFT, begin + WIDE - 16, HIGH - LOW

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + x(point[0]) * (right - left), bottom - y(point[1]) * (bottom - TOP)

    parts = [
        f'<text x="{left}" y="18" font-weight="600">{MODELS[rows[0]["model"]]}</text>',
        f'<path d="M{left} {TOP}V{bottom}H{right}" fill="none" stroke="#c9ccd1"/>',
        f'<text x="{right}" y="{HIGH - 8}" text-anchor="end">MB</text>',
        f'<text x="{begin + 8}" y="{TOP - 2}">KL</text>',
    ]
    for value in _ticks([point[1] for point in every]):
        height = at((every[0][0], value))[1]
        parts.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{value:g}</text>')
        parts.append(f'<path d="M{left} {height:.1f}H{right}" stroke="#eceef1"/>')
    for name, theirs in points["kl_llama"].items():
        (px, py), (_, oy) = at(theirs), at(points["kl"][name])
        parts.append(f'<path d="M{px:.1f} {py:.1f}V{oy:.1f}" stroke="#c9ccd1" stroke-dasharray="2 3"/>')
        for side, height in (("kl_llama", py), ("kl", oy)):
            parts.append(f'<circle cx="{px:.1f}" cy="{height:.1f}" r="4" fill="{COLOURS[side]}"/>')
    named = {f"{name.upper()} {point[0]:.0f}": at(point) for name, point in points["kl_llama"].items()}
    return parts + _labels(named, (left + right) / 2)


def _labels(named: Mapping[str, tuple[float, float]], middle: float) -> list[str]:
    """Labels of points, in a column where there is room, each below the one before it and with a line to its point."""
    parts, last = [], {True: -math.inf, False: -math.inf}
    columns = {
        True: max((x for x, _ in named.values() if x < middle), default=0.0) + 16,
        False: min((x for x, _ in named.values() if x >= middle), default=0.0) - 16,
    }
    for text, (x, y) in sorted(named.items(), key=lambda pair: pair[1][1]):
        right = x < middle
        last[right] = height = max(y, last[right] + 13)
        begin = columns[right]
        parts.append(f'<path d="M{x:.1f} {y:.1f}L{begin:.1f} {height:.1f}" stroke="#8a8f98" stroke-width="0.7"/>')
        anchor = "start" if right else "end"
        place = f'x="{begin + (3 if right else -3):.1f}" y="{height + 4:.1f}"'
        parts.append(f'<text {place} font-size="10" text-anchor="{anchor}">{text}</text>')
    return parts


def _scale(values: Sequence[float]) -> Any:
    """Value -> its place between 0 and 1, by powers, with room at both ends."""
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.15 * (high - low) or 0.5
    return lambda value: (math.log(value) - low + room) / (high - low + 2 * room)


def _ticks(values: Sequence[float]) -> list[float]:
    steps = [digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5)]
    return [step for step in steps if min(values) * 0.9 <= step <= max(values) * 1.1]


def rendered(page: str, rows: Sequence[Row]) -> str:
    """The page with today's tables."""
    made = {"peers": tables(rows), "bits": sizes()}
    return BLOCK.sub(lambda found: found[1] + made[found[2]] + found[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    rows = records()
    made = {PAGE: rendered(PAGE.read_text(encoding="utf-8"), rows), PICTURE: picture(rows)}
    different = [
        path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        print("\n".join(f"{name} differs" for name in different), file=sys.stderr)
        return bool(different)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
