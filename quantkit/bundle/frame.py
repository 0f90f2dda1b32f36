"""The rows of a bundle as a table: a column for each field, those of nested ones with dots (`baseline.ratio`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quantkit.errors import InputError, MissingDependency

Library = Literal["pandas", "pyarrow"]


def frame(rows: Sequence[Mapping[str, Any]], library: Library) -> Any:
    """A `pandas.DataFrame` or a `pyarrow.Table`, a row each.

    Raises:
        InputError: `usage`, another library.
        MissingDependency: the library.
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
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _column(pyarrow: Any, values: list[Any]) -> Any:
    """A column; a setting that is a number here and a word there is text throughout."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array([None if value is None else json.dumps(value) for value in values])
