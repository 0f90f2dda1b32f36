"""`nightly.yaml`: what is compared each night, with what, how closely, and where all of it goes.

The schema is closed, as a recipe's, and the whole matrix is checked before anything runs: every recipe and target is
there, every target runs its recipe in its runtime. Relative paths in it begin at its own folder.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator

from quantkit.bundle.manifest import MANIFEST
from quantkit.content import Closed, is_path, known_keys, read_yaml
from quantkit.devices import named
from quantkit.errors import InputError, did_you_mean, from_validation
from quantkit.model.source.alias import ALIASES, unknown_model
from quantkit.nightly.records import HERE, ON, SEPARATOR, BaselineKind, NightCell
from quantkit.pipeline.request import Request, kind_of, with_own_runtime
from quantkit.planning import support
from quantkit.report.kit import words
from quantkit.stats.decision import ALPHA
from quantkit.stats.slowdown import BLOCKS, MARGIN, ROUNDS

NAME = "nightly.yaml"
Name = Annotated[str, Field(min_length=1, pattern=rf"^[^{SEPARATOR}]+$")]
Batch = Annotated[int, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


class Match(Closed):
    """Cells by their parts: all that are named have to fit; globs, `*-int4`. `on` is a device, or `here`."""

    model: str | None = None
    recipe: str | None = None
    target: str | None = None
    runtime: str | None = None
    on: str | None = None
    batch: Annotated[list[Batch] | None, BeforeValidator(_listed)] = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if all(getattr(self, name) is None for name in Match.model_fields):
            raise ValueError(f"it names at least one of {', '.join(Match.model_fields)}")
        return self

    def fits(self, cell: NightCell) -> bool:
        """Whether a cell is meant."""
        globs = (self.model, self.recipe, self.target, self.runtime, self.on)
        parts = (cell.model, cell.recipe, cell.target, cell.program, cell.on or HERE)
        fitting = all(glob is None or fnmatchcase(part, glob) for glob, part in zip(globs, parts, strict=True))
        return fitting and (self.batch is None or cell.batch in self.batch)


class Include(Closed):
    """Cells besides the product.

    Args:
        runtime: None: the one of the target's that computes in most of what the recipe stores.
        batches: none: those of the matrix.
    """

    model: Name
    recipe: Name
    target: Name
    runtime: Name | None = None
    batches: list[Batch] = Field(default=[])


class NightMargins(Closed):
    """Differences of less are nobody's concern.

    Args:
        latency: 0.02 is 2 % slower.
        accuracy: 0.01 is one item in a hundred.
        kl: nats from the float model; and of the negative logarithm of the perplexity.
        size: 0.01 is 1 % larger.
    """

    latency: Margin = MARGIN
    accuracy: Margin = 0.01
    kl: Margin = 0.01
    size: Margin = 0.01


class MarginOverride(Match):
    """Other margins for some cells."""

    latency: Margin | None = None
    accuracy: Margin | None = None
    kl: Margin | None = None
    size: Margin | None = None


class NightGates(NightMargins):
    """What raises an alarm.

    Args:
        alpha: chance that any cell of a night is called worse by mistake.
        overrides: of the margins, by cells; where several fit the last one counts.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    overrides: list[MarginOverride] = Field(default=[])

    def of(self, cell: NightCell) -> NightMargins:
        """Find the margins of a cell."""
        fitting = [override.model_dump(exclude_none=True) for override in self.overrides if override.fits(cell)]
        margins = self.model_dump() | {name: value for override in fitting for name, value in override.items()}
        return NightMargins(**{name: margins[name] for name in NightMargins.model_fields})


