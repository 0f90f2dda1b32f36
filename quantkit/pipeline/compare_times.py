"""How long B takes against A: in one run, or by what each run of its own said of one baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quantkit import registry
from quantkit.errors import InputError
from quantkit.measure.compared import Asked, How
from quantkit.measure.latency import SHORT, Plan
from quantkit.measure.rows import Row
from quantkit.pipeline import worth
from quantkit.pipeline.compare_sides import Side
from quantkit.pipeline.graph_again import holds_graph
from quantkit.pipeline.progress import Progress
from quantkit.stats.apart import KNOWN, Apart, Measured, difference

_TIMED = ("latency.decode_step", "latency.prefill")
# a bootstrap draws at most so many groups of blocks
_GROUPS = 20
# a baseline that took so many times as long in one of the two runs had company
_BUSY = 1.2


def demand(a: Side, b: Side) -> None:
    """Refuse to begin what cannot be timed in one run.

    Raises:
        InputError: `compare-float`, `compare-graph`, `bundle-without-onnx`, `hash-mismatch`.
        MissingDependency: onnxruntime or scipy.
    """
    from quantkit.measure.speed import demand as packages

    packages()
    for side in (a, b):
        if side.floating:
            raise InputError(
                "compare-float",
                where=f"{side.name} --measure",
                value="the float model",
                rule="a bundle is timed against its float model by `measure`",
                remedy=side.measure(),
            )
        if holds_graph(side.bundle):
            raise InputError(
                "compare-graph",
                where=f"{side.name} --measure",
                value="a graph of one's own",
                rule="graphs are timed by `measure`, against their float graph",
                remedy=f"{a.measure()} and {b.measure()}, then compare without --measure",
            )
        registry.load("runtimes", worth.RUNTIME).checked(side.bundle)


def interleaved(a: Side, b: Side, plan: Plan, progress: Progress) -> list[Row]:
    """Both, timed in turns in ONNX Runtime: B's rows, with A for their baseline.

    Raises:
        InputError: those of `measure.speed.run`.
        MissingDependency: onnxruntime or scipy.
    """
    ours, theirs = (registry.load("runtimes", worth.RUNTIME).folder(side.bundle) for side in (b, a))
    context = min(worth.context_of(ours), worth.context_of(theirs))
    return worth.time_it(
        ours,
        b.subject,
        b.manifest.layers,
        theirs,
        a.subject,
        worth.fitting(plan, context, b.manifest.model.kind),
        lambda share, words: progress.at("speed", share, words),
        baseline_format=worth.format_of(a.manifest.layers),
    )


def of_run(rows: Sequence[Row], margin: float) -> list[Asked]:
    """What rows of B say that have A for their baseline."""
    return [_direct(row, margin, swapped=False) for row in rows if _is_timed(row)]


def narrowed(plan: Plan, cells: Sequence[Asked]) -> Plan:
    """The same plan with no other batches, contexts and prompts than those of some cells."""
    steps = [cell for cell in cells if cell.name == "latency.decode_step"]
    passes = [cell for cell in cells if cell.name == "latency.prefill"]
    return replace(
        plan,
        # of a model that does not decode, a plan's batches are those of its passes
        batches=_sizes(cell.batch for cell in steps or passes),
        contexts=_sizes((cell.shape or {}).get("context") for cell in steps),
        prefill_batches=_sizes(cell.batch for cell in passes),
        prefills=_sizes((cell.shape or {}).get("new_tokens") for cell in passes),
        seed=plan.seed + 1,
    )


def key(cell: Asked) -> tuple[Any, ...]:
    """What it is a time of."""
    return cell.name, cell.runtime, cell.device, cell.batch, tuple(sorted((cell.shape or {}).items()))


def recorded(a: Side, b: Side, margin: float) -> tuple[list[Asked], list[str]]:
    """What the rows of both say: those that were timed against each other, else against one baseline on one device.

    Returns:
        The comparisons, and what a reader must know of them.
    """
    direct = [_direct(row, margin, swapped=False) for row in _against(b, a)]
    direct += [_direct(row, margin, swapped=True) for row in _against(a, b)]
    if direct:
        return list({key(each): each for each in reversed(direct)}.values())[::-1], []
    ours = {_place(row): row for row in b.rows if _is_timed(row)}
    found, busy, versions = [], 1.0, set()
    for row in a.rows:
        other = ours.get(_place(row)) if _is_timed(row) else None
        if other is None or row.baseline is None or other.baseline is None:
            continue
        found.append(_by_ratio(row, other, margin))
        busy = max(busy, *(_times(other.baseline.value, row.baseline.value)))
        versions |= {str(each.versions.get(str(each.runtime))) for each in (row, other)}
    notes = []
    if busy > _BUSY:
        notes.append(
            f"the baseline took up to {busy:.1f} times as long in one run as in the other: the machine was busy"
        )
    if len(versions) > 1:
        notes.append(f"the two were timed in versions {' and '.join(sorted(versions))} of the runtime")
    return found, notes


def _times(one: float, other: float) -> tuple[float, float]:
    return one / other, other / one


def _sizes(values: Iterator[int | None]) -> tuple[int, ...]:
    return tuple(sorted({value for value in values if value}))


def _is_timed(row: Row) -> bool:
    base = row.baseline
    return row.name in _TIMED and row.value is not None and base is not None and base.ratio_ci95 is not None


def _against(side: Side, other: Side) -> list[Row]:
    """A side's own rows that have the other for their baseline."""
    return [
        row
        for row in side.rows
        if not side.floating and _is_timed(row) and row.baseline is not None and row.baseline.subject == other.subject
    ]


