"""The format-by-hardware matrix on screen: by runtime the targets that are alike, of one target its cells."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from quantkit.planning import matrix
from quantkit.planning.matrix import MatrixEntry
from quantkit.report.bundle import figures
from quantkit.report.kit.screen import DIM, grid, indented, lines, table

_STYLES = {"native": "green", "emulated": "yellow", "absent": DIM}
# one letter a part, so that a cell takes three: `WIK`
_PARTS = {"weights": "w", "inputs": "i", "kv_cache": "k"}
_NAMES = 14
_LEGEND = (
    "w: weights, i: inputs too, k: keys and values; a capital: a kernel computes in the stored form, a small letter: "
    "it is expanded to floats first. What has no letter does not run, or is not known. --target and --format choose; "
    "with both, the sources."
)


def shown(found: Sequence[MatrixEntry]) -> list[RenderableType]:
    """All targets alike in a line; of one target what each runtime does; of one format or runtime of it each source."""
    targets, formats, runtimes = ({getattr(e, part) for e in found} for part in ("target", "format", "runtime"))
    if len(formats) > 1 and len(targets) > 1:
        return _all(found)
    whole = len(formats) > 1 and len(runtimes) > 1
    shown = [
        part
        for runtime, cells in figures.by(found, lambda each: each.runtime).items()
        for part in _of(runtime, cells, sources=not whole)
    ]
    return [*shown, Text("with the source of each: --runtime or --format", DIM)] if whole else shown


def _all(found: Sequence[MatrixEntry]) -> list[RenderableType]:
    """A line for all targets that a runtime takes alike."""
    columns = _columns(found)
    formats = [names[0] for names in columns]
    everywhere = {each.target for each in found}
    heads = [f"{_short(first)}{'+' if others else ''}" for first, *others in columns]
    made = table(["", *heads], left=len(formats) + 1, gap=1)
    made.columns[0].width = _NAMES
    for column in made.columns[1:]:
        column.no_wrap = True
    for runtime in matrix.runtimes():
        alike: dict[tuple[str, ...], list[str]] = {}
        for target, cells in figures.by((e for e in found if e.runtime == runtime), lambda each: each.target).items():
            letters = tuple("".join(_letter(each) for each in cells if each.format == name) for name in formats)
            alike.setdefault(letters, []).append(target)
        if not alike:
            continue
        nowhere = tuple("" for _ in formats)
        largest = max(alike, key=lambda letters: len(alike[letters]))
        if set(alike) != {nowhere}:
            made.add_row(Text(runtime, "bold"))
        for letters, targets in sorted(alike.items(), key=lambda pair: pair[0] == largest):
            rest = letters == largest and len(alike) > 1 and sum(map(len, alike.values())) == len(everywhere)
            if letters != nowhere:
                made.add_row(Text("all others" if rest else ", ".join(targets), "cyan"), *letters)
    alike_everywhere = [f"{first}+: {', '.join(others)} too. " for first, *others in columns if others]
    return [made, Text("".join([*alike_everywhere, _LEGEND]), DIM)]


def _columns(found: Sequence[MatrixEntry]) -> list[list[str]]:
    """The formats of each column: those that are alike everywhere share one, under the shortest name."""
    alike: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(column.split(" ")[0] for column in matrix.columns(found)):
        cells = [each for each in found if each.format == name]
        key = frozenset((each.target, each.runtime, each.part, each.state, each.source) for each in cells)
        alike.setdefault(key, []).append(name)
    return [sorted(names, key=len) for names in alike.values()]


def _letter(each: MatrixEntry) -> str:
    letter = _PARTS[each.part]
    return {"native": letter.upper(), "emulated": letter, "absent": ""}[each.state]


def _short(name: str) -> str:
    """`fp16` for `float16`, `fp8` for `fp8_e4m3`, `i4` for `int4`: heads of narrow columns."""
    for long, short in (
        ("bfloat", "bf"),
        ("float", "fp"),
        ("fp8_e4m3", "fp8"),
        ("fp8_", ""),
        ("xfp", "x"),
        ("vfp", "v"),
        ("int", "i"),
    ):
        name = name.replace(long, short)
    return name


def _of(runtime: str, found: Sequence[MatrixEntry], *, sources: bool) -> list[RenderableType]:
    """One runtime: cells of one state, and of one source where it is asked for, share a line."""
    several, columns = len({each.target for each in found}) > 1, matrix.columns(found)
    ordered = sorted(found, key=lambda each: (list(_STYLES).index(each.state), columns.index(each.column)))
    alike = figures.by(ordered, lambda each: (_state(each), each.source if sources else ""))
    rows: list[list[RenderableType]] = []
    for (state, source), cells in alike.items():
        names = dict.fromkeys(f"{each.target} {each.column}" if several else each.column for each in cells)
        what = lines([Text(", ".join(names), "cyan"), *([Text(source, DIM)] if source else [])])
        rows.append([Text(state, _STYLES[cells[0].state]), what])
    return [Text(runtime, "bold"), *indented(grid(rows))]


def _state(each: MatrixEntry) -> str:
    return f"{each.state}{', symmetric' if each.symmetric_only and each.state != 'absent' else ''}"
