"""What a plan compares: recipes by name, formats that stand for one, and the runtime that would run each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit import content, plugins
from quantkit.errors import InputError, unknown_name
from quantkit.exporters import load_exporter
from quantkit.kinds import Kind
from quantkit.planning.support import ask, demand_kind, fitted, shipped, stored_formats
from quantkit.recipe import Recipe
from quantkit.target import Target

# how people spell the floats that weights are left in
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_UNQUANTIZED = ("bfloat16", "float16", "float32")
# what is compared where nothing is asked for: a recipe of each width, the first of them that the target runs natively
_DEFAULTS: dict[Kind, Sequence[Sequence[str]]] = {
    "decoder": (("fp8",), ("int8-dynamic",), ("awq-int4", "int4-tensorrt")),
    "encoder": (("fp8",), ("int8-dynamic", "int8-tensorrt"), ("awq-int4",)),
    "network": (("int8-tensorrt",),),
}
# they run language models and, some of them, encoders of text
_TEXT_ALONE = ("vllm", "llama_cpp")


@dataclass(frozen=True)
class Chosen:
    """A candidate before anything is reckoned.

    Args:
        label: as it was asked for.
        recipe: what it stands for, with the exports that the target reads.
        runtime: of the target that would run it.
    """

    label: str
    recipe: Recipe
    runtime: str


def labels(asked: Sequence[str], kind: Kind, target: Target) -> list[str]:
    """What to plan: what was asked for, else the usual ones that the target runs."""
    if asked:
        return list(dict.fromkeys(asked))
    usual = (next((each for each in like if _runs(each, kind, target, native=True)), None) for like in _DEFAULTS[kind])
    return ["float", *(label for label in usual if label is not None)]


def choose(
    label: str,
    kind: Kind,
    target: Target,
    *,
    changes: Sequence[str] = (),
    allow_code: bool = False,
    runtime: str | None = None,
) -> Chosen:
    """A recipe (`awq-int4`, `./mine.yaml`, `awq-int4+kv-fp8`) or a format (`int4`, `fp8_e4m3`, `bf16`) by its label.

    A format stands for the first shipped recipe that stores weights so and that the target runs natively; a float for
    the model as it is.

    Raises:
        InputError: `unknown-recipe`, `model-kind`, `target-cannot-run`, and what a recipe raises.
    """
    recipe = _recipe(label, kind, target, changes, allow_code=allow_code)
    demand_kind(recipe, target, (kind,), label)
    judged = runtime is None and recipe.passes
    readable = ask(recipe, target).recipe if judged else fitted(recipe, target)[0]
    return Chosen(label, readable, _runtime(readable, kind, target, runtime))


def float_of(label: str) -> str | None:
    """The float that a label asks for: `float16` for `fp16`; None where it asks for none."""
    name = _FLOATS.get(label, label)
    return name if name in _UNQUANTIZED else None


def _recipe(label: str, kind: Kind, target: Target, changes: Sequence[str], *, allow_code: bool) -> Recipe:
    name = _FLOATS.get(label, label)
    first = name.partition("+")[0]
    if content.is_path(first) or first in content.names("recipes"):
        plain = not changes and not content.is_path(first)
        return shipped(name) if plain else Recipe.load(name, changes, allow_code=allow_code)
    if name in _UNQUANTIZED:
        return Recipe.load("float", changes) if changes else shipped("float")
    storing = _storing(first, kind) if first in plugins.FORMATS else []
    if not storing:
        known = sorted({*content.names("recipes"), *_FLOATS, *plugins.FORMATS.names()})
        raise unknown_name("recipe", label, known)
    chosen = next((each for each in storing if _runs(each.name, kind, target, native=True)), None)
    chosen = chosen or next((each for each in storing if _runs(each.name, kind, target)), storing[0])
    name = name.replace(first, chosen.name, 1)
    return Recipe.load(name, changes) if changes else shipped(name)


def _storing(form: str, kind: Kind) -> list[Recipe]:
    """The shipped recipes whose weights are of that format, the default one first."""
    found = [shipped(name) for name in content.names("recipes")]
    fitting = [each for each in found if each.scheme.weights is not None and each.scheme.weights.format == form]
    fitting = [each for each in fitting if kind in each.models]
    return sorted(fitting, key=lambda each: (each.name != "awq-int4", each.name))


def _runs(name: str, kind: Kind, target: Target, *, native: bool = False) -> bool:
    try:
        recipe = ask(shipped(name), target).recipe
    except InputError:
        return False
    runtime = _runtime(recipe, kind, target, None)
    return not native or all(target.use(each, runtime).state == "native" for each in stored_formats(recipe))


def _runtime(recipe: Recipe, kind: Kind, target: Target, asked: str | None) -> str:
    """The target's first runtime that reads an export and computes natively in what it stores; else the first that
    runs it at all.
    """
    readers = {name for step in recipe.export for name in load_exporter(step.name).runtimes}
    if asked is not None:
        if asked not in target.runtimes:
            target.check([], asked)
        if recipe.passes and asked not in readers:
            raise InputError(
                "usage",
                where=f"--runtime {asked}",
                value=f"recipe {recipe.name} exports {', '.join(step.name for step in recipe.export)}",
                rule=f"which {', '.join(sorted(readers & set(target.runtimes)))} of {target.name} read",
                remedy="one of those, or another recipe",
            )
        target.check(stored_formats(recipe), asked)
        return asked
    reading = [name for name in target.runtimes if name in readers] or list(target.runtimes)
    if kind == "network":
        reading = [name for name in reading if name not in _TEXT_ALONE] or reading
    stored = stored_formats(recipe)

    def states(runtime: str) -> list[str]:
        return [target.use(each, runtime).state for each in stored]

    native = [name for name in reading if all(state == "native" for state in states(name))]
    able = [name for name in reading if "absent" not in states(name)]
    return (native or able or reading)[0]
