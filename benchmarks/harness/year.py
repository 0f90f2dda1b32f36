"""A store of many nights whose answers are drawn, not measured: as large as a real one, in the store's own file.

Most cells stay what they are, night after night, and half of them are measured against the very same bundle. Some get
slower and stay so until somebody repairs them; builds fail; a machine is away; a runtime is updated.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quantkit.nightly.records import Item, Night, NightCell, Record, Result, StoredDecision, Time, schema, to_table
from quantkit.nightly.store import Store
from quantkit.stats.slowdown import BLOCKS, BURST, ROUNDS

MODELS = ["smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]
MODELS += ["gemma-3-1b", "phi-4-mini", "minilm-l6"]
RECIPES = ["awq-int4", "gptq-int4", "int8", "fp8", "int4-best"]
TARGETS = {"cpu-x86": "onnxruntime", "rtx-4090": "tensorrt"}
BATCHES = [1, 4, 8, 32]
FIRST = datetime(2025, 11, 23, 3, tzinfo=UTC)
# what is kept of a cell on the default budget, of both sides
STEPS = 2 * ROUNDS * BLOCKS * 2 * BURST
_MARGINS = {"latency": 0.02, "accuracy": 0.01, "kl": 0.01, "size": 0.01}
_NOISE = {"latency": 0.004, "accuracy": 0.001, "kl": 0.0006, "size": 0.0}
Array = Any


def cells(count: int) -> list[NightCell]:
    """So many cells of a product of models, recipes, targets and batches."""
    models = [*MODELS, *(f"model-{i}" for i in range(len(MODELS), math.ceil(count / 40)))]
    product = itertools.product(models, RECIPES, TARGETS, BATCHES)
    return [NightCell(m, r, t, TARGETS[t], b) for m, r, t, b in itertools.islice(product, count)]


def synthesise(path: Path, *, count: int, nights: int, steps: int = STEPS, items: int = 200, seed: int = 0) -> Store:
    """Write a store.

    Args:
        path: a folder that is not there yet.
        count: of cells.
        nights: one a day.
        steps: timed iterations kept of a cell each night, both sides together.
        items: kept of a build each night, a side.
        seed: of everything that is drawn.
    """
    store = Store.open(path, create=True)
    year = _Year(cells(count), nights, np.random.default_rng(seed))
    for number in range(nights):
        with store._writing() as database:
            for kind, table in year.night(number, steps, items).items():
                database.register("drawn", table)
                database.execute(f"INSERT INTO {kind.table} FROM drawn")
    return store


class _Year:
    """What is drawn for all nights at once: `[cells, nights]`."""

    def __init__(self, drawn: Sequence[NightCell], nights: int, generator: np.random.Generator) -> None:
        self.cells, self.generator = drawn, generator
        self.keys = np.array([cell.key for cell in drawn])
        self.builds, self.build_of = np.unique([cell.build for cell in drawn], return_inverse=True)
        shape = (len(drawn), nights)
        self.step = generator.lognormal(-4.5, 0.6, len(drawn)) * np.sqrt([cell.batch for cell in drawn])
        self.noise = generator.lognormal(0, 0.4, (len(drawn), 1))
        self.state = np.full(shape, "done", dtype=object)
        self.changed = generator.random((len(self.builds), nights)) < 0.5
        self.slower = np.zeros(shape)
        for _ in range(max(1, shape[0] * nights // 2000)):
            cell, night = generator.integers(shape[0]), generator.integers(1, nights) if nights > 1 else 0
            self.slower[cell, night : night + generator.integers(1, 9)] = generator.choice([0.05, 0.09, -0.06, 0.18])
        for _ in range(max(1, len(self.builds) * nights // 1500)):
            build, night = generator.integers(len(self.builds)), generator.integers(nights)
            self.state[self.build_of == build, night : night + generator.integers(1, 6)] = "failed"
        # the last nights have something to show, whatever was drawn
        self.slower[:: max(1, shape[0] // 3), -3:] = 0.09
        self.state[self.build_of == len(self.builds) // 2, -2:] = "failed"
        targets = np.array([cell.target for cell in drawn])
        for _ in range(nights // 60):
            night = generator.integers(nights)
            self.state[targets == generator.choice(list(TARGETS)), night] = "missing"
        self.updated = sorted(generator.choice(nights, min(nights, 4), replace=False).tolist())

    def night(self, number: int, steps: int, items: int) -> dict[type[Record], pa.Table]:
        started = FIRST + timedelta(days=number)
        name = f"{started:%Y%m%dT%H%M%SZ}-{number:06x}"
        matrix = tuple(self.keys.tolist())
        row = Night(name, started, f"{number:040x}", hashlib.sha256(b"year").hexdigest(), "builder-1", matrix)
        done = self.state[:, number] == "done"
        return {
            Night: to_table(Night, [row]),
            Time: self._times(name, number, np.flatnonzero(done), steps, started.timestamp()),
            Item: self._items(name, np.unique(self.build_of[done]), items),
            Result: self._results(name, number, done),
            StoredDecision: self._decisions(name, number, done),
        }

    def _times(self, name: str, number: int, done: Array, steps: int, start: float) -> pa.Table:
        each = np.arange(steps)
        block, position = each // (4 * BURST), each % (4 * BURST)
        # ABBA or BAAB by the block
        candidate = (np.isin(position // BURST, (0, 3))) ^ (block % 2 == 1)
        shape = (len(done), steps)
        noise = self.generator.lognormal(0, 0.01, shape)
        noise *= np.where(self.generator.random(shape) < 0.01, 3.0, 1.0)
        seconds = self.step[done, None] * noise * (1 + candidate * self.slower[done, number, None])
        began = start + 20 * np.arange(len(done))[:, None] + np.cumsum(seconds, axis=1)
        count = seconds.size
        return _table(
            Time,
            count,
            night=name,
            cell=_repeated(self.keys[done], steps),
            attempt=1,
            side=_dictionary(np.tile(np.where(candidate, 0, 1), len(done)), ["candidate", "baseline"]),
            round=np.tile(block // BLOCKS, len(done)),
            block=np.tile(block % BLOCKS, len(done)),
            position=np.tile(position, len(done)),
            seconds=seconds.ravel(),
            began=began.ravel(),
        )

    def _items(self, name: str, builds: Array, items: int) -> pa.Table:
        count = len(builds) * items * 2
        right = self.generator.random((len(builds), items)) < 0.45
        flipped = self.generator.random(right.shape) < 0.01
        correct = np.stack([right, right ^ flipped], axis=2).ravel()
        texts = np.where(np.repeat(flipped.ravel(), 2), "the cat sat on the →  mat", None)
        return _table(
            Item,
            count,
            night=name,
            build=_repeated(self.builds[builds], 2 * items),
            attempt=1,
            item=np.tile(np.repeat(np.arange(items), 2), len(builds)),
            side=_dictionary(np.tile([1, 0], count // 2), ["candidate", "baseline"]),
            correct=correct,
            kl=self.generator.gamma(0.5, 0.02, count),
            logp=-self.generator.gamma(1.0, 3.0, count),
            sequence=np.tile(np.repeat(np.arange(items) // 100, 2), len(builds)),
            text=pa.array(texts.tolist(), pa.string()),
        )

    def _results(self, name: str, number: int, done: Array) -> pa.Table:
        minor = sum(number >= night for night in self.updated)
        versions = {"torch": "2.11.0", "onnxruntime": f"1.3{minor}.0", "transformers": "5.22.0", "onnx": "1.21.0"}
        versions |= {"quantkit": "0.1.0", "python": "3.11.9", "numpy": "2.4.1"}
        device = {"name": "a processor of 64 cores", "threads": 16, "memory_bytes": 270_000_000_000}
        rows = []
        for i, cell in enumerate(self.cells):
            state = self.state[i, number]
            if not done[i]:
                error = {"code": "out-of-memory", "where": cell.key, "value": "41.2 GB asked for", "rule": "24.0 GB"}
                error |= {"remedy": "use a smaller batch"}
                rows.append(Result.of(name, cell, state, error=error if state == "failed" else None, versions=versions))
                continue
            baseline = f"{self.build_of[i]:064x}"
            changed = self.changed[self.build_of[i], number]
            mine = f"{number + 1:032x}{self.build_of[i]:032x}" if changed else baseline
            size = 80_000_000 * (1 + int(self.build_of[i]))
            about = {"device": device, "versions": versions, "bytes": size, "baseline_bytes": size, "seconds": 41.5}
            about |= {"flags": () if changed else ("reused",), "baseline_kind": "accepted"}
            rows.append(Result.of(name, cell, "done", content_sha256=mine, baseline_sha256=baseline, **about))
        return to_table(Result, rows)

    def _decisions(self, name: str, number: int, done: Array) -> pa.Table:
        columns: dict[str, list[Any]] = {field.name: [] for field in schema(StoredDecision) if field.name != "night"}
        for (what, margin), i in itertools.product(_MARGINS.items(), range(len(self.cells))):
            sigma = _NOISE[what] * (float(self.noise[i, 0]) if what == "latency" else 1.0)
            value = self.generator.normal(0, sigma) if sigma else 0.0
            if what == "latency":
                value += self.slower[i, number]
            half = 2 * sigma * float(self.generator.lognormal(0, 0.3))
            answer = "same" if abs(value) + half < margin else "inconclusive"
            answer = "worse" if value - half > margin else "better" if value + half < -margin else answer
            answer = answer if done[i] else self.state[i, number]
            p = 0.5 * math.erfc((value - margin) / (half / 1.4 + 1e-9))
            known = bool(done[i])
            row = (self.keys[i], what, answer, value, value - half, value + half, p, min(1.0, 400 * p), margin)
            row = (*row[:3], *(each if known else None for each in row[3:8]), margin)
            extra = (margin + 1.5 * half, 40, True if answer == "worse" else None) if known else (None, None, None)
            for column, each in zip(columns.values(), (*row, *extra, _SAID[answer]), strict=True):
                column.append(each)
        return _table(StoredDecision, len(columns["cell"]), night=name, **columns)


_SAID = (
    {"same": "the whole interval lies within the margin", "worse": "beyond the margin in both runs"}
    | {"better": "shown to be better by more than the margin"}
    | {"inconclusive": "the interval reaches beyond the margin"}
    | {"failed": "out-of-memory: 41.2 GB asked for", "missing": "no machine of its target answered"}
)


def _table(kind: type[Record], count: int, **columns: Any) -> pa.Table:
    """A table of a kind from columns: an array, or one value for all rows; none for what is not known."""
    made = {}
    for field in schema(kind):
        given = columns.get(field.name)
        if given is None:
            made[field.name] = pa.nulls(count, field.type)
        elif isinstance(given, str | int):
            made[field.name] = pa.repeat(pa.scalar(given, field.type), count)
        elif isinstance(given, pa.Array):
            made[field.name] = given.cast(field.type)
        else:
            made[field.name] = pa.array(given, field.type)
    return pa.table(made, schema=schema(kind))


def _dictionary(codes: Array, names: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(names)))


def _repeated(names: Array, times: int) -> pa.Array:
    return _dictionary(np.repeat(np.arange(len(names)), times), names.tolist())
