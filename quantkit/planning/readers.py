"""Who reads each export of a recipe on a target, and whether it computes in what is stored.

A cell of a target's table (`target.py`) says what a runtime makes of a format; an exporter (`holds`) what of that it
leaves.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import yaml

from quantkit import plugins
from quantkit.errors import InputError
from quantkit.exporters import Exporter, LayerSpec, load_exporter
from quantkit.kinds import Kind
from quantkit.recipe import ExportStep, Recipe
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import State, Stored, Target

ORDER: tuple[State, ...] = ("native", "emulated", "absent")

# what takes most models: no graph is traced, and experts can be packed without zero points
_PLAIN = "int4-symmetric"


@dataclass(frozen=True)
class StoredUse:
    """Something that a recipe stores, what the runtime makes of it, and how that is known."""

    stored: Stored
    state: State
    source: str


@dataclass(frozen=True)
class Reader:
    """An export and the runtime that reads it.

    Args:
        runtime: the first of the target's that computes in most of what is stored.
        taken: everything that is stored.
    """

    export: str
    runtime: str
    taken: Sequence[StoredUse]

    @property
    def state(self) -> State:
        """Of the worst part; `native` where nothing is quantized."""
        return max((each.state for each in self.taken), key=ORDER.index, default="native")

    @property
    def rank(self) -> tuple[int, int]:
        """The lower, the more of it is computed in as it is stored."""
        return ORDER.index(self.state), len(self.emulated)

    @property
    def emulated(self) -> list[StoredUse]:
        """What is stored so, and computed in floats."""
        return [each for each in self.taken if each.state == "emulated"]


def readers(recipe: Recipe, target: Target, kind: Kind | None) -> list[Reader]:
    """Who reads each export; of a float graph `kind` is `network`.

    Raises:
        InputError: that of the first export that none of the target's runtimes can read.
    """
    steps = exports(recipe, kind)
    read = [step for step in steps if set(load_exporter(step.name).runtimes) & set(target.runtimes)]
    found: list[Reader] = []
    problems: list[tuple[str, InputError]] = []
    for step in read or steps:
        try:
            if step is _graph():
                graph_schemes(recipe)
            found.append(_reader(recipe, step, target))
        except InputError as error:
            problems.append((step.name, error))
    if not problems:
        return found
    name, problem = problems[0]
    if found and f"leave `{name}` out" not in problem.remedy:
        own = problem.remedy if problem.remedy.startswith("--set") else ""
        problem = with_remedy(problem, either(own, f"leave `{name}` out of `export`"))
    raise spelt_out(problem, recipe)


def spelt_out(error: InputError, recipe: Recipe) -> InputError:
    """The same error, and where an export is to be left out, the change that leaves it out, as a shell reads it."""

    def change(found: re.Match[str]) -> str:
        others = [{step.name: step.options} for step in recipe.export if step.name != found[1]]
        text = yaml.safe_dump(others, default_flow_style=True, width=math.inf).strip()
        if others:
            return f"{found[0]}: --set {shlex.quote(f'export={text}')}"
        return found[0] if "network" in recipe.models else f"take a recipe for a checkpoint: --recipe {_PLAIN}"

    return with_remedy(error, re.sub(r"leave `(\w+)` out of `export`", change, error.remedy))


def best(found: Sequence[Reader]) -> Reader:
    """The reader that computes in most of what is stored."""
    return min(found, key=lambda each: each.rank)


def stored_formats(recipe: Recipe) -> list[Stored]:
    """Everything that a recipe stores: weights, inputs, keys and values; each once."""
    found: dict[Stored, None] = {}
    for _, weights, inputs in _schemes(recipe):
        found[Stored(weights.format, weights.symmetric)] = None
        if inputs is not None:
            found[Stored(inputs.format, inputs.symmetric, "inputs")] = None
    cache = recipe.scheme.kv_cache
    if cache is not None:
        found[Stored(cache.format, cache.symmetric, "kv_cache")] = None
    return list(found)


def caveats(recipe: Recipe, target: Target, runtimes: Sequence[str] | None = None) -> list[str]:
    """What runtimes need beside themselves to read the exports of a recipe, or do otherwise than is stored.

    Args:
        runtimes: of these; None: of all that the target has.
    """
    found = []
    for step in recipe.export:
        exporter = load_exporter(step.name)
        for runtime in exporter.runtimes:
            said = exporter.caveat(step.settings, runtime)
            if not said or runtime not in (target.runtimes if runtimes is None else runtimes):
                continue
            try:
                _read_by(recipe, step, exporter, target, runtime)
            except InputError:
                continue
            found.append(said)
    return found


def graph_schemes(recipe: Recipe) -> tuple[WeightScheme, ActivationScheme]:
    """What a float graph can be quantized to for ONNX Runtime. Raises InputError `scheme-unsupported`."""
    weights, activations = recipe.scheme.weights, recipe.scheme.activations
    able = weights is not None and weights.format in ("int8", "int7") and weights.symmetric
    able = able and weights is not None and weights.granularity in ("channel", "tensor")
    if not able or activations is None or activations.format != "int8" or activations.granularity == "group":
        names = [weights.format if weights else "float", activations.format if activations else "float"]
        raise InputError(
            "scheme-unsupported",
            where=f"recipe {recipe.name}",
            value=f"weights {names[0]}, activations {names[1]}",
            rule="a graph is quantized to symmetric int8 or int7 weights, and int8 activations by tensor or token",
            remedy="--recipe int8",
        )
    assert weights is not None
    return weights, activations


def exports(recipe: Recipe, kind: Kind | None) -> list[ExportStep]:
    """The exports of a recipe; of a float graph the engine that it becomes if the recipe has one, else a graph."""
    if kind != "network":
        return recipe.export
    return [step for step in recipe.export if load_exporter(step.name).stores == "engine"] or [_graph()]


def with_remedy(error: InputError, remedy: str) -> InputError:
    """The same error with another remedy."""
    return InputError(error.code, where=error.where, value=error.value, rule=error.rule, remedy=remedy)


def either(*remedies: str) -> str:
    """Remedies in one line; "" where there is none."""
    return "; or: ".join(part for part in remedies if part)


def _reader(recipe: Recipe, step: ExportStep, target: Target) -> Reader:
    """The best of the target's runtimes for one export. Raises InputError, that of the first one."""
    exporter = load_exporter(step.name)
    if step is not _graph():
        _demand_place_for_moved(recipe, step, exporter)
    problems: list[InputError] = []
    found: list[Reader] = []
    for runtime in exporter.runtimes:
        if runtime not in target.runtimes:
            continue
        try:
            found.append(_read_by(recipe, step, exporter, target, runtime))
        except InputError as problem:
            problems.append(problem)
    if found:
        # of those that are as good, the one that the target lists first
        return min(found, key=lambda each: (*each.rank, target.runtimes.index(each.runtime)))
    if problems:
        raise problems[0]
    target.check([], exporter.runtimes[0])
    raise AssertionError("a runtime that the target does not list is refused")


