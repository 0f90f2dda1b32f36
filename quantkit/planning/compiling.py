"""Memory and disk of a compile, predicted from sizes; for refusals, plans and the choice of a device.

    peak of a part = sum over its contents of    bytes × number of copies at one time

Time is not predicted here: a compile measures its first block and multiplies. Parts of a transformer's compile:

    prove      the model in plain transformers, whole or up to a size that fits anyway
    begin      embeddings and head, and the hidden states before the first block
    quantize   a block with its widest solve, without experts that lie in files; hidden states in and out, the other
               inputs of blocks, the activations of one forward
    gradients  a block, its inputs and those of all others, the activations of a sequence; logits of a few positions
    check      for a checkpoint the model, or a few blocks of a large one twice; for a graph its session, and a block
    score      both heads and blocks, both models' hidden states, a few positions of logits; for a graph its session
    speed      the float model as a graph, made and loaded

Embeddings and head, the *ends*, are loaded whole, in 32-bit floats: once where a model begins and where an export is
checked, twice where two heads are compared. Large tensors return to the system when they are freed; glibc's heap keeps
a share of smaller ones, which later parts carry. The numbers of copies were fitted to compiles of random models
(`benchmarks/plan_compile.py --fit`): `compiling_memory.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit import machine, plugins
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.formats import is_halved, load_format, stored_bits
from quantkit.model.layouts import load_layout
from quantkit.model.layouts import names as layout_names
from quantkit.model.sizes.architecture import EXPERTS_IN_MEMORY, Architecture, BlockShapes, Matrix
from quantkit.model.sizes.storage import table_bytes
from quantkit.passes import ANSWERS, GRADIENTS, pass_of
from quantkit.planning.assigned import assign_sizes
from quantkit.plugins import Stores
from quantkit.recipe import ExportStep, PassStep, Recipe
from quantkit.scheme import WeightScheme

# bytes for the activations of one forward, and rough number of live tensors of the widest activation
ACTIVATION_BYTES, ALIVE = 768 * 2**20, 6
# names of linears that add to the residual stream, or begin a new shared input
OUTWARD = ("o_proj", "out_proj", "down_proj", "dense", "output", "fc2", "c_proj", "w2")
_ADDED = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt")  # types that add them as they are; others may norm them
# fewest positions that a compile scores, by the kind of model; tokens of a sequence if the calibration set does not say
SCORED, LENGTH = {"decoder": 2000, "encoder": 6000}, 512
# sequences per scoring forward; tokens and sequences of the long contexts for a quantized cache
SCORED_TOGETHER, LONG, LONG_SEQUENCES = 4, 2048, 4
# models up to so many bytes are compared with plain transformers whole, of larger ones what the other parts' peak holds
WHOLE = 640 * 2**20
# positions of which logits are taken at a time, as in `model/streaming/answers.py`
_PULLED = 128
# logits of one model in memory at one time; bytes from which on hidden states are kept in a file; live tensors of a
# scoring forward's widest activation
_LOGITS, _ON_DISK, _FORWARD = 1 << 23, 1 << 30, 4
# weights that a thread chooses codes of, such threads, and copies of the weights meanwhile: `passes/solvers/gptq.py`
_PIECE, _PIECES, _COPIES, _AT_ONCE = 1 << 21, 8, 7, 4 << 30
# kernels in bfloat16 that oneDNN keeps, each of one number of tokens, and bytes of one
_KERNELS, _KERNEL = 1024, 3e5
# bytes of a token in a tokenizer's memory: a byte-level BPE of 24,000 takes 28 MB, benchmarks/harness/tokenizer_side.py
_TOKENIZER = 1164
# bytes of packages that load a layout, beyond transformers: importing bitsandbytes 0.50
_LIBRARY = {"bitsandbytes": 4.8e7}
# bytes of a bundle's page with its drawing code, of a stored score per position, of a block's graph nodes, and of a
# token in a tokenizer's files: SmolLM2's 49,152 take 3.5 MB
_PAGE, _ITEM, _LAYER, _TOKEN = 1.7e6, 46, 4e4, 71
MEMORY = Path(__file__).with_name("compiling_memory.json")


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Args:
        bundle: the bundle itself.
        work: files beside the bundle while it is built: codes and hidden states.
        cache: files in the user's cache: the float model as a graph, if speed is measured; experts in files.
    """

    bundle: float
    work: float
    cache: float

    @property
    def most(self) -> float:
        """Largest number of bytes on the bundle's disk at one time."""
        return self.bundle + self.work


