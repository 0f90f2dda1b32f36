"""Which layer is stored how: the recipe's scheme, overrides and exceptions, laid over a model's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from quantkit import registry
from quantkit.bundle import Decision, LayerEntry
from quantkit.errors import InputError
from quantkit.formats import QuantTensor
from quantkit.formats._activation import InputScale
from quantkit.model import experts
from quantkit.model.structure import is_linear, weight_of
from quantkit.passes import decision
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, WeightScheme

# what lies outside the blocks; all but the head is never quantized, and naming it in `keep` says so
HEAD = "lm_head"
ROLES = ("embeddings", HEAD, "norms")
# decisions with these codes are no fallback: the recipe asks for them
AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER = "kept-as-asked", "group-shrunk", "head-rounded", "untied", "router-kept"
MIXED = "kept-high"
ASKED = (AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER, MIXED)
_POWERS = (256, 128, 64, 32, 16)


@dataclass(frozen=True)
class Layers:
    """The linears inside the blocks, and the head if it is to be quantized.

    Args:
        shapes: full name -> [N, K], of every one.
        schemes: full name -> scheme, of those to quantize.
        plain: full names of those that are `torch.nn.Linear`, which is what other libraries can load quantized.
        decisions: those left in high precision against the default, and what is stored otherwise than the scheme says.
        head: the language-model head's name, if it is to be quantized.
        tied: the head again, if it shares its weight with the embedding.
        activations: full name -> how its input is quantized, of those in `schemes` whose input is; never the head's.
        merged: those of experts, which transformers merges while it loads them.
    """

    shapes: Mapping[str, tuple[int, int]]
    schemes: Mapping[str, WeightScheme]
    plain: frozenset[str]
    decisions: Sequence[Decision]
    head: str | None = None
    tied: frozenset[str] = frozenset()
    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    merged: frozenset[str] = frozenset()

    @property
    def inside(self) -> Mapping[str, tuple[int, int]]:
        """`shapes` of the linears inside the blocks."""
        return {name: shape for name, shape in self.shapes.items() if name != self.head}

    @property
    def widest(self) -> int:
        """The largest number of features that goes into or comes out of a linear inside the blocks."""
        return max((max(shape) for shape in self.inside.values()), default=1)

    def padded(self) -> list[str]:
        """The layers whose last group is filled up with zeros."""
        return [name for name, scheme in self.schemes.items() if scheme.padding(self.shapes[name][1])]

    def entry(
        self, name: str, tensor: QuantTensor, error: float | None, static: InputScale | None = None
    ) -> LayerEntry:
        """A quantized layer as the manifest lists it; `error` is its relative weight error, `static` the fixed scale of
        its input.
        """
        form = registry.load("formats", tensor.scheme.format)
        rows, columns = self.shapes[name]
        stored = (rows, tensor.shape[1])  # with what fills up the last group
        return LayerEntry(
            name=name,
            shape=[rows, columns],
            scheme=tensor.scheme.model_dump(mode="json"),
            bits_per_weight=form.bits_per_weight(stored, tensor.scheme) * stored[1] / columns,
            error=error,
            activations=self.activations[name].model_dump(mode="json") if name in self.activations else None,
            input_scale=float(static.scale) if static is not None else None,
        )


def lay_out(
    recipe: Recipe, model: nn.Module, block_names: Sequence[str], dtype: str, *, head: str | None = None
) -> Layers:
    """Decide for every linear inside the blocks of a model (with or without weights), and for its head.

    Args:
        recipe: its scheme, overrides, `keep` and `on_indivisible`.
        model: has the blocks at `block_names`.
        block_names: paths of the blocks; `""` for a model that is one block.
        dtype: what the source stores; bfloat16 models read bfloat16 scales.
        head: a decoder's language-model head, by its name; quantized unless the recipe keeps it. None leaves it out.

    Raises:
        InputError: `override-unmatched`, `keep-unmatched`, `group-indivisible`, `nothing-to-quantize`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    plain, merged = set(), set()
    decisions: list[Decision] = []
    for block in block_names:
        for path, module in model.get_submodule(block).named_modules():
            name = f"{block}.{path}" if block else path
            if isinstance(module, experts.Expert):
                merged |= {f"{name}.{leaf}" for leaf, _ in module.named_children()}
            if experts.is_merged(module):
                reason = "its experts are one tensor; only linears are quantized"
                decisions.append(decision("recipe", "experts-merged", name, reason))
            if is_linear(module):
                rows, columns = weight_of(module).shape
                shapes[name] = (rows, columns)
                if isinstance(module, nn.Linear):
                    plain.add(name)
    if HEAD in recipe.keep or recipe.scheme.weights is None:
        head = None
    tied = frozenset[str]()
    if head is not None:
        weight = model.get_parameter(f"{head}.weight")
        shapes[head] = (weight.shape[0], weight.shape[1])
        plain.add(head)
        others = (value for name, value in model.named_parameters(remove_duplicate=False) if name != f"{head}.weight")
        tied = frozenset([head] if any(value is weight for value in others) else [])
    schemes: dict[str, WeightScheme] = {}
    if not recipe.passes:
        decisions = []
    else:
        _check_globs(recipe, shapes)
        schemes = _assigned(recipe, shapes, head, decisions)
        for router in sorted(experts.routers(model) & schemes.keys()):
            reason = "it chooses or weighs experts"
            decisions.append(decision("recipe", ROUTER, router, reason, schemes.pop(router).format))
        schemes = _divisible(recipe, shapes, schemes, decisions)
        schemes = _storable(schemes, dtype, decisions)
        _check_formats(schemes)
        if head is not None and head not in schemes:
            del shapes[head]
            head = None
        if head is not None:
            reason = "whichever pass assigns codes inside the blocks, the head is rounded to nearest in searched ranges"
            decisions.append(decision("recipe", ROUNDED, head, reason, None, schemes[head].format))
        if recipe.scheme.weights is not None and not schemes:
            raise InputError(
                "nothing-to-quantize",
                where=type(model).__name__,
                value=f"{len(shapes)} linears in its blocks, none of them to quantize",
                rule="a recipe with a weight scheme quantizes something",
                remedy="look at `keep`, `overrides` and `on_indivisible`",
            )
    inside = [name for name in schemes if name != head]
    found = Layers(
        shapes,
        schemes,
        frozenset(plain),
        decisions,
        head,
        tied if head is not None else frozenset(),
        {name: each for name in inside if (each := recipe.activations_for(name)) is not None},
        frozenset(merged),
    )
    _check_activations(found)
    return found


