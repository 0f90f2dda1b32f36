"""Memory and disk of a compile, from sizes alone: what refusals, plans and the choice of a device go by.

    peak of a part = sum over what it holds of    bytes × how often that is there at once

No time is foretold: a compile measures its first block and multiplies. The parts of a transformer's compile:

    prove      the model as plain transformers has it, whole or as much of it as fits anyway
    begin      embeddings and head, and the hidden states before the first block
    quantize   a block with what its widest solve holds, hidden states in and out, what blocks are given beside them,
               the activations of one forward
    check      of a checkpoint a few blocks twice; of a graph its session, and one block of what it is held against
    score      both heads, both models' hidden states, a few positions of logits; of a graph its session
    confirm    of the original and of its export, one after the other, all of it; left out of large models
    speed      the float model as a graph, made and loaded

Embeddings and head, the *ends*, are loaded whole, in 32-bit floats, wherever they are needed: once where a model begins
and where an export is checked, twice where two heads are compared. Tensors as large as they go back to the system when
they are freed; of what is smaller, glibc's heap keeps a share, which stays with the parts after it. How often a thing
is there at once was fitted to compiles of random models (`benchmarks/plan_compile.py --fit`): `compiling_memory.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit import plugins
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.formats import stored_bits
from quantkit.model.layouts import load_layout
from quantkit.model.layouts import names as layout_names
from quantkit.model.sizes.architecture import Architecture, BlockShapes, Matrix
from quantkit.model.sizes.storage import table_bytes
from quantkit.passes import pass_of
from quantkit.planning.assigned import assign_sizes
from quantkit.plugins import Stores
from quantkit.recipe import ExportStep, PassStep, Recipe
from quantkit.scheme import WeightScheme

# what one forward may take for activations, and tensors of the widest activation alive at one time, roughly
ACTIVATION_BYTES, ALIVE = 768 * 2**20, 6
# what adds to the residual stream, or begins a new shared input, by how such linears are called
OUTWARD = ("o_proj", "out_proj", "down_proj", "dense", "output", "fc2", "c_proj", "w2")
# positions that a compile scores at least, by the kind of model; tokens of a sequence where the calibration set says
# nothing of them
SCORED, LENGTH = {"decoder": 2000, "encoder": 6000}, 512
# sequences of a forward that scores; of a quantized cache's long contexts, tokens and sequences
SCORED_TOGETHER, LONG, LONG_SEQUENCES = 4, 2048, 4
# a model of so many bytes is held against plain transformers as a whole, whatever else its compile takes; a larger one
# where that takes so much of what its other parts take
WHOLE, CONFIRMED = 640 * 2**20, 1.25
# logits of one model that are in memory at one time; bytes from which on hidden states lie in a file
_LOGITS, _ON_DISK = 1 << 23, 1 << 30
# bytes of a token in a tokenizer's memory: a byte-level BPE of 24,000 takes 28 MB, benchmarks/harness/tokenizer_side.py
_TOKENIZER = 1164
# bytes that a package which a layout is loaded with takes beyond transformers: importing bitsandbytes 0.50
_LIBRARY = {"bitsandbytes": 4.8e7}
# bytes of a bundle's page with the code that draws it, of what is kept of a scored position, of a graph's nodes, and of
# a token in a tokenizer's files: SmolLM2's 49,152 take 3.5 MB
_PAGE, _ITEM, _LAYER, _TOKEN = 1.7e6, 46, 4e4, 71
MEMORY = Path(__file__).with_name("compiling_memory.json")
# of a GPU's free bytes: the rest is for libraries' workspaces and for holes between what is allocated
USABLE = 0.85
# of the widest shared input: Hessians [K, K] of a solve, and what solvers hold beside weights [N, K]
_SQUARES, _BESIDE = 8, 6
# bytes that a search for folds takes at most, and how often it would like to have a shared input's weights
_SEARCH, _TRIED = 4e9, 42


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Args:
        work: beside the bundle while it is built: codes and hidden states.
        cache: in the user's cache: the float model as a graph, where speed is measured.
    """

    bundle: float
    work: float
    cache: float

    @property
    def most(self) -> float:
        """Bytes that the bundle's disk has to hold at one time."""
        return self.bundle + self.work