def _place(row: Row) -> tuple[Any, ...]:
    """Rows of one place can be set against each other."""
    shape = tuple(sorted((row.shape or {}).items()))
    baseline = row.baseline.subject if row.baseline else None
    device = row.device.id if row.device else None
    return row.name, row.batch, shape, row.runtime, device, row.settings.get("threads"), baseline


def _ratio(row: Row, *, spread: bool) -> Measured:
    """How many times as fast as its baseline."""
    base = row.baseline
    assert base is not None and base.ratio is not None and base.ratio_ci95 is not None
    # a block has two visits a side, of two steps each where they are short
    steps = 4 if max(row.value or 0.0, base.value) < SHORT else 2
    degrees = max(1, min(_GROUPS, (row.n or 0) // steps) - 1)
    return Measured.ratio(
        base.ratio, base.ratio_ci95, spread=(row.aa_spread or 0.0) if spread else 0.0, degrees=degrees
    )


def _direct(row: Row, margin: float, *, swapped: bool) -> Asked:
    """Of one run; swapped: the row is A's."""
    assert row.baseline is not None
    found = _ratio(row, spread=False)
    own, other = (KNOWN, found) if swapped else (found, KNOWN)
    times = (row.value, row.baseline.value) if swapped else (row.baseline.value, row.value)
    return _asked(row, times, "interleaved", _slower(own, other, margin))


def _by_ratio(a: Row, b: Row, margin: float) -> Asked:
    evidence = _slower(_ratio(b, spread=True), _ratio(a, spread=True), margin)
    return _asked(b, (a.value, b.value), "ratio of ratios", evidence)


def _slower(candidate: Measured, baseline: Measured, margin: float) -> Apart:
    return difference(candidate, baseline, margin=margin, alarm=margin, lower_is_better=False, logarithm=True)


def _asked(row: Row, times: tuple[float | None, float | None], how: How, evidence: Apart) -> Asked:
    return Asked(
        what="latency",
        name=row.name,
        a=times[0],
        b=times[1],
        unit="s",
        how=how,
        evidence=evidence,
        n=row.n,
        runtime=row.runtime,
        batch=row.batch,
        shape=row.shape,
        device=row.device.name if row.device else None,
    )
