"""Which layer is stored how: the recipe's scheme, overrides and exceptions, laid over a model's shapes.

Names and shapes are enough: a compile takes them from the model, a plan from its config, and both decide by this.

Mixtures of types go by the name that users know a GGUF file by. A file's own type is that of most matrices; values,
what a layer puts out, and the head get more bits, some of them in some layers alone. Where 256 does not divide K, a
type of blocks of 32 stands in, whose bits are more. Source: `llama_tensor_get_type` and `tensor_type_fallback` of
llama.cpp (`src/llama-quant.cpp` in llama-cpp-python 0.3.36), with an importance matrix, since codes are chosen by what
inputs are here too. Falcon and mixtures of experts, for which it has exceptions, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from quantkit import plugins
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.blocks import FLOAT16
from quantkit.model.sizes.architecture import Architecture, Matrix
from quantkit.recipe import PassStep, Recipe
from quantkit.scheme import MIXTURES, ActivationScheme, WeightScheme

# linear -> [N, K]
Shapes = Mapping[str, tuple[int, int]]
# what lies outside the blocks; all but the head is never quantized, and naming it in `keep` says so
HEAD = "lm_head"
ROLES = ("embeddings", HEAD, "norms")
# decisions with these codes are no fallback: the recipe asks for them
AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER = "kept-as-asked", "group-shrunk", "head-rounded", "untied", "router-kept"
MIXED = "kept-high"
# these are: what stays in floats although the recipe does not say so
SHARED, FLOATS, EXPERTS = "shared-kept", "floats-left", "experts-merged"
# the same experts, where the recipe's `keep` names them
EXPERTS_KEPT = "experts-kept"
# the share of linear weights that may stay in floats without a word
FLOATS_LIMIT = 0.05
ASKED = (AS_ASKED, SHRUNK, ROUNDED, UNTIED, ROUTER, MIXED, EXPERTS_KEPT)


@dataclass(frozen=True)
class Assigned:
    """How each linear is stored.

    Args:
        schemes: linear -> scheme, of those to quantize.
        activations: linear -> how its input is quantized, of those in `schemes` whose input is; never the head's.
        decisions: those left in high precision against the default, and what is stored otherwise than the scheme says.
        head: the language-model head's name, if it is to be quantized.
    """

    schemes: Mapping[str, WeightScheme]
    activations: Mapping[str, ActivationScheme]
    decisions: list[Decision]
    head: str | None


def solves(step: PassStep) -> bool:
    """Tell whether a pass gives codes to a product alone, as the head is one."""
    kind = plugins.PASSES.of(step)
    return "unassigned" in kind.requires and "codes" in kind.ensures and not kind.on_graphs


def takes_head(recipe: Recipe) -> bool:
    """Tell whether a language-model head is one of the layers that a recipe stores in its scheme."""
    return HEAD not in recipe.keep and recipe.scheme.weights is not None


def assign_sizes(recipe: Recipe, architecture: Architecture, names: Mapping[str, Matrix] | None = None) -> Assigned:
    """Decide for every linear of a model that is not opened.

    Args:
        names: what the linears inside the blocks are called one by one; None: as the architecture calls them.

    Raises:
        InputError: those of `assign`.
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
    model: str = "model",
) -> Assigned:
    """Decide for every linear.

    Args:
        recipe: its scheme, overrides, `keep` and `on_indivisible`.
        shapes: name -> [N, K], of the linears inside the blocks, and of the head if `takes_head`.
        dtype: what the source stores; bfloat16 models read bfloat16 scales.
        head: which of them is the head.
        routers: those that choose or weigh experts, and stay as they are.
        shared: those whose weight another linear in another block has too -> that one; they stay as they are.
        largest: linear -> the largest magnitude of its weight, of those that are known.
        apart: modules inside the blocks whose matrices belong to no linear -> whether they are merged experts. They
            stay as they are, and `keep` may say so.

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
            reason = f"its weight is that of {other} too: one set of codes cannot follow the inputs of both"
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
        reason = "the pass that assigns codes inside the blocks knows no product alone: the head is rounded to nearest"
        decisions.append(decision("recipe", ROUNDED, head, reason, None, schemes[head].format))
    if recipe.scheme.weights is not None and not schemes:
        value = f"{len(shapes)} linears in its blocks, none of them to quantize"
        rule = "a recipe with a weight scheme quantizes something"
        remedy = "look at `keep`, `overrides` and `on_indivisible`"
        raise InputError("nothing-to-quantize", model, value, rule, remedy)
    activations = {name: how for name in schemes if name != head and (how := recipe.activations_for(name)) is not None}
    wrong = [name for name, how in activations.items() if how.group and shapes[name][1] % how.group]
    if wrong:
        value = f"activations in groups of {activations[wrong[0]].group}, K {shapes[wrong[0]][1]}"
        remedy = "quantize them by token, or leave these layers' inputs alone: an override with `activations: null`"
        raise InputError("group-indivisible", _first_of(wrong), value, "the group divides K", remedy)
    return Assigned(schemes, activations, decisions, head)


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} other layers)" if len(names) > 1 else "")


def _check_formats(schemes: Mapping[str, WeightScheme]) -> None:
    for name, scheme in schemes.items():
        if not load_format(scheme.format).rules.codes:
            quantizing = [form for form in plugins.FORMATS.shipped() if load_format(form).rules.codes]
            remedy = f"use {', '.join(quantizing)}; to leave layers as they are, `weights: null` in an override"
            raise InputError(
                "format-unsupported", name, f"weights in {scheme.format}", "it has no codes to assign", remedy
            )


def _keeps(recipe: Recipe, name: str) -> str | None:
    """Return the glob in a recipe's `keep` that names a layer."""
    return next((glob for glob in recipe.keep if glob not in ROLES and fnmatchcase(name, glob)), None)


