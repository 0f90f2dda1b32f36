"""Define the rows of the store: one frozen dataclass a table, with annotated columns.

A cell is model x recipe x target x runtime x batch. Cells that differ only in their batch share one compile and one
measurement of accuracy: a build. Both have a key, their parts joined by `|`:

    smollm2-135m|awq-int4|cpu-x86|onnxruntime           build
    smollm2-135m|awq-int4|cpu-x86|onnxruntime|8         cell, at batch 8
    smollm2-135m|awq-int4|cpu-arm|onnxruntime@pi5|8     the same on another machine

A `Mapping` is a text column with JSON, a tuple a list of texts, a time a timestamp in microseconds, UTC.
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

from quantkit.pipeline.many.jobs import Job

State = Literal["done", "failed", "missing"]
Side = Literal["candidate", "baseline", "release"]
BaselineKind = Literal["accepted", "bundle", "release"]
What = Literal["latency", "accuracy", "kl", "tasks", "size", "drift"]
Answer = Literal["better", "same", "worse", "inconclusive", "missing", "failed"]

SEPARATOR = "|"
# separator of a runtime and its device; name of this machine among devices
ON, HERE = "@", "here"
NIGHT_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4,32}")

RowKind = TypeVar("RowKind", bound="Record")


def night_id(started: datetime) -> str:
    """Return a new night's name: its start in UTC, so that names sort by time, and a random part.

    `20260102T030405Z-3f2a81`
    """
    return f"{started.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclass(frozen=True, order=True)
class NightCell:
    """One comparison of each night: a build at a batch."""

    model: str
    recipe: str
    target: str
    runtime: str
    batch: int

    @property
    def build(self) -> str:
        """Key shared with the cells of other batches."""
        return SEPARATOR.join((self.model, self.recipe, self.target, self.runtime))

    @property
    def program(self) -> str:
        """Runtime without the device."""
        return self.runtime.partition(ON)[0]

    @property
    def on(self) -> str:
        """Device to measure on; empty for this machine."""
        return self.runtime.partition(ON)[2]

    @property
    def key(self) -> str:
        """Name in the store."""
        return f"{self.build}{SEPARATOR}{self.batch}"

    @classmethod
    def of(cls, key: str) -> NightCell:
        """Read a key. Raises ValueError for an invalid one."""
        try:
            model, recipe, target, runtime, batch = key.split(SEPARATOR)
            return cls(model, recipe, target, runtime, int(batch))
        except ValueError:
            raise ValueError(f"a cell is model|recipe|target|runtime|batch, got {key!r}") from None


class Record:
    """A row of a table."""

    table: ClassVar[str]


@dataclass(frozen=True)
class BuildJob(Job):
    """A build with cells to measure.

    Args:
        config: path of the `nightly.yaml`.
        config_sha256: hash of that file when the night began.
        cells: keys of cells, all of one build.
        attempt: 1, or 2 for the repetition after an alarm.
        limit: see `Job`.
        device: YAML of the device to measure on; a cluster's node need not know the device.
    """

    night: str
    config: str
    config_sha256: str
    cells: tuple[str, ...]
    attempt: int
    limit: float
    device: str = ""
    alone: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Key of the build."""
        return NightCell.of(self.cells[0]).build

    @property
    def place(self) -> str:
        """Device, or target: a cluster's node offers its name."""
        return self.on or NightCell.of(self.cells[0]).target

    @property
    def on(self) -> str:
        """See `Job`."""
        return NightCell.of(self.cells[0]).on

    @property
    def paths(self) -> tuple[str, ...]:
        """See `Job`."""
        return (self.config,)


@dataclass(frozen=True)
class Night(Record):
    """One run of a matrix.

    Args:
        night: name, see `night_id`.
        commit: commit of the matrix's repository; None outside of one.
        config_sha256: hash of the configuration file.
        matrix: keys of the cells to measure.
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
    """Result of one cell in one night.

    Args:
        state: `missing`: no machine of its target.
        error: the five fields of a failed cell's error.
        content_sha256: content hash of the candidate's bundle.
        baseline_sha256: content hash of the baseline's bundle; None without one.
        release_sha256: content hash of the last release's bundle, if drift was measured.
        bytes: bytes of the candidate's weights.
        seconds: duration of the cell, compile included.
        attempt: 1, or 2 for the repetition after an alarm.
        versions: package -> version, including the driver.
        flags: caveats for the reader; a word, or `word: reason`. `reused`: the bundle existed; `baseline-unloadable`,
            `release-unloadable`; `accuracy-unscored`, `tasks-unasked`.
        recovery: score of a task, `piqa acc` -> [recovery, ends of its interval, items]; of a build's first cell.
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
    recovery: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, night: str, cell: NightCell, state: State, **others: Any) -> Self:
        """Make the row of a cell and fill in the cell's own columns."""
        return cls(night=night, cell=cell.key, build=cell.build, **dataclasses.asdict(cell), state=state, **others)


@dataclass(frozen=True)
class Time(Record):
    """One timed iteration; with clock, temperature and throttling of the device where known.

    Args:
        round: number of the round; something else ran between rounds.
        block: number of the block in the round, ABBA or BAAB.
        position: position of the iteration in the block, from 0.
        began: start in seconds since 1970 (UTC).
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
    """One item answered by both sides: a next word, an image, a pair. Items belong to the build.

    Args:
        item: index in the data.
        kl: divergence from the float model, in nats.
        logp: log-probability of the right answer.
        sequence: sequence of a next word, or another cluster (the photograph of a crop); its items are not independent.
        text: text for people, only for flipped answers.
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
    """Decision on one cell in one comparison. A build's decision is stored with each of its cells.

    Args:
        what: latency, accuracy, size: against the baseline. kl: the KL from the float model, or the log-perplexity if
            its answer is graver. tasks: the share of the original's scores that is lost. drift: latency or accuracy
            against the last release, likewise.
        value: effect; above zero is worse. A share of latency, drift and size (0.05 is 5 % more) and of items lost
            (0.01 is one in a hundred), nats of KL. `low` and `high` are the ends of its 95 % interval.
        p: one-sided p-value of being worse (or better, for a better answer) than the alarm, see `stats.decision`; None
            for counted values.
        p_adjusted: p-value adjusted by Holm, across the matrix.
        margin: smallest effect that matters.
        smallest: smallest detectable effect.
        n: items, or timed steps of the candidate.
        confirmed: True if a second run called it worse as well; None without one.
        because: explanation in one sentence.
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
    """Return a `pyarrow.Table` of rows. Raises `pyarrow.ArrowInvalid` for a value of a wrong type."""
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

    cores, empty = _columns(kind), [None] * len(table)
    known = set(table.column_names)  # an earlier version's lacks the last
    rows = zip(*(table.column(name).to_pylist() if name in known else empty for name in cores), strict=True)
    return [kind(*(loaded(value, core) for value, core in zip(row, cores.values(), strict=True))) for row in rows]
