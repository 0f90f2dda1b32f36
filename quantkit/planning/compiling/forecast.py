"""What a compile takes: seconds, memory and disk, from sizes alone; the one predictor, for plans and for compiles.

    processor seconds of a part = sum over kinds of work of    amount / (figure of the machine × efficiency)
    wall seconds                = the same, with what runs on all cores divided by their number
    peak of a part              = sum of what it holds × how often that is there at once

`work.py` counts the work of a transformer's compile, `memory.py` what it holds, `graph.py` both of a float graph's. The
efficiencies are learned: `rates.json` holds what `benchmarks/plan_compile.py --fit` found on random models, with the
machine that it ran on. They stand on the figures that `quantkit doctor` measures: rates of arithmetic on the float32
rate of a core, those of copying on the read bandwidth. What Python takes by itself (imports, tracing, a graph's nodes)
is in seconds, and does not scale.
"""

from __future__ import annotations

from typing import Literal

from quantkit.errors import InputError
from quantkit.planning.compiling import graph
from quantkit.planning.compiling.graph import GraphSpec
from quantkit.planning.compiling.memory import CONFIRMED, WHOLE, held, packed_bytes, table_saved
from quantkit.planning.compiling.result import Compiling, Disk, Machine, Rates, shipped
from quantkit.planning.compiling.spec import CompileSpec, elements, fitted, needs, stores, timed
from quantkit.planning.compiling.work import counted
from quantkit.planning.model.architecture import Architecture
from quantkit.planning.model.assigned import assign_sizes
from quantkit.recipe import Recipe

# bytes of a bundle's page with the code that draws it, of what is kept of a scored position, of a graph's nodes, and of
# a token in a tokenizer's files: SmolLM2's 49,152 take 3.5 MB
_PAGE, _ITEM, _LAYER, _TOKEN = 1.7e6, 46, 4e4, 71
Of = Literal["fp32", "read", "clock"]

# positions that a compile scores at least, and tokens of a sequence where the calibration set says nothing of them
SCORED, LENGTH = 6000, 512
# seconds that a compile's timing has for its cells: of decoders, and of what does not decode
TIMED = {"decoder": 40.0, "encoder": 60.0, "network": 60.0}


def described(
    architecture: Architecture,
    recipe: Recipe,
    *,
    speed: bool = False,
    cached: bool = False,
    baseline: bool = True,
    positions: int = SCORED,
) -> CompileSpec:
    """The compile of a model by a recipe, where the model is not opened.

    Args:
        recipe: its exports those that the target reads (`planning.support`).
        speed: whether what it exports is timed, if it can be.
        cached: whether the original was scored on the same text before.
        baseline: whether its graph has to be made to be timed against.
        positions: that are scored, at least.

    Raises:
        InputError: those of `planning.model.assigned.assign`.
    """
    found = assign_sizes(recipe, architecture)
    fixed = recipe.scheme.activations is not None and not recipe.scheme.activations.dynamic
    cache = recipe.scheme.kv_cache is not None and not recipe.scheme.kv_cache.dynamic
    looks = fixed or cache or any(needs(step) for step in recipe.passes)
    length = min(recipe.calibration.tokens, architecture.max_context or recipe.calibration.tokens)
    scored = min(LENGTH, architecture.max_context or LENGTH) if recipe.calibration.set == "random-tokens" else length
    is_timed = speed and bool(found.schemes) and timed(recipe) is not None
    return CompileSpec(
        architecture,
        recipe,
        found.schemes,
        recipe.calibration.samples if looks else 0,
        length,
        -(-positions // max(scored - 1, 1)) * scored,
        scored,
        cached=cached,
        timed=TIMED[architecture.kind] if is_timed else 0.0,
        baseline=baseline,
    )


def predict(spec: CompileSpec | GraphSpec, machine: Machine, rates: Rates | None = None) -> Compiling:
    """What a compile takes.

    Args:
        spec: of a transformer, or of a float graph.
        rates: instead of the shipped ones.

    Raises:
        InputError: `compile-unknown`, a network of images that is no graph yet.
    """
    if isinstance(spec, GraphSpec):
        rates = rates or graph.RATES
        parts, memory, files = graph.counted(spec), graph.peaks(spec), graph.disk(spec)
    else:
        if spec.architecture.kind == "network":
            raise InputError(
                "compile-unknown",
                where=spec.architecture.name,
                value="a network of images",
                rule="what a compile takes is known of decoders and encoders of text",
                remedy="quantkit compile --dry-run says it of a graph",
            )
        rates = rates or shipped()
        parts, memory, files = counted(spec), peaks(spec, rates), disk(spec)
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}
    for part, work in parts.items():
        stage = part.partition(" ")[0]
        for kind, amount in work.items():
            spent = amount * rates.seconds(kind, machine)
            cpu[stage] = cpu.get(stage, 0.0) + spent
            wall[stage] = wall.get(stage, 0.0) + spent / rates.at_once(kind, machine)
    notes = (machine.assumed,) if machine.assumed and not isinstance(spec, GraphSpec) else ()
    return Compiling(wall, cpu, rates.interval, memory, files, machine, notes)


def of(kind: str) -> tuple[Of, bool]:
    """Which figure of the machine a kind of work goes by, and whether it runs on all cores."""
    name = kind.partition(":")[0]
    if name in ("fixed", "layers", "calls", "timed", "built"):
        return "clock", False
    if name in ("bytes", "rest", "packed", "checked", "elements", "activations"):
        return "read", False
    return "fp32", name in ("products", "session", "logits", "rounded")


def peaks(spec: CompileSpec, rates: Rates | None = None) -> dict[str, float]:
    """Part -> bytes resident at its peak."""
    table = (rates or shipped()).memory
    found = {
        part: sum(amount * table[like].get(term, 0.0) for term, amount in terms.items())
        for part, terms in held(spec).items()
        if (like := fitted(part)) in table
    }
    others = max((peak for part, peak in found.items() if part != "confirm"), default=0.0)
    if 4.0 * spec.architecture.parameters > WHOLE and found.get("confirm", 0.0) > CONFIRMED * others:
        del found["confirm"]
    return found


def disk(spec: CompileSpec) -> Disk:
    """Bytes that a compile writes."""
    model = spec.architecture
    width = 4 if model.dtype == "float32" else 2
    inside = [matrix for matrix in model.inside() if matrix.name in spec.schemes]
    coded, packed = elements(inside), packed_bytes(spec)
    bundle = 0.0
    for name in spec.exports:
        what = stores(name)
        # a graph is in 32-bit floats, an engine in 16, and beside the network that it is built from
        bytes_each, copies = {"tensors": (width, 1), "file": (2, 1), "graph": (4, 1), "engine": (2, 2)}[what]
        if what == "graph":
            bundle -= table_saved(spec)
        bundle += copies * (packed + bytes_each * (model.parameters - coded)) + _TOKEN * (model.vocabulary or 0)
        if what != "engine":
            bundle += _ITEM * spec.scored
        if what in ("graph", "engine"):
            bundle += _LAYER * len(model.layers)
    if spec.schemes:
        bundle += _PAGE
    streams = 1 + spec.corrected
    hidden = 4.0 * streams * spec.tokens * model.hidden if spec.sequences else 0.0
    cache = 0.0
    if spec.timed and spec.baseline:  # a file is in 16 bits
        cache = (2.0 if stores(spec.timed_export) == "file" else 4.0) * model.parameters
    return Disk(bundle, (elements(list(model.inside())) if spec.schemes else 0.0) + 2 * hidden, cache)
