"""Table of the kernels that each runtime has for each format on each target, for `quantkit list matrix`."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.planning import matrix
from quantkit.planning.matrix import MatrixEntry
from quantkit.report.kit import words
from quantkit.report.kit.tree import Cell, Facts, Line, Part, Remark, Section, Sheet, Styled

_TONES = {"native": "good", "emulated": "inconclusive", "absent": "dim"}
# one letter for each part; a cell takes four at most: `WIKE`
_PARTS = {"weights": "w", "inputs": "i", "kv_cache": "k", "experts": "e"}
_LEGEND = (
    "w: weights, i: inputs too, k: keys and values, e: packed experts. A capital letter: a kernel computes in the "
    "stored form; a small letter: values are expanded to floats first; no letter: it does not run, or is not known. "
    "--target and --format narrow the table; both together show the sources."
)


def shown(cells: Sequence[MatrixEntry]) -> list[Part]:
    """Build the table; for one target, a section for each runtime; for one runtime of it, the source of each cell."""
    targets, formats, runtimes = ({getattr(e, part) for e in cells} for part in ("target", "format", "runtime"))
    if len(formats) > 1 and len(targets) > 1:
        return _all(cells)
    whole = len(formats) > 1 and len(runtimes) > 1
    by_runtime = words.by(cells, lambda cell: cell.runtime).items()
    parts: list[Part] = [_of(runtime, own, sources=not whole) for runtime, own in by_runtime]
    return [*parts, Remark("--runtime or --format shows the source of each", "caption")] if whole else parts


def _all(cells: Sequence[MatrixEntry]) -> list[Part]:
    """Build one line for each group of targets with equal cells."""
    columns = _columns(cells)
    formats = [names[0] for names in columns]
    everywhere = {cell.target for cell in cells}
    heads = [f"{_short(first)}{'+' if others else ''}" for first, *others in columns]
    rows: list[list[Line]] = []
    for runtime in matrix.runtimes():
        alike: dict[tuple[str, ...], list[str]] = {}
        for target, own in words.by((e for e in cells if e.runtime == runtime), lambda cell: cell.target).items():
            letters = tuple("".join(_letter(cell) for cell in own if cell.format == name) for name in formats)
            alike.setdefault(letters, []).append(target)
        if not alike:
            continue
        nowhere = tuple("" for _ in formats)
        largest = max(alike, key=lambda letters: len(alike[letters]))
        rows += [[Styled(runtime, "strong")]] if set(alike) != {nowhere} else []
        for letters, targets in sorted(alike.items(), key=lambda pair: pair[0] == largest):
            rest = letters == largest and len(alike) > 1 and sum(map(len, alike.values())) == len(everywhere)
            if letters != nowhere:
                rows.append([Styled("all others" if rest else ", ".join(targets), "name"), *letters])
    alike_everywhere = [f"{first}+: {', '.join(others)} too. " for first, *others in columns if others]
    table = Sheet(["", *heads], rows, words=len(formats) + 1)
    return [table, Remark("".join([*alike_everywhere, _LEGEND]), "caption")]


def _columns(entries: Sequence[MatrixEntry]) -> list[list[str]]:
    """Group formats with equal cells into one column, under the shortest name."""
    alike: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(column.split(" ")[0] for column in matrix.columns(entries)):
        cells = [entry for entry in entries if entry.format == name]
        key = frozenset((entry.target, entry.runtime, entry.part, entry.state, entry.source) for entry in cells)
        alike.setdefault(key, []).append(name)
    return [sorted(names, key=len) for names in alike.values()]


def _letter(entry: MatrixEntry) -> str:
    letter = _PARTS[entry.part]
    return {"native": letter.upper(), "emulated": letter, "absent": ""}[entry.state]


def _short(name: str) -> str:
    """Abbreviate a format for a narrow column: `fp16` for `float16`, `fp8` for `fp8_e4m3`, `i4` for `int4`."""
    shorter = {"bfloat": "bf", "float": "fp", "fp8_e4m3": "fp8", "fp8_": "", "xfp": "x", "vfp": "v", "int": "i"}
    for long, short in shorter.items():
        name = name.replace(long, short)
    return name


def _of(runtime: str, cells: Sequence[MatrixEntry], *, sources: bool) -> Part:
    several, columns = len({cell.target for cell in cells}) > 1, matrix.columns(cells)
    ordered = sorted(cells, key=lambda cell: (list(_TONES).index(cell.state), columns.index(cell.column)))
    alike = words.by(ordered, lambda cell: (_state(cell), cell.source if sources else ""))
    rows: list[tuple[Line, Cell]] = []
    for (state, source), own in alike.items():
        names = dict.fromkeys(f"{cell.target} {cell.column}" if several else cell.column for cell in own)
        what: list[Line] = [Styled(", ".join(names), "name"), *([Styled(source, "dim")] if source else [])]
        rows.append((Styled(state, _TONES[own[0].state]), what))
    return Section(runtime, [Facts(rows)])


def _state(entry: MatrixEntry) -> str:
    return f"{entry.state}{', symmetric' if entry.symmetric_only and entry.state != 'absent' else ''}"
