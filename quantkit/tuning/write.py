"""A choice as a recipe that people can read, and that `quantkit compile` takes.

The scheme that most weights have becomes the recipe's default; what differs becomes overrides, the widest glob that is
true first: a kind of layer in most blocks (`*.mlp.down_proj`), then single ones in single blocks. The last override
that matches a layer wins, and each names its whole scheme, so that none depends on another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme

# layer's full name -> its scheme; None: left in high precision
Assignment = Mapping[str, WeightScheme | None]


def recipe_of(base: Recipe, assignment: Assignment, sizes: Mapping[str, int], *, name: str, summary: str) -> Recipe:
    """The base recipe with these schemes.

    Args:
        base: passes, exports, gates, and overrides of layers that are not assigned here.
        assignment: every tuned layer.
        sizes: layer -> how many weights.

    Raises:
        InputError: `recipe-invalid`.
    """
    weights: Counter[WeightScheme] = Counter()
    for layer, scheme in assignment.items():
        if scheme is not None:
            weights[scheme] += sizes[layer]
    default = weights.most_common(1)[0][0] if weights else None
    if default is None:
        # all in high precision: a recipe without passes says just that
        data = {**base.as_dict(), "name": name, "summary": summary, "passes": [], "scheme": {}, "overrides": []}
        return Recipe.from_dict(data, name=name)
    overrides = [{"match": match, "weights": fields(scheme)} for match, scheme in globs(assignment, default, sizes)]
    data = base.as_dict()
    data |= {
        "name": name,
        "summary": summary,
        "scheme": {**data["scheme"], "weights": default.model_dump(mode="json", exclude_none=True)},
        # the user's own come last and win; none of them names a tuned layer
        "overrides": [*overrides, *data["overrides"]],
    }
    made = Recipe.from_dict(data, name=name)
    wrong = [layer for layer, scheme in assignment.items() if made.weights_for(layer) != scheme]
    assert not wrong, f"{wrong[0]} would get {made.weights_for(wrong[0])}"
    return made


def fields(scheme: WeightScheme | None) -> dict[str, Any] | None:
    """All fields of a scheme, as an override names them."""
    return None if scheme is None else scheme.model_dump(mode="json", exclude_none=True)


def globs(
    assignment: Assignment, default: WeightScheme, sizes: Mapping[str, int]
) -> list[tuple[str, WeightScheme | None]]:
    """(glob, scheme) in the order in which they apply; later ones win.

    >>> int8 = WeightScheme(format="int8")
    >>> int4 = WeightScheme(format="int4")
    >>> layers = {f"model.layers.{i}.mlp.up_proj": int8 if i else int4 for i in range(3)}
    >>> [match for match, _ in globs(layers, int4, dict.fromkeys(layers, 1))]
    ['*.mlp.up_proj', 'model.layers.0.mlp.up_proj']
    """
    kinds: dict[str, list[str]] = {}
    for layer in assignment:
        kinds.setdefault(_kind(layer), []).append(layer)
    found: list[tuple[str, WeightScheme | None]] = []
    now: dict[str, WeightScheme | None] = dict.fromkeys(assignment, default)
    for kind, layers in kinds.items():
        weights: Counter[WeightScheme | None] = Counter()
        for layer in layers:
            weights[assignment[layer]] += 1
        most, count = weights.most_common(1)[0]
        glob = f"*.{kind}"
        only_these = all(_kind(layer) == kind for layer in assignment if fnmatchcase(layer, glob))
        if most != default and count > 1 and 2 * count > len(layers) and only_these:
            found.append((glob, most))
            now |= dict.fromkeys(layers, most)
    left = [layer for layer, scheme in assignment.items() if now[layer] != scheme]
    while left:
        layer = left[0]
        scheme = assignment[layer]
        stem = layer.rpartition(".")[0]
        # a whole part of a block, where all that the glob matches has this scheme
        for glob in (f"{stem.rpartition('.')[0]}.*", f"{stem}.*", layer):
            matched = [other for other in assignment if fnmatchcase(other, glob)]
            saves = sum(other in left for other in matched) > 1
            if glob == layer or (saves and all(assignment[other] == scheme for other in matched)):
                break
        found.append((glob, scheme))
        left = [other for other in left if other not in matched]
    return found


def _kind(layer: str) -> str:
    """What a layer is called in its block: `mlp.down_proj` of `model.layers.3.mlp.down_proj`."""
    parts = layer.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else layer


def text(recipe: Recipe, comment: Sequence[str]) -> str:
    """The recipe as YAML: one line a key, one line an override, what was measured above it."""
    data = recipe.as_dict()
    lines = [f"# {line}".rstrip() for line in comment]
    lines.append(f"schema: {data.pop('schema')}")
    data.pop("name")
    for key, value in data.items():
        if key == "overrides" and value:
            lines.append("overrides:")
            lines += [f"  - {_flow(entry)}" for entry in value]
        elif key in ("passes", "export"):
            lines.append(f"{key}:" if value else f"{key}: []")
            lines += [f"  - {name}: {_flow(settings)}" for entry in value for name, settings in entry.items()]
        elif key == "scheme":
            lines.append("scheme:")
            lines += [f"  {part}: {_flow(fields_)}" for part, fields_ in value.items()]
        elif key == "gates":
            set_ = {gate: limit for gate, limit in value.items() if limit is not None}
            lines += [f"gates: {_flow(set_)}"] if set_ else []
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """YAML of one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").rstrip("\n")
