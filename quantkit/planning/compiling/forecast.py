"""What a compile takes: seconds, memory and disk, from sizes alone; one model of it for plans and for compiles.

    processor seconds of a part = sum over kinds of work of    amount / (figure of the machine × efficiency)
    wall seconds                = the same, with what runs on all cores divided by their number
    peak of a part              = sum of what it holds × how often that is there at once

`compile_work.py` counts the work, `compile_memory.py` what is held. The efficiencies are learned: `rates.json`
holds what `benchmarks/plan_compile.py --fit` found on random models, with the machine that it ran on. They stand on the
figures that `quantkit doctor` measures: rates of arithmetic on the float32 rate of a core, those of copying on the read
bandwidth. What Python takes by itself (imports, tracing, a graph's nodes) is in seconds, and does not scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from quantkit.errors import InputError
from quantkit.planning.compiling.memory import CONFIRMED, WHOLE, held, packed_bytes
from quantkit.planning.compiling.work import Question, counted, elements, needs
from quantkit.planning.model.architecture import Architecture
from quantkit.planning.model.assigned import assign, takes_head
from quantkit.recipe import Recipe
from quantkit.target import Target

RATES = Path(__file__).with_name("rates.json")
# bytes of a bundle's page with the code that draws it, of what is kept of a scored position, of a graph's nodes, and of
# a token in a tokenizer's files: SmolLM2's 49,152 take 3.5 MB
_PAGE, _ITEM, _LAYER, _TOKEN = 1.7e6, 46, 4e4, 71
Of = Literal["fp32", "read", "clock"]

# positions that a compile scores at least, and tokens of a sequence where the calibration set says nothing of them
SCORED, LENGTH = 6000, 512
# seconds that a compile's timing has for its cells: of decoders, and of what does not decode
TIMED = {"decoder": 40.0, "encoder": 60.0, "network": 60.0}


@dataclass(frozen=True)
class Rates:
    """What was learned of compiles.

    Args:
        kinds: kind of work -> `of` (the figure that it goes by), `value` (the share of it that is reached; of `clock`
            seconds a unit), `parallel` (whether on all cores).
        memory: part -> what it holds -> how often that is there at once; of what is counted as 1, bytes.
        interval: real over predicted seconds, from the least to the most that was seen of models that were not fitted.
        machine: `name`, `cores`, `fp32`, `read` of the one that it was learned on.
        sharing: of the cores, how much work that runs on all of them keeps busy.
    """

    kinds: Mapping[str, Mapping[str, Any]]
    memory: Mapping[str, Mapping[str, float]]
    interval: tuple[float, float]
    machine: Mapping[str, Any]
    sharing: float = 1.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `rates.json` holds."""
        low, high = data["interval"]
        return cls(data["kinds"], data["memory"], (low, high), data["machine"], data.get("sharing", 1.0))

    def seconds(self, kind: str, machine: Machine) -> float:
        """Processor seconds that one unit of a kind of work takes."""
        rate = self.kinds.get(kind)
        if rate is None or not rate["value"]:
            return 0.0
        if rate["of"] == "clock":
            return float(rate["value"])
        figure = machine.fp32 / machine.cores if rate["of"] == "fp32" else machine.read
        return 1.0 / (figure * float(rate["value"]))

    def at_once(self, kind: str, machine: Machine) -> float:
        """Processor seconds of a kind of work that pass in one by the clock."""
        if kind not in self.kinds or not self.kinds[kind]["parallel"]:
            return 1.0
        return max(1.0, machine.cores * self.sharing)


