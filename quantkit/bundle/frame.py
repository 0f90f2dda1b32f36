"""Measurements as a table: one column for each field; nested fields are joined with dots (`baseline.ratio`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quantkit.errors import InputError, MissingDependency

Library = Literal["pandas", "pyarrow"]


def frame(rows: Sequence[Mapping[str, Any]], library: Library) -> Any:
    """Return rows as a `pandas.DataFrame` or a `pyarrow.Table`.

    Raises:
        InputError: `usage`, an unknown library.
        MissingDependency: the library is not installed.
    """
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    columns = {name: [row.get(name) for row in flat] for name in names}
    if library == "pandas":
        with MissingDependency.unless_found("pandas", extra=None, purpose="a frame of rows"):
            import pandas
        return pandas.DataFrame(columns)
    if library == "pyarrow":
        with MissingDependency.unless_found("pyarrow", extra="data", purpose="a table of rows"):
            import pyarrow
        return pyarrow.table({name: _column(pyarrow, values) for name, values in columns.items()})
    raise InputError("usage", "frame", f"got {library!r:.80}", "pandas or pyarrow")


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _column(pyarrow: Any, values: list[Any]) -> Any:
    """Make a column; mixed numbers and words become text."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array([None if value is None else json.dumps(value) for value in values])
