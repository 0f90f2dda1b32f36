"""Support of a recipe on a target. `ask` is the question, `Support` its answer.

A cell of a target's table (`target.py`) says how a runtime handles a format; an exporter (`holds`) may limit that.
Together they tell which runtime reads each export, and whether it computes in the stored form. If the target cannot run
the recipe, or only emulates it, the answer names the nearest shipped recipe, export or target that can: for the same
kind of model, native, with the nearest bits. No model is opened.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from quantkit import content, plugins
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError, one
from quantkit.exporters import Exporter, LayerSpec, load_exporter
from quantkit.formats import load_format
from quantkit.kinds import Kind
from quantkit.passes import pass_of
from quantkit.recipe import ADDED, ExportStep, Recipe
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import State, Stored, Target

# code of the decision that no runtime of the target computes in the stored form
EMULATED = "emulated"
ORDER: tuple[State, ...] = ("native", "emulated", "absent")
# recipe for most models: no graph is traced, and experts can be packed without zero points
_PLAIN = "int4-symmetric"


@dataclass(frozen=True)
class StoredUse:
    """A stored part, its state in the runtime, and the source of that."""

    stored: Stored
    state: State
    source: str


@dataclass(frozen=True)
class Reader:
    """An export and the runtime that reads it.

    Args:
        export: name of the exporter.
        runtime: the first of the target's runtimes that computes in most of the stored parts.
        taken: all stored parts.
    """

    export: str
    runtime: str
    taken: Sequence[StoredUse]

    @property
    def state(self) -> State:
        """State of the worst part; `native` if nothing is quantized."""
        return max((use.state for use in self.taken), key=ORDER.index, default="native")

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key; lower if more parts are computed in their stored form."""
        return ORDER.index(self.state), len(self.emulated)

    @property
    def emulated(self) -> list[StoredUse]:
        """Parts computed in floats."""
        return [use for use in self.taken if use.state == "emulated"]


@dataclass(frozen=True)
class Support:
    """Support of a recipe on a target.

    Args:
        recipe: recipe with the exports that a runtime of the target reads, each with the target's settings.
        target: the target.
        left_out: names of the other exports.
        readers: reader of each export; for a graph, of the result.
    """

    recipe: Recipe
    target: Target
    left_out: tuple[str, ...]
    readers: Sequence[Reader]

    @property
    def best(self) -> Reader:
        """Reader with the most native parts."""
        return best(self.readers)

    def slower(self, kind: Kind | None = None, no_graph: bool = False) -> str:
        """Describe emulated parts and a remedy; "" if a runtime computes in all of them.

        Args:
            kind: kind of the model; None for the first of the recipe's.
            no_graph: True for a model with experts or images, for which no other export is suggested.
        """
        chosen = self.best
        if chosen.state != "emulated":
            return ""
        parts, where = ", ".join(use.stored.words for use in chosen.emulated), self.target.name
        packed = any(load_exporter(step.name).packs(step.settings) for step in self.recipe.export)
        reason = f"{parts}: stored so, but {chosen.runtime} computes in floats on {where}; smaller, not faster"
        if not packed:
            reason = f"{parts}: stored as values in floats; neither smaller nor faster"
        remedy = "" if no_graph else _instead(self.recipe, self.target, kind or self.recipe.models[0], native=True)
        return f"{reason}; {remedy}" if remedy else reason

    def decisions(self, kind: Kind, no_graph: bool = False) -> list[Decision]:
        """Return the same as a decision, for a model of this kind."""
        words, scheme = self.slower(kind, no_graph), self.recipe.scheme
        stored = scheme.weights or scheme.kv_cache
        if not words or stored is None:
            return []
        return [decision("target", EMULATED, self.target.name, words, stored.format, "float")]


def ask(recipe: Recipe, target: Target, kind: Kind | None = None) -> Support:
    """Determine the support of a recipe on a target.

    Args:
        recipe: recipe as requested. Exports without a runtime on the target are left out if others remain, and so are
            those that cannot store what an add-on adds.
        kind: kind of the model; None if unknown, and then not a graph.

    Raises:
        InputError: `target-cannot-run`, `layout-unsupported`, `scheme-unsupported` if no runtime of the target can read
            an export, or any export; with the nearest recipe or target that can.
    """
    recipe, unheld = _without_unheld(recipe, target, kind)
    try:
        readers = _readers(recipe, target, kind)
    except InputError as problem:
        raise _refusal(problem, recipe, target, kind or recipe.models[0]) from None
    readable, left_out = fitted(recipe, target, {reader.export: reader.runtime for reader in readers})
    return Support(readable, target, (*unheld, *left_out), readers)


