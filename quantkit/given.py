"""Check the arguments of Python calls: a wrong type is one line, not a traceback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.content import as_reference
from quantkit.errors import InputError


def model(value: Any, where: str = "model") -> str:
    """Return a model or a bundle by name or path; a `Path` is always a path. Raises InputError `usage`."""
    return as_reference(demand(where, value, (str, Path), "a name or a path"))


def path(value: Any, where: str) -> Path | None:
    """Return a file or a folder; None stays None. Raises InputError `usage`."""
    return None if value is None else Path(demand(where, value, (str, Path), "a path"))


def texts(value: Any, where: str) -> list[str]:
    """Return several texts, or one, as a list. Raises InputError `usage`."""
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, Sequence) or not all(isinstance(text, str | Path) for text in several):
        raise wrong(where, value, "a text or several")
    return [as_reference(text) for text in several]


def batches(value: Any, where: str = "batches") -> list[int]:
    """Return batch sizes, as `--batch` takes them. Raises InputError `usage`."""
    sizes = value if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise wrong(where, value, "numbers from 1 up: [1, 2, 4]")
    return list(sizes)


def mappings(value: Any, where: str) -> list[dict[str, Any]]:
    """Return several mappings as a list. Raises InputError `usage`."""
    if not isinstance(value, Sequence) or not all(isinstance(one, Mapping) for one in value):
        raise wrong(where, value, "several mappings: [{'format': 'int4'}]")
    return [dict(one) for one in value]


def word(value: Any, where: str, rule: str) -> str | None:
    """Return a name; None stays None. Raises InputError `usage`."""
    return None if value is None else str(demand(where, value, (str,), rule))


def flags(**values: Any) -> None:
    """Refuse a flag of another type than bool, by name: "no" would count as true. Raises InputError `usage`."""
    for where, value in values.items():
        demand(where, value, (bool,), "True or False")


def numbers(**values: Any) -> None:
    """Refuse a value of another type than a number, by name; None means the default. Raises InputError `usage`."""
    for where, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong(where, value, "a number")


def demand(where: str, value: Any, kinds: tuple[type, ...], rule: str) -> Any:
    """Return a value of one of these types. Raises InputError `usage`."""
    if not isinstance(value, kinds):
        raise wrong(where, value, rule)
    return value


def wrong(where: str, value: Any, rule: str) -> InputError:
    """Make the error `usage`."""
    return InputError("usage", where=where, value=f"got {value!r:.80}", rule=rule)
