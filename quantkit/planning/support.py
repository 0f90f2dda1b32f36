"""What a recipe can have on a target: `ask` is the one question, `Support` its answer.

`readers.py` says which runtime reads each of its exports, and whether it computes in the formats. What a
recipe asks for and its target cannot, or only emulates, is answered with the nearest recipe, export or target that can,
among those that ship: the same kind of model, computed in as it is stored, the nearest bits. No model is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from quantkit import content, plugins
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError, one
from quantkit.formats import load_format
from quantkit.kinds import Kind
from quantkit.planning.readers import ORDER, Reader, best, either, exports, readers, with_remedy
from quantkit.recipe import ADDED, ExportStep, Recipe
from quantkit.target import Target

# code of the decision that nothing on the target computes in what is stored
EMULATED = "emulated"


@dataclass(frozen=True)
class Support:
    """What a recipe can have on a target.

    Args:
        recipe: with the exports that a runtime of the target reads, each with the target's settings.
        left_out: the other exports.
        readers: who reads each export; of a graph, what it becomes.
    """

    recipe: Recipe
    target: Target
    left_out: tuple[str, ...]
    readers: Sequence[Reader]

    @property
    def best(self) -> Reader:
        """The reader that computes in most of what is stored."""
        return best(self.readers)

    def slower(self, kind: Kind | None = None, experts: bool = False) -> str:
        """What is only emulated, whoever reads it, and what to do about it; "" where a runtime computes in all of it.

        Args:
            kind: of the model; None: the first of the recipe's.
            experts: whether it has some, for which no other export is known to do.
        """
        chosen = self.best
        if chosen.state != "emulated":
            return ""
        what = ", ".join(each.stored.words for each in chosen.emulated)
        where = self.target.name
        reason = f"{what}: stored so, but {chosen.runtime} computes in floats on {where}; smaller, not faster"
        remedy = "" if experts else instead(self.recipe, self.target, kind or self.recipe.models[0], native=True)
        return f"{reason}; {remedy}" if remedy else reason

    def decisions(self, kind: Kind, experts: bool = False) -> list[Decision]:
        """The same as a decision, for a model of that kind."""
        words, scheme = self.slower(kind, experts), self.recipe.scheme
        stored = scheme.weights or scheme.kv_cache
        if not words or stored is None:
            return []
        return [decision("target", EMULATED, self.target.name, words, stored.format, "float")]


def ask(recipe: Recipe, target: Target, kind: Kind | None = None) -> Support:
    """What a recipe can have on a target.

    Args:
        recipe: as it is asked for; exports for which the target has no runtime are left out, if others are left, and
            those that cannot have what an add-on brings.
        kind: of the model; None where it is not known yet: not a graph.

    Raises:
        InputError: `target-cannot-run`, `layout-unsupported`, `scheme-unsupported`: an export that none of the target's
            runtimes can read, or no export for any of them; with the nearest recipe, or target, that can.
    """
    recipe, unheld = _without_unheld(recipe, target, kind)
    try:
        found = readers(recipe, target, kind)
    except InputError as problem:
        raise refusal(problem, recipe, target, kind or recipe.models[0]) from None
    readable, left_out = fitted(recipe, target, {each.export: each.runtime for each in found})
    return Support(readable, target, (*unheld, *left_out), found)


def _without_unheld(recipe: Recipe, target: Target, kind: Kind | None) -> tuple[Recipe, tuple[str, ...]]:
    """A recipe without the exports that cannot have what an add-on brings, and their names, if others can: whoever lays
    one over a recipe asks for what it adds, and did not write those exports."""
    if ADDED not in recipe.name or kind == "network":
        return recipe, ()
    kept = []
    for step in recipe.export:
        with suppress(InputError):
            readers(recipe.model_copy(update={"export": [step]}), target, kind)
            kept.append(step)
    if not kept:
        return recipe, ()
    return recipe.model_copy(update={"export": kept}), tuple(each.name for each in recipe.export if each not in kept)


def demand_kind(recipe: Recipe, target: Target, kinds: Sequence[Kind], where: str, said: str = "") -> None:
    """Refuse a model that a recipe is not for.

    Args:
        kinds: that the model may be; of an ONNX file two, of which the second is what it is compiled as.
        where: the model.
        said: what it is, if its kind does not say all.

    Raises:
        InputError: `model-kind`, with the nearest recipe for that kind.
    """
    if set(kinds) & set(recipe.models):
        return
    raise InputError(
        "model-kind",
        where=where,
        value=said or one(kinds[0]),
        rule=f"recipe {recipe.name} is for {', '.join(recipe.models)}",
        remedy=instead(recipe, target, kinds[-1]) or "--recipe float",
    )


def fitted(recipe: Recipe, target: Target, read_by: Mapping[str, str] | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the exports that a runtime of the target reads, and the names of the others.

    An option of an export that is left out takes what the target says: `accuracy_level` of `onnx` in its `build`, its
    `profiles`, the compute capability of its GPU. A recipe none of whose exports can be read is returned whole.

    Args:
        read_by: export -> who reads it; of others the first runtime that the target has.
    """
    kept, left_out = [], []
    for step in recipe.export:
        exporter = plugins.EXPORTERS.load(step.name)
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