def _without_unheld(recipe: Recipe, target: Target, kind: Kind | None) -> tuple[Recipe, tuple[str, ...]]:
    """Drop exports without a place for an add-on's part, if others have one; return their names too."""
    if ADDED not in recipe.name or kind == "network":
        return recipe, ()
    kept = []
    for step in recipe.export:
        with suppress(InputError):
            _readers(recipe.model_copy(update={"export": [step]}), target, kind)
            kept.append(step)
    if not kept:
        return recipe, ()
    return recipe.model_copy(update={"export": kept}), tuple(step.name for step in recipe.export if step not in kept)


def demand_kind(recipe: Recipe, target: Target, kinds: Sequence[Kind], where: str, shown: str = "") -> None:
    """Refuse a model of a kind that a recipe does not support.

    Args:
        kinds: kinds that the model may have; for an ONNX file two, of which the second is the kind for compiling.
        where: the model.
        shown: description of the model, if its kind does not suffice.

    Raises:
        InputError: `model-kind`, with the nearest recipe for that kind.
    """
    if set(kinds) & set(recipe.models):
        return
    value, rule = shown or one(kinds[0]), f"recipe {recipe.name} is for {', '.join(recipe.models)}"
    raise InputError("model-kind", where, value, rule, _instead(recipe, target, kinds[-1]) or "--recipe float")


