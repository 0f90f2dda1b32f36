"""Read `nightly.yaml`: what to compare each night, with which baseline and margins, and where to store everything.

The schema is closed, like a recipe's. The whole matrix is checked before anything runs: every recipe and target exists,
and every target can run its recipe in its runtime. Relative paths begin at the file's own folder.
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
from quantkit.measurement.load import ServerLoad
from quantkit.measurement.tasks.defined import opened
from quantkit.model.source.adapter import Adapter
from quantkit.model.source.alias import ALIASES, unknown_model
from quantkit.nightly.records import HERE, ON, SEPARATOR, BaselineKind, NightCell
from quantkit.pipeline.request import Request, kind_of, parted, with_own_runtime
from quantkit.pipeline.tasks import TaskQuestion
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
    """Cells selected by their parts; all given parts have to match; globs, `*-int4`. `on` is a device, or `here`."""

    model: str | None = None
    recipe: str | None = None
    target: str | None = None
    runtime: str | None = None
    on: str | None = None
    batch: Annotated[list[Batch] | None, BeforeValidator(_listed)] = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if all(getattr(self, name) is None for name in Match.model_fields):
            raise ValueError(f"needs at least one of {', '.join(Match.model_fields)}")
        return self

    def fits(self, cell: NightCell) -> bool:
        """Tell whether a cell matches."""
        globs = (self.model, self.recipe, self.target, self.runtime, self.on)
        parts = (cell.model, cell.recipe, cell.target, cell.program, cell.on or HERE)
        fitting = all(glob is None or fnmatchcase(part, glob) for glob, part in zip(globs, parts, strict=True))
        return fitting and (self.batch is None or cell.batch in self.batch)


class Include(Closed):
    """Additional cells.

    Args:
        runtime: None: the target's runtime that computes natively in most of the recipe's formats.
        batches: empty: those of the matrix.
    """

    model: Name
    recipe: Name
    target: Name
    runtime: Name | None = None
    batches: list[Batch] = Field(default=[])


class NightMargins(Closed):
    """Smallest differences that matter.

    Args:
        latency: 0.02 is 2 % slower.
        accuracy: 0.01 is one item in a hundred.
        kl: nats of KL from the float model, and of log-perplexity.
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
    """Conditions of an alarm.

    Args:
        alpha: chance that any cell of a night is called worse by mistake.
        overrides: margins for some cells; the last match counts.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    overrides: list[MarginOverride] = Field(default=[])

    def of(self, cell: NightCell) -> NightMargins:
        """Return the margins of a cell."""
        fitting = [override.model_dump(exclude_none=True) for override in self.overrides if override.fits(cell)]
        margins = self.model_dump() | {name: value for override in fitting for name, value in override.items()}
        return NightMargins(**{name: margins[name] for name in NightMargins.model_fields})


@dataclass(frozen=True)
class BaselineChoice:
    """Baseline of a cell.

    Args:
        kind: `accepted`, its own bundle of the last night that passed; `release`, the last release's bundle of its
            build; or `bundle`, the one at path `bundle`.
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
    """Budget of a cell's timing: seconds or ABBA blocks, in rounds between which all sides are reloaded.

    Args:
        rounds: number of rounds; an interval needs six or more.
        blocks: blocks of all rounds together.
        seconds: seconds instead of blocks.
    """

    rounds: Annotated[int, Field(gt=0)] = ROUNDS
    blocks: Annotated[int, Field(gt=0)] | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.blocks is not None and self.seconds is not None:
            raise ValueError("give either `blocks` or `seconds`")
        if self.blocks is not None and self.blocks < self.rounds:
            raise ValueError(f"{self.rounds} rounds need at least as many blocks, got {self.blocks}")
        return self

    @property
    def most(self) -> int | None:
        """Number of blocks; None if time decides."""
        return None if self.seconds is not None else self.blocks or self.rounds * BLOCKS


class NightTasks(Closed):
    """Tasks that each build is asked, as by `quantkit measure --tasks`.

    Args:
        names: of lm-eval's tasks, or paths of one's own.
        data: folder with the items of lm-eval's tasks.
        limit: items of each task.
        chat: whether prompts go through the chat template.
        recovery_min: recovery that the lower bound has to reach in every score, of the original's.
    """

    names: list[Name] = Field(min_length=1)
    data: str | None = None
    limit: Annotated[int, Field(ge=2)] | None = None
    chat: bool = False
    recovery_min: Annotated[float, Field(gt=0, le=1)]