@dataclass(frozen=True)
class Compiling:
    """What a compile takes.

    Args:
        memory: part -> bytes resident at its peak; a graph's timing runs in processes of its own and is not in it.
        notes: what was assumed.
        device: how it lies on a GPU, if it computes on one: bytes, and sequences that go through at once.
        seconds: stage -> seconds, of those that a rehearsal measured on one block; None where nothing was measured.
    """

    memory: Mapping[str, float]
    disk: Disk
    notes: tuple[str, ...] = ()
    device: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] | None = None

    @property
    def peak(self) -> float:
        """Bytes of memory."""
        return max(self.memory.values())

    @property
    def at_peak(self) -> str:
        """The part that takes the most memory."""
        return max(self.memory, key=lambda part: self.memory[part])

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON, in seconds and bytes; what is not measured is null."""
        return {
            "seconds": dict(self.seconds) if self.seconds else None,
            "total_seconds": sum(self.seconds.values()) if self.seconds else None,
            "total_interval": None,
            "cpu_seconds": None,
            "memory_peak_bytes": round(self.peak),
            "memory_peak_at": self.at_peak,
            "disk_bytes": {name: round(getattr(self.disk, name)) for name in ("bundle", "work", "cache")},
            "machine": None,
            "notes": list(self.notes),
            **({"device": dict(self.device)} if self.device else {}),
        }


@dataclass(frozen=True)
class CompileSpec:
    """One compile of a transformer in sizes.

    Args:
        recipe: its exports are those that the target reads.
        schemes: `Matrix.name` -> how it is stored; matrices that are not named stay as they are.
        sequences: to calibrate on, of `length` tokens each; 0 where no pass looks at data.
        scored: tokens that are scored, `scored_length` a sequence.
        timed: whether the result is timed.
        baseline: whether the float model has to be made as a graph, to be timed against.
        beside: values that blocks are given for a token besides its hidden states: per-layer embeddings.
        live: whether the model's own forward stands still at each block, one for every sequence (`model/streaming`).
    """

    architecture: Architecture
    recipe: Recipe
    schemes: Mapping[str, WeightScheme]
    sequences: int
    length: int
    scored: int
    scored_length: int
    timed: bool = False
    baseline: bool = False
    beside: int = 0
    live: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that calibrate."""
        return self.sequences * self.length

    @property
    def chunk(self) -> int:
        """Sequences of one forward while calibrating."""
        return chunk_size(self.widest, max(self.length, 1))

    @property
    def widest(self) -> int:
        """Features of the widest activation."""
        return max((max(matrix.N, matrix.K) for matrix in self.architecture.inside()), default=1)

    @property
    def corrected(self) -> bool:
        """Whether any pass looks at the original stream."""
        return any(_needs(step) & {"original_inputs", "original_outputs"} for step in self.recipe.passes)

    @property
    def solving(self) -> bool:
        """Whether any pass factors Hessians."""
        return any("hessian" in _needs(step) for step in self.recipe.passes)

    @property
    def exports(self) -> list[str]:
        """Destinations by name, in order."""
        return [step.name for step in self.recipe.export]

    @property
    def block(self) -> float:
        """Bytes of the largest block in 32-bit floats."""
        return 4.0 * max((elements(layer.matrices) for layer in self.architecture.layers), default=0.0)

    @property
    def ends(self) -> float:
        """Bytes of embeddings and head in 32-bit floats."""
        model = self.architecture
        head = model.head.parameters if model.head is not None and not model.tied else 0
        return 4.0 * (model.embeddings + model.others + head)


