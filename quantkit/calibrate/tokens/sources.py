"""Reads calibration data of any accepted kind: texts, conversations, or token ids used as given; and parts it.

    .txt            documents parted by blank lines
    .jsonl          one record a line; a bare list of ids is one too
    .json           a list of records
    .csv            a record a line, under a line of column names
    .parquet        a record a row
    a folder        with a `card.yaml`, or written by `datasets.Dataset.save_to_disk`

A record holds one of these, or anything in a column that the path names (`./reviews.csv:body`):

    text            a string
    messages        [{role, content}, ...], a conversation as OpenAI writes it
    conversations   [{from, value}, ...], one as ShareGPT writes it
    instruction     with `output`, and `input` where there is one: a conversation of two messages, as Alpaca writes it;
                    a text in Alpaca's own form of prompt where the tokenizer has no chat template
    input_ids       a list of token ids

Where several are there, `input_ids` wins: somebody has tokenized on purpose. Of a text and the messages that it was
made from, the messages are taken where a chat template will write them, else the text.

A user's own text has no splits: its last 10 % are kept for `eval`, the 5 % before for `tune`, by whole documents where
there are 20 or more, else by the length of the text; conversations are never cut. Token ids stay whole.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit import content, limits
from quantkit.calibrate.sets import card as cards
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.errors import InputError, MissingDependency

# as a file calls them
IDS, TEXT, MESSAGES = "input_ids", "text", "messages"
# as ShareGPT and Alpaca call their conversations, and what each conversation is read from beside that
_SHAREGPT, _ALPACA = ("conversations", "system"), ("instruction", "output", "input", "system")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
_PROMPT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.",
    ", paired with an input that provides further context",
)
_KINDS = "`text`, `messages`, `conversations`, `instruction` with `output`, or `input_ids`"
SUFFIXES = (".txt", *content.TABLES)
# what Hugging Face calls the three splits
_DATASET_SPLITS = {"calib": ("calib", "train"), "tune": ("tune", "validation"), "eval": ("eval", "test")}
# rows of a table that are read at a time, and what a value takes in Python beside its bytes
_ROWS, _OBJECT = 4096, 56
# from so many on, a text is parted by whole documents
_BY_DOCUMENT = 20


@dataclass(frozen=True)
class Texts:
    """Documents, in order; `joiner` is put between them; `alpaca` tells that records were written in Alpaca's form."""

    documents: tuple[str, ...]
    joiner: str = "\n\n"
    alpaca: bool = False


