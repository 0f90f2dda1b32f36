"""What a recipe can have on a target: `ask` is the one question, `Support` its answer.

`readers.py` says which runtime reads each of its exports, and whether it computes in the formats; `nearest.py` what to
ask for instead where none can. No model is opened, torch not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import plugins
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.kinds import Kind
from quantkit.planning.nearest import instead, refusal
from quantkit.planning.readers import Reader, best, readers
from quantkit.recipe import Recipe
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

    def slower(self, kind: Kind | None = None) -> str:
        """What is only emulated, whoever reads it, and what to do about it; "" where a runtime computes in all of it.

        Args:
            kind: of the model; None: the first of the recipe's.
        """
        chosen = self.best
        if chosen.state != "emulated":
            return ""
        what = ", ".join(each.stored.words for each in chosen.emulated)
        where = self.target.name
        reason = f"{what}: stored so, but {chosen.runtime} computes in floats on {where}; smaller, not faster"
        remedy = instead(self.recipe, self.target, kind or self.recipe.models[0], native=True)
        return f"{reason}; {remedy}" if remedy else reason

    def decisions(self, kind: Kind) -> list[Decision]:
        """The same as a decision, for a model of that kind."""
        words, scheme = self.slower(kind), self.recipe.scheme
        stored = scheme.weights or scheme.kv_cache
        if not words or stored is None:
            return []
        return [decision("target", EMULATED, self.target.name, words, stored.format, "float")]


def ask(recipe: Recipe, target: Target, kind: Kind | None = None) -> Support:
    """What a recipe can have on a target.

    Args:
        recipe: as it is asked for; exports for which the target has no runtime are left out, if others are left.
        kind: of the model; None where it is not known yet: not a graph.

    Raises:
        InputError: `target-cannot-run`, `layout-unsupported`, `scheme-unsupported`: an export that none of the target's
            runtimes can read, or no export for any of them; with the nearest recipe, or target, that can.
    """
    try:
        found = readers(recipe, target, kind)
    except InputError as problem:
        raise refusal(problem, recipe, target, kind or recipe.models[0]) from None
    readable, left_out = fitted(recipe, target, {each.export: each.runtime for each in found})
    return Support(readable, target, left_out, found)


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
