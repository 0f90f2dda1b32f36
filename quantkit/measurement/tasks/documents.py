"""Items of tasks from files of JSON lines: those of a task of one's own, and those of lm-eval's tasks.

A line of one's own is one of three:

    {"question": "The sky is", "choices": ["blue", "green"], "answer": 0}     the answer also as text or as a letter
    {"prompt": "2 + 2 =", "expected": "4"}                                    the text up to the end of its line
    {"prompt": "Tell me about the sea."}                                      no right answer: texts side by side

A file for a task of lm-eval, `NAME.jsonl` in a folder, holds the fields of its definition, as the hub's data set does,
or a question with choices and an answer (`_FIELDS`). Examples in the prompt come from `NAME-train.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError, absent

Line = dict[str, Any]
SUFFIX = ".jsonl"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lines(path: Path) -> list[Line]:
    """Read a file of JSON objects, one a line. Raises InputError: `file-missing`, `task-data-invalid`."""
    try:
        text = limits.read(path, limits.DATA).decode("utf-8")
    except FileNotFoundError:
        raise absent(path) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError("task-data-invalid", str(path), problem, "a task is a file of JSON lines, UTF-8") from None
    items: list[Line] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise _invalid(path, number, str(problem)) from None
        if not isinstance(item, dict):
            raise _invalid(path, number, f"got {type(item).__name__}")
        items.append(item)
    if not items:
        raise InputError("task-data-invalid", str(path), "no item", "a task has at least one item")
    return items


def _invalid(path: Path, number: int, value: str, rule: str = "every line is one JSON object") -> InputError:
    return InputError("task-data-invalid", f"{path}:{number}", value, rule, "correct the line, or remove it")


def right(item: Line, where: tuple[Path, int]) -> int:
    """Return the number of the right choice. Raises InputError `task-data-invalid`."""
    choices, answer = item.get("choices"), item.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise _invalid(*where, f"choices {str(choices)[:60]}", "`choices` is a list of two texts or more")
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer in _LETTERS:
        answer = _LETTERS.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    rule = f"`answer` is one of the choices, its letter, or its number from 0 to {len(choices) - 1}"
    raise _invalid(*where, f"answer {str(answer)[:60]!r}", rule)


def own(path: Path) -> tuple[str, list[Line]]:
    """Read a task of one's own: its kind (`choices`, `expected` or `open`) and its items.

    Raises InputError: those of `lines`; `task-data-invalid` for a line of none of the three, or of another than the
    first one's.
    """
    items, kinds = lines(path), dict[str, int]()
    for number, item in enumerate(items, start=1):
        asked = {name: item.get(name) for name in ("question", "prompt") if isinstance(item.get(name), str)}
        kind = "choices" if "question" in asked and "choices" in item else "expected" if "expected" in item else "open"
        if not any(asked.values()) or (kind != "choices") != ("prompt" in asked):
            rule = "a line has `question`, `choices` and `answer`; or `prompt`, with `expected` or alone"
            raise _invalid(path, number, f"got {', '.join(item) or 'nothing'}", rule)
        if kind == "choices":
            item["answer"] = right(item, (path, number))
        elif kind == "expected" and not (isinstance(item["expected"], str) and item["expected"]):
            raise _invalid(path, number, f"expected {item['expected']!r}", "`expected` is a text")
        kinds.setdefault(kind, number)
    if len(kinds) > 1:
        value = " and ".join(f"{kind} (line {number})" for kind, number in kinds.items())
        raise InputError("task-data-invalid", str(path), value, "the items of a file are of one kind", "split the file")
    return next(iter(kinds)), items


# task of lm-eval -> the fields of its definition, from a question with choices and the number of the right one
_FIELDS: Mapping[str, Callable[[Line, int], Line]] = {
    "piqa": lambda item, n: {
        "goal": item.get("goal") or item["question"],
        "sol1": item["choices"][0],
        "sol2": item["choices"][1],
        "label": n,
    },
    "hellaswag": lambda item, n: {"query": _hellaswag(item["question"]), "choices": item["choices"], "label": n},
    **dict.fromkeys(
        ("arc_easy", "arc_challenge"),
        lambda item, n: {"question": item["question"], "choices": _lettered(item), "answerKey": _LETTERS[n]},
    ),
    "openbookqa": lambda item, n: {
        "question_stem": item["question"],
        "choices": _lettered(item),
        "answerKey": _LETTERS[n],
    },
    "winogrande": lambda item, n: {
        "sentence": item.get("sentence") or item["question"],
        "option1": item["choices"][0],
        "option2": item["choices"][1],
        "answer": str(n + 1),
    },
}
# the changes of a definition for these fields, and what they lack of it
_CHANGED: Mapping[str, tuple[Line, str]] = {"hellaswag": ({"process_docs": None}, "prompt-without-activity-label")}


def _lettered(item: Line) -> Line:
    return {"text": item["choices"], "label": list(_LETTERS[: len(item["choices"])])}


def _hellaswag(question: str) -> str:
    """Write the last, unfinished sentence with a capital, as lm-eval does."""
    before, stop, last = question.strip().rpartition(". ")
    return f"{before}{stop}{last[:1].upper()}{last[1:]}"


def fielded(task: str, path: Path) -> tuple[list[Line], Line, list[str]]:
    """Read the items for a task of lm-eval; with the changes of its definition, and flags for its rows.

    Raises InputError: those of `lines` and `right`.
    """
    items = lines(path)
    mapped = _FIELDS.get(task)
    if mapped is None or not all("choices" in item and "answer" in item for item in items):
        return items, {}, []
    try:
        rows = [mapped(item, right(item, (path, number))) for number, item in enumerate(items, start=1)]
    except KeyError as problem:
        raise InputError("task-data-invalid", str(path), f"no {problem}", f"{task} asks something") from None
    changes, flag = _CHANGED.get(task, ({}, ""))
    return rows, dict(changes), [flag] if flag else []


def digest(items: Sequence[Line]) -> str:
    """Hash items."""
    import hashlib

    text = json.dumps(items, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
