"""`nightly.yaml`: what is compared each night, with what, how closely, and where all of it goes.

The schema is closed, as a recipe's, and the whole matrix is checked before anything runs: every recipe and target is
there, every target runs its recipe in its runtime. Relative paths in it begin at its own folder.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator

from quantkit.content import Closed, is_path, known_keys, read_yaml
from quantkit.errors import InputError, did_you_mean, from_validation
from quantkit.nightly.records import HERE, SEPARATOR, BaselineKind, NightCell
from quantkit.stats.deciding.decision import ALPHA
from quantkit.stats.deciding.slowdown import BLOCKS, MARGIN, ROUNDS

NAME = "nightly.yaml"
Name = Annotated[str, Field(min_length=1, pattern=rf"^[^{SEPARATOR}]+$")]
Batch = Annotated[int, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Match(Closed):
    """Cells by their parts: all that are named have to fit; globs, `*-int4`.

    Args:
        on: a device; `here` is this machine.
        batch: one or several.
    """

    model: str | None = None
    recipe: str | None = None
    target: str | None = None
    runtime: str | None = None
    on: str | None = None
    batch: list[Batch] | None = None

    @field_validator("batch", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if all(getattr(self, name) is None for name in Match.model_fields):
            raise ValueError(f"it names at least one of {', '.join(Match.model_fields)}")
        return self

    def fits(self, cell: NightCell) -> bool:
        """Whether a cell is meant."""
        parts = {"model": cell.model, "recipe": cell.recipe, "target": cell.target, "runtime": cell.program}
        globs = ((getattr(self, name), value) for name, value in {**parts, "on": cell.on or HERE}.items())
        fitting = all(glob is None or fnmatchcase(value, glob) for glob, value in globs)
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
        """The margins of a cell."""
        found = {name: getattr(self, name) for name in NightMargins.model_fields}
        for each in self.overrides:
            if each.fits(cell):
                found |= {
                    name: value for name in NightMargins.model_fields if (value := getattr(each, name)) is not None
                }
        return NightMargins(**found)


@dataclass(frozen=True)
class BaselineChoice:
    """What a cell is set against.

    Args:
        kind: `accepted`, its own bundle of the last night that passed; `release`, its build's bundle of the last
            release; or `bundle`.
        bundle: its path, as the file has it.
    """

    kind: BaselineKind = "accepted"
    bundle: str | None = None

    @classmethod
    def read(cls, value: Any) -> BaselineChoice:
        """Out of `last-accepted`, `release` or `{bundle: PATH}`. Raises ValueError."""
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
        """Each model once, of the product and besides."""
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
        from quantkit.nightly import matrix

        if not isinstance(data, dict):
            raise InputError("nightly-invalid", where=where, value="not a mapping", rule="it is a YAML mapping")
        known = known_keys(cls)
        try:
            found = cls.model_validate(data)
        except ValidationError as error:
            raise from_validation(error, where=where, code="nightly-invalid", known=known) from None
        found._folder = folder.absolute()
        if look:
            found._cells = matrix.checked(found, where)
        return found

    def cells(self) -> tuple[NightCell, ...]:
        """All cells, by model, recipe, target, runtime and batch, in the file's order."""
        return self._cells

    def chosen(self, only: str | None) -> tuple[NightCell, ...]:
        """The cells whose keys fit a glob; all of them where it is None. Raises InputError `no-such-cells`."""
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
        """The path that a relative one in the file means."""
        return self._folder / Path(place).expanduser()

    def reference(self, name: str) -> str:
        """A model, recipe, target or set as `quantkit compile` takes it, wherever that is called."""
        plain = not is_path(name) or name.startswith("hf:")
        return name if plain else str(self.at(name))

    def baseline_of(self, cell: NightCell) -> BaselineChoice:
        """What a cell is set against."""
        return self.baselines.get(cell.model, self.baseline)

    def product(self) -> Iterator[tuple[str, str, str, str | None]]:
        """(model, recipe, target, runtime) of the product, before anything is excluded."""
        runtimes: list[str | None] = [*self.runtimes] or [None]
        yield from itertools.product(self.models, self.recipes, self.targets, runtimes)


def builds(cells: Iterable[NightCell]) -> dict[str, list[NightCell]]:
    """Build -> its cells, in order."""
    found: dict[str, list[NightCell]] = {}
    for cell in cells:
        found.setdefault(cell.build, []).append(cell)
    return found
