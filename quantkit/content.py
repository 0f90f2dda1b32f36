"""Find and read the files that users edit: recipes, calibration sets, targets.

They are at the top of a clone, and inside the package (`quantkit/content/...`) of an installed wheel. A bare word is a
shipped name; a user's own file starts with `/`, `./` or `../`, ends with `/`, or has a suffix. A bare word is never
looked up as a path, and a path never as a shipped name.

Every document is YAML with a closed schema: a repeated key or an unknown key is an error.
"""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from yaml.composer import Composer

from quantkit import limits
from quantkit.errors import InputError, Inside, absent, from_validation, unknown_name

Document = TypeVar("Document", bound=BaseModel)
Kind = Literal["recipes", "calibration", "export"]
# text of a stranger that is shown: without characters that move a terminal's cursor or change a page
PRINTED = r"^[^\x00-\x1f\x7f-\x9f]*$"
# files of a calibration set in which `PATH:COLUMN` names the column to read
TABLES = (".jsonl", ".json", ".csv", ".parquet")
_SINGULAR = {"recipes": "recipe", "calibration": "calibration", "export": "target"}


class Bounded(BaseModel):
    """Base of documents from outside: numbers are finite, and integers have at most 64 bits."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, data: Any) -> Any:
        demand_bounded(data)
        return data


class Closed(Bounded):
    """Base of every document: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def demand_bounded(data: Any) -> None:
    """Raise Inside for a number in a document that is not finite, or an integer beyond 64 bits."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    met = set()
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise Inside("a whole number has 64 bits", place, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise Inside("a number is finite", place, value)
        if isinstance(value, dict | list | tuple) and id(value) not in met:  # a document may contain itself
            met.add(id(value))
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*place, str(key)), part) for key, part in parts]


@cache
def folder(kind: Kind) -> Path:
    """Find the folder of a kind: the packaged one, else the one beside `quantkit/`. Raises `content-missing`."""
    here = Path(__file__).parent
    for candidate in (here / "content" / kind, here.parent / kind):
        if candidate.is_dir():
            return candidate
    value = "not found in the package or beside it"
    raise InputError("content-missing", where=kind, value=value, remedy="reinstall quantkit")


def cache_dir() -> Path:
    """Return the user's cache folder (converted models, hashes, figures); it is not created here.

    `$QUANTKIT_CACHE`, else `$XDG_CACHE_HOME/quantkit`, else `~/.cache/quantkit`.
    """
    if own := os.environ.get("QUANTKIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quantkit"


def near(path: Path) -> str:
    """Return a path as a user would type it: relative if it is below the current folder."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd().resolve())}"
    except (ValueError, OSError):
        return str(path)


def names(kind: Kind) -> list[str]:
    """List the shipped names, sorted: YAML stems of recipes and targets, folders with a card for calibration sets."""
    root = folder(kind)
    if kind == "calibration":
        return sorted(path.parent.name for path in root.glob("*/card.yaml"))
    return sorted(path.stem for path in root.glob("*.yaml"))


def is_path(reference: str) -> bool:
    """Tell whether a reference is the path of a user's file, not a shipped name. (`qwen2.5-7b` has no suffix.)"""
    place = reference.startswith(("/", "./", "../", "~")) or reference.endswith("/")
    return place or Path(reference).suffix[1:2].isalpha()


def as_reference(reference: str | Path) -> str:
    """Prefix a bare `Path` with `./`, so that it is read as a path; a string is returned unchanged."""
    text = str(reference)
    return f"./{text}" if isinstance(reference, Path) and not is_path(text) else text


def column_of(reference: str) -> tuple[str, str | None]:
    """Part a table's path from the column that is named behind it; None where none is.

    >>> column_of("./reviews.csv:body"), column_of("./reviews.csv")
    (('./reviews.csv', 'body'), ('./reviews.csv', None))
    """
    file, _, column = reference.rpartition(":")
    return (file, column) if Path(file).suffix.lower() in TABLES else (reference, None)


