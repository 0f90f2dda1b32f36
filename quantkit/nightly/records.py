"""The rows of the store: one frozen dataclass a table, their columns as annotated.

A cell is model x recipe x target x runtime x batch. Cells that differ in their batch alone share one compile and one
measurement of accuracy: a build. Both are named by a key, their parts joined by `|`:

    smollm2-135m|awq-int4|cpu-x86|onnxruntime           build
    smollm2-135m|awq-int4|cpu-x86|onnxruntime|8         cell, at batch 8
    smollm2-135m|awq-int4|cpu-arm|onnxruntime@pi5|8     the same on another machine

A `Mapping` is a column of text that holds JSON, a tuple a list of texts, a time a timestamp in microseconds, UTC.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Self, TypeVar

State = Literal["done", "failed", "missing"]
Side = Literal["candidate", "baseline", "release"]
BaselineKind = Literal["accepted", "bundle", "release"]
What = Literal["latency", "accuracy", "kl", "size", "drift"]
Answer = Literal["better", "same", "worse", "inconclusive", "missing", "failed"]

SEPARATOR = "|"
# between a runtime and the device that it runs on; the word for this machine among devices
ON, HERE = "@", "here"
NIGHT_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4,32}")

RowKind = TypeVar("RowKind", bound="Record")


def night_id(started: datetime) -> str:
    """Name a new night: its start in UTC, so that names sort by time, and what tells two that start at once apart.

    `20260102T030405Z-3f2a81`
    """
    return f"{started.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclass(frozen=True, order=True)
class NightCell:
    """One thing that is compared each night: a build at a batch."""

    model: str
    recipe: str
    target: str
    runtime: str
    batch: int

    @property
    def build(self) -> str:
        """The key of what it shares with the cells of other batches."""
        return SEPARATOR.join((self.model, self.recipe, self.target, self.runtime))

    @property
    def program(self) -> str:
        """Its runtime, without the device."""
        return self.runtime.partition(ON)[0]

    @property
    def on(self) -> str:
        """The device that it is measured on; empty: this machine."""
        return self.runtime.partition(ON)[2]

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"{self.build}{SEPARATOR}{self.batch}"

    @classmethod
    def of(cls, key: str) -> NightCell:
        """Read a key. Raises ValueError for what is none."""
        try:
            model, recipe, target, runtime, batch = key.split(SEPARATOR)
            return cls(model, recipe, target, runtime, int(batch))
        except ValueError:
            raise ValueError(f"a cell is model|recipe|target|runtime|batch, got {key!r}") from None


class Record:
    """A row of a table."""

    table: ClassVar[str]


@dataclass(frozen=True)
class Night(Record):
    """One run of a matrix.

    Args:
        night: its name, see `night_id`.
        commit: of the repository that the matrix belongs to; None outside of one.
        config_sha256: of the configuration's file.
        matrix: keys of the cells that are to be measured.
    """

    table: ClassVar[str] = "nights"

    night: str
    started: datetime
    commit: str | None
    config_sha256: str
    host: str
    matrix: tuple[str, ...]


@dataclass(frozen=True)
class Result(Record):
    """What became of one cell in one night.

    Args:
        state: `missing`: it could not be tried (no machine of its target).
        error: the five fields of the error, of a cell that failed.
        content_sha256: of the candidate's bundle.
        baseline_sha256: of the bundle it was set against; None where there was none yet.
        release_sha256: of the last release's bundle, where drift was measured too.
        bytes: of the candidate's weights.
        seconds: that the cell took, compile included.
        attempt: 1, and 2 for the repetition that an alarm asks for.
        versions: package -> version, the driver among them.
        flags: what a reader must know before trusting it; a word, or `word: reason`. `reused`: the bundle was;
            `baseline-unloadable`, `release-unloadable`; `accuracy-unscored`.
    """

    table: ClassVar[str] = "results"

    night: str
    cell: str
    build: str
    model: str
    recipe: str
    target: str
    runtime: str
    batch: int
    state: State
    attempt: int = 1
    error: Mapping[str, str] | None = None
    content_sha256: str | None = None
    baseline_sha256: str | None = None
    baseline_kind: BaselineKind | None = None
    release_sha256: str | None = None
    bytes: int | None = None
    baseline_bytes: int | None = None
    seconds: float | None = None
    device: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, night: str, cell: NightCell, state: State, **others: Any) -> Self:
        """Make the row of a cell, whose own columns follow from it."""
        return cls(night=night, cell=cell.key, build=cell.build, **dataclasses.asdict(cell), state=state, **others)


@dataclass(frozen=True)
class Time(Record):
    """One timed iteration, as it was taken; clock, temperature and throttling of the device where known.

    Args:
        round: rounds have something else between them.
        block: of the round, ABBA or BAAB.
        position: of the iteration in the block, from 0.
        began: in seconds since 1970 (UTC).
    """

    table: ClassVar[str] = "times"

    night: str
    cell: str
    attempt: int
    side: Side
    round: int
    block: int
    position: int
    seconds: float
    began: float
    clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None


@dataclass(frozen=True)
class Item(Record):
    """One item that both sides answered: a next word, an image, a pair. Items belong to the build.

    Args:
        item: its number in the data.
        kl: divergence from the float model, in nats.
        logp: logarithm of the probability of what is right.
        sequence: that a next word belongs to, or another cluster (the photograph of a crop); items of one are not
            independent.
        text: for people, of items whose answer flipped; None for the others.
    """

    table: ClassVar[str] = "items"

    night: str
    build: str
    attempt: int
    item: int
    side: Side
    correct: bool | None = None
    kl: float | None = None
    logp: float | None = None
    sequence: int | None = None
    text: str | None = None


@dataclass(frozen=True)
class StoredDecision(Record):
    """What was decided of one cell in one respect. What holds for a build stands with each of its cells.

    Args:
        what: latency, accuracy, size: against the baseline. kl: the KL from the float model, or the log-perplexity
            where its answer is graver. drift: latency against the last release, or accuracy, likewise.
        value: the effect; above zero is worse. A share of latency, drift and size (0.05 is 5 % more) and of items
            lost (0.01 is one in a hundred), nats of KL. `low` and `high` are the ends of its 95 % interval.
        p: one-sided, that it is worse (where it is better: that it is better) than the alarm, see `stats.decision`;
            None of what was counted.
        p_adjusted: the same by Holm, across the matrix.
        margin: the least effect that counts.
        smallest: the least effect that could have been seen.
        n: items, or timed steps of the candidate.
        confirmed: whether a second run called it worse as well; None where there was none.
        because: one sentence.
    """

    table: ClassVar[str] = "decisions"

    night: str
    cell: str
    what: What
    answer: Answer
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    margin: float | None = None
    smallest: float | None = None
    n: int | None = None
    confirmed: bool | None = None
    because: str = ""


TABLES: tuple[type[Record], ...] = (Night, Result, Time, Item, StoredDecision)


def _columns(kind: Any) -> dict[str, Any]:
    """Map columns -> `str`, `tuple`, `Mapping`, ..., in order."""
    return {name: _core(hint) for name, hint in typing.get_type_hints(kind).items() if name != "table"}


def _core(annotation: Any) -> Any:
    parts = typing.get_args(annotation)
    if types.NoneType in parts:
        return _core(parts[0])
    origin = typing.get_origin(annotation)
    return str if origin is Literal else origin or annotation


def schema(kind: type[Record]) -> Any:
    """Return the `pyarrow.Schema` of a table."""
    import pyarrow as pa

    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), Mapping: pa.string()}
    plain |= {tuple: pa.list_(pa.string()), datetime: pa.timestamp("us", tz="UTC")}
    return pa.schema([(name, plain[core]) for name, core in _columns(kind).items()])


def to_table(kind: type[RowKind], rows: Iterable[RowKind]) -> Any:
    """Make a `pyarrow.Table` of rows. Raises `pyarrow.ArrowInvalid` for a value of another type."""
    import pyarrow as pa

    def stored(value: Any, core: Any) -> Any:
        if core is not Mapping or value is None:
            return value
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, default=str)

    columns = list(_columns(kind).items())
    return pa.Table.from_pylist(
        [{name: stored(getattr(row, name), core) for name, core in columns} for row in rows], schema=schema(kind)
    )


def from_table(kind: type[RowKind], table: Any) -> list[RowKind]:
    """Read the rows of a `pyarrow.Table`, in order."""

    def loaded(value: Any, core: Any) -> Any:
        if value is None:
            return None
        return tuple(value) if core is tuple else json.loads(value) if core is Mapping else value

    cores = _columns(kind)
    rows = zip(*(table.column(name).to_pylist() for name in cores), strict=True)
    return [kind(*(loaded(value, core) for value, core in zip(row, cores.values(), strict=True))) for row in rows]
