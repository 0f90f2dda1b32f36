"""Meaning of a label of `plan`: a recipe, and the runtime of the target that reads its export."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit import content, plugins
from quantkit.errors import InputError, unknown_name
from quantkit.exporters import load_exporter
from quantkit.kinds import Kind
from quantkit.planning.support import ORDER, ask, shipped, stored_formats
from quantkit.recipe import Recipe
from quantkit.target import Target

# how people spell the floats that weights are left in
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
UNQUANTIZED = ("bfloat16", "float16", "float32")
# what is compared where nothing is asked for: a recipe of each width, the first of them that the target runs natively
_DEFAULTS: dict[Kind, Sequence[Sequence[str]]] = {
    "decoder": (("fp8",), ("int8-dynamic",), ("awq-int4", "int4-tensorrt")),
    "encoder": (("fp8",), ("int8-dynamic", "int8-tensorrt"), ("awq-int4",)),
    "network": (("int8-tensorrt",),),
}
# they run language models and, some of them, encoders of text
_TEXT_ALONE = ("vllm", "llama_cpp")


def usual(kind: Kind, target: Target) -> list[str]:
    """Name the usual recipes of the target: native ones, or without any those of any state."""
    for native in (True, False):
        able = ([name for name in like if runs(name, kind, target, native=native)] for like in _DEFAULTS[kind])
        if first := [names[0] for names in able if names]:
            return first
    return []


def recipe_of(label: str, kind: Kind, target: Target, changes: Sequence[str], *, allow_code: bool) -> Recipe:
    """Read a recipe (`awq-int4`, `./mine.yaml`, `awq-int4+kv-fp8`) or a format (`int4`, `fp8_e4m3`, `bf16`).

    A format stands for the first shipped recipe that stores weights so and that the target runs natively; a float for
    the model as it is.

    Raises InputError: `unknown-recipe`, and what a recipe raises.
    """
    name = FLOATS.get(label, label)
    first = name.partition("+")[0]
    if content.is_path(first) or first in content.names("recipes"):
        plain = not changes and not content.is_path(first)
        return shipped(name) if plain else Recipe.load(name, changes, allow_code=allow_code)
    if name in UNQUANTIZED:
        name = "float"
    else:
        storing = [shipped(known) for known in content.names("recipes")] if first in plugins.FORMATS else []
        storing = [recipe for recipe in storing if recipe.scheme.weights and recipe.scheme.weights.format == first]
        storing = [recipe for recipe in storing if kind in recipe.models]
        if not storing:
            known = sorted({*content.names("recipes"), *FLOATS, *plugins.FORMATS.names()})
            raise unknown_name("recipe", label, known)
        # the default one first
        storing.sort(key=lambda recipe: (recipe.name != "awq-int4", recipe.name))
        able = (one for way in (True, False) for one in storing if runs(one.name, kind, target, native=way))
        name = name.replace(first, next(able, storing[0]).name, 1)
    return Recipe.load(name, changes) if changes else shipped(name)


def runs(name: str, kind: Kind, target: Target, *, native: bool = False) -> bool:
    """Tell whether a target runs a shipped recipe on models of a kind; `native`: with a kernel for each format."""
    try:
        recipe = ask(shipped(name), target).recipe
    except InputError:
        return False
    runtime = runtime_of(recipe, kind, target, None)
    return not native or all(target.use(form, runtime).state == "native" for form in stored_formats(recipe))


def runtime_of(recipe: Recipe, kind: Kind, target: Target, asked: str | None) -> str:
    """Return the target's first runtime that reads an export and computes natively in what it stores; else the first
    that runs it at all. Raises InputError `usage`, `target-cannot-run`."""
    readers = {name for step in recipe.export for name in load_exporter(step.name).runtimes}
    stored = stored_formats(recipe)
    if asked is not None:
        if recipe.passes and asked not in readers:
            value = f"recipe {recipe.name} exports {', '.join(step.name for step in recipe.export)}"
            rule = f"which {', '.join(sorted(readers & set(target.runtimes)))} of {target.name} read"
            remedy = "one of those, or another recipe"
            raise InputError("usage", where=f"--runtime {asked}", value=value, rule=rule, remedy=remedy)
        target.check(stored, asked)
        return asked
    reading = [name for name in target.runtimes if name in readers] or list(target.runtimes)
    if kind == "network":
        reading = [name for name in reading if name not in _TEXT_ALONE] or reading
    return min(reading, key=lambda name: max((ORDER.index(target.use(form, name).state) for form in stored), default=0))
