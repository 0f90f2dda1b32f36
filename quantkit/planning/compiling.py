"""What a compile takes of memory and disk, from sizes alone: what refusals, plans and the choice of a device go by.

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
from quantkit.model.sizes.assigned import assign_sizes
from quantkit.model.sizes.storage import table_bytes
from quantkit.passes import pass_of
from quantkit.plugins import Stores
from quantkit.recipe import ExportStep, PassStep, Recipe
from quantkit.scheme import WeightScheme

# what one forward may take for activations, and tensors of the widest activation alive at one time, roughly
ACTIVATION_BYTES, ALIVE = 768 * 2**20, 6
# what adds to the residual stream, or begins a new shared input, by how such linears are called
OUTWARD = ("o_proj", "out_proj", "down_proj", "dense", "output", "fc2", "c_proj", "w2")
# positions that a compile scores at least, and tokens of a sequence where the calibration set says nothing of them
SCORED, LENGTH = 6000, 512
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


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Args:
        bundle: of the result.
        work: beside it while it is built: codes and hidden states.
        cache: in the user's cache: the float model as a graph, where speed is measured.
    """

    bundle: float
    work: float
    cache: float

    @property
    def most(self) -> float:
        """What the bundle's disk has to hold at one time."""
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
        """As JSON, in seconds and bytes; what is not measured is null."""
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
        recipe: what to do; its exports those that the target reads.
        schemes: `Matrix.name` -> how it is stored; matrices that are not named stay as they are.
        sequences: to calibrate on; 0 where no pass looks at data.
        length: tokens of each.
        scored: tokens that are scored.
        scored_length: tokens a sequence of them.
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
        """That calibrate."""
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
        return any(needs(step) & {"original_inputs", "original_outputs"} for step in self.recipe.passes)

    @property
    def solving(self) -> bool:
        """Whether any pass factors Hessians."""
        return any("hessian" in needs(step) for step in self.recipe.passes)

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
    positions: int = SCORED,
) -> CompileSpec:
    """The compile of a model by a recipe, where the model is not opened.

    Args:
        recipe: its exports those that the target reads (`planning.support`).
        speed: whether what it exports is timed, if it can be.
        baseline: whether its graph has to be made to be timed against.
        positions: that are scored, at least.

    Raises:
        InputError: those of `planning.model.assigned.assign`; `compile-unknown`, a network of images.
    """
    if architecture.kind == "network":
        raise InputError(
            "compile-unknown",
            where=architecture.name,
            value="a network of images",
            rule="what a compile takes is known of decoders and encoders of text",
            remedy="quantkit compile --dry-run says it of a graph",
        )
    schemes = assign_sizes(recipe, architecture).schemes
    fixed = recipe.scheme.activations is not None and not recipe.scheme.activations.dynamic
    cache = recipe.scheme.kv_cache is not None and not recipe.scheme.kv_cache.dynamic
    looks = fixed or cache or any(needs(step) for step in recipe.passes)
    length = min(recipe.calibration.tokens, architecture.max_context or recipe.calibration.tokens)
    scored = min(LENGTH, architecture.max_context or LENGTH) if recipe.calibration.set == "random-tokens" else length
    return CompileSpec(
        architecture,
        recipe,
        schemes,
        recipe.calibration.samples if looks else 0,
        length,
        -(-positions // max(scored - 1, 1)) * scored,
        scored,
        timed=speed and bool(schemes) and timed(recipe) is not None,
        baseline=baseline,
    )


def predict(spec: CompileSpec | GraphSpec) -> Compiling:
    """What the compile of a transformer, or of a float graph, takes."""
    return spec.compiling() if isinstance(spec, GraphSpec) else Compiling(peaks(spec), disk(spec))


# --- what a recipe and its plug-ins say ------------------------------------------------------------------------------


def chunk_size(widest: int, tokens: int) -> int:
    """How many sequences of `tokens` go through one forward when the widest activation has `widest` features."""
    return max(1, ACTIVATION_BYTES // (widest * tokens * 4 * ALIVE))


def needs(step: PassStep) -> frozenset[str]:
    """The statistics that a pass of a recipe needs with its settings."""
    return pass_of(step).needs_with(step.settings)


def stores(export: str) -> Stores:
    """What becomes of a model in an export."""
    return load_exporter(export).stores


def timed(recipe: Recipe) -> ExportStep | None:
    """The export that is timed against the float model: a graph, else a file of everything."""
    by = {stores(step.name): step for step in reversed(recipe.export)}
    return by.get("graph") or by.get("file")


@cache
def storing(what: Stores) -> str:
    """The first exporter that stores models so."""
    return next(name for name in plugins.EXPORTERS.shipped() if stores(name) == what)


def fitted(part: str) -> str:
    """The part whose fit is that of a part: `check checkpoint` for `check gguf`; no file of everything was fitted."""
    kind, _, export = part.partition(" ")
    if not export:
        return part
    what = stores(export)
    return f"{kind} {storing('tensors' if what == 'file' else what)}"


def shared(layer: BlockShapes) -> list[list[Matrix]]:
    """The linears of a layer by the input that they share, in order, as far as their names tell."""
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
    """Weights of some linears, experts counted."""
    return float(sum(matrix.count * matrix.N * matrix.K for matrix in matrices))


# --- memory ----------------------------------------------------------------------------------------------------------


MEMORY = Path(__file__).with_name("compiling_memory.json")


@cache
def copies() -> Mapping[str, Mapping[str, float]]:
    """Part -> what it holds -> how often that is there at once; of what is counted as 1, bytes."""
    stored: dict[str, Any] = json.loads(MEMORY.read_text(encoding="utf-8"))
    return stored["memory"]  # type: ignore[no-any-return]


def peaks(spec: CompileSpec) -> dict[str, float]:
    """Part -> bytes resident at its peak."""
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
    """Part -> what it holds -> bytes; `one` is the interpreter with its libraries, `graph` and `engine` those of
    ONNX and of TensorRT.
    """
    model = spec.architecture
    libraries = {
        "one": 1.0,
        "tokenizer": float(_TOKENIZER * (model.vocabulary or 0)),
        "graph": float(any(stores(name) == "graph" for name in spec.exports)),
        "engine": float(any(stores(name) == "engine" for name in spec.exports)),
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
    left |= {"left floats": _table(spec)} if libraries["graph"] else {}
    for step in spec.recipe.export:
        layout = str(step.options.get("layout"))
        loaded_with = load_layout(layout.replace("-", "_")).libraries if layout in layout_names() else ()
        libraries["library"] = libraries.get("library", 0.0) + sum(_LIBRARY.get(name, 0.0) for name in loaded_with)
    for name in spec.exports:
        session = _session(spec) if stores(name) == "graph" else {}
        parts[f"check {name}"] = {**libraries, "ends": spec.ends, "block": spec.block, **session, **left}
        if stores(name) == "engine":
            continue
        tensors = stores(name) == "tensors"
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
        parts["speed"] = {**libraries, "ends": spec.ends, "whole": 4.0 * model.parameters + _table(spec), **left}
    return parts


def _width(model: Architecture) -> int:
    return 4 if model.dtype == "float32" else 2


def _timed_as(spec: CompileSpec) -> Stores | None:
    step = timed(spec.recipe)
    return stores(step.name) if step is not None else None


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
    return {"packed": packed_bytes(spec), "floats": 4.0 * kept + _table(spec) - _table_saved(spec)}


def _coded(spec: CompileSpec) -> list[Matrix]:
    """The linears of the blocks that get codes."""
    return [matrix for matrix in spec.architecture.inside() if matrix.name in spec.schemes]


def _table_saved(spec: CompileSpec) -> float:
    """Bytes that a graph's token embeddings take less than in 32-bit floats."""
    model, graph = spec.architecture, storing("graph")
    options = next((step.options for step in spec.recipe.export if step.name == graph), {})
    coded = model.head is not None and model.head.name in spec.schemes
    return 4.0 * model.embeddings - table_bytes(model, options.get("embedding", "float"), coded=coded)


def _table(spec: CompileSpec) -> float:
    """Bytes of a head that is the embedding as well: a graph looks tokens up in one and multiplies by the other."""
    model = spec.architecture
    return 4.0 * model.head.parameters if model.head is not None and model.tied else 0.0


def packed_bytes(spec: CompileSpec) -> float:
    """Of all codes with their scales and zero points."""
    model = spec.architecture
    matrices = [*model.inside(), *([model.head] if model.head is not None else [])]
    coded = ((matrix, scheme) for matrix in matrices if (scheme := spec.schemes.get(matrix.name)) is not None)
    return sum(matrix.count * stored_bits((matrix.N, matrix.K), scheme) / 8 for matrix, scheme in coded)


# --- disk ------------------------------------------------------------------------------------------------------------


def disk(spec: CompileSpec) -> Disk:
    """Bytes that a compile writes."""
    model = spec.architecture
    coded, packed = elements(_coded(spec)), packed_bytes(spec)
    bundle = _PAGE if spec.schemes else 0.0
    for name in spec.exports:
        what = stores(name)
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


# --- a float graph ---------------------------------------------------------------------------------------------------

# what Python with torch and ONNX Runtime takes; how often the weights are in memory: the file, the graph, a clone, and
# a session of it; how often what inner tensors hold of a feed
_INTERPRETER, _COPIES, _HELD = 0.7e9, 5, 3
# bytes of a node in a file; of a product's quantizers and names; of its step: a line of the journal, a file's head
_NODE, _SITE, _STEP = 200, 1500, 600


@dataclass(frozen=True)
class GraphSpec:
    """One compile of a float ONNX graph in sizes.

    Args:
        stored: bytes of its constants.
        inner: numbers in the tensors between its nodes, of one sample.
        products: that are quantized.
        weights, scales, rows: of those products; no weights where nothing is quantized.
        solved: samples that products are solved on.
        together: samples of one feed.
        inputs: bytes of all samples.
        mixed: whether products may stay in float32.
    """

    bytes: int
    stored: int
    nodes: int
    inner: int
    products: int
    weights: int
    scales: int
    rows: int
    solved: int
    together: int
    inputs: int
    mixed: bool

    def compiling(self) -> Compiling:
        """All of its compile is one part, which holds of activations what is shown of one feed, or what products that
        are still to be solved read of all of them.
        """
        activations = 4.0 * self.inner * max(_HELD * self.together, self.solved / 2)
        memory = {"codes": _INTERPRETER + _COPIES * self.bytes + self.inputs + activations}
        network = self.stored + _NODE * self.nodes
        if not self.weights:
            return Compiling(memory, Disk(network, 0, 0))
        # codes are bytes, whatever they hold; of each row a scale and a sum of biases
        bundle = network - 3 * self.weights + 12 * self.scales + _SITE * self.products
        # in steps a second sum of biases, and where products may be kept, two more solves
        step = self.weights + 4 * self.scales + 8 * self.rows + _STEP * self.products
        return Compiling(memory, Disk(bundle, 3 * step if self.mixed else step, 0))
