"""Formats by hardware by runtime: the cells of all targets in one table, each with its source.

    rows        targets
    columns     formats of weights, of products with inputs in the same format, of keys and values, of experts
    cells       runtimes: those that compute in the stored form, and those that expand it to floats first

A combination that no target lists is unknown and not shown; `Target.use` treats it as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, get_args

from quantkit import content
from quantkit.errors import unknown_name
from quantkit.target import Part, State, Target, known_formats, known_runtimes

# runtime -> its letter (upper case if it computes in the format, lower case if it emulates it) and its name; for others
# see `letter`
_KNOWN = {
    "onnxruntime": ("O", "ONNX Runtime"),
    "tensorrt": ("T", "TensorRT"),
    "tensorrt_rtx": ("R", "TensorRT-RTX"),
    "vllm": ("V", "vLLM"),
    "llama_cpp": ("L", "llama.cpp"),
    "openvino": ("N", "OpenVINO"),
    "torch": ("P", "transformers (PyTorch)"),
}
PARTS: tuple[Part, ...] = get_args(Part)
_PART = {"weights": "", "inputs": " inputs", "kv_cache": " KV cache", "experts": " experts"}
_ORDER = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "int8", "int7", "int4", "int3", "int2")
_INTRO = """# Formats by hardware by runtime

`make matrix` writes this page from the targets in `export/`. `quantkit list matrix` shows the same table; `--target`,
`--format` and `--runtime` select from it. `compile` refuses and warns by it before it opens a model.

**Native**: a kernel reads the stored form. **Emulated**: it runs, but weights are expanded to floats first: smaller,
not faster. **Absent**: it does not run. A plain column is about weights only, *inputs* about products whose weights and
inputs both have the format, *KV cache* about keys and values, *experts* about packed experts, where they differ from
other weights. An empty cell is unknown.
"""


def runtimes() -> list[str]:
    """List all known runtimes, in the order of the table."""
    return [*_KNOWN, *(name for name in known_runtimes() if name not in _KNOWN)]


@cache
def letter(runtime: str) -> str:
    """Return the letter of a runtime; for an unknown one, the first free letter of its name."""
    if runtime in _KNOWN:
        return _KNOWN[runtime][0]
    before = runtimes()[: runtimes().index(runtime)] if runtime in runtimes() else list(_KNOWN)
    taken = {letter(name) for name in before}
    return next((char for char in runtime.upper() if char.isalpha() and char not in taken), "?")


def title(runtime: str) -> str:
    """Return the name of a runtime in sentences: `ONNX Runtime`."""
    return _KNOWN[runtime][1] if runtime in _KNOWN else runtime


@dataclass(frozen=True)
class MatrixEntry:
    """One cell; `symmetric_only` means that zero points are refused."""

    target: str
    format: str
    part: Part
    runtime: str
    state: State
    symmetric_only: bool
    source: str

    @property
    def column(self) -> str:
        """Name of the column: `int8`, `int8 inputs`, `fp8_e4m3 KV cache`."""
        return f"{self.format}{_PART[self.part]}"

    @property
    def letter(self) -> str:
        """Letter of the runtime; "" if it cannot run the format."""
        own = letter(self.runtime)
        return {"native": own, "emulated": own.lower(), "absent": ""}[self.state]


def entries(*, target: str | None = None, form: str | None = None, runtime: str | None = None) -> list[MatrixEntry]:
    """List the cells of the shipped targets, or of one target by name or path; optionally of one format or runtime.

    Raises:
        InputError: `unknown-target`, `unknown-format`, `unknown-runtime`, with a did-you-mean.
    """
    if form is not None and form not in known_formats():
        raise unknown_name("format", form, known_formats(), where="--format")
    if runtime is not None and runtime not in known_runtimes():
        raise unknown_name("runtime", runtime, known_runtimes(), where="--runtime")
    if target is None:
        cells = [cell for name in content.names("export") for cell in _shipped(name)]
    else:
        cells = _of(Target.load(target))
    return [cell for cell in cells if form in (None, cell.format) and runtime in (None, cell.runtime)]


@cache
def _shipped(name: str) -> list[MatrixEntry]:
    """Load the cells of a shipped target; they do not change with measurements."""
    return _of(Target.load(name))


def _of(target: Target) -> list[MatrixEntry]:
    return [
        MatrixEntry(target.name, form, part, runtime, use.state, cell.symmetric_only, use.source)
        for form, cells in target.formats.items()
        for runtime, cell in cells.items()
        for part in PARTS
        if (use := cell.of(part)) is not None
    ]


def as_rows(cells: Iterable[MatrixEntry]) -> list[dict[str, Any]]:
    """Return an object per cell, for `--json`."""
    return [asdict(cell) for cell in cells]


def columns(cells: Iterable[MatrixEntry]) -> list[str]:
    """List the columns of a table: formats from wide to narrow, inputs and cache behind their weights."""
    places = {name: place for place, name in enumerate(_ORDER)}

    def place(cell: MatrixEntry) -> tuple[int, str, int]:
        return places.get(cell.format, len(places)), cell.format, PARTS.index(cell.part)

    return [cell.column for cell in sorted({cell.column: cell for cell in cells}.values(), key=place)]


def table(cells: Sequence[MatrixEntry]) -> dict[str, dict[str, str]]:
    """Map target -> column -> letters of the runtimes, native ones first."""
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        row = rows.setdefault(cell.target, {})
        row[cell.column] = row.get(cell.column, "") + cell.letter
    letters = [letter(name) for name in runtimes()]

    def before(own: str) -> tuple[bool, int]:
        return own.islower(), letters.index(own.upper()) if own.upper() in letters else len(letters)

    return {
        name: {column: "".join(sorted(marks, key=before)) for column, marks in row.items()}
        for name, row in rows.items()
    }


def legend(cells: Iterable[MatrixEntry]) -> str:
    """Explain the letters in these cells."""
    seen = {cell.runtime for cell in cells}
    named = ", ".join(f"{letter(name)} {title(name)}" for name in runtimes() if name in seen)
    return f"{named}; a capital computes in the stored form, a small letter expands it to floats first"


def markdown() -> str:
    """Write `docs/matrix.md`."""
    cells = entries()
    names = columns(cells)
    rows = [[name, *(row.get(column, "") for column in names)] for name, row in table(cells).items()]
    lines = [_INTRO, "## All of it", "", f"{legend(cells)}.", "", *_grid(["", *names], rows)]
    for runtime in runtimes():
        # one line per column, state and source
        alike: dict[tuple[str, str, str], list[str]] = {}
        for column in names:
            for cell in (cell for cell in cells if (cell.runtime, cell.column) == (runtime, column)):
                only = ", symmetric" if cell.symmetric_only and cell.state != "absent" else ""
                alike.setdefault((column, f"{cell.state}{only}", cell.source), []).append(cell.target)
        if alike:
            sourced = [[column, ", ".join(where), state, source] for (column, state, source), where in alike.items()]
            lines += ["", f"## {title(runtime)}", "", *_grid(["format", "targets", "state", "source"], sourced)]
    return "\n".join(lines) + "\n"


def _grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]
