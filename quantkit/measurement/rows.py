"""Define the rows of `measurements.jsonl`, one measurement each.

A row holds a value with its unit, its spread, the device and the data. An absent field is null. NaN and infinity are
refused on reading and writing.

`baseline.ratio` is the gain of the subject over its baseline: baseline/value if lower is better, value/baseline if
higher is. Above 1 the subject wins, for every quantity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit import limits
from quantkit.bundle.disk import write_atomic, writing
from quantkit.content import Closed, known_keys
from quantkit.errors import InputError, absent, did_you_mean, from_validation

NAMES = (
    *(f"accuracy.{x}" for x in ("perplexity", "kl", "top1_agreement", "next_word")),
    *(f"accuracy.{x}" for x in ("top1", "top5", "recall_at_1", "recall_at_5", "recall_at_10", "cosine")),
    "accuracy.ndcg_at_10",
    *("accuracy.relative_error", "accuracy.same", "accuracy.wer"),
    # of lm-eval's tasks, in `measurement.tasks`; `settings.task` and `settings.metric` name which
    *(f"task.{x}" for x in ("score", "departs")),
    *(f"size.{x}" for x in ("bytes", "bytes_read", "bits_per_weight")),
    *(f"latency.{x}" for x in ("prefill", "decode_step", "op")),
    # the same against another runtime, which `settings.baseline_runtime` names
    *(f"across.{x}" for x in ("prefill", "decode_step", "kl", "top1_agreement")),
    *(f"throughput.{x}" for x in ("prefill", "decode")),
    *(f"bandwidth.{x}" for x in ("effective", "saved")),
    # of a server, in `measurement.load`
    *(f"load.{x}" for x in ("ttft", "tpot", "itl", "e2el", "requests", "tokens", "goodput")),
    *(f"load.{x}" for x in ("in_flight", "kv_blocks", "memory")),
    "memory.peak",
    "energy.token",
    *(f"ceiling.{x}" for x in ("read", "copy", "compute", "launch")),
    *(f"tax.{x}" for x in ("total", "streaming", "decode", "activation", "launch", "break_even")),
)

Finite = Annotated[float, Field(allow_inf_nan=False)]
Interval = tuple[Finite, Finite]


class _Part(Closed):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# a later field -> the field without which it is not written: readers of schema 1 do not know it
_LEFT_OUT = {
    **dict.fromkeys(("difference", "difference_ci95", "p_value"), "difference"),
    **{name: name for name in ("shares", "hp_shares", "begins", "on", "machine", "isa")},
}


class _Sparse(_Part):
    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        left_out = {key for key, without in _LEFT_OUT.items() if key in data and getattr(self, without) is None}
        return {key: value for key, value in data.items() if key not in left_out}


class Baseline(_Sparse):
    """The baseline of a value; the subject is better if `ratio` is above 1.

    A share of the same items (top-1, recall) also has `difference`, value − baseline's value, its paired interval, and
    the p-value of McNemar's test. Other rows do not have these keys.
    """

    subject: str
    value: Finite
    ratio: Finite | None = None
    ratio_ci95: Interval | None = None
    difference: Finite | None = None
    difference_ci95: Interval | None = None
    p_value: Finite | None = Field(default=None, ge=0, le=1)


class Operation(_Sparse):
    """One matrix product of a tax row: activation [M, K] by weight [N, K], in seconds.

    A row of whole steps also has `shares` and `hp_shares`: the seconds of reading and of computing at the ceilings by
    component, for the subject and its baseline (`planning.bound.steps`). Other rows do not have these keys.
    """

    layer: str | None = None
    K: int | None = None
    N: int | None = None
    M: int | None = None
    format: str | None = None
    bound_s: Finite | None = None
    hp_bound_s: Finite | None = None
    hp_s: Finite | None = None
    raw_s: Finite | None = None
    shares: dict[str, Interval] | None = None
    hp_shares: dict[str, Interval] | None = None


class Device(_Sparse):
    """The device of a measurement; `id` distinguishes machines with the same name.

    A remote device also has `on`, its name in the user's list of devices, `machine` (`aarch64`) and `isa`, its
    instruction set. Other rows do not have these keys.
    """

    id: str
    kind: Literal["cpu", "gpu"]
    name: str
    on: str | None = None
    machine: str | None = None
    isa: str | None = None


class Data(_Sparse):
    """The data of a measurement: `sha256` hashes the token ids, `items` counts scored positions, pairs or sequences.

    `begins` is the special tokens at the start of every sequence, as text; it is absent without any.
    """

    set: str
    split: Literal["calib", "tune", "eval"]
    sha256: str
    items: int = Field(gt=0)
    begins: str | None = None


class Row(_Part):
    """One measurement.

    Args:
        name: one of `NAMES`.
        value: measured value; null if undefined, with the reason in `flags`.
        unit: SI or `B`, `bit`, `nat`; `1` for a plain number.
        stat: statistic of the n observations: `mean`, `median`, `total`, ...
        better: `lower` or `higher`; null if neither is better.
        quantiles: `p50`, `p90`, `p99` of the n observations.
        aa_spread: relative difference of two measurements of the same side.
        subject: `content_sha256` of the measured bundle.
        batch: number of sequences at one time.
        shape: other sizes, such as `{"new_tokens": 1, "context": 256}`.
        op: operation of a row about one operation.
        runtime, settings: runtime and its settings.
        resident_bytes: bytes of the weights in the runtime's memory.
        device: device of the run; null if nothing ran (sizes).
        data: data of an accuracy row.
        flags: reasons to doubt the value, or the reason for null.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str
    value: Finite | None
    unit: str = Field(min_length=1)
    stat: str | None = None
    better: Literal["lower", "higher"] | None = None
    quantiles: dict[Annotated[str, Field(pattern=r"^p\d{1,2}(\.\d+)?$")], Finite] | None = None
    ci95: Interval | None = None
    n: int | None = Field(default=None, gt=0)
    aa_spread: Finite | None = None
    subject: str
    baseline: Baseline | None = None
    batch: int | None = Field(default=None, gt=0)
    shape: dict[str, int] | None = None
    op: Operation | None = None
    runtime: str | None = None
    settings: dict[str, str | bool | int | Finite | None] = Field(default_factory=dict)
    resident_bytes: int | None = Field(default=None, ge=0)
    device: Device | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    data: Data | None = None
    flags: list[str] = Field(default_factory=list)

    @classmethod
    def seconds(cls, name: str, value: float | None, **others: Any) -> Row:
        """Return a row of a time in seconds, by default a median; lower is better."""
        return cls(name=name, value=value, **{"unit": "s", "stat": "median", "better": "lower", **others})

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        if value not in NAMES:
            raise ValueError(f"no measurement is called {value!r}; {did_you_mean(value, NAMES)}")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        base = self.baseline
        for interval in (self.ci95, *((base.ratio_ci95, base.difference_ci95) if base else ())):
            if interval is not None and interval[0] > interval[1]:
                raise ValueError(f"an interval must run from low to high, got {list(interval)}")
        return self

    @property
    def version(self) -> str:
        """Version of its runtime; "" if unknown. `llama_cpp` is the package llama-cpp-python."""
        called = {name.replace("-", "_").removesuffix("_python"): number for name, number in self.versions.items()}
        return called.get(self.runtime or "", "")

    @property
    def on(self) -> str | None:
        """Name of the remote device; None for this machine."""
        return self.device.on if self.device else None

    def as_dict(self) -> dict[str, Any]:
        """Return the contract's form: every key, in the contract's order."""
        return self.model_dump(mode="json", by_alias=True)

    def line(self) -> str:
        """Return the row as one line of JSON, without the newline."""
        return json.dumps(self.as_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a `measurements.jsonl`, in order.

    Raises InputError: `measurements-invalid` with the line number, `file-missing`, `file-unreadable`.
    """
    rows: list[Row] = []
    try:
        text = limits.read(path, limits.DATA).decode("utf-8")
    except FileNotFoundError:
        raise absent(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file-unreadable", where=str(path), value=str(error), remedy="check the file") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where, rule = f"{path}:{number}", "every line is one JSON object"
        try:
            rows.append(Row.model_validate(json.loads(line, parse_constant=_refuse)))
        except ValidationError as error:
            raise from_validation(error, where=where, code="measurements-invalid", known=known_keys(Row)) from None
        except (ValueError, RecursionError) as error:
            raise InputError("measurements-invalid", where=where, value=str(error), rule=rule) from None
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON Lines, completely or not at all.

    Raises InputError: `file-unwritable`; Stopped: `disk-full`.
    """
    data = "".join(f"{row.line()}\n" for row in rows).encode()
    with writing(path):
        write_atomic(path, data)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number; an absent value is null")
