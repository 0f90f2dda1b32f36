"""One compile of a transformer in sizes: what the prediction has to know of it, and what its plug-ins declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from quantkit import plugins
from quantkit.planning.model.architecture import Architecture, BlockShapes, Matrix
from quantkit.plugins import Stores
from quantkit.recipe import ExportStep, PassStep, Recipe
from quantkit.scheme import WeightScheme

# what one forward may take for activations, and tensors of the widest activation alive at one time, roughly
ACTIVATION_BYTES = 768 * 2**20
ALIVE = 6
# what adds to the residual stream, or begins a new shared input, by how such linears are called
OUTWARD = ("o_proj", "out_proj", "down_proj", "dense", "output", "fc2", "c_proj", "w2")


@dataclass(frozen=True)
class CompileSpec:
    """One compile.

    Args:
        recipe: what to do; its exports those that the target reads.
        schemes: `Matrix.name` -> how it is stored; matrices that are not named stay as they are.
        sequences: to calibrate on; 0 where no pass looks at data.
        length: tokens of each.
        scored: tokens that are scored.
        scored_length: tokens a sequence of them.
        cached: whether what the original puts out on them is known from before.
        timed: seconds that timing may take; 0 where nothing is timed.
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
    cached: bool = False
    timed: float = 0.0
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
        widest = max((max(matrix.N, matrix.K) for matrix in self.architecture.inside()), default=1)
        return chunk_size(widest, max(self.length, 1))

    @property
    def corrected(self) -> bool:
        """Whether any pass looks at the original stream."""
        return any(needs(step) & {"original_inputs", "original_outputs"} for step in self.recipe.passes)

    @property
    def exports(self) -> list[str]:
        """Destinations by name, in order."""
        return [step.name for step in self.recipe.export]

    @property
    def timed_export(self) -> str:
        """The export that is timed, if any is, and in which the float model is written for that."""
        step = timed(self.recipe)
        return step.name if step is not None else ""


def chunk_size(widest: int, tokens: int) -> int:
    """How many sequences of `tokens` go through one forward when the widest activation has `widest` features."""
    return max(1, ACTIVATION_BYTES // (widest * tokens * 4 * ALIVE))


def needs(step: PassStep) -> frozenset[str]:
    """The statistics that a pass of a recipe needs with its settings."""
    return plugins.PASSES.of(step).needs_with(step.settings)


def stores(export: str) -> Stores:
    """What becomes of a model in an export."""
    return plugins.EXPORTERS.load(export).stores


def timed(recipe: Recipe) -> ExportStep | None:
    """The export that is timed against the float model: a graph, else a file of everything."""
    found = {stores(step.name): step for step in reversed(recipe.export)}
    return found.get("graph") or found.get("file")


@cache
def storing(what: Stores) -> str:
    """The exporter that stores models so."""
    return next(name for name in plugins.EXPORTERS.shipped() if stores(name) == what)


def rated(export: str) -> str:
    """The exporter whose rates are an export's: the first that stores so; no file of everything has been fitted yet."""
    what = stores(export)
    return storing("tensors" if what == "file" else what)


def fitted(part: str) -> str:
    """The part whose rates are those of a part: `check checkpoint` for `check gguf`."""
    kind, _, export = part.partition(" ")
    return f"{kind} {rated(export)}" if export else part


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
