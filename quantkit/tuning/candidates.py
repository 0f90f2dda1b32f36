"""List the weight schemes that a unit may have.

A candidate is the recipe's own weight scheme with another format or group. `float` leaves a unit in high precision.
The target and the recipe's exports must support all candidates in one model. Layers that the recipe's overrides or
`keep` name are not tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from quantkit import plugins
from quantkit.bundle import Decision
from quantkit.errors import InputError, did_you_mean
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.formats import load_format
from quantkit.passes import decision
from quantkit.passes.rtn import Rtn
from quantkit.planning.support import ask
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.pipeline import Prepared
    from quantkit.pipeline.blocks.layers import Layers

FLOAT = "float"
# candidates if the user names none; those that cannot be exported are dropped
USUAL = ("int3", "int4", "int8", FLOAT)


@dataclass(frozen=True)
class Candidate:
    """One way to store a unit.

    Args:
        name: short name of the scheme, such as `int4 g64`.
        scheme: the weight scheme; None leaves the unit in high precision.
        layers: scheme of every tuned linear by full name; its group is smaller where the scheme's does not divide K.
    """

    name: str
    scheme: WeightScheme | None
    layers: Mapping[str, WeightScheme] = field(default_factory=dict)


@dataclass(frozen=True)
class Choices:
    """All candidates, at least two, and the linears that are not tuned.

    Args:
        candidates: the candidates.
        fixed: scheme of every untuned quantized linear, by full name.
        kept: full names of linears that the recipe leaves in high precision.
        shapes: [N, K] of every linear by full name.
        head: name of the output head if the recipe quantizes it, else None.
        decisions: candidates that were dropped or made symmetric, with the reason.
    """

    candidates: Sequence[Candidate]
    fixed: Mapping[str, WeightScheme]
    kept: Sequence[str]
    shapes: Mapping[str, tuple[int, int]]
    head: str | None
    decisions: Sequence[Decision]


def name_of(scheme: WeightScheme | None) -> str:
    """Name a scheme: `int4 g64`, `int8 channel`, `int4 g32 asymmetric`, `float`."""
    if scheme is None:
        return FLOAT
    span = f"{'b' if scheme.granularity == 'block' else 'g'}{scheme.group}" if scheme.group else scheme.granularity
    return f"{scheme.format} {span}{'' if scheme.symmetric else ' asymmetric'}"


def choices(
    prepared: Prepared, formats: Sequence[str] | None = None, schemes: Sequence[Mapping[str, Any]] = ()
) -> Choices:
    """Find the candidates for a model.

    Args:
        prepared: a prepared compile with the base recipe.
        formats: names of formats, or `float`; None tries `USUAL` and drops those that cannot be exported.
        schemes: further candidates, each as fields to change in the recipe's scheme: `{"format": "int4", "group": 32}`.

    Raises InputError: `unknown-format`, `recipe-invalid`, `nothing-to-choose`; for a named candidate, also the errors
    of `lay_out`, of the exporters and of the target.
    """
    recipe = prepared.request.recipe
    base = recipe.scheme.weights
    if base is None:
        rule, remedy = "tune needs a recipe that quantizes weights", "--recipe gptq-int4"
        raise InputError("nothing-to-choose", where=recipe.name, value="no weight scheme", rule=rule, remedy=remedy)
    known = [*plugins.FORMATS.names(), FLOAT]
    for name in formats or ():
        if name not in known:
            remedy = did_you_mean(name, known)
            raise InputError("unknown-format", where="--formats", value=f"no format is called {name!r}", remedy=remedy)
    named = formats is not None or bool(schemes)
    wanted = [name for name in (formats if formats is not None else () if schemes else USUAL) if name in known]
    asked: list[WeightScheme] = [
        _changed(base, {"format": name}, recipe.name)
        for name in dict.fromkeys(wanted)
        if name != FLOAT and not name.startswith(("float", "bfloat"))
    ]
    asked += [_changed(base, change, recipe.name) for change in schemes]
    decisions: list[Decision] = []
    possible = _possible(prepared, dict.fromkeys(asked), named, decisions)
    possible = _together(prepared, possible, decisions)
    tuned = set().union(*(layers.schemes for layers in possible.values())) - _named(recipe, prepared.layers)
    candidates = [
        Candidate(name_of(scheme), scheme, {name: own for name, own in layers.schemes.items() if name in tuned})
        for scheme, layers in possible.items()
    ]
    if not named or any(name == FLOAT or name.startswith(("float", "bfloat")) for name in wanted):
        candidates.append(Candidate(FLOAT, None))
    if len(candidates) < 2 or not tuned:
        value = f"{', '.join(own.name for own in candidates) or 'no candidate'} for {len(tuned)} linears"
        rule, remedy = "tune needs at least two candidates", "--formats int4,int8"
        raise InputError("nothing-to-choose", where=recipe.name, value=value, rule=rule, remedy=remedy)
    fixed = {name: scheme for name, scheme in prepared.layers.schemes.items() if name not in tuned}
    kept = [name for name in prepared.layers.shapes if name not in tuned and name not in fixed]
    return Choices(candidates, fixed, kept, prepared.layers.shapes, prepared.layers.head, decisions)


def _changed(base: WeightScheme, change: Mapping[str, Any], recipe: str) -> WeightScheme:
    rules = load_format(change.get("format", base.format)).rules
    fields: dict[str, Any] = {"format": base.format}
    # keep the fields of the recipe's scheme that the new format supports; the format's defaults fill in the others
    if base.granularity in rules.granularities and (not rules.groups or base.group in (None, *rules.groups)):
        fields |= {"granularity": base.granularity, "group": base.group}
    fields |= {"symmetric": base.symmetric} if base.symmetric in rules.symmetric else {}
    fields |= {"scale": base.scale} if base.scale in rules.scales else {}
    if "granularity" in change or "group" in change:
        fields.pop("group", None)
        fields |= {"granularity": "group"} if "granularity" not in change else {}
    fields |= change
    checked = Recipe.from_dict(
        {"schema": 1, "summary": "a candidate", "scheme": {"weights": fields}, "passes": [{Rtn.name: {}}]},
        name=recipe,
        where=f"candidate {dict(change)}",
    ).scheme.weights
    assert checked is not None
    return checked


def _possible(
    prepared: Prepared, asked: Mapping[WeightScheme, None], named: bool, decisions: list[Decision]
) -> dict[WeightScheme, Layers]:
    """Return the schemes supported by the layout, the target and the exports for a whole model."""
    laid_out = {}
    for scheme in asked:
        try:
            layers = _laid_out(prepared, scheme)
            _accept(prepared, layers, layers.schemes)
        except InputError as problem:
            if named:
                raise
            reason = "; ".join(part for part in (problem.value, problem.rule) if part)
            decisions.append(decision("tune", "candidate-dropped", name_of(scheme), reason, name_of(scheme)))
        else:
            laid_out[scheme] = layers
    return laid_out


def _laid_out(prepared: Prepared, scheme: WeightScheme) -> Layers:
    from quantkit.pipeline.blocks.layers import lay_out

    recipe = with_weights(prepared.request.recipe, scheme)
    ask(recipe, prepared.request.target)
    stream = prepared.stream
    return lay_out(recipe, stream.skeleton, stream.block_names, prepared.source.dtype, head=stream.head)


def with_weights(recipe: Recipe, scheme: WeightScheme) -> Recipe:
    """Return the recipe with another default weight scheme."""
    return recipe.model_copy(update={"scheme": recipe.scheme.model_copy(update={"weights": scheme})})


def _accept(prepared: Prepared, layers: Layers, schemes: Mapping[str, WeightScheme]) -> None:
    for step in prepared.request.recipe.export:
        load_exporter(step.name).accepts(step.settings, LayerSpec(schemes, layers.plain, layers.padded(), layers.tied))


def _together(
    prepared: Prepared, possible: dict[WeightScheme, Layers], decisions: list[Decision]
) -> dict[WeightScheme, Layers]:
    """Return candidates supported by the exports in one model, without zero points if that is necessary."""
    try:
        _accept_mixed(prepared, possible)
    except InputError as problem:
        without = {_changed(scheme, {"symmetric": True}, "symmetric"): None for scheme in possible}
        if without.keys() == possible.keys():
            raise
        symmetric = {scheme: _laid_out(prepared, scheme) for scheme in without}
        _accept_mixed(prepared, symmetric)
        reason = f"{problem.rule}: mixed schemes are stored without zero points"
        decisions.append(decision("tune", "made-symmetric", "scheme.weights.symmetric", reason, False, True))
        return symmetric
    return possible


def _accept_mixed(prepared: Prepared, possible: Mapping[WeightScheme, Layers]) -> None:
    """Raise the exports' error for a model whose layers use these schemes in turn."""
    if not possible:
        return
    layers = list(possible.values())
    names = list(dict.fromkeys(name for layer_set in layers for name in layer_set.schemes))
    mixed = {
        name: schemes[name]
        for number, name in enumerate(names)
        if name in (schemes := layers[number % len(layers)].schemes)
    }
    _accept(prepared, layers[0], mixed)


def _named(recipe: Recipe, layers: Layers) -> set[str]:
    """Return the linears matched by the recipe's overrides, and the head."""
    globs = [override.match for override in recipe.overrides]
    return {name for name in layers.shapes if name == layers.head or any(fnmatchcase(name, glob) for glob in globs)}