def _schemes(recipe: Recipe) -> Iterator[tuple[str, WeightScheme, ActivationScheme | None]]:
    """Where a recipe says so, how weights are stored there, and how their inputs are; not what stays in floats."""
    weights, inputs = recipe.scheme.weights, recipe.scheme.activations
    if weights is not None:
        yield "scheme", weights, inputs
    for each in recipe.overrides:
        own = each.over(weights, WeightScheme) if each.concerns(WeightScheme) else weights
        fed = each.over(inputs, ActivationScheme) if each.concerns(ActivationScheme) else inputs
        if own is not None:
            yield f"overrides: {each.match}", own, fed


@cache
def _graph() -> ExportStep:
    """What a float graph becomes where its recipe builds no engine of it."""
    return ExportStep(name=next(name for name in plugins.EXPORTERS.shipped() if load_exporter(name).stores == "graph"))


def _demand_place_for_moved(recipe: Recipe, step: ExportStep, exporter: Exporter) -> None:
    """Refuse an export that has no place for what a pass makes of inputs. Raises InputError `layout-unsupported`."""
    moving = [each.name for each in recipe.passes if "moved" in plugins.PASSES.of(each).ensures]
    if moving and not exporter.moves:
        raise InputError(
            "layout-unsupported",
            where=f"export: {step.name}",
            value=f"channels that {moving[0]} moves",
            rule="it has no place for what becomes of an input before it is quantized",
            remedy=f"--set 'export=[{{onnx: {{}}}}]' or [{{tensorrt: {{}}}}], or leave {moving[0]} out of `passes`",
        )


def _read_by(recipe: Recipe, step: ExportStep, exporter: Exporter, target: Target, runtime: str) -> Reader:
    stored = stored_formats(recipe)
    target.check(stored, runtime)
    weights = {place: own for place, own, _ in _schemes(recipe)}
    inputs = {place: fed for place, _, fed in _schemes(recipe) if fed is not None}
    left: State = "native"
    if step is not _graph():  # whose own rules are `graph_schemes`
        left = exporter.holds(
            step.settings, runtime, LayerSpec(weights, activations=inputs, cache=recipe.scheme.kv_cache)
        )
    taken = []
    for each in stored:
        use = target.use(each, runtime)
        floats = left == "emulated" and each.part != "kv_cache"
        source = f"the {step.name} holds the values that codes stand for" if floats else use.source
        taken.append(StoredUse(each, "emulated" if floats else use.state, source))
    return Reader(step.name, runtime, taken)
