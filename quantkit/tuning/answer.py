"""What a search leaves behind: the recipe, `front.json`, the harms, the page.

tuned.yaml     the recipe, for `quantkit compile`
front.json     everything below as data; the page is made from it alone
harm.jsonl     one line a unit and candidate
report.html    the page
bundle/        the choice, compiled
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle.disk import write_atomic
from quantkit.recipe import Recipe
from quantkit.tuning import front, store
from quantkit.tuning import write as recipes
from quantkit.tuning.front import FrontPoint, Tables

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.tuning.check import ScoredChoice
    from quantkit.tuning.harm import UnitHarm

RECIPE, FRONT, HARMS, REPORT = "tuned.yaml", "front.json", "harm.jsonl", "report.html"


def front_of(
    facts: Mapping[str, Any],
    tables: Tables,
    chosen: FrontPoint,
    measured: Sequence[tuple[FrontPoint, ScoredChoice]],
    uniform: Mapping[str, Any] | None,
    points: Sequence[FrontPoint],
) -> dict[str, Any]:
    """`front.json`.

    Args:
        facts: model, base recipe, target, budget, candidates, texts, factor, decisions, notes.
        measured: what was compiled and scored on the way to it, the choice last.
        uniform: the best single scheme within the choice's bits, compiled and scored.
    """
    factor = facts["factor"] or 1.0
    alone = {name: tables.uniform(name) for name in tables.names}
    return {
        "schema": 1,
        **facts,
        "chosen": {
            **chosen.as_dict(tables, factor),
            **(measured[-1][1].as_dict() if measured else {"measured": None, "held_out": None}),
        },
        "checks": [{**each.as_dict(), **point.as_dict(tables, factor)} for point, each in measured],
        "uniform": uniform,
        "alone": [
            {"name": name, **front.point(tables, choice).as_dict(tables, factor)}
            for name, choice in alone.items()
            if choice is not None
        ],
        "front": [each.as_dict(tables, factor) for each in points],
        "timings": sorted(tables.seconds),
        "units": [
            {
                "block": unit.block,
                "members": list(unit.members),
                "weights": unit.weights,
                "harm": {
                    name: float(value)
                    for name, value in zip(tables.names, tables.harm[u], strict=True)
                    if value == value  # noqa: PLR0124 (not nan: the unit has this candidate)
                },
                "chosen": tables.names[int(chosen.choice[u])],
            }
            for u, unit in enumerate(tables.units)
        ],
    }


def write(folder: Path, recipe: Recipe, data: Mapping[str, Any], harms: Sequence[UnitHarm]) -> None:
    """Write everything but the bundle.

    Raises:
        MissingDependency: plotly.
    """
    from quantkit.report.tune.page import page

    write_atomic(folder / RECIPE, recipes.text(recipe, comment(data)).encode())
    Recipe.load(folder / RECIPE)  # what is written is what can be read
    write_atomic(folder / HARMS, store.text(harms).encode())
    write_atomic(folder / FRONT, (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    write_atomic(folder / REPORT, page(data, (folder / RECIPE).read_text(encoding="utf-8")).encode())


def comment(data: Mapping[str, Any]) -> list[str]:
    """What stands above the recipe: what was measured."""
    chosen, seen, check = data["chosen"], data["texts"]["harm"], data["texts"]["check"]
    limits = ", ".join(f"{kind}={value:g}" for kind, value in data["budget"].items())
    lines = [
        f"{data['model']['name']} within {limits}, chosen by quantkit tune from {data['base']}.",
        f"{len(data['units'])} units, each measured alone on {seen['samples']} x {seen['tokens']} tokens of"
        f" {seen['set']} ({seen['split']}).",
        f"{chosen['bits']:.4f} bits a weight; sum of harms {chosen['predicted']:.4f} nats a token.",
    ]
    if chosen["measured"] is not None and check is not None:
        lines.append(
            f"Compiled: KL {chosen['measured']:.4f} on {check['items']} positions of {check['set']}"
            f" ({check['split']}){_held_out(chosen)}."
        )
    if data["uniform"]:
        alone = data["uniform"]
        lines.append(
            f"{alone['name']} throughout, {alone['bits']:.4f} bits: KL {alone['measured']:.4f}{_held_out(alone)}."
        )
    return lines


def _held_out(scored: Mapping[str, Any]) -> str:
    return f", {scored['held_out']:.4f} on its eval split" if scored["held_out"] is not None else ""


def text_of(text: TokenSet) -> dict[str, Any]:
    """A text as `front.json` names it."""
    samples, tokens = text.ids.shape
    return {
        "set": text.name,
        "split": text.split,
        "sha256": text.sha256,
        "samples": samples,
        "tokens": tokens,
        "items": text.items,
        **({} if text.begins is None else {"begins": text.begins}),
    }
