"""Formats by hardware by runtime: all targets' cells in one table, each with its source. There is no second table.

    rows        targets
    columns     formats, of weights, of products whose inputs are in them too, of keys and values
    cells       the runtimes: which compute in the stored form, which expand it to floats first

What is not written in a target is not known, and not shown; `Target.use` takes it for absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, get_args

from quantkit import content
from quantkit.errors import unknown_name
from quantkit.target import Part, State, Target, known_formats, known_runtimes

# runtime -> the letter that stands for it where space is short (large where it computes in the format, small where it
# only emulates it) and what people call it; of others see `letter` and `title`
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
_PART = {"weights": "", "inputs": " inputs", "kv_cache": " KV cache"}
_ORDER = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "int8", "int7", "int4", "int3", "int2")
_INTRO = """# Formats by hardware by runtime

Made from the targets in `export/` by `make matrix`; not written by hand. `quantkit list matrix` shows the same, with
`--target`, `--format` and `--runtime` to choose from it; `compile` refuses and warns by it before it opens a model.

**Native**: a kernel reads the stored form. **Emulated**: it runs, but what is stored is expanded to floats first:
smaller, not faster. **Absent**: it does not run. Columns without a word are of weights alone; *inputs* are of products
whose weights and inputs are both in the format; *KV cache* is of keys and values. What is in no cell is not known.
"""


def runtimes() -> list[str]:
    """All that a target may speak of, in the order of the table."""
    return [*_KNOWN, *(name for name in known_runtimes() if name not in _KNOWN)]


@cache
def letter(runtime: str) -> str:
    """The letter of a runtime; of one that the table does not know the first of its name that is free."""
    if runtime in _KNOWN:
        return _KNOWN[runtime][0]
    before = runtimes()[: runtimes().index(runtime)] if runtime in runtimes() else list(_KNOWN)
    taken = {letter(name) for name in before}
    return next((each for each in runtime.upper() if each.isalpha() and each not in taken), "?")


def title(runtime: str) -> str:
    """What people call a runtime."""
    return _KNOWN[runtime][1] if runtime in _KNOWN else runtime


@dataclass(frozen=True)
class MatrixEntry:
    """One cell.

    Args:
        state: what it makes of it.
        symmetric_only: whether a zero point is refused.
    """

    target: str
    format: str
    part: Part
    runtime: str
    state: State
    symmetric_only: bool
    source: str

    @property
    def column(self) -> str:
        """`int8`, `int8 inputs`, `fp8_e4m3 KV cache`."""
        return f"{self.format}{_PART[self.part]}"

    @property
    def letter(self) -> str:
        """Of the runtime; "" where it does not run."""
        own = letter(self.runtime)
        return {"native": own, "emulated": own.lower(), "absent": ""}[self.state]


def entries(*, target: str | None = None, form: str | None = None, runtime: str | None = None) -> list[MatrixEntry]:
    """All cells of the shipped targets, or of one that is named by name or path; of one format, of one runtime.

    Raises:
        InputError: `unknown-target`, `unknown-format`, `unknown-runtime`, each with a did-you-mean.
    """
    if form is not None and form not in known_formats():
        raise unknown_name("format", form, known_formats(), where="--format")
    if runtime is not None and runtime not in known_runtimes():
        raise unknown_name("runtime", runtime, known_runtimes(), where="--runtime")
    if target is None:
        found = [each for name in content.names("export") for each in _shipped(name)]
    else:
        found = _of(Target.load(target))
    return [each for each in found if form in (None, each.format) and runtime in (None, each.runtime)]


@cache
def _shipped(name: str) -> list[MatrixEntry]:
    """Cells are no figures: what the doctor measures changes none of them."""
    return _of(Target.load(name))


def _of(target: Target) -> list[MatrixEntry]:
    found = []
    for form, cells in target.formats.items():
        for runtime, cell in cells.items():
            for part in PARTS:
                use = cell.of(part)
                if use is not None:
                    entry = MatrixEntry(target.name, form, part, runtime, use.state, cell.symmetric_only, use.source)
                    found.append(entry)
    return found


def as_rows(found: Iterable[MatrixEntry]) -> list[dict[str, Any]]:
    """For `--json`: one object a cell."""
    return [asdict(each) for each in found]


def columns(found: Iterable[MatrixEntry]) -> list[str]:
    """Of a table of those cells: formats from wide to narrow, inputs and cache behind their weights."""
    seen = {each.column: each for each in found}
    places = {name: place for place, name in enumerate(_ORDER)}

    def place(each: MatrixEntry) -> tuple[int, str, int]:
        return places.get(each.format, len(places)), each.format, PARTS.index(each.part)

    return [each.column for each in sorted(seen.values(), key=place)]


def table(found: Sequence[MatrixEntry]) -> dict[str, dict[str, str]]:
    """Target -> column -> the letters of the runtimes that run it, those that compute in it first."""
    made: dict[str, dict[str, str]] = {}
    for each in found:
        row = made.setdefault(each.target, {})
        row[each.column] = row.get(each.column, "") + each.letter
    return {
        name: {column: "".join(sorted(letters, key=_before)) for column, letters in row.items()}
        for name, row in made.items()
    }


def _before(own: str) -> tuple[bool, int]:
    letters = [letter(name) for name in runtimes()]
    return own.islower(), letters.index(own.upper()) if own.upper() in letters else len(letters)


def legend(found: Iterable[MatrixEntry]) -> str:
    """What the letters mean, of those that occur."""
    seen = {each.runtime for each in found}
    named = ", ".join(f"{letter(name)} {title(name)}" for name in runtimes() if name in seen)
    return f"{named}; a capital computes in the stored form, a small letter expands it to floats first"


def markdown() -> str:
    """`docs/matrix.md`."""
    found = entries()
    names = columns(found)
    lines = [_INTRO, "## All of it", "", f"{legend(found)}.", ""]
    rows = [[name, *(row.get(column, "") for column in names)] for name, row in table(found).items()]
    lines += _grid(["", *names], rows)
    for runtime in runtimes():
        own = [each for each in found if each.runtime == runtime]
        lines += ["", f"## {title(runtime)}", ""] if own else []
        lines += _grid(["format", "targets", "state", "source"], _sourced(own, names)) if own else []
    return "\n".join(lines) + "\n"


def _sourced(found: Sequence[MatrixEntry], names: Sequence[str]) -> list[list[str]]:
    """One line for each column and each way in which targets know of it."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for column in names:
        for each in (entry for entry in found if entry.column == column):
            only = ", symmetric" if each.symmetric_only and each.state != "absent" else ""
            grouped.setdefault((column, f"{each.state}{only}", each.source), []).append(each.target)
    return [[column, ", ".join(targets), state, source] for (column, state, source), targets in grouped.items()]


def _grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]