def described(
    architecture: Architecture,
    recipe: Recipe,
    *,
    speed: bool = False,
    baseline: bool = True,
    positions: int | None = None,
) -> CompileSpec:
    """Describe the compile of a model by a recipe, where the model is not opened.

    Args:
        recipe: its exports are those that the target reads (`planning.support`).
        speed: whether what it exports is timed, if it can be.
        baseline: whether its graph has to be made to be timed against.
        positions: that are scored, at least; None: as many as a compile scores.

    Raises:
        InputError: those of `assign_sizes`; `compile-unknown`, a network of images.
    """
    if architecture.kind == "network":
        rule = "what a compile takes is known of decoders and encoders of text"
        remedy = "quantkit compile --dry-run says it of a graph"
        raise InputError("compile-unknown", architecture.name, "a network of images", rule, remedy)
    schemes, scheme, calibration = assign_sizes(recipe, architecture).schemes, recipe.scheme, recipe.calibration
    fixed = any(part is not None and not part.dynamic for part in (scheme.activations, scheme.kv_cache))
    looks = fixed or any(_needs(step) for step in recipe.passes)
    length = min(calibration.tokens, architecture.max_context or calibration.tokens)
    scored = min(LENGTH, architecture.max_context or LENGTH) if calibration.set == "random-tokens" else length
    return CompileSpec(
        architecture,
        recipe,
        schemes,
        calibration.samples if looks else 0,
        length,
        -(-(positions or SCORED[architecture.kind]) // max(scored - 1, 1)) * scored,
        scored,
        timed=speed and bool(schemes) and timed(recipe) is not None,
        baseline=baseline,
    )


def predict(spec: CompileSpec) -> Compiling:
    """Predict what the compile of a transformer takes."""
    return Compiling(peaks(spec), disk(spec))


# --- what a recipe and its plug-ins say ------------------------------------------------------------------------------


def chunk_size(widest: int, tokens: int) -> int:
    """Count the sequences of `tokens` that go through one forward when the widest activation has `widest` features."""
    return max(1, ACTIVATION_BYTES // (widest * tokens * 4 * ALIVE))


def _needs(step: PassStep) -> frozenset[str]:
    """The statistics that a pass of a recipe needs with its settings."""
    return pass_of(step).needs_with(step.settings)


def _stores(export: str) -> Stores:
    return load_exporter(export).stores


def timed(recipe: Recipe) -> ExportStep | None:
    """Choose the export that is timed against the float model: a graph, else a file of everything."""
    by = {_stores(step.name): step for step in reversed(recipe.export)}
    return by.get("graph") or by.get("file")


@cache
def _storing(what: Stores) -> str:
    """The first exporter that stores models so."""
    return next(name for name in plugins.EXPORTERS.shipped() if _stores(name) == what)


def fitted(part: str) -> str:
    """Name the part whose fit is taken: `check checkpoint` for `check gguf`; no file of everything was fitted."""
    kind, _, export = part.partition(" ")
    if not export:
        return part
    what = _stores(export)
    return f"{kind} {_storing('tensors' if what == 'file' else what)}"


def shared(layer: BlockShapes) -> list[list[Matrix]]:
    """Group the linears of a layer by the input that they share, in order, as far as their names tell."""
    groups: list[list[Matrix]] = []
    for matrix in layer.matrices:
        parent, _, leaf = matrix.name.rpartition(".")
        last = groups[-1][0] if groups else None
        alike = last is not None and last.name.rpartition(".")[0] == parent and last.K == matrix.K
        if alike and leaf not in OUTWARD:
            groups[-1].append(matrix)
        else:
            groups.append([matrix])
    return groups


def elements(matrices: Sequence[Matrix]) -> float:
    """Count the weights of some linears, all experts."""
    return float(sum(matrix.count * matrix.N * matrix.K for matrix in matrices))


# --- memory ----------------------------------------------------------------------------------------------------------


@cache
def copies() -> Mapping[str, Mapping[str, float]]:
    """Read part -> what it holds -> how often that is there at once; of what is counted as 1, bytes."""
    stored: dict[str, Any] = json.loads(MEMORY.read_text(encoding="utf-8"))
    return stored["memory"]  # type: ignore[no-any-return]


def peaks(spec: CompileSpec) -> dict[str, float]:
    """Map part -> bytes resident at its peak."""
    memory = {
        part: sum(amount * table.get(term, 0.0) for term, amount in terms.items())
        for part, terms in held(spec).items()
        if (table := copies().get(fitted(part))) is not None
    }
    others = max((peak for part, peak in memory.items() if part != "confirm"), default=0.0)
    if 4.0 * spec.architecture.parameters > WHOLE and memory.get("confirm", 0.0) > CONFIRMED * others:
        del memory["confirm"]
    return memory


def held(spec: CompileSpec) -> dict[str, dict[str, float]]:
    """Map part -> what it holds -> bytes; `one` is the interpreter with its libraries, `graph` and `engine` those of
    ONNX and of TensorRT.
    """
    model, stored = spec.architecture, {_stores(name) for name in spec.exports}
    libraries = {
        "one": 1.0,
        "tokenizer": float(_TOKENIZER * (model.vocabulary or 0)),
        "graph": float("graph" in stored),
        "engine": float("engine" in stored),
    }
    largest = max((matrix.N * matrix.K for matrix in model.inside()), default=0)
    parts: dict[str, dict[str, float]] = {
        "open": {**libraries, "largest": float(_width(model) * max(largest, model.embeddings))},
        "prove": {**libraries, "whole": min(4.0 * model.parameters, WHOLE)},
    }
    left: dict[str, float] = {}
    if spec.recipe.passes or spec.sequences:
        quantized = _quantizing(spec)
        parts["begin"] = {**libraries, "ends": spec.ends, **{name: quantized[name] for name in ("hidden", "beside")}}
        parts["quantize"] = {**libraries, **quantized}
        left = {f"left {name}": amount for name, amount in quantized.items()}
    # of a session that was closed, too
    left |= {"left floats": _table(model)} if libraries["graph"] else {}
    for step in spec.recipe.export:
        layout = str(step.options.get("layout"))
        loaded_with = load_layout(layout.replace("-", "_")).libraries if layout in layout_names() else ()
        libraries["library"] = libraries.get("library", 0.0) + sum(_LIBRARY.get(name, 0.0) for name in loaded_with)
    for name in spec.exports:
        session = _session(spec) if _stores(name) == "graph" else {}
        parts[f"check {name}"] = {**libraries, "ends": spec.ends, "block": spec.block, **session, **left}
        if _stores(name) == "engine":
            continue
        tensors = _stores(name) == "tensors"
        parts[f"score {name}"] = {
            **libraries,
            "ends": spec.ends * (2 if tensors and model.head is not None else 1),
            **_scoring(spec, cache=tensors and spec.recipe.scheme.kv_cache is not None),
            "block": spec.block,
            **session,
            **left,
        }
        parts["confirm"] = {**libraries, "whole": 4.0 * model.parameters, **left}
    # the float model as a graph, made and loaded; a file is written and read tensor by tensor
    if spec.timed and spec.baseline and _timed_as(spec) == "graph":
        parts["speed"] = {**libraries, "ends": spec.ends, "whole": 4.0 * model.parameters + _table(model), **left}
    return parts


def _width(model: Architecture) -> int:
    return 4 if model.dtype == "float32" else 2


def _timed_as(spec: CompileSpec) -> Stores | None:
    step = timed(spec.recipe)
    return _stores(step.name) if step is not None else None


def _quantizing(spec: CompileSpec) -> dict[str, float]:
    model = spec.architecture
    layer = max(model.layers, key=lambda layer: elements(layer.matrices))
    groups = shared(layer)
    widest = max(groups, key=lambda group: group[0].K * (group[0].K + sum(matrix.N for matrix in group)))
    at_once = min(spec.chunk, spec.sequences) * spec.length
    features = max((sum(matrix.N for matrix in group) + group[0].K for group in groups), default=0)
    hidden = 4.0 * spec.tokens * model.hidden
    kept = sum(group[0].active * group[0].K for group in groups) if spec.corrected else 0
    return {
        "weights": 4.0 * elements(layer.matrices) * (2 if spec.corrected else 1),
        "solve": 4.0 * sum(matrix.N for matrix in widest) * widest[0].K if spec.solving else 0.0,
        "hessian": 4.0 * widest[0].K ** 2 if spec.solving else 0.0,
        "hidden": 0.0 if hidden > _ON_DISK else hidden * (2 if spec.corrected else 1),
        "activations": 4.0 * at_once * features,
        "originals": 4.0 * at_once * kept,
        "beside": _beside(spec, spec.tokens),
    }


def _beside(spec: CompileSpec, tokens: int) -> float:
    """What blocks are given besides hidden states, of all tokens: from `_ON_DISK` bytes on, the rest lies in files."""
    return min(4.0 * tokens * spec.beside, _ON_DISK)


def _scoring(spec: CompileSpec, *, cache: bool) -> dict[str, float]:
    """Hidden states of what is scored, activations of a forward and logits; of a quantized cache, at long contexts."""
    model = spec.architecture
    tokens, length = spec.scored, spec.scored_length
    if cache:
        length = min(LONG, model.max_context or LONG)
        tokens = max(tokens, LONG_SEQUENCES * length)
    widest = max((sum(matrix.N for matrix in group) for layer in model.layers for group in shared(layer)), default=0)
    rows = model.head.N if model.head is not None else 0
    return {
        "states": 4.0 * tokens * model.hidden,
        "forward": 4.0 * min(SCORED_TOGETHER * length, tokens) * widest,
        "beside": _beside(spec, tokens),
        "logits": 4.0 * rows * min(max(1, _LOGITS // max(rows, 1)), spec.scored_length),
    }


def _session(spec: CompileSpec) -> dict[str, float]:
    """Of ONNX Runtime: packed weights, and the rest in 32-bit floats."""
    kept = max(spec.architecture.parameters - elements(_coded(spec)), 0.0)
    return {"packed": _packed_bytes(spec), "floats": 4.0 * kept + _table(spec.architecture) - _table_saved(spec)}


def _coded(spec: CompileSpec) -> list[Matrix]:
    """The linears of the blocks that get codes."""
    return [matrix for matrix in spec.architecture.inside() if matrix.name in spec.schemes]


def _table_saved(spec: CompileSpec) -> float:
    """Bytes that a graph's token embeddings take less than in 32-bit floats."""
    model, graph = spec.architecture, _storing("graph")
    options = next((step.options for step in spec.recipe.export if step.name == graph), {})
    coded = model.head is not None and model.head.name in spec.schemes
    return 4.0 * model.embeddings - table_bytes(model, options.get("embedding", "float"), coded=coded)


def _table(model: Architecture) -> float:
    """Bytes of a head that is the embedding as well: a graph looks tokens up in one and multiplies by the other."""
    return 4.0 * model.head.parameters if model.head is not None and model.tied else 0.0


def _packed_bytes(spec: CompileSpec) -> float:
    """Bytes of all codes with their scales and zero points."""
    model = spec.architecture
    matrices = [*model.inside(), *([model.head] if model.head is not None else [])]
    coded = ((matrix, scheme) for matrix in matrices if (scheme := spec.schemes.get(matrix.name)) is not None)
    return sum(matrix.count * stored_bits((matrix.N, matrix.K), scheme) / 8 for matrix, scheme in coded)


# --- disk ------------------------------------------------------------------------------------------------------------


def disk(spec: CompileSpec) -> Disk:
    """Count the bytes that a compile writes."""
    model = spec.architecture
    coded, packed = elements(_coded(spec)), _packed_bytes(spec)
    bundle = _PAGE if spec.schemes else 0.0
    for name in spec.exports:
        what = _stores(name)
        # a graph is in 32-bit floats, an engine in 16, and beside the network that it is built from
        width, count = {"tensors": (_width(model), 1), "file": (2, 1), "graph": (4, 1), "engine": (2, 2)}[what]
        bundle += count * (packed + width * (model.parameters - coded)) + _TOKEN * (model.vocabulary or 0)
        bundle -= _table_saved(spec) if what == "graph" else 0.0
        bundle += _ITEM * spec.scored if what != "engine" else 0.0
        bundle += _LAYER * len(model.layers) if what in ("graph", "engine") else 0.0
    hidden = 4.0 * (1 + spec.corrected) * spec.tokens * model.hidden
    cache = 0.0
    if spec.timed and spec.baseline:  # a file is in 16 bits
        cache = (2.0 if _timed_as(spec) == "file" else 4.0) * model.parameters
    return Disk(bundle, (elements(list(model.inside())) if spec.schemes else 0.0) + 2 * hidden, cache)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How a compile lies on a device.

    Args:
        needed: bytes without which it does not fit.
        free: bytes on the device.
        chunk: sequences of one forward; 0 where it does not fit.
        resident: whether hidden states of the whole set stay there.
        parts: bytes by what they are for.
    """

    needed: float
    free: float
    chunk: int
    resident: bool
    parts: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """Whether a block with its activations does."""
        return self.chunk > 0

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON."""
        return {
            "fits": self.fits,
            "needed_bytes": round(self.needed),
            "free_bytes": round(self.free),
            "sequences_at_once": self.chunk,
            "hidden_states": "device" if self.resident else "memory",
            "bytes": {name: round(size) for name, size in self.parts.items()},
        }


def fit(spec: CompileSpec, free: float) -> Fit:
    """Lay a compile on a device with so many bytes free, before anything is loaded there.

    While blocks are solved, these are there together: three blocks in float32 (one is worked on, one is on its way, one
    is being written; a fourth where a pass looks at the original stream), the widest solve, a search's candidates, and
    the widest activation of a sequence `ALIVE` times; where the model's own forward stands still at each block, what
    lies outside the blocks and what each forward holds meanwhile (three hidden states, what is beside them, a mask).
    While models are scored: the ends of both, a block of each, a few sequences. The larger of the two has to fit. What
    is left goes to hidden states of the whole set, if all of them fit, then to sequences that go through at once; where
    forwards stand still, hidden states stay there in any case, and sequences go through one by one.
    """
    model = spec.architecture
    streams = 2 if spec.corrected else 1
    folding = any("hessian" in _needs(step) and "folded" in pass_of(step).ensures for step in spec.recipe.passes)
    inputs = [(group[0].K, sum(matrix.N for matrix in group)) for layer in model.layers for group in shared(layer)]
    sequence = 4.0 * ALIVE * spec.widest * max(spec.length, spec.scored_length, 1)
    hidden = 4.0 * spec.tokens * model.hidden * 2 * streams
    parts = {
        "blocks": (2 + streams) * spec.block,
        "solving": max((4.0 * (_SQUARES * k**2 * spec.solving + _BESIDE * n * k) for k, n in inputs), default=0.0),
        "searching": max((min(_SEARCH, 4.0 * folding * _TRIED * n * k) for k, n in inputs), default=0.0),
        "ends": 2 * spec.ends,
        "sequence": sequence,
        "hidden": hidden,
    }
    solved = parts["blocks"] + parts["solving"] + parts["searching"] + sequence
    if spec.live:
        suspended = spec.length * (3 * model.hidden + spec.beside + spec.length)
        parts["suspended"] = streams * (spec.ends + 4.0 * spec.sequences * suspended)
        solved += parts["suspended"] + hidden
    needed = max(solved, parts["ends"] + 2 * spec.block + SCORED_TOGETHER * sequence)
    if needed > USABLE * free:
        return Fit(needed, free, 0, False, parts)
    if spec.live:
        return Fit(needed, free, 1, True, parts)
    left = USABLE * free - solved + sequence
    resident = hidden + sequence <= left
    chunk = max(1, int((left - hidden * resident) // sequence))
    # all of them, or a power of two: what else the card holds is then less likely to change the order of sums
    chunk = spec.sequences if 0 < spec.sequences <= chunk else 2 ** (chunk.bit_length() - 1)
    return Fit(needed, free, chunk, resident, parts)
