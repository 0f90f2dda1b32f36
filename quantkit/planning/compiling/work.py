"""What a compile computes, counted part by part: operations, elements, bytes. No seconds: those are `forecast.py`.

A block of L layers, T calibration tokens, a linear y = W x with W [N, K]; linears that share an input share one
Hessian and one factor. In one pass that looks at data:

    products   2 T N K of each linear, 2 T² heads · head_dim of attention, for each time that the block runs
               T K (K + 256) of each Hessian, its upper half in panels; 2 T K² of a drift, 2 T N K of a lag
    solve      on one core: K³/3 of a factor, N K² of what columns tell later ones; 4 N K² + K³/3 of a correction
    columns    N K, each rounded in its turn, in rows short enough for a cache
    searched   N K times the grids that are tried for its range
    calls      K of each solve: torch is called a few times a column, however short it is

If all sequences fit into one forward, one run serves all stages of a pass; else each stage replays the block up to its
point (`calibrate/statistics/collected.py`). A compile is scored on `scored` tokens by both models, through their heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from quantkit import plugins
from quantkit.planning.compiling.spec import OUTWARD, CompileSpec, elements, needs, rated, shared, stores, storing
from quantkit.planning.model.architecture import Architecture, BlockShapes
from quantkit.planning.model.assigned import solves
from quantkit.recipe import PassStep
from quantkit.scheme import WeightScheme

# columns of a Hessian that are summed at a time
_PANEL = 256
# grids that a range search measures, by what chooses ranges: those of `Search()`, of a search weighted by what inputs
# are (`passes/assign.py`), and min-max alone
Grids = Literal["searched", "wide", "minmax"]
_GRIDS: Mapping[Grids, int] = {"searched": 8, "wide": 11, "minmax": 1}
# tokens that `measurement.accuracy.harm` runs both models on, and those of a quantized cache's long contexts, sequence
# by sequence
_HARM = 128
LONG, LONG_SEQUENCES = 2048, 4
# sequences of a forward that scores, and positions on which a score is confirmed
SCORED_TOGETHER, CONFIRMING = 4, 192
# of text that a model writes itself, whole in memory: seconds of a layer's calls, bytes of weights read in a second
_CALL, _READ = 2e-3, 1e10


class _Pass(plugins.PassFacts, Protocol):
    """What the prediction asks of a pass; see `quantkit.passes.Pass`."""

    def work(self, settings: Any, linears: SharedLinears) -> Mapping[str, float]: ...

    def learned(self, settings: Any) -> tuple[int, int]: ...


_PASSES: plugins.Kind[_Pass] = plugins.Kind("passes")


class WorkCounts(dict[str, float]):
    """Kind of work -> how much of it; none of what is not there."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.values())

    def __missing__(self, kind: str) -> float:
        return 0.0

    def __add__(self, other: Mapping[str, float]) -> WorkCounts:
        """The work of both."""
        return WorkCounts({kind: self[kind] + other.get(kind, 0.0) for kind in (*self, *other)})

    def __iadd__(self, other: Mapping[str, float]) -> Self:  # type: ignore[misc,override]
        """And that of another."""
        for kind, amount in other.items():
            self[kind] += amount
        return self


@dataclass(frozen=True)
class SharedLinears:
    """Linears that share an input, as a pass that solves them together sees them.

    Args:
        rows: of all together, those that get codes.
        columns: K.
        count: how many such groups there are: the experts of a layer; else 1.
        seen: calibration tokens that each sees.
        outward: rows of those whose outputs are added to the residual stream.
        scheme: how they are stored.
    """

    rows: int
    columns: int
    count: int
    seen: int
    outward: int
    scheme: WeightScheme

    @property
    def weights(self) -> float:
        """Of all `count`."""
        return float(self.count * self.rows * self.columns)

    @property
    def snap(self) -> str:
        """What rounding a weight is counted as: integers are rounded, values of a codebook or of floats looked for."""
        return "" if self.scheme.format.startswith("int") else ":looked-up"

    def gathered(self) -> WorkCounts:
        """The sum of the input's products, its upper half in panels."""
        return WorkCounts({"products": float(self.seen * self.columns * (self.columns + _PANEL))})

    def searched(self, how: Grids, times: float = 1.0) -> WorkCounts:
        """The search for the range of each group, so many times."""
        return WorkCounts({f"searched{self.snap}": times * self.weights * _GRIDS[how]})


def counted(spec: CompileSpec) -> dict[str, WorkCounts]:
    """Part -> kind of work -> how much of it; the parts are those that a compile names as it goes."""
    parts = {"open": _open(spec), "prove": _prove(spec)}
    if spec.recipe.passes or spec.sequences:
        parts["quantize"] = _quantize(spec)
    for name in spec.exports:
        parts[f"export {name}"] = _export(spec, name)
        parts[f"check {name}"] = _check(spec, name)
    if any(stores(name) == "engine" for name in spec.exports):
        layers = spec.architecture.layers
        inside = elements(list(spec.architecture.inside()))
        parts["build"] = WorkCounts({"fixed:build": 1, "layers:build": len(layers), "built": inside})
    parts |= _score(spec)
    parts["score confirm"] = _confirm(spec)
    if spec.timed:
        parts["speed"] = WorkCounts({"fixed:speed": 1, "timed": spec.timed})
        if spec.baseline:
            parts["speed"] += _export(spec, spec.timed_export, dense=True)
            parts["speed"] += _check(spec, spec.timed_export, dense=True)
    parts["finish"] = WorkCounts({"fixed:finish": 1, "fixed:page": 1 if spec.schemes else 0})
    return parts


