"""Which kernel multiplies at which batch: the fastest that was measured, within the memory one allows.

Candidates are ours (`weight_only`, `native`), torch's own (`_weight_int4pack_mm`, `_int_mm`, `_scaled_mm`), a peer's,
or dequantize-then-matmul. What they took comes from outside, as plain data; choosing is a pure function of it:

    choice(shape, M) = the candidate of the smallest seconds at M among those that hold no copy in high precision
                       (unless asked otherwise); ties go to fewer resident bytes, then by name

Between two measured batches the choice of the larger one holds: what a kernel does for 17 rows is what it does for a
tile of 32. The table is plain data again, so that a bundle can carry it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import InputError

FILE = "kernels.json"
# what a layer can run (`kernels.linear`): the format's own kernel, torch's product with an expanded weight, torch's own
# products of 8-bit codes; another library's kernel, of formats that ours lack
OURS, EXPANDED, INT_MM, SCALED_MM = "quantkit", "dequantize_matmul", "torch._int_mm", "torch._scaled_mm"
HUMMING = "humming"
LAYERS = (OURS, EXPANDED, INT_MM, SCALED_MM, HUMMING)


@dataclass(frozen=True)
class KernelTiming:
    """One candidate at one shape and batch.

    Args:
        candidate: its name: `quantkit`, `torch._int_mm`, `dequantize_matmul`, ...
        shape: (N, K) of the weight.
        batch: M, rows of x.
        seconds: median.
        resident_bytes: all that stays in memory between calls: the packed weight, and any copy of it.
        config: of ours: what `configs.Config.as_dict` gives; None of others.
        copy: whether a copy of the weight in high precision stays resident.
    """

    candidate: str
    shape: tuple[int, int]
    batch: int
    seconds: float
    resident_bytes: int
    config: Mapping[str, int] | None = None
    copy: bool = False


@dataclass(frozen=True)
class Choice:
    """What to run up to and including a batch.

    Args:
        batch: the largest M it was chosen for.
        candidate: what to run.
        config: with which tile sizes.
        seconds: what it took.
        resident_bytes: what it keeps.
    """

    batch: int
    candidate: str
    config: Mapping[str, int] | None
    seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Table:
    """The choices of a device: (N, K) -> by rising batch."""

    choices: Mapping[tuple[int, int], Sequence[Choice]]

    def choose(self, shape: tuple[int, int], batch: int) -> Choice:
        """The choice for M = `batch`: that of the next batch that was measured; beyond the largest, its choice.

        Raises:
            InputError: `shape-unmeasured`, `batch-invalid`.
        """
        if batch < 1:
            raise InputError("batch-invalid", value=f"a batch of {batch}", rule="a batch is 1 or more")
        if shape not in self.choices:
            raise InputError(
                "shape-unmeasured",
                value=f"N {shape[0]}, K {shape[1]}",
                rule="a kernel is chosen from what was measured on the device",
                remedy=f"measured: {', '.join(f'{n}x{k}' for n, k in sorted(self.choices)) or 'none'}",
            )
        known = self.choices[shape]
        place = bisect_left([choice.batch for choice in known], batch)
        return known[min(place, len(known) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a bundle: `{"schema": 1, "choices": [{"N", "K", "by_batch": [...]}]}`."""
        shapes = [
            {"N": n, "K": k, "by_batch": [_plain(choice) for choice in choices]}
            for (n, k), choices in sorted(self.choices.items())
        ]
        return {"schema": 1, "choices": shapes}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Table:
        """The inverse of `as_dict`.

        Raises:
            InputError: `dispatch-invalid`.
        """
        try:
            if data["schema"] != 1:
                raise KeyError("schema 1")
            shapes = {(s["N"], s["K"]): tuple(Choice(**choice) for choice in s["by_batch"]) for s in data["choices"]}
        except (KeyError, TypeError) as error:
            raise InputError(
                "dispatch-invalid",
                value=str(error),
                rule="a table as `Table.as_dict` writes it",
                remedy="measure again",
            ) from None
        return cls(shapes)


def fastest(timings: Iterable[KernelTiming], *, copies: bool = False) -> Table:
    """The fastest candidate for every shape and batch measured.

    Args:
        timings: any number for each shape and batch; those without a finite time above zero are passed over.
        copies: whether candidates may keep a copy of the weight in high precision.

    Raises:
        InputError: `nothing-measured`: a shape and batch of which nothing may be chosen.
    """
    groups: dict[tuple[tuple[int, int], int], list[KernelTiming]] = {}
    for timing in timings:
        able = groups.setdefault((timing.shape, timing.batch), [])
        if 0 < timing.seconds < float("inf") and (copies or not timing.copy):
            able.append(timing)
    choices: dict[tuple[int, int], list[Choice]] = {}
    for (shape, batch), able in sorted(groups.items()):
        if not able:
            raise InputError(
                "nothing-measured",
                value=f"N {shape[0]}, K {shape[1]}, batch {batch}",
                rule="a time of at least one candidate without a copy in high precision",
                remedy="measure dequantize_matmul: it always runs",
            )
        best = min(able, key=lambda t: (t.seconds, t.resident_bytes, t.candidate))
        choices.setdefault(shape, []).append(
            Choice(batch, best.candidate, best.config, best.seconds, best.resident_bytes)
        )
    return Table({shape: tuple(found) for shape, found in choices.items()})


def _plain(choice: Choice) -> dict[str, Any]:
    return {
        "batch": choice.batch,
        "candidate": choice.candidate,
        "config": None if choice.config is None else dict(choice.config),
        "seconds": choice.seconds,
        "resident_bytes": choice.resident_bytes,
    }


@dataclass(frozen=True)
class Recorded:
    """The choices that were measured on a device, as a bundle carries them: `kernels.json`.

        {"schema": 1, "device": {"id", "kind", "name"}, "versions": {"torch", "triton", ...},
         "variant": "int4.g64.zeros", "table": what `Table.as_dict` gives}

    They hold for the device alone: tile sizes that are the fastest on one card spill or starve on another.

    Args:
        device: `id`, `kind` and `name`, as in rows of measurements.
        versions: of torch and Triton.
        variant: the format that was timed.
        table: the choices.
    """

    device: Mapping[str, str]
    versions: Mapping[str, str]
    variant: str
    table: Table

    def as_bytes(self) -> bytes:
        """The file."""
        data = {"schema": 1, "device": dict(self.device), "versions": dict(self.versions), "variant": self.variant}
        return (json.dumps({**data, "table": self.table.as_dict()}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def of(cls, data: bytes) -> Recorded:
        """The inverse of `as_bytes`.

        Raises:
            InputError: `dispatch-invalid`.
        """
        try:
            found = json.loads(data)
            if found["schema"] != 1:
                raise KeyError("schema 1")
            return cls(found["device"], found["versions"], found["variant"], Table.of(found["table"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "dispatch-invalid",
                where=FILE,
                value=str(error),
                rule="a file as `quantkit tax BUNDLE --device cuda` writes it",
                remedy="run that again",
            ) from None