def refusal(error: InputError, recipe: Recipe, target: Target, kind: Kind) -> InputError:
    """A refusal that names the nearest recipe or target that can, and the settings that it named itself."""
    remedy = either(instead(recipe, target, kind), _elsewhere(recipe, target, kind))
    if not remedy:
        alike = sorted(_alike(recipe, kind), key=lambda other: (*_differ(recipe, other), other.name))
        places = ((other.name, _elsewhere(other, target, kind)) for other in alike)
        remedy = next((f"--recipe {name} {place}" for name, place in places if place), "")
    own = error.remedy if not remedy or error.remedy.startswith(("--set", "leave")) else ""
    return with_remedy(error, either(own, remedy))


def instead(recipe: Recipe, target: Target, kind: Kind, *, native: bool = False) -> str:
    """What to ask for instead: the nearest shipped recipe, or another export; "" without either.

    Args:
        native: only what is computed in as it is stored.
    """
    parts = []
    others = [each for each in _others(recipe, target, kind) if not native or each[2].state == "native"]
    if others:
        _, other, found = min(others, key=lambda each: each[0])
        how = "native" if found.state == "native" else "computed in floats"
        parts.append(f"--recipe {other.name} ({how} in {found.runtime})")
    for name, runtime in _exports(recipe, target, kind):
        parts.append(f"--set 'export=[{{{name}: {{}}}}]' (native in {runtime})")
    return either(*parts)


def _elsewhere(recipe: Recipe, target: Target, kind: Kind) -> str:
    """The nearest target that computes in all that a recipe stores."""
    wanted = {runtime for step in exports(recipe, kind) for runtime in plugins.EXPORTERS.load(step.name).runtimes}
    for name in sorted(content.names("export"), key=lambda name: _apart(_outline(name), target)):
        if not wanted & set(_outline(name)["runtimes"]):
            continue  # to parse all of them would take a second
        try:
            found = best(readers(recipe, Target.load(name), kind))
        except InputError:
            continue
        if found.state == "native":
            return f"--target {name} (native in {found.runtime})"
    return ""


@cache
def _outline(name: str) -> dict[str, Any]:
    """A few lines of a shipped target."""
    lines = content.find("export", name).read_text(encoding="utf-8").splitlines()
    keys = ("kind: ", "arch: ", "runtimes: ")
    found = yaml.safe_load("\n".join(line for line in lines if line.startswith(keys)))
    return {**found, "name": name}


def _exports(recipe: Recipe, target: Target, kind: Kind) -> Iterator[tuple[str, str]]:
    """(export, runtime): the first export that the recipe could have, and that is computed in as it is stored."""
    for name in sorted({*plugins.EXPORTERS.shipped()} - {step.name for step in recipe.export}):
        changed = recipe.model_copy(update={"export": [ExportStep(name=name)]})
        try:
            found = best(readers(changed, target, kind))
        except InputError:
            continue
        if found.state == "native" and found.export == name and found.taken:
            yield name, found.runtime
            return


@cache
def shipped(name: str) -> Recipe:
    """A recipe that ships, read once: several candidates and their stand-ins look at the same."""
    return Recipe.load(name)


def _alike(recipe: Recipe, kind: Kind) -> list[Recipe]:
    """The other shipped recipes for that kind of model."""
    others = [shipped(name) for name in content.names("recipes") if name != recipe.name]
    # an add-on is no recipe by itself, and a graph is quantized or left alone
    quantized = [each for each in others if each.scheme.weights or (each.scheme.kv_cache is None and kind != "network")]
    return [each for each in quantized if kind in each.models]


def _others(recipe: Recipe, target: Target, kind: Kind) -> Iterator[tuple[tuple[Any, ...], Recipe, Reader]]:
    """Shipped recipes that a target runs, with how far they are from another one."""
    asked = {step.name for step in recipe.export}
    for other in _alike(recipe, kind):
        try:
            known = readers(other, target, kind)
        except InputError:
            continue
        found = min(known, key=lambda each: (*each.rank, each.export not in asked))
        yield (ORDER.index(found.state), *_differ(recipe, other), other.name), other, found


def _differ(recipe: Recipe, other: Recipe) -> tuple[float | bool, ...]:
    """How unlike two recipes are, what matters most first: for another program, bits, inputs, exports, kind of format,
    zero points."""
    one, two = recipe.scheme, other.scheme
    bits = [float(load_format(x.weights.format).bits) if x.weights else 16.0 for x in (one, two)]
    inputs = [x.activations.format if x.activations else "" for x in (one, two)]
    kinds = [x.weights.format[:2] if x.weights else "" for x in (one, two)]
    exports = [{step.name for step in x.export} for x in (recipe, other)]
    zeros = [x.weights.symmetric if x.weights else True for x in (one, two)]
    dynamic = [x.activations.dynamic if x.activations else None for x in (one, two)]
    files = [any(plugins.EXPORTERS.load(step.name).stores == "file" for step in x.export) for x in (recipe, other)]
    return (
        files[0] != files[1],
        abs(bits[0] - bits[1]),
        (inputs[0] == "") != (inputs[1] == ""),
        not exports[0] & exports[1],
        kinds[0] != kinds[1],
        dynamic[0] != dynamic[1],
        zeros[0] != zeros[1],
        recipe.passes != other.passes,
    )


def _apart(other: dict[str, Any], target: Target) -> tuple[Any, ...]:
    """How unlike a target another one is, by its outline."""
    sm = abs(float(other["arch"].get("sm") or 0) - float(target.arch.sm or 0))
    return other["kind"] != target.kind, other["arch"]["vendor"] != target.arch.vendor, sm, other["name"]