def _check_globs(recipe: Recipe, shapes: Shapes, apart: Collection[str]) -> None:
    # not every model has a head; but a glob that only a kept head would match is a contradiction
    anyway = [] if HEAD in recipe.keep else [HEAD]
    asked = [("override-unmatched", "overrides", each.match) for each in recipe.overrides if each.match not in anyway]
    asked += [("keep-unmatched", "keep", glob) for glob in recipe.keep if glob not in ROLES]
    for code, where, glob in asked:
        if not any(fnmatchcase(name, glob) for name in (*shapes, *(apart if where == "keep" else ()))):
            like = f"layers are called like {next(iter(shapes), 'none')!r}"
            remedy = "take lm_head out of `keep`" if glob == HEAD else like
            raise InputError(code, where, f"{glob!r} matches no layer", "every glob matches something", remedy)


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


def _fallen_back(
    mixture: str, shapes: Shapes, schemes: Mapping[str, WeightScheme], decisions: list[Decision]
) -> dict[str, WeightScheme]:
    """Put in what stands in for super-blocks that K does not fill; one decision a kind, one for all bits."""
    stored = {name: instead(scheme, shapes[name][1]) for name, scheme in schemes.items()}
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, scheme in schemes.items():
        if stored[name] != scheme:
            kinds.setdefault((scheme.format, stored[name].format, shapes[name][1]), []).append(name)
    for (before, after, columns), names in kinds.items():
        bits = [load_format(each).bits_per_weight((1, 256), WeightScheme(format=each)) for each in (before, after)]
        reason = f"256 does not divide K {columns}: {bits[1]:.4g} bits a weight instead of {bits[0]:.4g}"
        decisions.append(decision("recipe", "type-fallback", _first_of(names), reason, before, after))
    if kinds:
        meant, taken = _bits(schemes, shapes), _bits(stored, shapes)
        reason = f"with what stands in for other types this {mixture} takes {taken:.2f} bits a weight, not {meant:.2f}"
        decisions.append(decision("recipe", "mixture-bits", "scheme.mixture", reason, round(meant, 4), round(taken, 4)))
    return stored


def _bits(schemes: Mapping[str, WeightScheme], shapes: Shapes) -> float:
    """Return the bits of a weight of all of them, on the mean; as if K were whole groups."""
    sizes = {name: shapes[name][0] * shapes[name][1] for name in schemes}
    bits = {name: load_format(how.format).bits_per_weight((1, 256), how) for name, how in schemes.items()}
    return sum(bits[name] * size for name, size in sizes.items()) / max(1, sum(sizes.values()))