@dataclass(frozen=True)
class BaselineChoice:
    """What a cell is set against.

    Args:
        kind: `accepted`, its own bundle of the last night that passed; `release`, its build's bundle of the last
            release; or `bundle`, whose path stands there as the file has it.
    """

    kind: BaselineKind = "accepted"
    bundle: str | None = None

    @classmethod
    def read(cls, value: Any) -> BaselineChoice:
        """Read `last-accepted`, `release` or `{bundle: PATH}`. Raises ValueError."""
        words: dict[str, BaselineKind] = {"last-accepted": "accepted", "release": "release"}
        if isinstance(value, str) and value in words:
            return cls(words[value])
        if isinstance(value, dict) and list(value) == ["bundle"] and isinstance(value["bundle"], str):
            return cls("bundle", value["bundle"])
        known = did_you_mean(value, words) if isinstance(value, str) else f"known: {', '.join(words)}"
        raise ValueError(f"{known}, {{bundle: PATH}}")


class TimeBudget(Closed):
    """How long a cell is measured: so many seconds, or so many ABBA blocks, in rounds between which both are reloaded.

    Args:
        rounds: six or more are what an interval stands on.
        blocks: of all rounds together.
        seconds: instead.
    """

    rounds: Annotated[int, Field(gt=0)] = ROUNDS
    blocks: Annotated[int, Field(gt=0)] | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.blocks is not None and self.seconds is not None:
            raise ValueError("either `blocks` or `seconds`")
        if self.blocks is not None and self.blocks < self.rounds:
            raise ValueError(f"{self.rounds} rounds take at least as many blocks, not {self.blocks}")
        return self

    @property
    def most(self) -> int | None:
        """Blocks; None where time decides."""
        return None if self.seconds is not None else self.blocks or self.rounds * BLOCKS