def _stored(spec: CompileSpec) -> float:
    """Elements of the linears that get codes, the head included."""
    head = spec.architecture.head
    matrices = [*spec.architecture.inside(), *([head] if head is not None else [])]
    return elements([matrix for matrix in matrices if matrix.name in spec.schemes])


def forward(layer: BlockShapes, tokens: int, length: int) -> float:
    """Operations of a layer on so many tokens, in sequences of `length`; a multiply-add counts two."""
    linears = sum(2.0 * tokens * matrix.active * matrix.N * matrix.K for matrix in layer.matrices)
    attention = layer.attention
    if attention is None:
        return linears
    reach = min(length, attention.window or length)
    return linears + 2.0 * tokens * reach * attention.heads * (attention.head_dim + attention.value_dim)


def _moved(layer: BlockShapes, tokens: int) -> float:
    """Elements of activations that a layer reads and writes: norms, rotations, gates, additions."""
    return float(tokens * sum(matrix.active * (matrix.N + matrix.K) for matrix in layer.matrices))


def _run(layers: Sequence[BlockShapes], tokens: int, length: int, times: float = 1.0) -> WorkCounts:
    return WorkCounts(
        {
            "products": times * sum(forward(layer, tokens, length) for layer in layers),
            "activations": times * sum(_moved(layer, tokens) for layer in layers),
        }
    )


def _through_head(model: Architecture, tokens: int) -> WorkCounts:
    """The logits of so many tokens, and what is made of them."""
    if model.head is None:
        return WorkCounts()
    logits = float(tokens * model.head.N)
    return WorkCounts({"products": 2.0 * logits * model.head.K, "logits": logits})


def _open(spec: CompileSpec) -> WorkCounts:
    model = spec.architecture
    opened = {"fixed:open": 1.0, "layers:open": len(model.layers), "bytes:open": model.parameters * _width(model)}
    found = WorkCounts(opened)
    written = round(spec.recipe.calibration.generated * spec.sequences) * spec.length
    if written:
        # a step of all sequences reads all weights once
        found["timed"] = spec.length * (_CALL * len(model.layers) + 4.0 * model.parameters / _READ)
        found += _run(model.layers, written, spec.length)
        found += _through_head(model, written)  # to draw from a vocabulary takes what it takes to score on it
    return found


def _prove(spec: CompileSpec) -> WorkCounts:
    """Loaded as a whole, by plain transformers, and run on a few tokens, as is the stream; loading takes what it takes
    when a checkpoint is checked."""
    model = spec.architecture
    loaded = {"fixed:prove": 1.0, f"rest:check {storing('tensors')}": 4.0 * model.parameters}
    return WorkCounts(loaded) + _run(model.layers, 128, 32, 2.0)


def _width(model: Architecture) -> int:
    return 4 if model.dtype == "float32" else 2


def _quantize(spec: CompileSpec) -> WorkCounts:
    layers = spec.architecture.layers
    inside = list(spec.architecture.inside())
    found = WorkCounts({"fixed:quantize": 1, "layers:quantize": len(layers), "elements:quantize": elements(inside)})
    for step in spec.recipe.passes:
        for layer in layers:
            found += _pass(spec, step, layer)
    found += _streams(spec)
    head = spec.architecture.head
    if head is not None and head.name in spec.schemes:
        alone = SharedLinears(head.N, head.K, 1, spec.tokens, 0, spec.schemes[head.name])
        for step in spec.recipe.passes:
            found += _PASSES.of(step).work(step.settings, alone) if solves(step) else {}
    return found


def _streams(spec: CompileSpec) -> WorkCounts:
    """How often each layer runs on the calibration set, and what that costs its quantized inputs."""
    if not spec.sequences:
        return WorkCounts()
    layers, tokens, length = spec.architecture.layers, spec.tokens, spec.length
    looking = [step for step in spec.recipe.passes if needs(step)]
    learned = [_PASSES.of(step).learned(step.settings) for step in spec.recipe.passes]
    staged = max(1, sum(not _PASSES.of(step).learned(step.settings)[0] for step in looking))
    found = WorkCounts()
    runs = float(staged)
    if spec.sequences > spec.chunk:  # each stage replays the layer up to its point
        runs += staged * _replayed(layers[0])
    found += _run(layers, tokens, length, runs)
    if spec.corrected:
        found += _run(layers, tokens, length, 1.0 + (_replayed(layers[0]) if runs > staged else 0.0))
    for steps, sequences in learned:
        if steps:
            # a forward and a backward, which is two
            found += _run(layers, steps * sequences * length + tokens, length, 3.0)
            found["columns"] += steps * elements(list(spec.architecture.inside())) / 4
    if spec.recipe.scheme.activations is not None:
        dynamic = spec.recipe.scheme.activations.dynamic
        entering = sum(matrix.active * matrix.K for layer in layers for matrix in layer.matrices)
        found["rounded"] += 2 * tokens * entering
        if not dynamic:
            first = sum(group[0].active * group[0].K for layer in layers for group in shared(layer))
            found["observed"] += tokens * first
    return found