def _check_activations(layers: Layers) -> None:
    wrong = [name for name, each in layers.activations.items() if each.group and layers.shapes[name][1] % each.group]
    for name in wrong[:1]:
        others = f" (and {len(wrong) - 1} other layers)" if len(wrong) > 1 else ""
        raise InputError(
            "group-indivisible",
            where=f"{name}{others}",
            value=f"activations in groups of {layers.activations[name].group}, K {layers.shapes[name][1]}",
            rule="the group divides K",
            remedy="quantize them by token, or leave these layers' inputs alone: an override with `activations: null`",
        )


def _check_formats(schemes: Mapping[str, WeightScheme]) -> None:
    for name, scheme in schemes.items():
        if not hasattr(registry.load("formats", scheme.format), "nearest"):
            raise InputError(
                "format-unsupported",
                where=name,
                value=f"weights in {scheme.format}",
                rule="it has no codes to assign",
                remedy=f"use {', '.join(_quantizing())}; to leave layers as they are, `weights: null` in an override",
            )


def _quantizing() -> list[str]:
    return [name for name in registry.names("formats") if hasattr(registry.load("formats", name), "nearest")]


def _check_globs(recipe: Recipe, shapes: Mapping[str, tuple[int, int]]) -> None:
    # not every model has a head; but a glob that only a kept head would match is a contradiction
    anyway = [] if HEAD in recipe.keep else [HEAD]
    asked = [("override-unmatched", "overrides", each.match) for each in recipe.overrides if each.match not in anyway]
    asked += [("keep-unmatched", "keep", glob) for glob in recipe.keep if glob not in ROLES]
    for code, where, glob in asked:
        if not any(fnmatchcase(name, glob) for name in shapes):
            example = next(iter(shapes), "none")
            raise InputError(
                code,
                where=where,
                value=f"{glob!r} matches no layer",
                rule="every glob matches something",
                remedy="take lm_head out of `keep`" if glob == HEAD else f"layers are called like {example!r}",
            )