class Nightly(Closed):
    """What is compared each night.

    Args:
        models: as `quantkit compile` takes them: names, folders (`./mine`), `hf:org/name`.
        recipes: names or paths.
        targets: names or paths.
        runtimes: none: for each recipe and target the one that computes in most of what is stored.
        on: devices that cells are measured on, by their names (`quantkit device list`); `here` is this machine.
        batches: sequences at once.
        exclude: cells of the product that are left out; each entry must fit some.
        include: cells besides the product.
        set_: `set`, changes to every recipe, `PATH=YAML`.
        calibration: instead of the recipes' own set.
        gates: what raises an alarm.
        baseline: what candidates are set against.
        baselines: the same for one model.
        release: the last release, a bundle or a folder of them; drift is measured against it.
        budget: of measuring a cell.
        limit: hours that a build may take; one that takes longer is ended, and has failed.
        store: folder of the results.
        bundles: folder of the bundles.
        page: folder of the site.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    models: list[Name] = Field(min_length=1)
    recipes: list[Name] = Field(min_length=1)
    targets: list[Name] = Field(min_length=1)
    runtimes: list[Name] = Field(default=[])
    on: list[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]] = Field(default=[HERE], min_length=1)
    batches: list[Batch] = Field(default=[1], min_length=1)
    exclude: list[Match] = Field(default=[])
    include: list[Include] = Field(default=[])
    set_: list[str] = Field(default=[], alias="set")
    calibration: str | None = None
    gates: NightGates = NightGates()
    baseline: Annotated[BaselineChoice, BeforeValidator(BaselineChoice.read)] = BaselineChoice()
    baselines: dict[str, Annotated[BaselineChoice, BeforeValidator(BaselineChoice.read)]] = Field(default={})
    release: str | None = None
    budget: TimeBudget = TimeBudget()
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    store: str = "nightly/store"
    bundles: str = "nightly/bundles"
    page: str = "nightly/page"
    _folder: Path = PrivateAttr(default=Path())
    _sha256: str = PrivateAttr(default="")
    _cells: tuple[NightCell, ...] = PrivateAttr(default=())

    @field_validator("models", "recipes", "targets", "runtimes", "on", "batches")
    @classmethod
    def _once(cls, value: list[Any]) -> list[Any]:
        twice = [each for each in value if value.count(each) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is there twice")
        return value

    @model_validator(mode="after")
    def _release_is_named(self) -> Self:
        if self.release is None and any(each.kind == "release" for each in (self.baseline, *self.baselines.values())):
            raise ValueError("a baseline of the last release needs `release: PATH`")
        strange = [name for name in self.baselines if name not in self.all_models()]
        if strange:
            raise ValueError(f"baselines: no model {strange[0]!r} here; {did_you_mean(strange[0], self.all_models())}")
        return self

    def all_models(self) -> list[str]:
        """List each model once, of the product and besides."""
        return list(dict.fromkeys([*self.models, *(each.model for each in self.include)]))

    @classmethod
    def load(cls, path: str | Path, *, look: bool = True) -> Nightly:
        """Read a `nightly.yaml` and check all of it.

        Args:
            look: for what it names. False for what reads the store alone, which is there when a model or a baseline
                has gone, and for a job of a night, on a machine that does not know its devices; it has no cells then.

        Raises:
            InputError: `nightly-invalid`: an unknown key, a wrong value, an entry that fits no cell; what a recipe or a
                target raises; `target-cannot-run`. One line, with a did-you-mean.
        """
        place = Path(path).expanduser()
        found = cls.from_dict(read_yaml(place), folder=place.parent, where=str(path), look=look)
        found._sha256 = hashlib.sha256(place.read_bytes()).hexdigest()
        return found

    @classmethod
    def from_dict(cls, data: Any, *, folder: Path = Path(), where: str = NAME, look: bool = True) -> Nightly:
        """Check a mapping. `folder` is where its relative paths begin; `look`: see `load`."""
        if not isinstance(data, dict):
            raise InputError("nightly-invalid", where=where, value="not a mapping", rule="it is a YAML mapping")
        known = known_keys(cls)
        try:
            found = cls.model_validate(data)
        except ValidationError as error:
            raise from_validation(error, where=where, code="nightly-invalid", known=known) from None
        found._folder = folder.absolute()
        if look:
            found._cells = _checked(found, where)
        return found

    def cells(self) -> tuple[NightCell, ...]:
        """List all cells, by model, recipe, target, runtime and batch, in the file's order."""
        return self._cells

    def chosen(self, only: str | None) -> tuple[NightCell, ...]:
        """Choose the cells whose keys fit a glob; all of them where it is None. Raises InputError `no-such-cells`."""
        found = tuple(cell for cell in self._cells if only is None or fnmatchcase(cell.key, only))
        if not found:
            rule = "a glob of cells as the store calls them: model|recipe|target|runtime|batch"
            remedy = f"one is called {self._cells[0].key}"
            raise InputError("no-such-cells", where="--only", value=only, rule=rule, remedy=remedy)
        return found

    @property
    def sha256(self) -> str:
        """Of the file; empty where there was none."""
        return self._sha256

    def at(self, place: str) -> Path:
        """Find the path that a relative one in the file means."""
        return self._folder / Path(place).expanduser()

    def reference(self, name: str) -> str:
        """Write a model, recipe, target or set as `quantkit compile` takes it, wherever that is called."""
        return name if not is_path(name) or name.startswith("hf:") else str(self.at(name))

    def baseline_of(self, cell: NightCell) -> BaselineChoice:
        """Find what a cell is set against."""
        return self.baselines.get(cell.model, self.baseline)

    def request(self, model: str, recipe: str, target: str, **others: Any) -> Request:
        """Make the compile of a build. Raises InputError."""
        calibration = None if self.calibration is None else self.reference(self.calibration)
        how: dict[str, Any] = {"recipe": self.reference(recipe), "target": self.reference(target), **others}
        return Request.of(self.reference(model), calibration=calibration, changes=self.set_, **how)


def builds(cells: Iterable[NightCell]) -> dict[str, list[NightCell]]:
    """Group cells by their builds, in order."""
    return words.by(cells, lambda cell: cell.build)


# --- the matrix, checked ---

# (model, recipe, target, runtime that is asked for) -> the runtime
RuntimeOf = Callable[[str, str, str, str | None], str]
# what works where code of a recipe's own file does not: nobody is there at night to allow it
_PACKAGE = "nightly runs what installed packages offer: make the file one, as docs/plugins.md shows"


