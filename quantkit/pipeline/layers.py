"""Which layer is stored how: the recipe's scheme, overrides and exceptions, laid over a model's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from quantkit import registry
from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.model.structure import is_linear, weight_of
from quantkit.passes import decision
from quantkit.recipe import Recipe, WeightScheme

# what lies outside the blocks is never quantized by the scheme; naming it in `keep` is allowed and says so
ROLES = ("embeddings", "lm_head", "norms")
# a decision with this code is no fallback: the recipe names the layer
AS_ASKED = "kept-as-asked"


@dataclass(frozen=True)
class Layers:
    """The linears inside the blocks.

    Args:
        shapes: full name -> [N, K], of every one.
        schemes: full name -> scheme, of those to quantize.
        plain: full names of those that are `torch.nn.Linear`, which is what other libraries can load quantized.
        decisions: those left in high precision against the default, and scales stored otherwise than asked.
    """

    shapes: Mapping[str, tuple[int, int]]
    schemes: Mapping[str, WeightScheme]
    plain: frozenset[str]
    decisions: Sequence[Decision]

    @property
    def widest(self) -> int:
        """The largest number of features that goes into or comes out of a linear."""
        return max((max(shape) for shape in self.shapes.values()), default=1)

    def padded(self) -> list[str]:
        """The layers whose last group is filled up with zeros."""
        return [
            name
            for name, scheme in self.schemes.items()
            if scheme.group is not None and self.shapes[name][1] % scheme.group
        ]


def lay_out(recipe: Recipe, model: nn.Module, block_names: Sequence[str], dtype: str) -> Layers:
    """Decide for every linear inside the blocks of a model (with or without weights).

    Args:
        recipe: its scheme, overrides, `keep` and `on_indivisible`.
        model: has the blocks at `block_names`.
        block_names: paths of the blocks; `""` for a model that is one block.
        dtype: what the source stores; bfloat16 models read bfloat16 scales.

    Raises:
        InputError: `override-unmatched`, `keep-unmatched`, `group-indivisible`, `nothing-to-quantize`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    plain = set()
    for block in block_names:
        for path, module in model.get_submodule(block).named_modules():
            if is_linear(module):
                name = f"{block}.{path}" if block else path
                rows, columns = weight_of(module).shape
                shapes[name] = (rows, columns)
                if isinstance(module, nn.Linear):
                    plain.add(name)
    decisions: list[Decision] = []
    schemes: dict[str, WeightScheme] = {}
    if recipe.passes:
        _check_globs(recipe, shapes)
        schemes = _assigned(recipe, shapes, decisions)
        schemes = _divisible(recipe, shapes, schemes, decisions)
        schemes = _storable(schemes, dtype, decisions)
        _check_formats(schemes)
        if recipe.scheme.weights is not None and not schemes:
            raise InputError(
                "nothing-to-quantize",
                where=type(model).__name__,
                value=f"{len(shapes)} linears in its blocks, none of them to quantize",
                rule="a recipe with a weight scheme quantizes something",
                remedy="look at `keep`, `overrides` and `on_indivisible`",
            )
    return Layers(shapes, schemes, frozenset(plain), decisions)


def _check_formats(schemes: Mapping[str, WeightScheme]) -> None:
    for name, scheme in schemes.items():
        if not hasattr(registry.load("formats", scheme.format), "nearest"):
            raise InputError(
                "format-unsupported",
                where=name,
                value=f"weights in {scheme.format}",
                rule="passes assign codes of integer formats",
                remedy="use int4 or int8; to leave layers as they are, `weights: null` in an override",
            )


def _check_globs(recipe: Recipe, shapes: Mapping[str, tuple[int, int]]) -> None:
    asked = [("override-unmatched", "overrides", override.match) for override in recipe.overrides]
    asked += [("keep-unmatched", "keep", glob) for glob in recipe.keep if glob not in ROLES]
    for code, where, glob in asked:
        if not any(fnmatchcase(name, glob) for name in shapes):
            example = next(iter(shapes), "none")
            raise InputError(
                code,
                where=where,
                value=f"{glob!r} matches no layer",
                rule="every glob matches something",
                remedy=f"layers are called like {example!r}",
            )


def _assigned(
    recipe: Recipe, shapes: Mapping[str, tuple[int, int]], decisions: list[Decision]
) -> dict[str, WeightScheme]:
    schemes = {}
    for name in shapes:
        glob = next((glob for glob in recipe.keep if glob not in ROLES and fnmatchcase(name, glob)), None)
        scheme = None if glob else recipe.weights_for(name)
        if scheme is not None:
            schemes[name] = scheme
        elif recipe.scheme.weights is not None:
            reason = f"keep: {glob}" if glob else "an override says so"
            decisions.append(decision("recipe", AS_ASKED, name, reason, recipe.scheme.weights.format))
    return schemes


def _divisible(
    recipe: Recipe,
    shapes: Mapping[str, tuple[int, int]],
    schemes: Mapping[str, WeightScheme],
    decisions: list[Decision],
) -> dict[str, WeightScheme]:
    wrong = [name for name, scheme in schemes.items() if scheme.group and shapes[name][1] % scheme.group]
    if not wrong or recipe.on_indivisible == "pad":
        for name in wrong:
            columns, group = shapes[name][1], schemes[name].group or 1
            reason = f"K {columns} in groups of {group}"
            decisions.append(decision("recipe", "padded", name, reason, columns, columns + -columns % group))
        return dict(schemes)
    if recipe.on_indivisible == "keep":
        for name in wrong:
            reason = f"group {schemes[name].group} does not divide K {shapes[name][1]}"
            decisions.append(decision("recipe", "kept", name, reason, schemes[name].format))
        return {name: scheme for name, scheme in schemes.items() if name not in wrong}
    first = wrong[0]
    group, columns = schemes[first].group or 1, shapes[first][1]
    widths = sorted({shapes[name][1] for name in wrong})
    fitting = [size for size in (256, 192, 128, 96, 64, 48, 32, 16) if all(width % size == 0 for width in widths)]
    use = f"use {min(fitting, key=lambda size: abs(size - group))}, or " if fitting else ""
    others = f" (and {len(wrong) - 1} other layers)" if len(wrong) > 1 else ""
    raise InputError(
        "group-indivisible",
        where=f"{first}{others}",
        value=f"group {group}, K {columns}",
        rule="group divides K",
        remedy=f"{use}on_indivisible: keep",
    )


def _storable(schemes: Mapping[str, WeightScheme], dtype: str, decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Scales in a dtype that the model's dtype holds exactly: runtimes read them in the model's dtype."""
    if dtype not in ("float16", "bfloat16"):
        return dict(schemes)
    changed = sorted({scheme.scale for scheme in schemes.values()} - {dtype})
    for scale in changed:
        reason = f"a {dtype} model's runtimes read its scales as {dtype}"
        decisions.append(decision("recipe", "scale-dtype", "scheme.weights.scale", reason, scale, dtype))
    return {name: scheme.model_copy(update={"scale": dtype}) for name, scheme in schemes.items()}