def find(kind: Kind, reference: str) -> Path:
    """Find the file of a reference: a recipe, a target, or a calibration set's card or data.

    Raises:
        InputError: `unknown-recipe|target|calibration` with a did-you-mean, or `file-missing`.
    """
    if is_path(reference):
        path = Path(column_of(reference)[0] if kind == "calibration" else reference).expanduser()
        if not path.exists():
            raise absent(reference)
        return path
    if reference not in names(kind):
        singular = _SINGULAR[kind]
        raise unknown_name(singular, reference, names(kind), more=f"`quantkit list {singular}s` says what each is")
    root = folder(kind)
    return root / reference / "card.yaml" if kind == "calibration" else root / f"{reference}.yaml"


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, list[str]]:
    """Map every dotted location in nested documents to the keys allowed there."""
    keys = {prefix.rstrip("."): [field.alias or name for name, field in model.model_fields.items()]}
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            keys.update(known_keys(inner, f"{prefix}{field.alias or name}."))
    return keys


def validated(
    model: type[Document],
    data: Any,
    *,
    where: str,
    code: str,
    rule: str = "",
    keys: Mapping[str, list[str]] | None = None,
    context: Mapping[str, Any] | None = None,
    **more: Any,
) -> Document:
    """Validate data, together with the fields in `more`, as a document.

    Args:
        rule: message for data that is not a mapping: `a card is a YAML mapping`.
        keys: dotted location -> keys allowed there, for places below free names.
        context: context passed to the validators.

    Raises:
        InputError: with `code`: one line, with a did-you-mean for a misspelt key.
    """
    if rule and not isinstance(data, dict):
        raise InputError(code, where=where, value="not a mapping", rule=rule)
    try:
        return model.model_validate({**data, **more} if more else data, context=context)
    except ValidationError as error:
        known = {**known_keys(model), **(keys or {})}
        known[""] = [key for key in known[""] if key not in more]
        raise from_validation(error, where=where, code=code, known=known) from None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


try:
    from yaml import CSafeLoader

    class _SafeLoader(Composer, CSafeLoader):
        """Safe loader on libyaml, six times as fast; it composes in Python, where deep nesting is no stack overflow."""

        def __init__(self, text: str) -> None:
            CSafeLoader.__init__(self, text)
            Composer.__init__(self)

except ImportError:  # built without libyaml
    _SafeLoader = yaml.SafeLoader  # type: ignore[assignment, misc]


class _UniqueKeyLoader(_SafeLoader):
    """Safe loader that refuses a repeated key; plain YAML silently takes the last."""


def _unique_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=deep)  # type: ignore[no-untyped-call]
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
# PyYAML reads YAML 1.1, where 4.0e9 and 1e-3 are text, because the exponent lacks a sign or the mantissa a point.
# In YAML 1.2, and to people, they are numbers
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> Any:
    """Parse a YAML file safely. Raises InputError (`yaml-invalid` with the line, `file-missing`, `file-unreadable`)."""
    try:
        text = limits.read(path).decode("utf-8")
    except FileNotFoundError:
        raise absent(path) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError("file-unreadable", where=str(path), value=reason, remedy="check the file") from None
    return parse_yaml(text, where=str(path))


def _values(value: Any, known: dict[int, float]) -> float:
    """Count the values of a document, aliases at every use; infinite if it contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # the result if it is met again inside itself
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(value)]


def parse_yaml(text: str, *, where: str) -> Any:
    """Parse YAML safely. Raises InputError (`yaml-invalid` with the line)."""
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
        limits.VALUES.demand(_values(data, {}), where)
        return data
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        problem = getattr(error, "problem", None) or str(error)
    except RecursionError:
        place, problem = where, "nested too deeply"
    except InputError:
        raise
    except Exception as error:
        # PyYAML raises these for impossible dates, keys that are lists, `!!int x`, `!!bool x`
        place, problem = where, str(error)
    raise InputError("yaml-invalid", where=place, value=problem, remedy="correct the YAML")
