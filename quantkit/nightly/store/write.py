"""What is written: one attempt at a cell, the decisions of a night, an answer as CSV or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from quantkit.bundle.disk import fsync, writing
from quantkit.nightly.store import files
from quantkit.nightly.store.records import NIGHT_ID, Item, Record, Result, StoredDecision, Time, to_table


def commit(root: Path, result: Result, times: Sequence[Time], items: Sequence[Item]) -> bool:
    """See `Store.commit`."""
    _demand(NIGHT_ID.fullmatch(result.night) is not None, f"a night's name, got {result.night!r}")
    attempt = (result.night, result.cell, result.attempt)
    _demand(all((each.night, each.cell, each.attempt) == attempt for each in times), f"times of {attempt}")
    of_build = (result.night, result.build, result.attempt)
    _demand(all((each.night, each.build, each.attempt) == of_build for each in items), f"items of {of_build}")
    # the result last: it is what makes the others count
    packed: dict[type[Record], bytes] = {}
    if times:
        packed[Time] = files.pack(Time, to_table(Time, times))
    if items:
        packed[Item] = files.pack(Item, to_table(Item, items))
    packed[Result] = files.pack(Result, to_table(Result, [result]))
    name = f"{files.key(result.cell, result.attempt)}-{files.digest(*packed.values())}.parquet"
    with files.locked(root):
        if _is_committed(root, result):
            return False
        for kind, data in packed.items():
            files.put(files.folder(root, kind.table, result.night) / name, data)
    return True


def _is_committed(root: Path, result: Result) -> bool:
    """Whether a file that can be read holds this attempt."""
    key = files.key(result.cell, result.attempt)
    place = files.folder(root, Result.table, result.night)
    for stem in files.stems(root, Result.table, result.night):
        path = place / f"{stem}.parquet"
        if stem.startswith((f"{key}-", files.WHOLE)) and files.readable(path):
            table = files.parquet().read_table(path, columns=["cell", "attempt"], partitioning=None)
            if (result.cell, result.attempt) in zip(*(each.to_pylist() for each in table.columns), strict=True):
                return True
    return False


def decide(root: Path, night: str, decisions: Sequence[StoredDecision]) -> None:
    """See `Store.decide`."""
    _demand(NIGHT_ID.fullmatch(night) is not None, f"a night's name, got {night!r}")
    _demand(all(each.night == night for each in decisions), f"decisions of {night}")
    data = files.pack(StoredDecision, to_table(StoredDecision, decisions))
    with files.locked(root):
        numbers = [stem.partition("-")[0] for stem in files.stems(root, StoredDecision.table, night)]
        number = 1 + max((int(each) for each in numbers if each.isdigit()), default=0)
        name = f"{number:06d}-{files.digest(data)}.parquet"
        files.put(files.folder(root, StoredDecision.table, night) / name, data)


def _demand(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"a commit takes {rule}")


def export(out: Path, batches: Iterator[Any]) -> int:
    """Write batches, of which the first tells the columns, into a file, whole or not at all; the number of rows."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with writing(out):
            with temporary.open("wb") as stream:
                count = FORMATS[out.suffix](stream, batches)
            fsync(temporary)
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _csv(stream: IO[bytes], batches: Iterator[Any]) -> int:
    """Lists and the like become JSON, null an empty field."""
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    count, writer = 0, None
    for batch in batches:
        flat = pa.RecordBatch.from_arrays([_flat(each) for each in batch.columns], names=batch.schema.names)
        writer = writer or CSVWriter(stream, flat.schema)
        writer.write_batch(flat)
        count += batch.num_rows
    if writer is not None:
        writer.close()
    return count


def _flat(column: Any) -> Any:
    """A column that CSV has: numbers, times and text as they are."""
    import pyarrow as pa

    if not (pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_interval(column.type)):
        return column
    values = [plain(value) for value in column.to_pylist()]
    texts = [json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value for value in values]
    return pa.array(texts, type=pa.string())


def _json(stream: IO[bytes], batches: Iterator[Any]) -> int:
    """An array, an object a line."""
    count = 0
    stream.write(b"[")
    for batch in batches:
        for row in batch.to_pylist():
            text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False)
            stream.write(f"{',' if count else ''}\n{text}".encode())
            count += 1
    stream.write(b"\n]\n")
    return count


def plain(value: Any) -> Any:
    """What JSON has: NaN and infinity become null, times ISO 8601, the rest its text."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


FORMATS: dict[str, Callable[[IO[bytes], Iterator[Any]], int]] = {".csv": _csv, ".json": _json}