def _assigned(
    recipe: Recipe, shapes: Mapping[str, tuple[int, int]], head: str | None, decisions: list[Decision]
) -> dict[str, WeightScheme]:
    schemes = {}
    for name in shapes:
        glob = next((glob for glob in recipe.keep if glob not in ROLES and fnmatchcase(name, glob)), None)
        scheme = None if glob else recipe.weights_for(name, HEAD if name == head else None)
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
    wrong = [name for name, scheme in schemes.items() if scheme.padding(shapes[name][1])]
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
    if recipe.on_indivisible == "shrink":
        kinds: dict[tuple[str, int, int], list[str]] = {}
        for name in wrong:
            kinds.setdefault((schemes[name].format, schemes[name].group or 1, shapes[name][1]), []).append(name)
        sizes = {kind: _power(*kind) for kind in kinds}
        wrong = [name for kind, names in kinds.items() for name in names if sizes[kind] is None]
        if not wrong:
            return _shrunk(schemes, kinds, sizes, decisions)
    first = wrong[0]
    group, columns = schemes[first].group or 1, shapes[first][1]
    widths = sorted({shapes[name][1] for name in wrong})
    sizes_of = registry.load("formats", schemes[first].format).rules.groups or (256, 192, 128, 96, 64, 48, 32, 16)
    fitting = [size for size in sizes_of if all(width % size == 0 for width in widths)]
    use = f"use {min(fitting, key=lambda size: abs(size - group))}, or " if fitting else ""
    others = f" (and {len(wrong) - 1} other layers)" if len(wrong) > 1 else ""
    raise InputError(
        "group-indivisible",
        where=f"{first}{others}",
        value=f"group {group}, K {columns}",
        rule="group divides K",
        remedy=f"{use}on_indivisible: keep",
    )


def _power(name: str, group: int, columns: int) -> int | None:
    """The largest power of two up to `group` that divides K and that the format has."""
    allowed = registry.load("formats", name).rules.groups or _POWERS
    return next((size for size in _POWERS if size <= group and columns % size == 0 and size in allowed), None)


def _shrunk(
    schemes: Mapping[str, WeightScheme],
    kinds: Mapping[tuple[str, int, int], Sequence[str]],
    sizes: Mapping[tuple[str, int, int], int | None],
    decisions: list[Decision],
) -> dict[str, WeightScheme]:
    """Schemes with smaller groups for the layers of each kind, (format, group, K); one decision a kind."""
    found = dict(schemes)
    for (form, group, columns), names in kinds.items():
        size = sizes[form, group, columns]
        found |= {name: schemes[name].model_copy(update={"group": size}) for name in names}
        reason = f"{size} is the largest power of two up to {group} that divides K {columns}"
        others = f" (and {len(names) - 1} other layers)" if len(names) > 1 else ""
        decisions.append(decision("recipe", SHRUNK, f"{names[0]}{others}", reason, group, size))
    return found


def _storable(schemes: Mapping[str, WeightScheme], dtype: str, decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Scales in a dtype that the model's dtype holds exactly: runtimes read them in the model's dtype."""
    if dtype not in ("float16", "bfloat16"):
        return dict(schemes)
    found = {
        # a format may have no such scales, and be read by kernels of its own
        name: scheme.model_copy(update={"scale": dtype})
        if dtype in registry.load("formats", scheme.format).rules.scales
        else scheme
        for name, scheme in schemes.items()
    }
    for scale in sorted({schemes[name].scale for name, scheme in found.items() if scheme != schemes[name]}):
        reason = f"a {dtype} model's runtimes read its scales as {dtype}"
        decisions.append(decision("recipe", "scale-dtype", "scheme.weights.scale", reason, scale, dtype))
    return found