@cache
def shipped() -> Rates:
    """`rates.json`."""
    return Rates.from_dict(json.loads(RATES.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Machine:
    """What a compile runs on.

    Args:
        name: for people.
        cores: that torch computes with.
        fp32: flop/s of all of them.
        read: B/s from memory.
        assumed: where the figures are not this machine's, whose they are.
    """

    name: str
    cores: int
    fp32: float
    read: float
    assumed: str = ""

    @classmethod
    def of(cls, target: Target | None, cores: int) -> Self:
        """The machine that a CPU target describes; without measured figures that of the table, scaled by cores.

        Args:
            target: with `doctor --write`'s figures, if it was run here.
            cores: that may be used.
        """
        fitted = shipped().machine
        figures = target.figures() if target is not None and target.kind == "cpu" else {}
        found = {place: figure.value for place, figure in figures.items() if isinstance(figure.value, float)}
        if target is not None and {"compute.fp32", "memory.read_bandwidth"} <= found.keys():
            return cls(target.name, cores, found["compute.fp32"], found["memory.read_bandwidth"])
        share = cores / fitted["cores"]
        assumed = f"a core like those of {fitted['name']}: quantkit doctor --write measures this machine's"
        return cls(fitted["name"], cores, fitted["fp32"] * share, fitted["read"], assumed)


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
        seconds: by stage, in order: `open`, `quantize`, `export`, `check`, `build`, `score`, `speed`, `finish`.
        cpu_seconds: the same, summed over cores.
        interval: factors on `seconds` between which compiles of other models than the fitted ones lay.
        memory: part -> bytes resident at its peak; a graph's timing runs in processes of its own and is not in it.
        disk: what it writes.
        machine: it was reckoned for.
        notes: what was assumed.
    """

    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    interval: tuple[float, float]
    memory: Mapping[str, float]
    disk: Disk
    machine: Machine
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds, all stages."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        """Bytes of memory."""
        return max(self.memory.values())

    @property
    def at_peak(self) -> str:
        """The part that takes the most memory."""
        return max(self.memory, key=lambda part: self.memory[part])

    def as_dict(self) -> dict[str, Any]:
        """As JSON: seconds and bytes."""
        low, high = self.interval
        return {
            "seconds": dict(self.seconds),
            "total_seconds": self.total,
            "total_interval": [self.total * low, self.total * high],
            "cpu_seconds": sum(self.cpu_seconds.values()),
            "memory_peak_bytes": round(self.peak),
            "memory_peak_at": self.at_peak,
            "disk_bytes": {name: round(getattr(self.disk, name)) for name in ("bundle", "work", "cache")},
            "machine": self.machine.name,
            "notes": list(self.notes),
        }


def asked(
    architecture: Architecture,
    recipe: Recipe,
    *,
    speed: bool = False,
    cached: bool = False,
    baseline: bool = True,
    positions: int = SCORED,
) -> Question:
    """The question that a compile of a model by a recipe is, where the model is not opened.

    Args:
        architecture: of the model.
        recipe: its exports those that the target reads (`pipeline.request.for_target`).
        speed: whether a graph that it exports is timed.
        cached: whether the original was scored on the same text before.
        baseline: whether its graph has to be made to be timed against.
        positions: that are scored, at least.

    Raises:
        InputError: those of `plan.assigned.assign`.
    """
    inside = list(architecture.inside())
    shapes = {matrix.name: (matrix.N, matrix.K) for matrix in inside}
    head = architecture.head if takes_head(recipe) and architecture.kind == "decoder" else None
    if head is not None:
        shapes[head.name] = (head.N, head.K)
    found = assign(recipe, shapes, architecture.dtype, head=head.name if head else None, model=architecture.name)
    fixed = recipe.scheme.activations is not None and not recipe.scheme.activations.dynamic
    cache = recipe.scheme.kv_cache is not None and not recipe.scheme.kv_cache.dynamic
    looks = fixed or cache or any(needs(step) for step in recipe.passes)
    length = min(recipe.calibration.tokens, architecture.max_context or recipe.calibration.tokens)
    scored = min(LENGTH, architecture.max_context or LENGTH) if recipe.calibration.set == "random-tokens" else length
    timed = speed and bool(found.schemes) and any(step.name == "onnx" for step in recipe.export)
    return Question(
        architecture,
        recipe,
        found.schemes,
        recipe.calibration.samples if looks else 0,
        length,
        -(-positions // max(scored - 1, 1)) * scored,
        scored,
        cached=cached,
        timed=TIMED[architecture.kind] if timed else 0.0,
        baseline=baseline,
    )


def compiling(question: Question, machine: Machine, rates: Rates | None = None) -> Compiling:
    """What it takes, by the shipped rates or by others.

    Raises:
        InputError: `compile-unknown`, a graph of images, whose compile is another.
    """
    if question.architecture.kind == "network":
        raise InputError(
            "compile-unknown",
            where=question.architecture.name,
            value="a network of images",
            rule="what a compile takes is known of decoders and encoders of text",
            remedy="quantkit compile --dry-run says it of a graph",
        )
    rates = rates or shipped()
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}
    for part, work in counted(question).items():
        stage = part.partition(" ")[0]
        for kind, amount in work.items():
            spent = amount * rates.seconds(kind, machine)
            cpu[stage] = cpu.get(stage, 0.0) + spent
            wall[stage] = wall.get(stage, 0.0) + spent / rates.at_once(kind, machine)
    notes = (machine.assumed,) if machine.assumed else ()
    memory = peaks(question, rates)
    return Compiling(_ordered(wall), _ordered(cpu), rates.interval, memory, disk(question), machine, notes)


_STAGES = ("open", "prove", "quantize", "export", "check", "build", "score", "speed", "finish")


def _ordered(found: Mapping[str, float]) -> dict[str, float]:
    return {stage: found[stage] for stage in _STAGES if stage in found}


def of(kind: str) -> tuple[Of, bool]:
    """Which figure of the machine a kind of work goes by, and whether it runs on all cores."""
    name = kind.partition(":")[0]
    if name in ("fixed", "layers", "calls", "timed", "built"):
        return "clock", False
    if name in ("bytes", "rest", "packed", "checked", "elements", "activations"):
        return "read", False
    return "fp32", name in ("products", "session", "logits", "rounded")


def peaks(question: Question, rates: Rates | None = None) -> dict[str, float]:
    """Part -> bytes resident at its peak."""
    table = (rates or shipped()).memory
    found = {
        part: sum(amount * table[part].get(term, 0.0) for term, amount in terms.items())
        for part, terms in held(question).items()
        if part in table
    }
    others = max((peak for part, peak in found.items() if part != "confirm"), default=0.0)
    if 4.0 * question.architecture.parameters > WHOLE and found.get("confirm", 0.0) > CONFIRMED * others:
        del found["confirm"]
    return found


def disk(question: Question) -> Disk:
    """Bytes that a compile writes."""
    model = question.architecture
    width = 4 if model.dtype == "float32" else 2
    inside = [matrix for matrix in model.inside() if matrix.name in question.schemes]
    coded, packed = elements(inside), packed_bytes(question)
    bundle = 0.0
    for name in question.exports:
        # a graph's network is in 32-bit floats, TensorRT's in 16
        bytes_each = 4 if name == "onnx" else 2 if name == "tensorrt" else width
        weights = packed + bytes_each * (model.parameters - coded)
        # an engine stands beside the network that it is built from
        bundle += weights * (2 if name == "tensorrt" else 1) + _TOKEN * (model.vocabulary or 0)
        if name != "checkpoint":
            bundle += _LAYER * len(model.layers)
    if question.schemes:
        bundle += _PAGE
    bundle += _ITEM * question.scored * sum(name in ("checkpoint", "onnx") for name in question.exports)
    streams = 1 + question.corrected
    hidden = 4.0 * streams * question.tokens * model.hidden if question.sequences else 0.0
    cache = 4.0 * model.parameters if question.timed and question.baseline else 0.0
    return Disk(bundle, (elements(list(model.inside())) if question.schemes else 0.0) + 2 * hidden, cache)
