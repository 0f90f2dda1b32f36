"""What a night would do and how long it would take: `--dry-run`.

    a build   its compile, as `quantkit plan` reckons it; none where a bundle of the same inputs is there
                of builds that differ in their runtime or device alone, the first makes the bundle
    a cell    rounds × 2 sides × loading + blocks × 2 sides × 2 visits × (steps counted + not counted) × a step

Devices measure side by side: of their seconds those of the longest count. Guesses, and called so. Where a plan knows
nothing of a model (a graph, the hub), figures are assumed and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.nightly.config import Nightly, builds
from quantkit.nightly.records import NightCell
from quantkit.stats.deciding.slowdown import BURST, SETTLE

if TYPE_CHECKING:
    from rich.console import RenderableType

# seconds, where nothing is known: a compile, a step, and opening a bundle in its runtime
COMPILE, STEP, LOAD = 300.0, 0.05, 3.0


def dry_run(config: Nightly, only: str | None = None) -> dict[str, Any]:
    """The cells of a night and the seconds that each is expected to take, as JSON. Nothing is opened or written.

    Raises:
        InputError: `no-such-cells`, where `only` fits none.
    """
    cells: list[dict[str, Any]] = []
    notes = [f"opening a bundle in its runtime: {LOAD:.0f} s assumed"]
    compiled: dict[str, float] = {}
    made: set[tuple[str, str, str]] = set()
    # by device
    measuring: dict[str, float] = {}
    for build, members in builds(config.chosen(only)).items():
        compile_seconds, steps, assumed = _planned(config, members)
        bundle = (members[0].model, members[0].recipe, members[0].target)
        compiled[build] = 0.0 if bundle in made else compile_seconds
        made.add(bundle)
        notes += [f"{build}: {each}" for each in assumed]
        for cell, step in zip(members, steps, strict=True):
            seconds = _measuring(config, step)
            measuring[cell.on] = measuring.get(cell.on, 0.0) + seconds
            cells.append(
                {
                    "cell": cell.key,
                    "build": build,
                    **asdict(cell),
                    "baseline": config.baseline_of(cell).kind,
                    "seconds": seconds,
                }
            )
    here = measuring.pop("", 0.0)
    measured = here + max(measuring.values(), default=0.0)
    notes += ["devices measure side by side: those of the longest count"] if len(measuring) > 1 else []
    return {
        "cells": cells,
        "builds": [{"build": build, "seconds": seconds} for build, seconds in compiled.items()],
        "seconds": {"compile": sum(compiled.values()), "measure": measured},
        "total_seconds": sum(compiled.values()) + measured,
        "notes": notes,
    }


def terminal(found: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    from rich.table import Table
    from rich.text import Text

    from quantkit.report.kit import words

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("model", "recipe", "target", "runtime", "batch", "baseline"):
        table.add_column(name, justify="right" if name == "batch" else "left")
    table.add_column("measuring", justify="right", no_wrap=True)
    for cell in found["cells"]:
        parts = (str(cell[name]) for name in ("model", "recipe", "target", "runtime", "batch", "baseline"))
        table.add_row(*parts, words.duration(cell["seconds"]))
    compiles, measures = found["seconds"]["compile"], found["seconds"]["measure"]
    made = sum(bool(each["seconds"]) for each in found["builds"])
    count = f"{words.plural(len(found['cells']), 'cell')}, {words.plural(made, 'compile')}"
    total = f"{count}: {words.about(found['total_seconds'])}"
    split = f"compiling {words.duration(compiles)}, less what earlier nights left; measuring {words.duration(measures)}"
    return [table, Text(f"\n{total}", "bold"), Text(split), *(Text(f"! {note}", "dim") for note in found["notes"])]


def _measuring(config: Nightly, step: float) -> float:
    """Seconds that a cell is measured."""
    budget = config.budget
    loading = budget.rounds * 2 * LOAD
    if budget.most is None:
        assert budget.seconds is not None
        return loading + budget.seconds
    return loading + budget.most * 2 * 2 * (BURST + SETTLE) * step


def _planned(config: Nightly, cells: Sequence[NightCell]) -> tuple[float, list[float], list[str]]:
    """(seconds of a build's compile, of a step of each of its cells, what was assumed)."""
    from quantkit.pipeline.plan.plan import PlanQuestion, plan

    first = cells[0]
    question = PlanQuestion(
        config.reference(first.model),
        [config.reference(first.recipe)],
        config.reference(first.target),
        first.program,
        sorted({cell.batch for cell in cells}),
        changes=config.set_,
    )
    try:
        candidate = plan(question).candidates[0]
        if candidate.problem is not None:
            raise candidate.problem
    except InputError as problem:
        notes = [f"no plan ({problem.value or problem.rule}): {COMPILE:.0f} s of compiling, steps of {STEP} s assumed"]
        return COMPILE, [STEP] * len(cells), notes
    known = {row.batch: row.step.seconds for row in candidate.rows}
    steps = [known.get(cell.batch) for cell in cells]
    notes = [] if None not in steps else [f"steps of {STEP} s assumed"]
    notes.append(f"a compile of {COMPILE:.0f} s assumed: its time is known after the first block")
    return COMPILE, [STEP if each is None else each for each in steps], notes