def _divisible(
    recipe: Recipe,
    shapes: Shapes,
    schemes: Mapping[str, WeightScheme],
    decisions: list[Decision],
) -> dict[str, WeightScheme]:
    wrong = [name for name, scheme in schemes.items() if scheme.padding(shapes[name][1])]
    if not wrong or recipe.on_indivisible == "pad":
        for name in wrong:
            columns, scheme = shapes[name][1], schemes[name]
            reason = f"K {columns} in groups of {scheme.multiple}"
            decisions.append(decision("recipe", "padded", name, reason, columns, columns + scheme.padding(columns)))
        return dict(schemes)
    if recipe.on_indivisible == "keep":
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
    groups = () if rules.multiple else rules.groups or (256, 192, 128, 96, 64, 48, 32, 16)  # of a multiple there is one
    fitting = [size for size in groups if all(width % size == 0 for width in widths)]
    # not all that reads groups reads other sizes than powers of two
    nearest = min(fitting, key=lambda size: (size & (size - 1) != 0, abs(size - group))) if fitting else None
    remedies = [f"--set scheme.weights.group={nearest}"] if nearest else []
    if len(wrong) < len(schemes):  # what would keep every layer leaves nothing to quantize
        remedies.append("--set on_indivisible=keep")
    remedy = ", or ".join(remedies or ["--recipe int8, whose scales are of whole rows"])
    raise InputError("group-indivisible", _first_of(wrong), f"group {group}, K {columns}", "group divides K", remedy)


def _shrunk(
    schemes: Mapping[str, WeightScheme],
    kinds: Mapping[tuple[str, int, int], Sequence[str]],
    sizes: Mapping[tuple[str, int, int], int | None],
    decisions: list[Decision],
) -> dict[str, WeightScheme]:
    """Shrink the groups of the layers of each kind, (format, group, K); one decision a kind."""
    shrunk = dict(schemes)
    for (form, group, columns), names in kinds.items():
        size = sizes[form, group, columns]
        shrunk |= {name: schemes[name].model_copy(update={"group": size}) for name in names}
        reason = f"{size} is the largest power of two up to {group} that divides K {columns}"
        decisions.append(decision("recipe", SHRUNK, _first_of(names), reason, group, size))
    return shrunk


def _multiplied(
    schemes: Mapping[str, WeightScheme], largest: Mapping[str, float], decisions: list[Decision]
) -> dict[str, WeightScheme]:
    """Widen scales to float32 where weights go beyond float16: runtimes multiply codes in the dtype of their scales."""
    widened = dict(schemes)
    for name, scheme in schemes.items():
        reaches, wide = largest.get(name, 0.0), "float32" in load_format(scheme.format).rules.scales
        # half of it is left to what passes fold into weights, or multiply them by
        if scheme.scale == "float16" and wide and reaches > FLOAT16 / 2:
            widened[name] = scheme.model_copy(update={"scale": "float32"})
            reason = f"its weights go up to {reaches:.3g}; scales in float16 are multiplied there, which ends at 65504"
            decisions.append(decision("recipe", "scale-dtype", name, reason, "float16", "float32"))
    return widened


def _storable(schemes: Mapping[str, WeightScheme], dtype: str, decisions: list[Decision]) -> dict[str, WeightScheme]:
    """Store scales in a dtype that the model's dtype holds exactly: runtimes read them in the model's dtype."""
    if dtype not in ("float16", "bfloat16"):
        return dict(schemes)
    found = {
        # a format may have no such scales, and be read by kernels of its own
        name: scheme.model_copy(update={"scale": dtype}) if dtype in load_format(scheme.format).rules.scales else scheme
        for name, scheme in schemes.items()
    }
    for scale in sorted({schemes[name].scale for name, scheme in found.items() if scheme != schemes[name]}):
        reason = f"a {dtype} model's runtimes read its scales as {dtype}"
        decisions.append(decision("recipe", "scale-dtype", "scheme.weights.scale", reason, scale, dtype))
    return found


# --- mixtures, and groups that do not divide K ----------------------------------------------------------------------

_POWERS = (256, 128, 64, 32, 16)

_FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_VALUES = ("v_proj", "qkv_proj")


class _Place(NamedTuple):
    """A matrix's layer, of how many, and how many queries share a value."""

    layer: int
    layers: int
    shared: int


