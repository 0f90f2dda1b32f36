"""Assignment of schemes to layers: the recipe's scheme, overrides and exceptions, applied to a model's shapes.

Names and shapes suffice. A compile takes them from the model, a plan from its config, and both decide here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantkit import plugins
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.blocks import FLOAT16
from quantkit.model.layouts import Schemes, Shapes
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.model.sizes.storage import instead, mixed, power
from quantkit.recipe import PassStep, Recipe
from quantkit.scheme import ActivationScheme, WeightScheme

# parts outside of the blocks; only the head can be quantized, and `keep` may name the others
HEAD = "lm_head"
ROLES = ("embeddings", HEAD, "norms")
# decisions with these codes are not fallbacks: the recipe asks for them
AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER = "kept-as-asked", "group-shrunk", "head-rounded", "untied", "router-kept"
MIXED = "kept-high"
# fallbacks: layers stay in floats although the recipe does not say so
SHARED, FLOATS, EXPERTS = "shared-kept", "floats-left", "experts-merged"
# the same experts, where the recipe's `keep` names them
EXPERTS_KEPT = "experts-kept"
LEFT_OUT = "export-left-out"
# packed experts have no zero points, so that transformers loads them
SYMMETRIC = "experts-symmetric"
# what becomes of most of a vision-language model's weights beside its text stack
TOWER = "the tower of images and its projector stay as they are"
# share of linear weights that may stay in floats without a decision
FLOATS_LIMIT = 0.05
ASKED = (AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER, MIXED, EXPERTS_KEPT)


@dataclass(frozen=True)
class Assigned:
    """Storage of each linear.

    Args:
        schemes: linear -> scheme of its weight.
        activations: linear in `schemes` -> scheme of its quantized input; never the head.
        decisions: linears left in high precision against the default, and changes of the scheme.
        head: name of the language-model head, if it is quantized.
    """

    schemes: Mapping[str, WeightScheme]
    activations: Mapping[str, ActivationScheme]
    decisions: list[Decision]
    head: str | None


def solves(step: PassStep) -> bool:
    """Tell whether a pass can assign codes to a single product, such as the head."""
    kind = plugins.PASSES.of(step)
    return "unassigned" in kind.requires and "codes" in kind.ensures and not kind.on_graphs


def takes_head(recipe: Recipe) -> bool:
    """Tell whether a recipe quantizes the language-model head."""
    return HEAD not in recipe.keep and recipe.scheme.weights is not None


def assign_sizes(recipe: Recipe, architecture: Architecture, names: Mapping[str, Matrix] | None = None) -> Assigned:
    """Assign schemes for a model that is not opened.

    Args:
        names: name -> linear inside the blocks, if the names differ from the architecture's.
    """
    inside = names if names is not None else {matrix.name: matrix for matrix in architecture.inside()}
    shapes = {name: (matrix.N, matrix.K) for name, matrix in inside.items()}
    routers = [name for name, matrix in inside.items() if matrix.router]
    last = None
    if (head := architecture.head) is not None and takes_head(recipe) and architecture.kind == "decoder":
        last, shapes[head.name] = head.name, (head.N, head.K)
    return assign(recipe, shapes, architecture.dtype, head=last, routers=routers, model=architecture.name)


def assign(
    recipe: Recipe,
    shapes: Shapes,
    dtype: str,
    *,
    head: str | None = None,
    routers: Collection[str] = (),
    shared: Mapping[str, str] | None = None,
    largest: Mapping[str, float] | None = None,
    apart: Mapping[str, bool] | None = None,
    tower: Collection[str] = (),
    model: str = "model",
) -> Assigned:
    """Assign a scheme to every linear.

    Args:
        shapes: shapes of the linears inside the blocks, and of the head if `takes_head`.
        dtype: dtype of the source; bfloat16 models read bfloat16 scales.
        head: name of the head.
        routers: linears that choose or weigh experts; they stay as they are.
        shared: linear -> linear of another block with the same weight; both stay as they are.
        largest: linear -> largest magnitude of its weight, if known.
        apart: module with matrices that belong to no linear -> True for merged experts. They stay as they are; `keep`
            may name them.
        tower: linears of a tower of images, which an override names; their inputs stay in floats.
        model: name of the model, for errors.

    Raises:
        InputError: `override-unmatched`, `keep-unmatched`, `group-indivisible`, `format-unsupported`,
            `nothing-to-quantize`.
    """
    decisions: list[Decision] = []
    if not recipe.passes:
        return Assigned({}, {}, decisions, head)
    _check_globs(recipe, shapes, apart or {})
    for name, merged in (apart or {}).items():
        if glob := _keeps(recipe, name):
            decisions.append(decision("recipe", EXPERTS_KEPT if merged else AS_ASKED, name, f"keep: {glob}"))
        elif merged:
            reason = "its experts are one tensor; only linears are quantized"
            decisions.append(decision("recipe", EXPERTS, name, reason))
    schemes = _assigned(recipe, shapes, head, decisions)
    reason = "it chooses or weighs experts"
    kept = {name: schemes.pop(name).format for name in sorted(schemes.keys() & set(routers))}
    decisions += [decision("recipe", ROUTER, name, reason, form) for name, form in kept.items()]
    for name, other in sorted((shared or {}).items()):
        if name in schemes:
            reason = f"{other} has the same weight: one set of codes cannot fit the inputs of both"
            decisions.append(decision("recipe", SHARED, name, reason, schemes.pop(name).format))
    if recipe.scheme.mixture is not None:
        schemes = _fallen_back(recipe.scheme.mixture, shapes, schemes, decisions)
    schemes = _divisible(recipe, shapes, schemes, decisions)
    schemes = _storable(schemes, dtype, decisions)
    schemes = _multiplied(schemes, largest or {}, decisions)
    _check_formats(schemes)
    if head is not None and head not in schemes:
        head = None
    if head is not None and not any(solves(step) for step in recipe.passes):
        reason = "the pass that assigns codes in blocks cannot take a single product: the head is rounded to nearest"
        decisions.append(decision("recipe", ROUNDED, head, reason, None, schemes[head].format))
    if recipe.scheme.weights is not None and not schemes:
        value = f"{len(shapes)} linears in its blocks, none of them to quantize"
        rule = "a recipe with a weight scheme must quantize something"
        remedy = "check `keep`, `overrides` and `on_indivisible`"
        raise InputError("nothing-to-quantize", model, value, rule, remedy)
    plain = (name for name in schemes if name != head and name not in tower)
    activations = {name: how for name in plain if (how := recipe.activations_for(name)) is not None}
    wrong = [name for name, how in activations.items() if how.group and shapes[name][1] % how.group]
    if wrong:
        value = f"activations in groups of {activations[wrong[0]].group}, K {shapes[wrong[0]][1]}"
        remedy = "quantize them by token, or keep these layers' inputs in floats: an override with `activations: null`"
        raise InputError("group-indivisible", _first_of(wrong), value, "the group divides K", remedy)
    return Assigned(schemes, activations, decisions, head)


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} other layers)" if len(names) > 1 else "")


def _check_formats(schemes: Schemes) -> None:
    for name, scheme in schemes.items():
        if not load_format(scheme.format).rules.codes:
            quantizing = [form for form in plugins.FORMATS.shipped() if load_format(form).rules.codes]
            remedy = f"use {', '.join(quantizing)}; to keep layers in floats, `weights: null` in an override"
            raise InputError(
                "format-unsupported", name, f"weights in {scheme.format}", "it has no codes to assign", remedy
            )


def _keeps(recipe: Recipe, name: str) -> str | None:
    """Return the glob of a recipe's `keep` for a layer."""
    globs = (glob for glob in recipe.keep if glob not in ROLES)
    return next((glob for glob in globs if any(fnmatchcase(one, glob) for one in _with_module(name))), None)