def fitted(recipe: Recipe, target: Target, read_by: Mapping[str, str] | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """Keep the exports with a runtime on the target; return the names of the others too.

    Unset options of an export take the target's values: `accuracy_level` of `onnx` from its `build`, its `profiles`,
    the
    compute capability of its GPU. If no export can be read, the recipe is returned whole.

    Args:
        read_by: export -> its runtime; by default the first one of the target.
    """
    kept, left_out = [], []
    for step in recipe.export:
        exporter = load_exporter(step.name)
        able = [name for name in exporter.runtimes if name in target.runtimes]
        if not able:
            left_out.append(step.name)
            continue
        chosen = (read_by or {}).get(step.name, able[0])
        settings: dict[str, Any] = {**target.build.get(chosen, {}), "library": chosen, "sm": target.arch.sm}
        settings["profiles"] = [profile.model_dump(mode="json") for profile in target.profiles]
        options = {name: settings[name] for name in exporter.Options.model_fields if name in settings}
        kept.append(step.model_copy(update={"options": {**options, **step.options}}))
    if not kept:
        return recipe, ()
    return recipe.model_copy(update={"export": kept}), tuple(left_out)


# --- what to ask for instead -----------------------------------------------------------------------------------------


def _refusal(error: InputError, recipe: Recipe, target: Target, kind: Kind) -> InputError:
    """Return a refusal with the nearest recipe or target as a remedy, and its own `--set` remedy."""
    remedy = _either(_instead(recipe, target, kind), _elsewhere(recipe, target, kind))
    if not remedy:
        alike = sorted(_alike(recipe, kind), key=lambda other: (*_differ(recipe, other), other.name))
        places = ((other.name, _elsewhere(other, target, kind)) for other in alike)
        remedy = next((f"--recipe {name} {place}" for name, place in places if place), "")
    own = error.remedy if not remedy or error.remedy.startswith(("--set", "leave")) else ""
    return with_remedy(error, _either(_changed(recipe, target, kind) or own, remedy))


def _changed(recipe: Recipe, target: Target, kind: Kind) -> str:
    """Return one change of the scheme with which all exports are readable; "" without any."""
    scheme, changes = recipe.scheme.weights, list[str]()
    if scheme is None or kind == "network":
        return ""
    if scheme.granularity == "group" and scheme.group:
        # 128 divides K of fewer models
        group = scheme.group
        sizes = sorted((16, 32, 64, 128), key=lambda size: (size > group, size == 128, abs(size - group)))
        changes += [f"scheme.weights.group={size}" for size in sizes if size != group]
    changes += [] if scheme.symmetric else ["scheme.weights.symmetric=true"]
    # a bfloat16 model stores these instead of float16
    scales = ["scheme.weights.scale=bfloat16"]
    both = scheme.scale == "float16" and "bfloat16" in load_format(scheme.format).rules.scales
    for change in changes:
        with suppress(InputError):
            for asked in ([change], [change, *scales])[: 1 + both]:
                data, allowed = recipe.as_dict(), bool(recipe.code)
                _readers(Recipe.from_dict(data, name=recipe.name, changes=asked, allow_code=allowed), target, kind)
            return f"--set {change}"
    return ""


def with_remedy(error: InputError, remedy: str) -> InputError:
    """Copy an error with another remedy."""
    return InputError(error.code, where=error.where, value=error.value, rule=error.rule, remedy=remedy)


def _either(*remedies: str) -> str:
    return "; or: ".join(part for part in remedies if part)


def _instead(recipe: Recipe, target: Target, kind: Kind, *, native: bool = False) -> str:
    """Return the nearest shipped recipe, or another export, as a remedy; "" without either.

    `native` admits only those that compute in the stored form.
    """
    parts, asked = [], {step.name for step in recipe.export}
    others = []
    for other in _alike(recipe, kind):
        with suppress(InputError):
            readers = _readers(other, target, kind)
            reader = min(readers, key=lambda reader: (*reader.rank, reader.export not in asked))
            others.append(((ORDER.index(reader.state), *_differ(recipe, other), other.name), reader))
    nearest = min(
        (one for one in others if not native or one[1].state == "native"), default=None, key=lambda one: one[0]
    )
    if nearest is not None:
        (*_, name), reader = nearest
        how = "native" if reader.state == "native" else "computed in floats"
        parts.append(f"--recipe {name} ({how} in {reader.runtime})")
    # the first other export that the recipe could have natively
    for name in sorted({*plugins.EXPORTERS.shipped()} - asked):
        with suppress(InputError):
            reader = best(_readers(recipe.model_copy(update={"export": [ExportStep(name=name)]}), target, kind))
            if reader.state == "native" and reader.export == name and reader.taken:
                parts.append(f"--set 'export=[{{{name}: {{}}}}]' (native in {reader.runtime})")
                break
    return _either(*parts)


def _elsewhere(recipe: Recipe, target: Target, kind: Kind) -> str:
    """Return the nearest target with native support of all stored parts."""
    wanted = {runtime for step in _exports(recipe, kind) for runtime in load_exporter(step.name).runtimes}
    for name in sorted(content.names("export"), key=lambda name: _apart(_outline(name), target)):
        if not wanted & set(_outline(name)["runtimes"]):
            continue  # parsing all of them would take a second
        with suppress(InputError):
            reader = best(_readers(recipe, Target.load(name), kind))
            if reader.state == "native":
                return f"--target {name} (native in {reader.runtime})"
    return ""


@cache
def _outline(name: str) -> dict[str, Any]:
    """Read a few lines of a shipped target."""
    lines = content.find("export", name).read_text(encoding="utf-8").splitlines()
    keys = ("kind: ", "arch: ", "runtimes: ")
    outline = yaml.safe_load("\n".join(line for line in lines if line.startswith(keys)))
    return {**outline, "name": name}


def _apart(other: dict[str, Any], target: Target) -> tuple[Any, ...]:
    """Return the distance between targets by their outline."""
    sm = abs(float(other["arch"].get("sm") or 0) - float(target.arch.sm or 0))
    return other["kind"] != target.kind, other["arch"]["vendor"] != target.arch.vendor, sm, other["name"]


@cache
def shipped(name: str) -> Recipe:
    """Load a shipped recipe once."""
    return Recipe.load(name)


def _alike(recipe: Recipe, kind: Kind) -> list[Recipe]:
    """Return the other shipped recipes for this kind of model."""
    others = [shipped(name) for name in content.names("recipes") if name != recipe.name]
    # an add-on is no recipe by itself, and a graph is either quantized or not
    quantized = [other for other in others if other.scheme.weights or not (other.scheme.kv_cache or kind == "network")]
    return [other for other in quantized if kind in other.models]


def _differ(recipe: Recipe, other: Recipe) -> tuple[float | bool, ...]:
    """Return the distance between recipes, most important first.

    The order: single files, bits, more bits before as many fewer, inputs, exports, kind of format, fixed scales, zero
    points, passes.
    """
    ours, theirs = recipe.scheme, other.scheme
    bits = [float(load_format(x.weights.format).bits) if x.weights else 16.0 for x in (ours, theirs)]
    kinds = [x.weights.format[:2] if x.weights else "" for x in (ours, theirs)]
    exports = [{step.name for step in x.export} for x in (recipe, other)]
    zeros = [x.weights.symmetric if x.weights else True for x in (ours, theirs)]
    dynamic = [x.activations.dynamic if x.activations else None for x in (ours, theirs)]
    files = [any(load_exporter(step.name).stores == "file" for step in x.export) for x in (recipe, other)]
    return (
        files[0] != files[1],
        abs(bits[0] - bits[1]),
        bits[1] < bits[0],
        (ours.activations is None) != (theirs.activations is None),
        not exports[0] & exports[1],
        kinds[0] != kinds[1],
        dynamic[0] != dynamic[1],
        zeros[0] != zeros[1],
        recipe.passes != other.passes,
    )


# --- who reads an export ---------------------------------------------------------------------------------------------


def _readers(recipe: Recipe, target: Target, kind: Kind | None) -> list[Reader]:
    """Return the reader of each export. Raises the InputError of the first export without a reader."""
    steps = _exports(recipe, kind)
    read = [step for step in steps if set(load_exporter(step.name).runtimes) & set(target.runtimes)]
    readers: list[Reader] = []
    problems: list[tuple[str, InputError]] = []
    for step in read or steps:
        try:
            if step is _graph():
                graph_schemes(recipe)
            readers.append(_reader(recipe, step, target))
        except InputError as error:
            problems.append((step.name, error))
    if not problems:
        return readers
    name, problem = problems[0]
    if readers and f"leave `{name}` out" not in problem.remedy:
        own = problem.remedy if problem.remedy.startswith("--set") else ""
        problem = with_remedy(problem, _either(own, f"leave `{name}` out of `export`"))
    raise spelt_out(problem, recipe)


def spelt_out(error: InputError, recipe: Recipe) -> InputError:
    """Copy an error; a remedy that leaves out an export becomes the `--set` that does so, quoted for a shell."""

    def change(asked: re.Match[str]) -> str:
        others = [{step.name: step.options} for step in recipe.export if step.name != asked[1]]
        text = yaml.safe_dump(others, default_flow_style=True, width=math.inf).strip()
        if others:
            return f"{asked[0]}: --set {shlex.quote(f'export={text}')}"
        return asked[0] if "network" in recipe.models else f"take a recipe for a checkpoint: --recipe {_PLAIN}"

    return with_remedy(error, re.sub(r"leave `(\w+)` out of `export`", change, error.remedy))


def best(readers: Sequence[Reader]) -> Reader:
    """Return the best reader: the one with the most native parts."""
    return min(readers, key=lambda reader: reader.rank)


def stored_formats(recipe: Recipe) -> list[Stored]:
    """List all stored parts of a recipe once: weights, inputs, keys and values."""
    stored: dict[Stored, None] = {}
    for _, weights, inputs in _schemes(recipe):
        stored[Stored(weights.format, weights.symmetric)] = None
        if inputs is not None:
            stored[Stored(inputs.format, inputs.symmetric, "inputs")] = None
    cache = recipe.scheme.kv_cache
    if cache is not None:
        stored[Stored(cache.format, cache.symmetric, "kv_cache")] = None
    return list(stored)


def caveats(recipe: Recipe, target: Target, runtimes: Sequence[str] | None = None) -> list[str]:
    """List extra requirements and deviations of runtimes that read the exports of a recipe.

    Args:
        runtimes: runtimes to ask about; None for all of the target.
    """
    lines = []
    for step in recipe.export:
        exporter = load_exporter(step.name)
        for runtime in exporter.runtimes:
            line = exporter.caveat(step.settings, runtime)
            if line and runtime in (target.runtimes if runtimes is None else runtimes):
                with suppress(InputError):
                    _read_by(recipe, step, exporter, target, runtime)
                    lines.append(line)
    return lines


def graph_schemes(recipe: Recipe) -> tuple[WeightScheme, ActivationScheme]:
    """Return the schemes of a float graph for ONNX Runtime. Raises InputError `scheme-unsupported`."""
    weights, inputs = recipe.scheme.weights, recipe.scheme.activations
    if weights is not None and inputs is not None:
        able = weights.format in ("int8", "int7") and weights.symmetric and weights.granularity in ("channel", "tensor")
        if able and inputs.format == "int8" and inputs.granularity != "group":
            return weights, inputs
    value = f"weights {weights.format if weights else 'float'}, activations {inputs.format if inputs else 'float'}"
    rule = "a graph is quantized to symmetric int8 or int7 weights, and int8 activations by tensor or token"
    raise InputError("scheme-unsupported", f"recipe {recipe.name}", value, rule, "--recipe int8")


def _exports(recipe: Recipe, kind: Kind | None) -> list[ExportStep]:
    """Return the exports of a recipe; for a float graph its engine if the recipe has one, else a graph."""
    if kind != "network":
        return recipe.export
    return [step for step in recipe.export if load_exporter(step.name).stores == "engine"] or [_graph()]


def _reader(recipe: Recipe, step: ExportStep, target: Target) -> Reader:
    """Return the best runtime of the target for one export. Raises the InputError of the first one."""
    exporter = load_exporter(step.name)
    if step is not _graph():
        _demand_place_for_moved(recipe, step, exporter)
    problems: list[InputError] = []
    readers: list[Reader] = []
    for runtime in exporter.runtimes:
        if runtime in target.runtimes:
            try:
                readers.append(_read_by(recipe, step, exporter, target, runtime))
            except InputError as problem:
                problems.append(problem)
    if readers:
        # ties go to the target's order
        return min(readers, key=lambda reader: (*reader.rank, target.runtimes.index(reader.runtime)))
    if problems:
        raise problems[0]
    target.check([], exporter.runtimes[0])
    raise AssertionError("`check` refuses a runtime that the target does not list")


def _schemes(recipe: Recipe) -> Iterator[tuple[str, WeightScheme, ActivationScheme | None]]:
    """Yield each place of a recipe with a weight scheme: the place, the scheme, the scheme of inputs."""
    weights, inputs = recipe.scheme.weights, recipe.scheme.activations
    if weights is not None:
        yield "scheme", weights, inputs
    for change in recipe.overrides:
        own = change.over(weights, WeightScheme) if change.concerns(WeightScheme) else weights
        fed = change.over(inputs, ActivationScheme) if change.concerns(ActivationScheme) else inputs
        if own is not None:
            yield f"overrides: {change.match}", own, fed


@cache
def _graph() -> ExportStep:
    """Return the export of a float graph if its recipe builds no engine."""
    return ExportStep(name=next(name for name in plugins.EXPORTERS.shipped() if load_exporter(name).stores == "graph"))


def _demand_place_for_moved(recipe: Recipe, step: ExportStep, exporter: Exporter) -> None:
    """Refuse an export without a place for moved channels. Raises InputError `layout-unsupported`."""
    moving = [change.name for change in recipe.passes if "moved" in pass_of(change).ensures]
    if moving and not exporter.moves:
        rule = "this export cannot store a transform of an input before it is quantized"
        remedy = f"--set 'export=[{{onnx: {{}}}}]' or [{{tensorrt: {{}}}}], or leave {moving[0]} out of `passes`"
        raise InputError("layout-unsupported", f"export: {step.name}", f"channels that {moving[0]} moves", rule, remedy)


def _read_by(recipe: Recipe, step: ExportStep, exporter: Exporter, target: Target, runtime: str) -> Reader:
    stored = stored_formats(recipe)
    target.check(stored, runtime)
    for _, scheme, fed in _schemes(recipe):
        target.demand_pair(scheme, fed, runtime)
    weights = {place: scheme for place, scheme, _ in _schemes(recipe)}
    inputs = {place: scheme for place, _, scheme in _schemes(recipe) if scheme is not None}
    left: State = "native"
    if step is not _graph():  # a graph has rules of its own: `graph_schemes`
        asked = LayerSpec(schemes=weights, activations=inputs, cache=recipe.scheme.kv_cache)
        left = exporter.holds(step.settings, runtime, asked)
    uses = []
    for part in stored:
        use = target.use(part, runtime)
        floats = left == "emulated" and part.part != "kv_cache"
        source = f"the {step.name} stores dequantized values" if floats else use.source
        uses.append(StoredUse(part, "emulated" if floats else use.state, source))
    return Reader(step.name, runtime, uses)