@dataclass(frozen=True)
class Compiling:
    """Resources of a compile.

    Args:
        memory: part -> peak resident bytes; timing of a graph runs in processes of its own and is not included.
        disk: bytes on disk.
        notes: assumptions.
        device: placement on a GPU, if it computes on one: bytes, and sequences per forward.
        seconds: stage -> seconds, for stages that a rehearsal measured on one block; None without a measurement.
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
        """Part with the highest peak."""
        return max(self.memory, key=lambda part: self.memory[part])

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON, in seconds and bytes; unmeasured values are null."""
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
    """Sizes of one compile of a transformer.

    Args:
        architecture: shapes of the model.
        recipe: recipe with the exports that the target reads.
        schemes: `Matrix.name` -> scheme; other matrices stay as they are.
        sequences: calibration sequences; 0 if no pass needs data.
        length: tokens of a calibration sequence.
        scored: tokens to score.
        scored_length: tokens of a scored sequence.
        timed: True if the result is timed.
        baseline: True if the float model has to be exported as a graph for timing.
        beside: values per token that blocks receive beside hidden states: per-layer embeddings.
        live: True if the model's own forward pauses at each block, once per sequence (`model/streaming`).
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
        """Calibration tokens."""
        return self.sequences * self.length

    @property
    def chunk(self) -> int:
        """Sequences per forward while calibrating."""
        return chunk_size(self.widest, max(self.length, 1))

    @property
    def widest(self) -> int:
        """Features of the widest activation."""
        return max((max(matrix.N, matrix.K) for matrix in self.architecture.inside()), default=1)

    @property
    def corrected(self) -> bool:
        """True if any pass needs the original stream."""
        return any(needs_of(step) & {"original_inputs", "original_outputs"} for step in self.recipe.passes)

    @property
    def solving(self) -> bool:
        """True if any pass factors Hessians."""
        return any("hessian" in needs_of(step) for step in self.recipe.passes)

    @property
    def gradients(self) -> int:
        """Number of sequences with gradients for a pass."""
        return max((step.settings.gradients for step in self.recipe.passes if GRADIENTS in needs_of(step)), default=0)

    @property
    def graded(self) -> int:
        """Tokens with gradients."""
        return min(self.gradients, self.sequences) * self.length

    @property
    def training(self) -> Any:
        """Settings of a pass of scope `answers`; None without one."""
        return next((step.settings for step in self.recipe.passes if ANSWERS in needs_of(step)), None)

    @property
    def exports(self) -> list[str]:
        """Names of the exporters, in order."""
        return [step.name for step in self.recipe.export]

    @property
    def block(self) -> float:
        """Bytes of the largest block in 32-bit floats, without experts in files."""
        return 4.0 * max((elements(in_memory(layer.matrices)) for layer in self.architecture.layers), default=0.0)

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
    """Describe the compile of a model by a recipe, without opening the model.

    Args:
        recipe: recipe with the exports that the target reads (`planning.support`).
        speed: True to time the exports.
        baseline: True if the float graph has to be made for that.
        positions: fewest positions to score; None: as many as a compile scores.

    Raises:
        InputError: as `assign_sizes`; `compile-unknown` for a network of images.
    """
    if architecture.kind == "network":
        rule = "resources are predicted for decoders and encoders of text"
        remedy = "for a graph, quantkit compile --dry-run predicts them"
        raise InputError("compile-unknown", architecture.name, "a network of images", rule, remedy)
    schemes, scheme, calibration = assign_sizes(recipe, architecture).schemes, recipe.scheme, recipe.calibration
    fixed = any(part is not None and not part.dynamic for part in (scheme.activations, scheme.kv_cache))
    looks = fixed or any(needs_of(step) for step in recipe.passes)
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
    """Predict the resources of a transformer's compile."""
    return Compiling(peaks(spec), disk(spec))


