"""What a caller in Python gives, as the command line has it: a wrong type is one line, not a traceback from within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.content import as_reference
from quantkit.errors import InputError


def model(value: Any, where: str = "model") -> str:
    """A model or a bundle by name or path; a `Path` is a path, however it is spelt. Raises InputError `usage`."""
    return as_reference(demand(where, value, (str, Path), "a name or a path"))


def path(value: Any, where: str) -> Path | None:
    """A file or a folder; None stays None. Raises InputError `usage`."""
    return None if value is None else Path(demand(where, value, (str, Path), "a path"))


def texts(value: Any, where: str) -> list[str]:
    """Several texts, or one. Raises InputError `usage`."""
    given = [value] if isinstance(value, str | Path) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str | Path) for each in given):
        raise wrong(where, value, "a text or several")
    return [as_reference(each) for each in given]


def batches(value: Any, where: str = "batches") -> list[int]:
    """Sequences at once, as `--batch` takes them. Raises InputError `usage`."""
    sizes = value if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in sizes):
        raise wrong(where, value, "numbers from 1 up: [1, 2, 4]")
    return list(sizes)


def mappings(value: Any, where: str) -> list[dict[str, Any]]:
    """Several mappings. Raises InputError `usage`."""
    if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
        raise wrong(where, value, "several mappings: [{'format': 'int4'}]")
    return [dict(each) for each in value]


def word(value: Any, where: str, rule: str) -> str | None:
    """A name; None stays None. Raises InputError `usage`."""
    return None if value is None else str(demand(where, value, (str,), rule))


def flags(**values: Any) -> None:
    """Refuse what is neither true nor false, by its name: "no" would be true. Raises InputError `usage`."""
    for where, value in values.items():
        demand(where, value, (bool,), "True or False")


def numbers(**values: Any) -> None:
    """Refuse what is no number, by its name; None is left to its default. Raises InputError `usage`."""
    for where, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong(where, value, "a number")


def demand(where: str, value: Any, kinds: tuple[type, ...], rule: str) -> Any:
    """What is of one of these types. Raises InputError `usage`."""
    if not isinstance(value, kinds):
        raise wrong(where, value, rule)
    return value


def wrong(where: str, value: Any, rule: str) -> InputError:
    """The error `usage`."""
    return InputError("usage", where=where, value=f"got {value!r:.80}", rule=rule)
