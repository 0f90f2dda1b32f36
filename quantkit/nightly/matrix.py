"""The cells of a `nightly.yaml`, each of them checked: what it names is there, and its target runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from quantkit.bundle.manifest import MANIFEST
from quantkit.content import is_path
from quantkit.devices import named
from quantkit.errors import InputError
from quantkit.model.source.alias import ALIASES, unknown_model
from quantkit.nightly.records import HERE, ON, NightCell
from quantkit.pipeline.request import Request, kind_of, with_own_runtime
from quantkit.planning import support

if TYPE_CHECKING:
    from quantkit.nightly.config import Nightly

# (model, recipe, target, runtime that is asked for) -> the runtime
RuntimeOf = Callable[[str, str, str, str | None], str]
# what works where code of a recipe's own file does not: nobody is there at night to allow it
_PACKAGE = "nightly runs what installed packages offer: make the file one, as docs/plugins.md shows"


def checked(config: Nightly, where: str) -> tuple[NightCell, ...]:
    """The cells of a matrix.

    Raises:
        InputError: something named that is not there; a cell whose target cannot run it; an entry that fits no cell,
            or adds none.
    """
    for model in config.all_models():
        _demand_model(config, model, where)
    for device in config.on:
        if device != HERE:
            named.find(device, where=f"{where}: on")
    _demand_bundles(config, where)
    runtime_of = _runtimes(config, where)
    cells = _product(config, where, runtime_of)
    for number, added in enumerate(config.include):
        runtime = runtime_of(added.model, added.recipe, added.target, added.runtime)
        batches = added.batches or config.batches
        more = [
            NightCell(added.model, added.recipe, added.target, _on(runtime, device), batch)
            for device, batch in itertools.product(config.on, batches)
        ]
        if set(more) <= cells.keys():
            raise _idle(f"{where}: include.{number}", "adds no cell")
        cells.update(dict.fromkeys(more))
    if not cells:
        raise InputError("nightly-invalid", where=where, value="no cell is left", remedy="exclude less")
    for number, override in enumerate(config.gates.overrides):
        if not any(override.fits(cell) for cell in cells):
            raise _idle(f"{where}: gates.overrides.{number}", "fits no cell")
    return tuple(cells)


def _product(config: Nightly, where: str, runtime_of: RuntimeOf) -> dict[NightCell, None]:
    """The cells of the product that are not left out, in order."""
    used: set[int] = set()

    def left_out(cell: NightCell) -> bool:
        fitting = {number for number, each in enumerate(config.exclude) if each.fits(cell)}
        used.update(fitting)
        return bool(fitting)

    cells: dict[NightCell, None] = {}
    for model, recipe, target, asked in config.product():
        # what is left out need not run, so it is not asked which runtime would
        places = [
            (device, batch)
            for device, batch in itertools.product(config.on, config.batches)
            if not left_out(NightCell(model, recipe, target, _on(asked or "", device), batch))
        ]
        if places:
            runtime = runtime_of(model, recipe, target, asked)
            found = [NightCell(model, recipe, target, _on(runtime, device), batch) for device, batch in places]
            cells.update(dict.fromkeys(cell for cell in found if not left_out(cell)))
    for number in range(len(config.exclude)):
        if number not in used:
            raise _idle(f"{where}: exclude.{number}", "fits no cell of the product")
    return cells


def _on(runtime: str, device: str) -> str:
    return runtime if device == HERE else f"{runtime}{ON}{device}"


def _runtimes(config: Nightly, where: str) -> RuntimeOf:
    """Which runtime a build runs in; InputError where it cannot, or cannot in the one that is asked for."""

    def found(model: str, recipe: str, target: str, asked: str | None) -> str:
        kind = kind_of(model)
        request = Request.of(
            model,
            recipe=config.reference(recipe),
            target=config.reference(target),
            calibration=None if config.calibration is None else config.reference(config.calibration),
            changes=config.set_,
        )
        if kind is not None:
            request = with_own_runtime(request, kind)
        aimed = request.target
        if asked is not None:
            if asked not in aimed.runtimes:
                aimed.check([], asked)  # which says so
            aimed = aimed.model_copy(update={"runtimes": [asked]})
        return support.ask(request.recipe, aimed, kind).best.runtime

    alike: dict[tuple[str | None, str, str, str | None], str] = {}

    def runtime_of(model: str, recipe: str, target: str, asked: str | None) -> str:
        # models of one kind differ in nothing that matters here
        key = (kind_of(model), recipe, target, asked)
        try:
            if key not in alike:
                alike[key] = found(model, recipe, target, asked)
        except InputError as error:
            place = f"{where}: {recipe} on {target}" + (f" in {asked}" if asked else "")
            instead = f"exclude: [{{recipe: {recipe}, target: {target}{f', runtime: {asked}' if asked else ''}}}]"
            remedy = _PACKAGE if error.code == "code-not-allowed" else error.remedy
            raise InputError(
                error.code,
                where=f"{place}: {error.where}" if error.where else place,
                value=error.value,
                rule=error.rule,
                remedy="; or: ".join(part for part in (remedy, instead) if part),
            ) from None
        return alike[key]

    return runtime_of


def _demand_model(config: Nightly, model: str, where: str) -> None:
    """Refuse a model that is neither shipped nor there; what the hub has is not asked."""
    if model in ALIASES or model.startswith("hf:"):
        return
    if not is_path(model):
        raise unknown_model(model, where=f"{where}: models")
    if not config.at(model).exists():
        raise InputError(
            "file-missing",
            where=f"{where}: models",
            value=f"{config.at(model)} does not exist",
            rule="relative paths begin at the folder of the file",
            remedy="check the path",
        )


def _demand_bundles(config: Nightly, where: str) -> None:
    """Refuse a bundle to compare with that is none."""
    named = {"baseline": config.baseline, **{f"baselines.{name}": each for name, each in config.baselines.items()}}
    for key, baseline in named.items():
        if baseline.bundle is not None and not (config.at(baseline.bundle) / MANIFEST).is_file():
            raise _no_bundle(f"{where}: {key}", config.at(baseline.bundle), "a bundle's folder")
    if config.release is not None:
        place = config.at(config.release)
        if not (place / MANIFEST).is_file() and not any(place.glob(f"*/{MANIFEST}")):
            raise _no_bundle(f"{where}: release", place, "a bundle's folder, or a folder of those")


def _no_bundle(where: str, place: object, rule: str) -> InputError:
    value = f"{place} holds no {MANIFEST}"
    return InputError("not-a-bundle", where=where, value=value, rule=f"it is {rule}", remedy="check the path")


def _idle(where: str, value: str) -> InputError:
    return InputError("nightly-invalid", where=where, value=value, remedy="mend it, or leave it out")