def _replayed(layer: BlockShapes) -> float:
    """How much of a layer runs again so that each of its stages is reached."""
    groups = shared(layer)
    sizes = [elements(group) for group in groups]
    return sum(sum(sizes[:place]) for place in range(len(groups))) / max(sum(sizes), 1.0)


def _pass(spec: CompileSpec, step: PassStep, layer: BlockShapes) -> WorkCounts:
    """What a pass does to a layer beside running it."""
    found = WorkCounts()
    for group in shared(layer):
        named = [matrix for matrix in group if matrix.name in spec.schemes]
        if named:
            first = named[0]
            outward = [matrix.N for matrix in named if matrix.name.rpartition(".")[2] in OUTWARD]
            rows, seen = sum(matrix.N for matrix in named), spec.tokens * first.active
            scheme = spec.schemes[first.name]
            linears = SharedLinears(rows, first.K, first.count, seen, sum(outward), scheme)
            found += _PASSES.of(step).work(step.settings, linears)
    return found


def _export(spec: CompileSpec, name: str, *, dense: bool = False) -> WorkCounts:
    model = spec.architecture
    codes = 0.0 if dense else _stored(spec)
    kept = model.parameters - elements(list(model.inside()) if codes else [])
    name = rated(name)
    found = WorkCounts({f"fixed:export {name}": 1, f"packed:{name}": codes, f"bytes:{name}": 4.0 * max(kept, 0.0)})
    if stores(name) != "tensors":
        found[f"layers:{name}"] += len(model.layers)
    return found


def _check(spec: CompileSpec, name: str, *, dense: bool = False) -> WorkCounts:
    model = spec.architecture
    codes, name = 0.0 if dense else _stored(spec), rated(name)
    found = WorkCounts({f"fixed:check {name}": 1, f"checked:{name}": codes})
    found[f"rest:check {name}"] += 4.0 * max(model.parameters - codes, 0.0)
    if stores(name) != "tensors":
        found += _run(model.layers, 64, 16)
    return found


def _score(spec: CompileSpec) -> dict[str, WorkCounts]:
    """Of each export in its own runtime; the first also says where the model is hurt."""
    model, tokens, length = spec.architecture, spec.scored, spec.scored_length
    head = model.head
    logits = float(tokens * head.N) if head is not None else 0.0
    one_head = WorkCounts({"products": 2.0 * logits * head.K}) if head is not None else WorkCounts()
    run = _run(model.layers, tokens, length)
    inside = elements([matrix for matrix in model.inside() if matrix.name in spec.schemes])
    parts = {}
    for number, name in enumerate(spec.exports):
        if stores(name) == "engine" and number:
            continue
        # an engine alone, whose GPU is elsewhere: the values that it was built from are scored, as a checkpoint's are
        like = storing("tensors") if stores(name) == "engine" else rated(name)
        found = WorkCounts({f"fixed:score {like}": 1, "logits": logits, f"elements:score {like}": inside}) + one_head
        if number == 0 and not spec.cached:
            found += run
        if stores(name) == "graph":
            found["session"] += run["products"] + one_head["products"]
            found["activations"] += run["activations"]
        else:
            found += run + one_head
            found += _rounded(spec, tokens)
        if number == 0 and spec.schemes:
            found += _run(model.layers, _HARM, _HARM, 3.0)
            found["harmed"] += inside
        if stores(name) == "tensors" and spec.recipe.scheme.kv_cache is not None:
            # two candidates, whose original is computed once
            context = min(LONG, model.max_context or LONG)
            longer = LONG_SEQUENCES * context
            found += _run(model.layers, longer, context, 3.0)
            for _ in range(4):
                found += WorkCounts({kind: amount * longer / tokens for kind, amount in one_head.items()})
            found["logits"] += 2 * logits * longer / tokens
        parts[f"score {name}"] = found
    return parts


def _confirm(spec: CompileSpec) -> WorkCounts:
    """The original and the checkpoint, each loaded as a whole by plain transformers and run on a few positions."""
    model = spec.architecture
    loads = 1 + (storing("tensors") in spec.exports)
    found = WorkCounts({"fixed:confirm": 1.0, f"rest:check {storing('tensors')}": loads * 4.0 * model.parameters})
    return found + _through_head(model, loads * CONFIRMING) + _run(model.layers, CONFIRMING, CONFIRMING // 2, loads)


def _rounded(spec: CompileSpec, tokens: int) -> WorkCounts:
    """Inputs that are quantized as the model runs."""
    if spec.recipe.scheme.activations is None:
        return WorkCounts()
    return WorkCounts({"rounded": tokens * sum(matrix.active * matrix.K for matrix in spec.architecture.inside())})