def chunk_size(widest: int, tokens: int) -> int:
    """Count the sequences of `tokens` per forward if the widest activation has `widest` features."""
    return max(1, ACTIVATION_BYTES // (widest * tokens * 4 * ALIVE))


def needs_of(step: PassStep) -> frozenset[str]:
    """Return the statistics needed by a pass with its settings."""
    return pass_of(step).needs_with(step.settings)


def _stores(export: str) -> Stores:
    return load_exporter(export).stores


def timed(recipe: Recipe) -> ExportStep | None:
    """Choose the export to time against the float model: a graph, else a single file."""
    by = {_stores(step.name): step for step in reversed(recipe.export)}
    return by.get("graph") or by.get("file")


@cache
def _storing(what: Stores) -> str:
    """Return the first exporter with this kind of storage."""
    return next(name for name in plugins.EXPORTERS.shipped() if _stores(name) == what)


def fitted(part: str) -> str:
    """Return the part with the fit: `check checkpoint` for `check gguf`, since single files were not fitted."""
    kind, _, export = part.partition(" ")
    what = _stores(export) if export else None
    return f"{kind} {_storing('tensors' if what == 'file' else what)}" if what else part


def shared(layer: BlockShapes) -> list[list[Matrix]]:
    """Group the linears of a layer by their shared input, in order, as far as their names tell."""
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


def in_memory(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Return the linears of a layer that are in memory together: without experts in files."""
    experts = [matrix for matrix in matrices if matrix.count > 1]
    apart = 4 * elements(experts) > EXPERTS_IN_MEMORY
    return [matrix for matrix in matrices if not apart or matrix not in experts]


@cache
def copies() -> Mapping[str, Mapping[str, float]]:
    """Read part -> content -> number of copies at one time; for contents counted as 1, bytes."""
    stored: dict[str, Any] = json.loads(MEMORY.read_text(encoding="utf-8"))
    return stored["memory"]  # type: ignore[no-any-return]


def peaks(spec: CompileSpec) -> dict[str, float]:
    """Map part -> peak resident bytes."""
    return {
        part: sum(amount * table.get(term, 0.0) for term, amount in terms.items())
        for part, terms in held(spec).items()
        if (table := copies().get(fitted(part))) is not None
    }


def held(spec: CompileSpec) -> dict[str, dict[str, float]]:
    """Map part -> content -> bytes; `one` is the interpreter with its libraries, `graph`, `engine` ONNX, TensorRT's."""
    model, stored = spec.architecture, {_stores(name) for name in spec.exports}
    libraries = {
        "one": 1.0,
        "tokenizer": float(_TOKENIZER * (model.vocabulary or 0)),
        "graph": float("graph" in stored),
        "engine": float("engine" in stored),
    }
    largest = max((matrix.N * matrix.K for matrix in model.inside()), default=0)
    whole, experts = 4.0 * model.parameters, elements([matrix for matrix in model.inside() if matrix.count > 1])
    parts: dict[str, dict[str, float]] = {
        "open": {**libraries, "largest": float(_width(model) * max(largest, model.embeddings))},
        "prove": {**libraries, "whole": whole if whole <= WHOLE else max(WHOLE, _alone(spec))},
    }
    left: dict[str, float] = {}
    libraries["library"] = _kernels(spec)
    if spec.recipe.passes or spec.sequences:
        quantized = _quantizing(spec)
        parts["begin"] = {**libraries, "ends": spec.ends, **{name: quantized[name] for name in ("hidden", "beside")}}
        parts["quantize"] = {**libraries, **quantized}
        if spec.gradients:
            parts["gradients"] = {**libraries, **_grading(spec)}
        kept = min(1.0, machine.KEPT / max(sum(quantized.values()), 1.0))
        left = {f"left {name}": kept * amount for name, amount in quantized.items()}
        if (training := spec.training) is not None:
            parts["train"] = {**libraries, "ends": 3 * spec.ends, **_recovering(spec, training)}
    left |= {"left floats": _table(model)} if libraries["graph"] else {}  # a closed session leaves memory too
    for step in spec.recipe.export:
        layout = str(step.options.get("layout"))
        loaded_with = load_layout(layout.replace("-", "_")).libraries if layout in layout_names() else ()
        libraries["library"] += sum(_LIBRARY.get(name, 0.0) for name in loaded_with)
    for name in spec.exports:
        session = _session(spec) if _stores(name) == "graph" else {}
        what: dict[str, float] = {"ends": spec.ends, "block": spec.block}
        if _stores(name) in ("tensors", "file") and whole <= WHOLE:
            # experts are there twice as transformers joins them; codes are read beside their floats
            what = {"whole": whole + _width(model) * experts, "file": _packed_bytes(spec)}
        parts[f"check {name}"] = {**libraries, **what, **session, **left}
        if _stores(name) == "engine":
            continue
        tensors = _stores(name) == "tensors"
        scoring = _scoring(spec, cache=tensors and spec.recipe.scheme.kv_cache is not None)
        # layers are compared before the forward, in three more copies of the largest
        beyond = max(12.0 * largest - _FORWARD * scoring["forward"], 0.0)
        parts[f"score {name}"] = {
            **libraries,
            "ends": spec.ends * (2 if tensors and model.head is not None else 1),
            **scoring,
            "block": spec.block,
            "compared": beyond if tensors and spec.schemes else 0.0,
            **session,
            **left,
        }
    # the float model as a graph, made and loaded; a file is written and read tensor by tensor
    if spec.timed and spec.baseline and _timed_as(spec) == "graph":
        parts["speed"] = {**libraries, "ends": spec.ends, "whole": whole + _table(model), **left}
    return parts


def _alone(spec: CompileSpec) -> float:
    """Count a block in plain transformers: floats with pages of its files, experts apart too; `memory.py --block`."""
    largest = max((layer.matrices for layer in spec.architecture.layers), key=elements, default=[])
    return 5.2 * elements(largest) + 7.0 * elements([one for one in largest if one.count > 1]) + spec.ends


def _width(model: Architecture) -> int:
    return 4 if model.dtype == "float32" else 2


def _timed_as(spec: CompileSpec) -> Stores | None:
    step = timed(spec.recipe)
    return _stores(step.name) if step is not None else None


def _quantizing(spec: CompileSpec) -> dict[str, float]:
    model = spec.architecture
    layer = max(model.layers, key=lambda layer: elements(layer.matrices))
    groups = shared(layer)
    at_once = min(spec.chunk, spec.sequences) * spec.length
    features = max((sum(matrix.N for matrix in group) + group[0].K for group in groups), default=0)
    hidden = 4.0 * spec.tokens * model.hidden
    kept = sum(group[0].active * group[0].K for group in groups) if spec.corrected else 0
    return {
        # codes of a byte beside the floats
        "weights": (4.0 * (2 if spec.corrected else 1) + bool(spec.schemes)) * elements(in_memory(layer.matrices)),
        "solve": max([_solving_head(spec), _folding(spec, layer), *(_solving(spec, group) for group in groups)]),
        "hidden": 0.0 if hidden > _ON_DISK else hidden * (2 if spec.corrected else 1),
        "activations": 4.0 * at_once * features,
        "originals": 4.0 * at_once * kept,
        "gradients": 2.0 * spec.graded * sum(matrix.active * matrix.N for matrix in layer.matrices),
        "beside": _beside(spec, spec.tokens),
    }


def _folding(spec: CompileSpec, layer: BlockShapes) -> float:
    """Return the bytes of a fold's proof: the block in float64, and once more what the fold changes."""
    if not any("folded" in pass_of(step).ensures for step in spec.recipe.passes):
        return 0.0
    return 8.0 * (elements(in_memory(layer.matrices)) + max(map(elements, shared(layer))))


def _solving(spec: CompileSpec, group: Sequence[Matrix]) -> float:
    """Return the bytes of one input's solve: its Hessian twice while it is factored, or its factor beside codes."""
    inputs, largest = group[0].K, max(matrix.N * matrix.K for matrix in group)
    if not spec.solving:
        return 8.0 * largest
    hessian, rows = 4.0 * inputs**2, sum(matrix.N for matrix in group)
    weights, summed = 4.0 * rows * inputs, 2 * hessian
    if spec.corrected:  # the drift of an output that is added to a stream as it is: a sum of its weights' size
        added = group[0].name.rpartition(".")[2] in OUTWARD and spec.architecture.model_type in _ADDED
        summed += 3 * weights if added else hessian + 2 * weights
    chosen = hessian + _COPIES * 4.0 * min(rows * inputs, _PIECE * min(machine.cores(), _PIECES))
    if spec.gradients:  # a curvature by outputs is summed and factored, then codes are chosen; on two threads, if small
        swept = any(getattr(step.settings, "sweeps", 0) for step in spec.recipe.passes)
        apiece = sorted(
            max(8.0 * N**2 + (12.0 * spec.graded + 4.0 * inputs) * N, 4.0 * (1 + swept) * N**2 + 16.0 * N * inputs)
            for N in (matrix.N for matrix in group)
        )
        alone = 2 * max(8.0 * matrix.N**2 + 20.0 * matrix.N * inputs for matrix in group) > _AT_ONCE
        chosen = (1 + swept) * hessian + weights + sum(apiece[-1:] if alone else apiece[-2:])
    return max(summed, chosen, 8.0 * largest)


def _solving_head(spec: CompileSpec) -> float:
    """Return the bytes of the head's solve: it is read as stored, in floats for each stream, and coded in pieces."""
    head, streams = spec.architecture.head, (1 + spec.corrected) * spec.solving
    count = float(head.N * head.K) if head is not None and head.name in spec.schemes else 0.0
    at_once = min(count, _PIECE * min(machine.cores(), _PIECES))
    return (_width(spec.architecture) + 4.0 * streams + 1) * count + _COPIES * 4.0 * at_once


def _grading(spec: CompileSpec) -> dict[str, float]:
    """Return the bytes of the gradients' collection, before the first block is solved."""
    model = spec.architecture
    layer = max(model.layers, key=lambda layer: elements(layer.matrices))
    return {
        "ends": spec.ends,
        "weights": spec.block,
        "hidden": 4.0 * spec.graded * model.hidden * (1 + len(model.layers)),
        "activations": 4.0 * spec.length * sum(matrix.active * (matrix.N + matrix.K) for matrix in layer.matrices),
        "logits": 4.0 * min(spec.length, _PULLED) * (model.vocabulary or 0),
    }


def _kernels(spec: CompileSpec) -> float:
    """Return the bytes of kernels left behind by gradients, of experts alone: other shapes are few."""
    experts = sum(matrix.count for matrix in spec.architecture.inside() if matrix.count > 1)
    return _KERNEL * min(_KERNELS, experts * min(spec.gradients, spec.sequences))


def _recovering(spec: CompileSpec, settings: Any) -> dict[str, float]:
    model = spec.architecture
    inside = 4.0 * sum(elements(layer.matrices) for layer in model.layers)
    layer = max(model.layers, key=lambda layer: elements(layer.matrices))
    scales = sum(
        matrix.count * matrix.N * -(-matrix.K // (spec.schemes[matrix.name].group or matrix.K))
        for matrix in model.inside()
        if matrix.name in spec.schemes
    )
    tokens = (settings.sequences + settings.held) * spec.length
    return {
        "whole": inside if inside <= WHOLE else 0.0,
        "weights": spec.block,
        "scales": 4.0 * scales,
        "hidden": min(4.0 * tokens * model.hidden, _ON_DISK),
        "states": 4.0 * settings.batch * spec.length * model.hidden * len(model.layers),
        "activations": 4.0 * spec.length * sum(matrix.active * (matrix.N + matrix.K) for matrix in layer.matrices),
        "logits": 4.0 * min(spec.length, _PULLED) * (model.vocabulary or 0),
    }


def _beside(spec: CompileSpec, tokens: int) -> float:
    """Return the bytes of other inputs of blocks for all tokens; above `_ON_DISK` the rest is in files."""
    return min(4.0 * tokens * spec.beside, _ON_DISK)


def _scoring(spec: CompileSpec, *, cache: bool) -> dict[str, float]:
    """Return bytes of hidden states, activations of a forward and logits; for a quantized cache, at long contexts."""
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
    """Return the bytes of an ONNX Runtime session: packed weights, and the rest in 32-bit floats."""
    kept = max(spec.architecture.parameters - elements(_coded(spec)), 0.0)
    return {"packed": _packed_bytes(spec), "floats": 4.0 * kept + _table(spec.architecture) - _table_saved(spec)}


def _coded(spec: CompileSpec) -> list[Matrix]:
    """Return the quantized linears of the blocks."""
    return [matrix for matrix in spec.architecture.inside() if matrix.name in spec.schemes]


def _table_saved(spec: CompileSpec) -> float:
    """Return the bytes saved by a graph's token embeddings against 32-bit floats."""
    model, graph = spec.architecture, _storing("graph")
    options = next((step.options for step in spec.recipe.export if step.name == graph), {})
    coded = model.head is not None and model.head.name in spec.schemes
    return 4.0 * model.embeddings - table_bytes(model, options.get("embedding", "float"), coded=coded)


def _table(model: Architecture) -> float:
    """Return the bytes of a tied head: a graph has it once as a table and once as a matrix."""
    return 4.0 * model.head.parameters if model.head is not None and model.tied else 0.0


def _packed_bytes(spec: CompileSpec, *, work: bool = False) -> float:
    """Return the bytes of all codes, scales and zero points, packed or as they are kept until the export (`work`)."""
    model, total = spec.architecture, 0.0
    for matrix in [*model.inside(), *([model.head] if model.head is not None else [])]:
        if (scheme := spec.schemes.get(matrix.name)) is not None:
            spare = (4 if is_halved(scheme) else 8) - load_format(scheme.format).bits if work else 0.0
            if work and scheme.scale == "super":  # float32 scales and offsets beside the parts that they come from
                spare += 64 / (scheme.group or matrix.K)
            total += matrix.count * (stored_bits((matrix.N, matrix.K), scheme) + spare * matrix.N * matrix.K) / 8
    return total


def disk(spec: CompileSpec) -> Disk:
    """Return the bytes on disk of a compile."""
    model = spec.architecture
    coded, packed = elements(_coded(spec)), _packed_bytes(spec)
    bundle = _PAGE if spec.schemes else 0.0
    for name in spec.exports:
        what = _stores(name)
        # a graph has 32-bit floats; an engine has 16-bit floats, beside the network that it is built from
        width, count = {"tensors": (_width(model), 1), "file": (2, 1), "graph": (4, 1), "engine": (2, 2)}[what]
        bundle += count * (packed + width * (model.parameters - coded)) + _TOKEN * (model.vocabulary or 0)
        bundle -= _table_saved(spec) if what == "graph" else 0.0
        bundle += _ITEM * spec.scored if what != "engine" else 0.0
        bundle += _LAYER * len(model.layers) if what in ("graph", "engine") else 0.0
    hidden = 4.0 * (1 + spec.corrected) * spec.tokens * model.hidden
    # weights before and after, and codes of a byte
    beside = (elements(layer.matrices) - elements(in_memory(layer.matrices)) for layer in model.layers)
    cache = 9.0 * max(beside, default=0.0)
    if spec.timed and spec.baseline:  # a single file has 16-bit floats
        cache += (2.0 if _timed_as(spec) == "file" else 4.0) * model.parameters
    # of the rows that see every token: experts share those of their layer
    rows = sum(matrix.active * matrix.N for layer in model.layers for matrix in layer.matrices)
    gradients = 2.0 * spec.gradients * spec.length * rows
    return Disk(bundle, _packed_bytes(spec, work=True) + 2 * hidden + gradients, cache)