def _with_module(name: str) -> list[str]:
    """Return the names of a linear for `keep`: of an expert's, also the module of all experts."""
    before, inside, _ = name.rpartition(".experts.")
    return [name, f"{before}.experts"] if inside else [name]


def _check_globs(recipe: Recipe, shapes: Shapes, apart: Collection[str]) -> None:
    # not every model has a head; but a glob that matches only a kept head is a contradiction
    anyway = [] if HEAD in recipe.keep else [HEAD]
    globs = [change.match for change in recipe.overrides]
    asked = [("override-unmatched", "overrides", glob) for glob in globs if glob not in anyway]
    asked += [("keep-unmatched", "keep", glob) for glob in recipe.keep if glob not in ROLES]
    for code, where, glob in asked:
        names = shapes if where == "overrides" else {one for name in (*shapes, *apart) for one in _with_module(name)}
        if not any(fnmatchcase(name, glob) for name in names):
            like = f"layers have names like {next(iter(shapes), 'none')!r}"
            remedy = "take lm_head out of `keep`" if glob == HEAD else like
            raise InputError(code, where, f"{glob!r} matches no layer", "every glob matches a layer", remedy)


def _assigned(recipe: Recipe, shapes: Shapes, head: str | None, decisions: list[Decision]) -> dict[str, WeightScheme]:
    schemes = {}
    mixture = recipe.scheme.mixture
    mix = {} if mixture is None else mixed(mixture, shapes, head)
    for name in shapes:
        glob = _keeps(recipe, name)
        scheme = None if glob else recipe.weights_for(name, HEAD if name == head else None, mix.get(name))
        if scheme is not None:
            schemes[name] = scheme
        elif recipe.scheme.weights is not None:
            reason = f"keep: {glob}" if glob else "an override says so"
            decisions.append(decision("recipe", AS_ASKED, name, reason, recipe.scheme.weights.format))
    return schemes