class NightLoad(Closed):
    """Load of the servers of cells in a runtime that is not timed by steps: `vllm`.

    Args:
        rate: requests a second.
        requests: requests of a visit; each side is visited twice.
        prompt, output: tokens of a request.
        slo: limits for the goodput, as of `measure --slo`; the result's flags state it.
        gate: latency of a request that is compared and gated: `ttft`, `tpot` or `e2el`.
    """

    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    requests: Annotated[int, Field(ge=20)] = 40
    prompt: Annotated[int, Field(gt=0)] = 256
    output: Annotated[int, Field(gt=1)] = 128
    slo: str | None = None
    gate: Literal["ttft", "tpot", "e2el"] = "e2el"

    def asked(self) -> ServerLoad:
        """Return the load. Raises InputError as `ServerLoad.parse`."""
        sizes = {"prompt": self.prompt, "output": self.output, "requests": self.requests}
        return ServerLoad.parse(f"rate={self.rate:.12g}", self.slo, **sizes)

    @model_validator(mode="after")
    def _limits_are_known(self) -> Self:
        try:
            self.asked()
        except InputError as problem:
            raise ValueError(problem.line()) from None
        return self


class Nightly(Closed):
    """The configuration of a night.

    Args:
        models: names, folders (`./mine`) or `hf:org/name`, as for `quantkit compile`; `MODEL + ./ADAPTER` merges one.
        recipes: names or paths.
        targets: names or paths.
        runtimes: runtimes; empty: for each recipe and target the one that computes natively in most formats.
        on: devices to measure on, by name (`quantkit device list`); `here` is this machine.
        batches: batch sizes.
        exclude: cells to leave out; each entry must match some.
        include: additional cells.
        set_: `set`, changes to every recipe, `PATH=YAML`.
        calibration: calibration set in place of the recipes' own.
        gates: conditions of an alarm.
        baseline: baseline of the candidates.
        baselines: model -> its own baseline.
        release: last release, a bundle or a folder of them; drift is measured against it.
        budget: time budget of a cell.
        load_: `load`, load of cells in vLLM; None scores them alone.
        tasks: tasks with the recovery to reach; None asks none.
        limit: most hours of a build; a longer one is ended and fails.
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
    load_: Annotated[NightLoad | None, Field(alias="load")] = None
    tasks: NightTasks | None = None
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
        twice = [entry for entry in value if value.count(entry) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is listed twice")
        return value

    @model_validator(mode="after")
    def _release_is_named(self) -> Self:
        if self.release is None and any(one.kind == "release" for one in (self.baseline, *self.baselines.values())):
            raise ValueError("a baseline of the last release needs `release: PATH`")
        strange = [name for name in self.baselines if name not in self.all_models()]
        if strange:
            raise ValueError(f"baselines: no model {strange[0]!r} here; {did_you_mean(strange[0], self.all_models())}")
        return self

    def all_models(self) -> list[str]:
        """List every model once."""
        return list(dict.fromkeys([*self.models, *(added.model for added in self.include)]))

    @classmethod
    def load(cls, path: str | Path, *, look: bool = True) -> Nightly:
        """Read and check a `nightly.yaml`.

        Args:
            look: False to skip checking that models, recipes and devices exist, and to leave the cells empty: for
                readers of the store, and for a job on a machine that lacks the devices.

        Raises InputError: `nightly-invalid`: an unknown key, a wrong value, an entry that matches no cell; errors of a
        recipe or target; `target-cannot-run`. One line, with a suggestion.
        """
        place = Path(path).expanduser()
        config = cls.from_dict(read_yaml(place), folder=place.parent, where=str(path), look=look)
        config._sha256 = hashlib.sha256(place.read_bytes()).hexdigest()
        return config

    @classmethod
    def from_dict(cls, data: Any, *, folder: Path = Path(), where: str = NAME, look: bool = True) -> Nightly:
        """Check a mapping. `folder`: start of its relative paths; `look`: see `load`."""
        if not isinstance(data, dict):
            raise InputError(
                "nightly-invalid", where=where, value="not a mapping", rule="nightly.yaml is a YAML mapping"
            )
        known = known_keys(cls)
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise from_validation(error, where=where, code="nightly-invalid", known=known) from None
        config._folder = folder.absolute()
        if look:
            config._cells = _checked(config, where)
        return config

    def cells(self) -> tuple[NightCell, ...]:
        """List all cells, by model, recipe, target, runtime and batch, in the file's order."""
        return self._cells

    def chosen(self, only: str | None) -> tuple[NightCell, ...]:
        """Return the cells with keys that match a glob; None: all. Raises InputError `no-such-cells`."""
        cells = tuple(cell for cell in self._cells if only is None or fnmatchcase(cell.key, only))
        if not cells:
            rule = "--only is a glob of cell keys: model|recipe|target|runtime|batch"
            remedy = f"one cell is {self._cells[0].key}"
            raise InputError("no-such-cells", where="--only", value=only, rule=rule, remedy=remedy)
        return cells

    @property
    def sha256(self) -> str:
        """Hash of the file; empty without a file."""
        return self._sha256

    def at(self, place: str) -> Path:
        """Resolve a relative path of the file."""
        return self._folder / Path(place).expanduser()

    def reference(self, name: str) -> str:
        """Return a model, recipe, target or set in a form that `quantkit compile` accepts from any folder."""
        return name if not is_path(name) or name.startswith("hf:") else str(self.at(name))

    def baseline_of(self, cell: NightCell) -> BaselineChoice:
        """Return the baseline choice of a cell."""
        return self.baselines.get(cell.model, self.baseline)

    def question(self) -> TaskQuestion | None:
        """Return the tasks to ask; None if there are none."""
        if (asked := self.tasks) is None:
            return None
        data = None if asked.data is None else self.at(asked.data)
        return TaskQuestion([self.reference(name) for name in asked.names], data, asked.limit, asked.chat)

    def request(self, model: str, recipe: str, target: str, **others: Any) -> Request:
        """Return the compile request of a build. Raises InputError."""
        calibration = None if self.calibration is None else self.reference(self.calibration)
        how: dict[str, Any] = {"recipe": self.reference(recipe), "target": self.reference(target), **others}
        base, *adapters = map(self.reference, parted(model))
        return Request.of(base, adapters=adapters, calibration=calibration, changes=self.set_, **how)