@dataclass(frozen=True)
class Ids:
    """Lists of token ids, in order, and their places (`calib.jsonl:3`)."""

    rows: tuple[list[int], ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Conversations:
    """Lists of messages, in order, and their places (`chats.jsonl:3`)."""

    items: tuple[list[dict[str, Any]], ...]
    places: tuple[str, ...]


Content = Texts | Ids | Conversations


@dataclass(frozen=True)
class SplitData:
    """Data of one split before tokenization; `content` is None for drawn ids, `notes` are decisions."""

    content: Content | None
    sampling: SetSampling
    name: str
    where: str
    notes: tuple[str, ...] = ()


def read(reference: str, split: Split, *, chat: bool | None) -> SplitData:
    """Return one split of a calibration set.

    Args:
        reference: a shipped name, or a path; see `ids.load_tokens`.
        chat: True if a chat template will write all data, False if it may write conversations, None if there is none.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `folder`, `suffix`, `empty`, `not-text`, `json`, `fields`, `mixed`, `unreadable`, `ids`,
            `messages`.
    """
    path = content.find("calibration", reference)
    if (card := Card.at(path)) is not None:
        card.demand_kind("random", "text", "tokens", rule="a language model reads text or tokens")
        if card.kind == "random":
            return SplitData(None, card.sampling, card.name, card.where)
        files = [(data, {"suffix": path.suffix.lower(), "where": str(path)}) for path, data in card.read(split)]
        parts = [parse(data, chat=chat, **how) for data, how in files]
        return SplitData(_joined(parts, split, card.where), card.sampling, card.name, card.where)
    name, own_splits = path.resolve().name, False
    if not path.is_dir():
        column = content.column_of(reference)[1]
        whole = parse(read_bytes(path), suffix=path.suffix.lower(), where=reference, chat=chat, column=column)
    elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        whole, own_splits = read_dataset(path, split, where=reference, chat=chat)
    else:
        inside = sorted(str(Path(reference) / file.name) for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        rule = f"a set is a file ({', '.join(SUFFIXES)}), a folder with card.yaml, or one of datasets' save_to_disk"
        remedy = f"give one file: {', '.join(map(_typed, inside[:5]))}" if inside else "give a file of text"
        if len(inside) > 1 and all(name.endswith(".txt") for name in inside):
            remedy += f"; or join them: cat {reference.rstrip('/')}/*.txt > joined.txt"
        raise InputError("calibration-folder", reference, "neither a card.yaml nor a saved dataset in it", rule, remedy)
    if own_splits:
        return SplitData(whole, SetSampling(), name, reference)
    if isinstance(whole, Ids):
        note = f"{name} has no splits: the ids are used as given for {split} as for any other split"
        return SplitData(whole, SetSampling(), name, reference, (note,))
    part, of = _own_split(whole, split)
    note = f"{name} has no splits: {split} is {of}"
    return SplitData(part, SetSampling(), name, f"{reference} ({split} part)", (note,))


def _joined(parts: Sequence[Content], split: Split, where: str) -> Content:
    """Return the content of several files as that of one. Raises InputError `calibration-mixed`."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        value = f"texts, conversations or input_ids, not one kind, in the split {split!r}"
        raise InputError("calibration-mixed", where=where, value=value)
    if isinstance(first, Texts):
        return replace(first, documents=tuple(document for part in parts for document in part.documents))  # type: ignore[union-attr]
    places = tuple(place for part in parts for place in part.places)  # type: ignore[union-attr]
    if isinstance(first, Ids):
        return Ids(tuple(row for part in parts for row in part.rows), places)  # type: ignore[union-attr]
    return Conversations(tuple(item for part in parts for item in part.items), places)  # type: ignore[union-attr]


def _own_split(whole: Texts | Conversations, split: Split) -> tuple[Content, str]:
    """Return a split of data without splits, and its part of the whole in words."""
    if isinstance(whole, Conversations):
        count = len(whole.items)
        first, last = cards.bounds(split, count)
        part = Conversations(whole.items[first:last], whole.places[first:last])
        return part, f"conversations {first + 1} to {last} of {count}"
    if (count := len(whole.documents)) >= _BY_DOCUMENT:
        first, last = cards.bounds(split, count)
        return replace(whole, documents=whole.documents[first:last]), f"documents {first + 1} to {last} of {count}"
    text = whole.joiner.join(whole.documents)

    def cut(share: float) -> int:
        """Return the first white space at or after a share of the text."""
        place = int(len(text) * share)
        while place < len(text) and not text[place].isspace():
            place += 1
        return place if place < len(text) else int(len(text) * share)

    first, last = cards.bounds(split, len(text), cut)
    return replace(whole, documents=(text[first:last].strip(),)), f"characters {first} to {last} of {len(text)}"


def parse(data: bytes, *, suffix: str, where: str, chat: bool | None = False, column: str | None = None) -> Content:
    """Return the content of one file.

    Args:
        suffix: of its name, with the dot.
        chat: as of `read`.
        column: key of a record that holds the text, the conversation or the ids; None takes those of the module.

    Raises:
        InputError: `calibration-` followed by `suffix`, `empty`, `not-text`, `json`, `fields`, `mixed`, `ids`,
            `messages`, `unreadable`.
    """
    if suffix not in SUFFIXES:
        rule = f"one of {', '.join(SUFFIXES)}, or a folder; pairs for an encoder: .tsv, lines of a name, a text, a text"
        raise cards.suffix(where, suffix, rule)
    if not data.strip():
        raise cards.empty(where, "no text and no ids in it")
    if suffix == ".parquet":
        return _parquet(data, where, chat, column)
    text = cards.decoded(data, where)
    if "\x00" in text:
        raise cards.not_text(where, f"a zero byte at character {text.index(chr(0))}")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if suffix == ".jsonl":
        # not splitlines(), which also parts at U+2028 and its like, and those may stand inside a JSON string
        lines = enumerate(text.split("\n"), start=1)
        records = ((f"{where}:{n}", _json(line, f"{where}:{n}")) for n, line in lines if line.strip())
        return _records(records, where, chat, column)
    if suffix == ".csv":
        rows = _csv(text, where)
        columns = _columns(list(rows[0]), where, chat, column)
        words = [name for name in rows[0] if not all(_is_number(row[name]) for row in rows[1:])]
        if column is not None and column not in words and rows[1:]:
            raise _numbers(where, column, words)
        named = ((f"{where}: row {n}", {key: row[key] for key in columns}) for n, row in enumerate(rows[1:]))
        return _records(named, where, chat, column)
    if suffix == ".json":
        items = _json(text, where)
        if not isinstance(items, list):
            raise InputError("calibration-json", where=where, value="not a list", rule="a list of id lists or objects")
        return _records(((f"{where}[{n}]", item) for n, item in enumerate(items)), where, chat, column)
    return Texts(tuple(part for part in re.split(r"\n[^\S\n]*\n\s*", text.strip()) if part))


def read_dataset(folder: Path, split: Split, *, where: str, chat: bool | None = False) -> tuple[Content, bool]:
    """Return a `datasets` folder's content, and True if it is a split of its own.

    Raises:
        InputError: `calibration-unreadable`, `calibration-split`, `calibration-fields`, `calibration-empty`.
        MissingDependency: without datasets.
    """
    with MissingDependency.unless_found("datasets", extra="data", purpose="a datasets folder"):
        import datasets
    with cards.reading(where):
        data = datasets.load_from_disk(str(folder))
    own_splits = isinstance(data, datasets.DatasetDict)
    if own_splits:
        names = [name for name in _DATASET_SPLITS[split] if name in data]
        if not names and len(data) == 1:
            names, own_splits = list(data), False
        if not names:
            rule, remedy = f"it has {', '.join(sorted(data))}", f"save a split named {split!r}"
            raise InputError("calibration-split", where, f"none of {', '.join(_DATASET_SPLITS[split])}", rule, remedy)
        data = data[names[0]]
    columns = _columns(list(data.column_names), where, chat)
    with cards.reading(where):
        rows = list(data.select_columns(columns).with_format(None))
    return _tabular(rows, where, chat), own_splits


def _csv(text: str, where: str) -> list[dict[str, Any]]:
    """Read a table; its first row maps the names of the columns to themselves."""
    limit = csv.field_size_limit(max(len(text), 1))  # a document may be longer than the module's 131,072 characters
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as problem:
        raise cards.unreadable(where, problem) from None
    finally:
        csv.field_size_limit(limit)
    wrong = next((n for n, row in enumerate(rows) if row and len(row) != len(rows[0])), None)
    if wrong is not None:
        value = f"{len(rows[wrong])} fields in row {wrong}, {len(rows[0])} columns are named"
        remedy = 'put fields with commas or line breaks between quotes ("), and commas between fields'
        raise InputError("calibration-fields", where, value, "every row has a field for each column", remedy)
    return [dict(zip(rows[0], row, strict=True)) for row in rows if row]


def _parquet(data: bytes, where: str, chat: bool | None, column: str | None) -> Content:
    with MissingDependency.unless_found("pyarrow", extra="data", purpose="a .parquet file"):
        import pyarrow.parquet
    with cards.reading(where):
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        names = list(file.schema_arrow.names)
    columns = _columns(names, where, chat, column)
    rows, size = list[Any](), 0
    with cards.reading(where):
        # in small pieces: a few bytes can stand for any number of rows
        for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
            size += batch.nbytes + _OBJECT * len(batch)
            limits.UNPACKED.demand(size, where)
            rows += batch.to_pylist()
    return _tabular(rows, where, chat, column)


def _wanted(chat: bool | None) -> tuple[str, ...]:
    return (IDS, MESSAGES, TEXT) if chat else (IDS, TEXT, MESSAGES)


def _columns(names: list[str], where: str, chat: bool | None, column: str | None = None) -> list[str]:
    """Choose the columns of a table to read. Raises InputError `calibration-fields`."""
    if column is not None and column in names:
        return [column]
    if column is not None:
        raise _no_column(names, where, column)
    ways: dict[str, list[tuple[str, ...]]] = {MESSAGES: [(MESSAGES,), _SHAREGPT, _ALPACA], IDS: [(IDS,)]}
    for way in (way for wanted in _wanted(chat) for way in ways.get(wanted, [(TEXT,)])):
        if set(way) - {"input", "system"} <= set(names):
            return [name for name in way if name in names]
    value = f"columns {', '.join(map(repr, names)) or 'none'}"
    raise InputError("calibration-fields", where, value, f"a column {_KINDS}", _name_it(where, "column"))


def _no_column(names: Iterable[str], where: str, column: str) -> InputError:
    """Make the error for a column that is not there, with the nearest name."""
    names = list(names)
    near = (difflib.get_close_matches(column, names, n=1) or ["COLUMN"])[0]
    rule, remedy = f"columns: {', '.join(names) or 'none'}", f"write {content.column_of(where)[0]}:{near}"
    return InputError("calibration-fields", where, f"no column {column!r}", rule, remedy)


def _numbers(where: str, column: str, words: Sequence[str]) -> InputError:
    """Make the error for a column of numbers; `words` are the columns of text."""
    file = content.column_of(where)[0]
    remedy = f"write {' or '.join(f'{file}:{name}' for name in words)}" if words else "name a column of text"
    return InputError("calibration-fields", where, f"the column {column!r} holds numbers", "text is read", remedy)


def _is_number(value: Any) -> bool:
    """Tell whether a table's field is a number, or empty."""
    try:
        return value is None or value == "" or float(value) is not None
    except (TypeError, ValueError):
        return False


def _typed(path: str) -> str:
    """Return a path as a reference: a relative one begins with `./`."""
    return path if content.is_path(path) and path[0] in "/.~" else f"./{path}"


def _name_it(where: str, what: str) -> str:
    """Advise to name a key or a column behind the path, where the path is a table's."""
    file = content.column_of(where)[0]
    return (
        f"name the {what} behind the path: {file}:{what.upper()}" if file.endswith(SUFFIXES) else f"rename the {what}"
    )


def _tabular(rows: list[Any], where: str, chat: bool | None, column: str | None = None) -> Content:
    return _records(((f"{where}: row {n}", row) for n, row in enumerate(rows)), where, chat, column)


def _as_prompt(record: dict[str, Any]) -> str | None:
    """Return a record of Alpaca as text, in the form that Alpaca was trained on; None for any other record."""
    asked, answer, context = (record.get(key) for key in _ALPACA[:3])
    if not isinstance(asked, str) or not isinstance(answer, str) or isinstance(record.get(TEXT), str):
        return None
    opening = record.get("system") or _PROMPT[0].format(_PROMPT[1] if context else "")
    parts = [("Instruction", asked), *([("Input", context)] if context else []), ("Response", answer)]
    return "\n\n".join([opening, *(f"### {title}:\n{words}" for title, words in parts)])


def _as_messages(record: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a record of ShareGPT or Alpaca as one with `messages`; any other stays as it is."""
    turns, asked, answer = (record.get(key) for key in (_SHAREGPT[0], *_ALPACA[:2]))
    if turns is None and isinstance(asked, str) and isinstance(answer, str):
        words = "\n\n".join(part for part in (asked, record.get("input")) if part)
        turns = [{"from": "human", "value": words}, {"from": "gpt", "value": answer}]
    if turns is None or record.get(MESSAGES) is not None:
        return record
    if isinstance(turns, list):
        turns = [
            {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]}
            if isinstance(turn, dict) and {"from", "value"} <= turn.keys()
            else turn
            for turn in turns
        ]
        turns = [*([{"role": "system", "content": record["system"]}] if record.get("system") else []), *turns]
    return {**record, MESSAGES: turns}


def _of_column(record: dict[str, Any], column: str) -> Any:
    """Return the contents of the named column, under the name of its kind."""
    value = record[column]
    if not isinstance(value, list):
        return {TEXT: value} if isinstance(value, str) else record
    turns = bool(value) and isinstance(value[0], dict)
    return {_SHAREGPT[0] if turns else IDS: value}


def _records(records: Iterable[tuple[str, Any]], where: str, chat: bool | None, column: str | None = None) -> Content:
    alpaca, read = False, dict[str, list[Any]]()
    places: list[str] = []
    for place, record in records:
        value = {IDS: record} if isinstance(record, list) else record
        if column is not None and isinstance(value, dict):
            if column not in value:
                raise _no_column(value, where, column)
            if isinstance(value[column], int | float):
                raise _numbers(where, column, [name for name, held in value.items() if isinstance(held, str)])
            value = _of_column(value, column)
        if chat is None and isinstance(value, dict) and (prompt := _as_prompt(value)) is not None:
            value, alpaca = {TEXT: prompt}, True
        value = _as_messages(value) if isinstance(value, dict) else value
        kind = next((key for key in _wanted(chat) if _holds(value, key)), None)
        if kind is None:
            kinds = ""
            if isinstance(value, dict):
                kinds = ", ".join(f"{key!r:.40}: {type(item).__name__}" for key, item in list(value.items())[:6])
            value = f"keys {kinds or 'none'}" if isinstance(value, dict) else f"{value!r:.60}"
            rule = f"an object with {_KINDS}" if column is None else f"text, messages or ids under {column!r}"
            raise InputError("calibration-fields", place, value, rule, _name_it(where, "key"))
        read.setdefault(kind, []).append(_READ[kind](value[kind], place))
        places.append(place)
        if len(read) > 1:
            rule = "all lines have `text`, or all have `messages`, or all have `input_ids`"
            remedy = "split them into two files"
            raise InputError("calibration-mixed", place, f"{' and '.join(read)} in one file", rule, remedy)
    if IDS in read:
        return Ids(tuple(read[IDS]), tuple(places))
    if MESSAGES in read:
        # what occurs twice must not end up on both sides of a split
        once: dict[str, tuple[Any, str]] = {}
        for item, place in zip(read[MESSAGES], places, strict=True):
            once.setdefault(json.dumps(item, sort_keys=True, default=str), (item, place))
        return Conversations(*zip(*once.values(), strict=True))
    documents = tuple(dict.fromkeys(text for text in read.get(TEXT, ()) if text.strip()))
    if not documents:
        raise cards.empty(where, "no text and no ids in it")
    return Texts(documents, alpaca=alpaca)


def _holds(record: Any, key: str) -> bool:
    """Tell whether a record has this kind of content; a text may be null beside other columns."""
    if not isinstance(record, dict) or key not in record:
        return False
    return isinstance(record[key], str) if key == TEXT else key == IDS or record[key] is not None


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation without null keys: a table has every key in every row."""
    kept = [
        {key: item for key, item in message.items() if item is not None}
        for message in (value if isinstance(value, list) else [])
        if isinstance(message, dict)
    ]
    wrong = next((message for message in kept if not _is_message(message)), None)
    if not isinstance(value, list) or not value or len(kept) < len(value) or wrong is not None:
        rule = "a conversation is a list of {role, content}, or of {from, value}, both strings"
        remedy = "rename the keys, or leave that conversation out"
        raise InputError("calibration-messages", place, f"{value if wrong is None else wrong!r:.80}", rule, remedy)
    for message in kept:
        for item in message.values():
            if isinstance(item, str):
                _whole(item, place)
    return kept


def _is_message(message: dict[str, Any]) -> bool:
    """Tell whether a message has a role and content; tool calls or a list of parts count as content."""
    words = isinstance(message.get("content"), (str, list)) or "tool_calls" in message
    return isinstance(message.get("role"), str) and words


def _whole(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes
        value = f"half a character, \\u{ord(text[error.start]):04x}, at {error.start}"
        raise cards.not_text(place, value) from None
    return text


def _id_list(value: Any, place: str) -> list[int]:
    # bool is an int to Python, not to the person who wrote `true`
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    wrong = next((item for item in value if type(item) is not int), None) if isinstance(value, list) else value
    rule = "`input_ids` is a flat list of whole numbers"
    raise InputError("calibration-ids", where=place, value=f"{wrong!r:.60}", rule=rule)


_READ: dict[str, Callable[[Any, str], Any]] = {IDS: _id_list, TEXT: _whole, MESSAGES: _messages}


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        rule = "valid JSON; in a .jsonl, one object a line"
        raise InputError("calibration-json", where=place, value=reason, rule=rule) from None
