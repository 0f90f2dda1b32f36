"""Reads calibration data of any accepted kind: texts, conversations, or token ids used as given.

    .txt            documents parted by blank lines
    .jsonl          one object a line with `text`, with `messages` (a list of {role, content}), or with an `input_ids`
                    list (a bare list of ids also counts)
    .json           a list of such objects or lists
    .parquet        a column `text`, `messages` or `input_ids`
    a folder        written by `datasets.Dataset.save_to_disk`

Where several are there, `input_ids` wins: somebody has tokenized on purpose. Of a text and the messages that it was
made from, the messages are taken where a chat template will write them, else the text. Every problem is one clear error
that names the line.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.calibrate.sets import own
from quantkit.calibrate.sets.card import Split
from quantkit.errors import InputError, MissingDependency

# as a file calls them
IDS, TEXT, MESSAGES = "input_ids", "text", "messages"
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
# what Hugging Face calls the three splits
_DATASET_SPLITS = {"calib": ("calib", "train"), "tune": ("tune", "validation"), "eval": ("eval", "test")}


@dataclass(frozen=True)
class Texts:
    """Documents, in order. `joiner` stands between two of them when they are put together."""

    documents: tuple[str, ...]
    joiner: str = "\n\n"


@dataclass(frozen=True)
class Ids:
    """Token id lists, in order, and where each stands (`calib.jsonl:3`)."""

    rows: tuple[list[int], ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Conversations:
    """Lists of messages, in order, and where each stands (`chats.jsonl:3`)."""

    items: tuple[list[dict[str, Any]], ...]
    places: tuple[str, ...]


# rows of a table that are read at a time, and what a value takes in Python beside its bytes
_ROWS, _OBJECT = 4096, 56

Content = Texts | Ids | Conversations


def parse(data: bytes, *, suffix: str, where: str, chat: bool = False) -> Content:
    """The content of one file.

    Args:
        suffix: of its name, with the dot.
        chat: whether a chat template will write what is in it.

    Raises:
        InputError: `calibration-suffix`, `calibration-empty`, `calibration-not-text`, `calibration-json`,
            `calibration-fields`, `calibration-mixed`, `calibration-ids`, `calibration-messages`,
            `calibration-unreadable`.
    """
    if suffix not in SUFFIXES:
        rule = f"one of {', '.join(SUFFIXES)}, or a folder; pairs for an encoder: .tsv, lines of a name, a text, a text"
        raise own.suffix(where, suffix, rule)
    if not data.strip():
        raise own.empty(where, "no text and no ids in it")
    if suffix == ".parquet":
        return _parquet(data, where, chat)
    text = _decode(data, where)
    if suffix == ".jsonl":
        # not splitlines(), which also parts at U+2028 and its like, and those may stand inside a JSON string
        lines = enumerate(text.split("\n"), start=1)
        records = ((f"{where}:{n}", _json(line, f"{where}:{n}")) for n, line in lines if line.strip())
        return _records(records, where, chat)
    if suffix == ".json":
        items = _json(text, where)
        if not isinstance(items, list):
            raise InputError("calibration-json", where=where, value="not a list", rule="a list of id lists or objects")
        return _records(((f"{where}[{n}]", item) for n, item in enumerate(items)), where, chat)
    return Texts(tuple(part for part in re.split(r"\n[^\S\n]*\n\s*", text.strip()) if part))


def is_dataset(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_dataset(folder: Path, split: Split, *, where: str, chat: bool = False) -> tuple[Content, bool]:
    """A `datasets` folder's content, and whether it has splits of its own (then it is the one asked for).

    Raises:
        InputError: `calibration-unreadable`, `calibration-split`, `calibration-fields`, `calibration-empty`.
        MissingDependency: datasets is not installed.
    """
    with MissingDependency.unless_found("datasets", extra="compile", purpose="a datasets folder"):
        import datasets
    with own.reading(where):
        data = datasets.load_from_disk(str(folder))
    own_splits = isinstance(data, datasets.DatasetDict)
    if own_splits:
        found = [name for name in _DATASET_SPLITS[split] if name in data]
        if not found and len(data) == 1:
            found, own_splits = list(data), False
        if not found:
            raise InputError(
                "calibration-split",
                where=where,
                value=f"none of {', '.join(_DATASET_SPLITS[split])}",
                rule=f"it has {', '.join(sorted(data))}",
                remedy=f"save a split named {split!r}",
            )
        data = data[found[0]]
    column = _column(list(data.column_names), where, chat)
    with own.reading(where):
        values = list(data.select_columns([column]).with_format(None)[column])
    return _columnar(column, values, where, chat), own_splits


def _parquet(data: bytes, where: str, chat: bool) -> Content:
    with MissingDependency.unless_found("pyarrow", extra="compile", purpose="a .parquet file"):
        import pyarrow.parquet
    with own.reading(where):
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        names = list(file.schema_arrow.names)
    column = _column(names, where, chat)
    values, size = list[Any](), 0
    with own.reading(where):
        # in small pieces: a few bytes can stand for any number of rows
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            size += batch.nbytes + _OBJECT * len(batch)
            limits.UNPACKED.demand(size, where)
            values += batch.column(0).to_pylist()
    return _columnar(column, values, where, chat)


def _wanted(chat: bool) -> tuple[str, ...]:
    return (IDS, MESSAGES, TEXT) if chat else (IDS, TEXT, MESSAGES)


def _column(names: list[str], where: str, chat: bool) -> str:
    for wanted in _wanted(chat):
        if wanted in names:
            return wanted
    raise InputError(
        "calibration-fields",
        where=where,
        value=f"columns {', '.join(map(repr, names)) or 'none'}",
        rule="a column `text`, `messages` or `input_ids`",
        remedy="rename the column",
    )


def _columnar(column: str, values: list[Any], where: str, chat: bool) -> Content:
    return _records(((f"{where}: row {n}", {column: value}) for n, value in enumerate(values)), where, chat)


def _records(records: Iterable[tuple[str, Any]], where: str, chat: bool) -> Content:
    found: dict[str, list[Any]] = {}
    places: list[str] = []
    for place, record in records:
        value = {IDS: record} if isinstance(record, list) else record
        kind = next((key for key in _wanted(chat) if _holds(value, key)), None)
        if kind is None:
            raise _no_fields(value, place)
        found.setdefault(kind, []).append(_READ[kind](value[kind], place))
        places.append(place)
        if len(found) > 1:
            raise InputError(
                "calibration-mixed",
                where=place,
                value=f"{' and '.join(found)} in one file",
                rule="all lines have `text`, or all have `messages`, or all have `input_ids`",
                remedy="part them into two files",
            )
    if IDS in found:
        return Ids(tuple(found[IDS]), tuple(places))
    if MESSAGES in found:
        # what occurs twice must not end up on both sides of a split
        once: dict[str, tuple[Any, str]] = {}
        for item, place in zip(found[MESSAGES], places, strict=True):
            once.setdefault(json.dumps(item, sort_keys=True, default=str), (item, place))
        return Conversations(*zip(*once.values(), strict=True))
    documents = tuple(dict.fromkeys(text for text in found.get(TEXT, ()) if text.strip()))
    if not documents:
        raise own.empty(where, "no text and no ids in it")
    return Texts(documents)


def _holds(record: Any, key: str) -> bool:
    """Whether a record has this kind of content; a text may be null beside other columns."""
    if not isinstance(record, dict) or key not in record:
        return False
    return isinstance(record[key], str) if key == TEXT else key == IDS or record[key] is not None


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """The messages of a conversation, without the keys that are null there: a table has every key in every row."""
    kept = [
        {key: item for key, item in message.items() if item is not None}
        for message in (value if isinstance(value, list) else [])
        if isinstance(message, dict)
    ]
    wrong = next((message for message in kept if not _is_message(message)), None)
    if not isinstance(value, list) or not value or len(kept) < len(value) or wrong is not None:
        raise InputError(
            "calibration-messages",
            where=place,
            value=f"{value if wrong is None else wrong!r:.80}",
            rule="`messages` is a list of {role, content}, both strings",
            remedy="rename the keys, or leave that conversation out",
        )
    for message in kept:
        for item in message.values():
            if isinstance(item, str):
                _whole(item, place)
    return kept


def _is_message(message: dict[str, Any]) -> bool:
    """A call of a tool may stand for the words, and parts of several kinds too: that is up to the template."""
    content = isinstance(message.get("content"), (str, list)) or "tool_calls" in message
    return isinstance(message.get("role"), str) and content


def _whole(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes
        raise own.not_text(place, f"half a character, \\u{ord(text[error.start]):04x}, at {error.start}") from None
    return text


def _id_list(value: Any, place: str) -> list[int]:
    # bool is an int to Python, not to the person who wrote `true`
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    wrong = next((item for item in value if type(item) is not int), None) if isinstance(value, list) else value
    raise InputError(
        "calibration-ids", where=place, value=f"{wrong!r:.60}", rule="`input_ids` is a flat list of whole numbers"
    )


_READ: dict[str, Callable[[Any, str], Any]] = {IDS: _id_list, TEXT: _whole, MESSAGES: _messages}


def _no_fields(value: Any, place: str) -> InputError:
    if isinstance(value, dict):
        kinds = ", ".join(f"{key!r:.40}: {type(item).__name__}" for key, item in list(value.items())[:6])
        found = f"keys {kinds or 'none'}"
    else:
        found = f"{value!r:.60}"
    return InputError(
        "calibration-fields",
        where=place,
        value=found,
        rule="an object with `text` (a string), `messages` or `input_ids` (lists)",
        remedy="rename the key",
    )


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise InputError(
            "calibration-json", where=place, value=reason, rule="valid JSON; in a .jsonl, one object a line"
        ) from None


def _decode(data: bytes, where: str) -> str:
    text = own.decoded(data, where)
    if "\x00" in text:
        raise own.not_text(where, f"a zero byte at character {text.index(chr(0))}")
    return text.replace("\r\n", "\n").replace("\r", "\n")