def builds(cells: Iterable[NightCell]) -> dict[str, list[NightCell]]:
    """Group cells by their builds, in order."""
    return words.by(cells, lambda cell: cell.build)


# --- the matrix, checked ---

# (model, recipe, target, requested runtime) -> the runtime
RuntimeOf = Callable[[str, str, str, str | None], str]
# remedy for a recipe with its own Python file: at night nobody can allow it
_PACKAGE = "nightly only runs installed plug-ins: package the file, as docs/plugins.md shows"


def _checked(config: Nightly, where: str) -> tuple[NightCell, ...]:
    """Make the cells of a matrix.

    Raises InputError: a named thing is missing; a target cannot run its cell; an entry matches no cell, or adds none.
    """
    for model in config.all_models():
        _demand_model(config, model, where)
    for device in config.on:
        if device != HERE:
            named.find(device, where=f"{where}: on")
    _demand_bundles(config, where)
    if (question := config.question()) is not None:
        opened(question.names, question.data)
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
        raise InputError("nightly-invalid", where=where, value="no cell remains", remedy="exclude less")
    for number, override in enumerate(config.gates.overrides):
        if not any(override.fits(cell) for cell in cells):
            raise _idle(f"{where}: gates.overrides.{number}", "fits no cell")
    return tuple(cells)


def _product(config: Nightly, where: str, runtime_of: RuntimeOf) -> dict[NightCell, None]:
    """Return the cells of the product that are not excluded, in order."""
    used: set[int] = set()

    def left_out(cell: NightCell) -> bool:
        fitting = {number for number, match in enumerate(config.exclude) if match.fits(cell)}
        used.update(fitting)
        return bool(fitting)

    cells: dict[NightCell, None] = {}
    runtimes: list[str | None] = [*config.runtimes] or [None]
    for model, recipe, target, asked in itertools.product(config.models, config.recipes, config.targets, runtimes):
        # excluded cells need no runtime
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
    """Return a function for the runtime of a build; it raises InputError if the build cannot run, or not as
    requested."""

    def chosen(model: str, recipe: str, target: str, asked: str | None) -> str:
        kind, request = kind_of(parted(model)[0]), config.request(model, recipe, target)
        request = request if kind is None else with_own_runtime(request, kind)
        aimed = request.target
        if asked is not None:
            if asked not in aimed.runtimes:
                aimed.check([], asked)  # which says so
            aimed = aimed.model_copy(update={"runtimes": [asked]})
        return support.ask(request.recipe, aimed, kind).best.runtime

    alike: dict[tuple[str | None, str, str, str | None], str] = {}

    def runtime_of(model: str, recipe: str, target: str, asked: str | None) -> str:
        # models of one kind have the same runtime
        key = (kind_of(parted(model)[0]), recipe, target, asked)
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
    """Refuse an unknown model or adapter; the hub is not asked."""
    base, *adapters = parted(model)
    if base not in ALIASES and not base.startswith("hf:") and not is_path(base):
        raise unknown_model(base, where=f"{where}: models")
    for part in (base, *adapters):
        if part in ALIASES or part.startswith("hf:"):
            continue
        if is_path(part) and not config.at(part).exists():
            value, rule = f"{config.at(part)} does not exist", "relative paths begin at the folder of the file"
            raise InputError("file-missing", where=f"{where}: models", value=value, rule=rule, remedy="check the path")
        if part in adapters:
            Adapter.at(config.reference(part))


def _demand_bundles(config: Nightly, where: str) -> None:
    """Refuse a baseline without a bundle."""
    choices = {"baseline": config.baseline, **{f"baselines.{name}": named for name, named in config.baselines.items()}}
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
    return InputError("nightly-invalid", where=where, value=value, remedy="correct or remove it")