def mixed(mixture: str, shapes: Shapes, head: str | None = None) -> dict[str, WeightScheme]:
    """Return the scheme that a mixture gives each matrix, whatever divides its K.

    Args:
        mixture: one of `MIXTURES`.
        shapes: name -> [N, K], as layers follow one another.
        head: which of them is the head.
    """
    leaves = {name: name.rpartition(".")[2] for name in shapes if name != head}
    numbers = {name: int(blocks[0]) for name in leaves if (blocks := re.findall(r"\.(\d+)\.", f".{name}."))}
    layers = max(numbers.values(), default=-1) + 1
    values = [name for name, leaf in leaves.items() if leaf in _VALUES]
    rows = {leaf: shapes[name][0] for name, leaf in leaves.items() if leaf in ("q_proj", "k_proj")}
    shared = rows.get("q_proj", 1) // rows.get("k_proj", 1)
    found: dict[str, WeightScheme] = {}
    for name in shapes:
        if name == head:
            kind = MIXTURES[mixture] if MIXTURES[mixture] == "q8_0" else "q6_k"
        elif leaves[name] in _VALUES:
            kind = _of_values(mixture, _Place(values.index(name), len(values), shared), layers)
        elif leaves[name] == "down_proj":
            kind = _of_down(mixture, _Place(numbers.get(name, 0), layers, shared))
        elif leaves[name] == "o_proj" and mixture == "q3_k_m":
            kind = "q4_k"
        else:
            kind = MIXTURES[mixture]
        found[name] = WeightScheme(format=kind)
    return found


def instead(scheme: WeightScheme, columns: int) -> WeightScheme:
    """Return what stands in where K = `columns` is no whole super-blocks; else, or where nothing does, the scheme."""
    kind = _FALLBACKS.get(scheme.format)
    return WeightScheme(format=kind) if kind is not None and scheme.padding(columns) else scheme


def of_table(scheme: WeightScheme, columns: int, floats: str, name: str) -> tuple[WeightScheme | None, list[Decision]]:
    """Return what a table of embeddings is stored in, None where 32 does not divide its width, and the decision.

    Args:
        scheme: what was asked for.
        columns: the table's width.
        floats: the float format of what has no codes.
    """
    found = instead(scheme, columns)
    if found == scheme and not found.padding(columns):
        return scheme, []
    whole = not found.padding(columns)
    before, after = (load_format(each.format).bits_per_weight((1, 256), each) for each in (scheme, found))
    bits = after if whole else 32.0 if floats == "float32" else 16.0
    reason = f"{256 if whole else 32} does not divide its width {columns}: {bits:.4g} bits a weight, not {before:.4g}"
    to = found.format if whole else floats
    return found if whole else None, [decision("recipe", "type-fallback", name, reason, scheme.format, to)]


def _of_values(mixture: str, at: _Place, layers: int) -> str:
    kind = MIXTURES[mixture]
    if mixture == "q3_k_m":
        kind = "q5_k" if at.layer < 2 else "q4_k"
    elif mixture == "iq4_nl" and at.shared >= 4:
        kind = "q5_k"
    elif mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        kind = "q6_k"
    # of 80 layers whose queries share values: they are an eighth of the queries' matrix
    return "q5_k" if layers == 80 and at.shared > 1 and kind in ("q3_k", "q4_k") else kind


def _of_down(mixture: str, at: _Place) -> str:
    if mixture == "q3_k_m":
        return "q5_k" if at.layer < at.layers // 16 else "q4_k"
    if mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        return "q6_k"
    if mixture == "q4_0" and at.layer < at.layers // 8:
        return "q4_1"
    return MIXTURES[mixture]


def _more_bits(at: _Place) -> bool:
    """Tell whether it is in the first or the last eighth of the layers, or every third between them."""
    eighth = at.layers // 8
    return at.layer < eighth or at.layer >= 7 * at.layers // 8 or (at.layer - eighth) % 3 == 2


def power(name: str, group: int, columns: int) -> int | None:
    """Return the largest power of two up to `group` that divides K and that the format has."""
    rules = load_format(name).rules
    allowed = () if rules.multiple else rules.groups or _POWERS
    return next((size for size in _POWERS if size <= group and columns % size == 0 and size in allowed), None)


def padded(linear: str, scheme: WeightScheme, columns: int | None) -> InputError:
    """Make the error for a layer whose last group is filled up, in an export that stores whole groups alone.

    Args:
        scheme: its groups do not divide K.
        columns: K, where it is known.
    """
    size = None if columns is None or scheme.group is None else power(scheme.format, scheme.group, columns)
    remedy = "--set on_indivisible=keep"
    if size:
        remedy = f"--set scheme.weights.group={size}, or --set on_indivisible=shrink"
    value = f"{f'K {columns} in groups' if columns else 'its last group'} of {scheme.group}, padded"
    rule = "who reads this takes whole groups alone; padding goes with `onnx` and `checkpoint: {layout: dense}`"
    return InputError("layout-unsupported", linear, value, rule, remedy)
