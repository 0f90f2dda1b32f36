"""What a recipe makes of a model's weights in an export: laid over the model's sizes, and counted by the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantkit.errors import InputError
from quantkit.exporters import load_exporter, unheld
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.model.sizes.assigned import ROLES, Assigned, assign_sizes
from quantkit.model.sizes.storage import LaidOver, Storage, StoredLinear
from quantkit.passes import pass_of
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, WeightScheme


def storage(architecture: Architecture, recipe: Recipe, export: str | None = None) -> Storage:
    """Predict what a recipe makes of a model's weights.

    Args:
        export: one of its exports; the first of them by default.

    Raises:
        InputError: what a compile would refuse, as `laid_over` and the exporter do; `export-unknown`, one that the
            recipe has not.
    """
    steps = {step.name: step for step in recipe.export}
    chosen = export or next(iter(steps))
    if chosen not in steps:
        raise InputError("export-unknown", where=recipe.name, value=chosen, rule=f"it exports {', '.join(steps)}")
    exporter = load_exporter(chosen)
    if exporter.classes and architecture.class_name and architecture.class_name not in exporter.classes:
        rule = f"`{chosen}` is written of {', '.join(exporter.classes)}"
        raise unheld(architecture.name, architecture.class_name, rule, f"leave `{chosen}` out of `export`")
    laid, assigned = laid_over(architecture, recipe)
    found = exporter.storage(steps[chosen].settings, laid)
    shared = architecture.tied and assigned.head is None
    return replace(found, shared=shared, decisions=[*assigned.decisions, *found.decisions])


def laid_over(architecture: Architecture, recipe: Recipe) -> tuple[LaidOver, Assigned]:
    """Lay a recipe over a model, and tell which linear is stored how.

    Raises:
        InputError: what a compile would refuse: `override-unmatched`, `keep-unmatched`, `group-indivisible`,
            `format-unsupported`, `nothing-to-quantize`.
    """
    matrices = {each.name: each for each in architecture.inside()}
    names = _names(matrices, recipe)
    head, found = architecture.head, assign_sizes(recipe, architecture, names)
    # experts one by one become an entry for each way in which they are stored
    kinds: dict[tuple[str, WeightScheme | None, ActivationScheme | None], int] = {}
    for name, matrix in names.items():
        key = (matrix.name, found.schemes.get(name), found.activations.get(name))
        kinds[key] = kinds.get(key, 0) + (matrix.count if name == matrix.name else 1)
    linears = [
        StoredLinear(_part(matrices[name], count), scheme, inputs) for (name, scheme, inputs), count in kinds.items()
    ]
    linears += [StoredLinear(each) for each in matrices.values() if each.router]
    last = StoredLinear(head, found.schemes.get(head.name)) if head is not None else None
    moved = any("moved" in pass_of(step).ensures for step in recipe.passes)
    return LaidOver(architecture, linears, last, recipe.scheme.kv_cache, moved), found


def _part(matrix: Matrix, count: int) -> Matrix:
    """So many of an entry's experts, to which tokens go as often as to the others."""
    return replace(matrix, count=count, active=max(1, round(matrix.active * count / matrix.count)))


def _names(matrices: Mapping[str, Matrix], recipe: Recipe) -> dict[str, Matrix]:
    """Linear by its name in a compile -> its entry; experts one by one only where globs could tell them apart."""
    globs = [glob for glob in (*recipe.keep, *(each.match for each in recipe.overrides)) if glob not in ROLES]
    found: dict[str, Matrix] = {}
    for name, matrix in matrices.items():
        if matrix.router:
            continue  # a parameter, which no recipe names
        before, place, after = name.partition(".*.")
        if globs and place:
            found |= {f"{before}.{number}.{after}": matrix for number in range(matrix.count)}
        else:
            found[name] = matrix
    return found