def _fallen_back(mixture: str, shapes: Shapes, schemes: Schemes, decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Replace super-blocks if they do not divide K; one decision per kind, one for the bits of the mixture."""
    stored = {name: instead(scheme, shapes[name][1]) for name, scheme in schemes.items()}
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, scheme in schemes.items():
        if stored[name] != scheme:
            kinds.setdefault((scheme.format, stored[name].format, shapes[name][1]), []).append(name)
    for (before, after, columns), names in kinds.items():
        bits = [load_format(form).bits_per_weight((1, 256), WeightScheme(format=form)) for form in (before, after)]
        reason = f"256 does not divide K {columns}: {bits[1]:.4g} bits a weight instead of {bits[0]:.4g}"
        decisions.append(decision("recipe", "type-fallback", _first_of(names), reason, before, after))
    if kinds:
        meant, taken = _bits(schemes, shapes), _bits(stored, shapes)
        reason = f"with its replacement types this {mixture} has {taken:.2f} bits a weight, not {meant:.2f}"
        decisions.append(decision("recipe", "mixture-bits", "scheme.mixture", reason, round(meant, 4), round(taken, 4)))
    return stored


def _bits(schemes: Schemes, shapes: Shapes) -> float:
    """Return the mean bits of a weight, as if groups divided K."""
    sizes = {name: shapes[name][0] * shapes[name][1] for name in schemes}
    bits = {name: load_format(how.format).bits_per_weight((1, 256), how) for name, how in schemes.items()}
    return sum(bits[name] * size for name, size in sizes.items()) / max(1, sum(sizes.values()))


def _divisible(recipe: Recipe, shapes: Shapes, schemes: Schemes, decisions: list[Decision]) -> dict[str, WeightScheme]:
    wrong = [name for name, scheme in schemes.items() if scheme.padding(shapes[name][1])]
    if not wrong or recipe.on_indivisible == "pad":
        for name in wrong:
            columns, scheme = shapes[name][1], schemes[name]
            reason = f"K {columns} in groups of {scheme.multiple}"
            decisions.append(decision("recipe", "padded", name, reason, columns, columns + scheme.padding(columns)))
        return dict(schemes)
    if recipe.on_indivisible == "keep" and len(wrong) < len(schemes):
        for name in wrong:
            reason = f"group {schemes[name].multiple} does not divide K {shapes[name][1]}"
            decisions.append(decision("recipe", "kept", name, reason, schemes[name].format))
        return {name: scheme for name, scheme in schemes.items() if name not in wrong}
    if recipe.on_indivisible == "shrink":
        kinds: dict[tuple[str, int, int], list[str]] = {}
        for name in wrong:
            kinds.setdefault((schemes[name].format, schemes[name].group or 1, shapes[name][1]), []).append(name)
        sizes = {kind: power(*kind) for kind in kinds}
        wrong = [name for kind, names in kinds.items() for name in names if sizes[kind] is None]
        if not wrong:
            return _shrunk(schemes, kinds, sizes, decisions)
    first = wrong[0]
    group, columns = schemes[first].multiple, shapes[first][1]
    widths = sorted({shapes[name][1] for name in wrong})
    rules = load_format(schemes[first].format).rules
    groups = () if rules.multiple else rules.groups or (256, 192, 128, 96, 64, 48, 32, 16)
    fitting = [size for size in groups if all(width % size == 0 for width in widths)]
    # some readers of groups take only powers of two
    nearest = min(fitting, key=lambda size: (size & (size - 1) != 0, abs(size - group))) if fitting else None
    remedies = [f"--set scheme.weights.group={nearest}"] if nearest else []
    if len(wrong) < len(schemes):  # keeping every layer would leave nothing to quantize
        remedies.append("--set on_indivisible=keep")
    remedy = ", or ".join(remedies or ["--recipe int8-weights, which has one scale per row"])
    raise InputError("group-indivisible", _first_of(wrong), f"group {group}, K {columns}", "group divides K", remedy)


def _shrunk(
    schemes: Schemes,
    kinds: Mapping[tuple[str, int, int], Sequence[str]],
    sizes: Mapping[tuple[str, int, int], int | None],
    decisions: list[Decision],
) -> dict[str, WeightScheme]:
    """Shrink the groups of the layers of each kind, (format, group, K); one decision per kind."""
    shrunk = dict(schemes)
    for (form, group, columns), names in kinds.items():
        size = sizes[form, group, columns]
        shrunk |= {name: schemes[name].model_copy(update={"group": size}) for name in names}
        reason = f"{size} is the largest power of two up to {group} that divides K {columns}"
        decisions.append(decision("recipe", SHRUNK, _first_of(names), reason, group, size))
    return shrunk


def _multiplied(schemes: Schemes, largest: Mapping[str, float], decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Widen scales to float32 if weights exceed float16: runtimes multiply codes in the dtype of their scales."""
    widened = dict(schemes)
    for name, scheme in schemes.items():
        reaches, wide = largest.get(name, 0.0), "float32" in load_format(scheme.format).rules.scales
        # half of the range is left for the scalings of passes
        if scheme.scale == "float16" and wide and reaches > FLOAT16 / 2:
            widened[name] = scheme.model_copy(update={"scale": "float32"})
            reason = f"its weights go up to {reaches:.3g}; float16 scales multiply in float16, which ends at 65504"
            decisions.append(decision("recipe", "scale-dtype", name, reason, "float16", "float32"))
    return widened


def _storable(schemes: Schemes, dtype: str, decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Store scales in the model's own dtype, in which runtimes read them."""
    if dtype not in ("float16", "bfloat16"):
        return dict(schemes)
    stored = {
        # a format without such scales has kernels of its own
        name: scheme.model_copy(update={"scale": dtype}) if dtype in load_format(scheme.format).rules.scales else scheme
        for name, scheme in schemes.items()
    }
    for scale in sorted({schemes[name].scale for name, scheme in stored.items() if scheme != schemes[name]}):
        reason = f"a {dtype} model's runtimes read its scales as {dtype}"
        decisions.append(decision("recipe", "scale-dtype", "scheme.weights.scale", reason, scale, dtype))
    return stored