def _checked(config: Nightly, where: str) -> tuple[NightCell, ...]:
    """Make the cells of a matrix.

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
        parts = added.model, added.recipe, added.target
        places = itertools.product(config.on, added.batches or config.batches)
        more = [NightCell(*parts, _on(runtime, device), batch) for device, batch in places]
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
    """Make the cells of the product that are not left out, in order."""
    used: set[int] = set()

    def left_out(cell: NightCell) -> bool:
        fitting = {number for number, match in enumerate(config.exclude) if match.fits(cell)}
        used.update(fitting)
        return bool(fitting)

    cells: dict[NightCell, None] = {}
    runtimes: list[str | None] = [*config.runtimes] or [None]
    for model, recipe, target, asked in itertools.product(config.models, config.recipes, config.targets, runtimes):
        # what is left out need not run, so it is not asked which runtime would
        places = [
            (device, batch)
            for device, batch in itertools.product(config.on, config.batches)
            if not left_out(NightCell(model, recipe, target, _on(asked or "", device), batch))
        ]
        if places:
            runtime = runtime_of(model, recipe, target, asked)
            kept = [NightCell(model, recipe, target, _on(runtime, device), batch) for device, batch in places]
            cells.update(dict.fromkeys(cell for cell in kept if not left_out(cell)))
    for number in range(len(config.exclude)):
        if number not in used:
            raise _idle(f"{where}: exclude.{number}", "fits no cell of the product")
    return cells


def _on(runtime: str, device: str) -> str:
    return runtime if device == HERE else f"{runtime}{ON}{device}"


def _runtimes(config: Nightly, where: str) -> RuntimeOf:
    """Tell which runtime a build runs in; InputError where it cannot, or cannot in the one that is asked for."""

    def chosen(model: str, recipe: str, target: str, asked: str | None) -> str:
        kind, request = kind_of(model), config.request(model, recipe, target)
        request = request if kind is None else with_own_runtime(request, kind)
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
                alike[key] = chosen(model, recipe, target, asked)
        except InputError as error:
            place = f"{where}: {recipe} on {target}{f' in {asked}' if asked else ''}"
            instead = f"exclude: [{{recipe: {recipe}, target: {target}{f', runtime: {asked}' if asked else ''}}}]"
            remedy = words.joined(_PACKAGE if error.code == "code-not-allowed" else error.remedy, instead, by="; or: ")
            place = f"{place}: {error.where}" if error.where else place
            raise InputError(error.code, where=place, value=error.value, rule=error.rule, remedy=remedy) from None
        return alike[key]

    return runtime_of


def _demand_model(config: Nightly, model: str, where: str) -> None:
    """Refuse a model that is neither shipped nor there; what the hub has is not asked."""
    if model in ALIASES or model.startswith("hf:"):
        return
    if not is_path(model):
        raise unknown_model(model, where=f"{where}: models")
    if not config.at(model).exists():
        value, rule = f"{config.at(model)} does not exist", "relative paths begin at the folder of the file"
        raise InputError("file-missing", where=f"{where}: models", value=value, rule=rule, remedy="check the path")


def _demand_bundles(config: Nightly, where: str) -> None:
    """Refuse a bundle to compare with that is none."""
    choices = {"baseline": config.baseline, **{f"baselines.{name}": each for name, each in config.baselines.items()}}
    for key, choice in choices.items():
        if choice.bundle is not None and not (config.at(choice.bundle) / MANIFEST).is_file():
            raise _no_bundle(f"{where}: {key}", config.at(choice.bundle), "a bundle's folder")
    if config.release is not None:
        place = config.at(config.release)
        if not (place / MANIFEST).is_file() and not any(place.glob(f"*/{MANIFEST}")):
            raise _no_bundle(f"{where}: release", place, "a bundle's folder, or a folder of those")


def _no_bundle(where: str, place: object, rule: str) -> InputError:
    value = f"{place} holds no {MANIFEST}"
    return InputError("not-a-bundle", where=where, value=value, rule=f"it is {rule}", remedy="check the path")


def _idle(where: str, value: str) -> InputError:
    return InputError("nightly-invalid", where=where, value=value, remedy="mend it, or leave it out")
