"""Exceptions that quantkit raises on purpose.

An error has five fields, in the order in which a reader needs them: a stable `code`, `where` it happened, the wrong
`value`, the `rule` that it breaks and the `remedy`. The command line prints them as one line and ends with `exit`;
`--json` prints the same five fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

# what a terminal obeys or cannot show: controls (C0 except the line feed, DEL, C1), bidi marks, lone surrogates
_OBEYED = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# colour codes in a library's messages
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def printable(text: str) -> str:
    r"""Make a stranger's text safe for a terminal: every control character becomes a visible one of one column.

    >>> printable("a\x1b[2Jb\x9b")
    'a␛[2Jb�'
    """
    return _OBEYED.sub(_picture, text)


def in_line(text: str) -> str:
    r"""Make a stranger's text safe and put it on one line, so that no part of it passes for a line of ours.

    >>> in_line("a\n✓ all checks hold")
    'a␊✓ all checks hold'
    """
    return printable(text).replace("\n", "␊")


def _picture(match: re.Match[str]) -> str:
    number = ord(match[0])
    return chr(0x2400 + number) if number < 0x20 else "␡" if number == 0x7F else "�"


def escaped(text: str) -> str:
    """Escape control characters in a JSON text; the document stays equal."""
    return _OBEYED.sub(lambda match: json.dumps(match[0])[1:-1], text)


class QuantkitError(Exception):
    """Base of errors that the user can act on. Exit code 2: wrong use or wrong input.

    Args:
        code: stable name, lower-case, hyphenated; scripts match on it.
        where: file, layer, key or option.
        value: wrong value.
        rule: condition that has to hold.
        remedy: action that helps.
    """

    exit: ClassVar[int] = 2

    def __init__(self, code: str, where: str = "", value: object = "", rule: str = "", remedy: str = "") -> None:
        self.code, self.where, self.rule, self.remedy = code, where, rule, remedy
        self.value = _COLOUR.sub("", str(value))
        super().__init__(self.line())

    def line(self) -> str:
        """Write the whole error on one line: `[code] where: value; rule; remedy`."""
        parts = [part for part in (self.value, self.rule, self.remedy) if part]
        head = f"{self.where}: " if self.where else ""
        return printable(" ".join(f"[{self.code}] {head}{'; '.join(parts)}".split()))

    def as_dict(self) -> dict[str, str]:
        """Return the object `error` of the `--json` output."""
        return {name: getattr(self, name) for name in ("code", "where", "value", "rule", "remedy")}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.as_dict()))


@contextmanager
def reading(refused: Callable[[str], QuantkitError]) -> Iterator[None]:
    """Turn every exception of a library about a damaged file into one error of ours.

    Our own errors and a lack of memory pass. A panic of a Rust library is caught too, although it is no `Exception`.

    Args:
        refused: function that makes the error from the first line of the library's message.
    """
    try:
        yield
    except (QuantkitError, MemoryError, NameError, ImportError, AssertionError):
        raise  # the last three are our own mistakes
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        raise refused((lines[0] if lines else type(problem).__name__)[:200]) from None


class Rebuilt(UserWarning):
    """Warning that a cached file was damaged and is made again."""


def _rebuild(kind: type[QuantkitError], fields: dict[str, str]) -> QuantkitError:
    return kind(**fields)


class InputError(QuantkitError):
    """Error for a file, model, recipe or option that is not valid. Exit code 2."""


class GateError(QuantkitError):
    """Error for a result that fails a gate, a check, a comparison or `--strict`. Exit code 1."""

    exit: ClassVar[int] = 1


class Inconclusive(QuantkitError):
    """Error for a measurement that is too noisy to decide. Exit code 3."""

    exit: ClassVar[int] = 3


class Stopped(QuantkitError):
    """Error for a safe stop (signal, full disk); finished steps are kept, and `--resume` continues. Exit code 75."""

    exit: ClassVar[int] = 75


class Told(QuantkitError):
    """End of a process whose result or error another one tells: nothing is printed.

    Args:
        code: exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__("told")
        self.exit = code  # type: ignore[misc]


class MissingDependency(QuantkitError):
    """Error for an optional package that is not installed. Exit code 2.

    Args:
        package: name to import.
        extra: extra of quantkit that installs it; None if it is installed by its own name.
        purpose: feature that needs it.
    """

    def __init__(self, package: str, *, extra: str | None, purpose: str) -> None:
        self._asked = {"package": package, "extra": extra, "purpose": purpose}
        super().__init__(
            "missing-dependency",
            where=package,
            value=f"{package} is not installed",
            rule=f"{purpose} needs it",
            remedy=install(extra) if extra else f"pip install {package}",
        )

    @classmethod
    @contextmanager
    def unless_found(cls, package: str, *, extra: str | None, purpose: str) -> Iterator[None]:
        """Raise this error for a failed import in the body."""
        try:
            yield
        except ImportError:
            raise cls(package, extra=extra, purpose=purpose) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_missing, (self._asked,))


def install(extra: str) -> str:
    """Write the command to install an extra of quantkit from its clone; PyPI has no quantkit."""
    return f"in the clone of quantkit: pip install -e '.[{extra}]'"


def _rebuild_missing(fields: dict[str, Any]) -> MissingDependency:
    return MissingDependency(**fields)


def one(kind: str) -> str:
    """Put the article before a kind or a type: `a decoder`, `an encoder`, `an int`."""
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Write the remedy for a misspelt name: the closest known name, then all of them, or the 8 nearest of over 40.

    >>> did_you_mean("awq-int5", ["awq-int4", "float"])
    "did you mean 'awq-int4'? known: awq-int4, float"
    """
    import difflib

    names = sorted(known)
    # one of two letters may be wrong; for longer names, 0.5 would suggest `cpu-arm` for `cuda`
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6 if len(word) > 2 else 0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    if (others := len(names) - 8) > 32:  # a folder's files, a graph's products
        names = [*difflib.get_close_matches(word, names, n=8, cutoff=0.0), f"and {others} more"]
    return f"{guess}known: {', '.join(names) or 'none'}"


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "", more: str = "") -> InputError:
    """Make the error for an unknown name.

    Args:
        more: further help, shown after the known names.
    """
    return InputError(
        f"unknown-{kind}",
        where=where,
        value=f"no {kind} is called {name!r}",
        remedy="; ".join(part for part in (did_you_mean(name, known), more) if part),
    )


def absent(where: object, remedy: str = "check the path") -> InputError:
    """Make the error `file-missing`, for a file or a folder."""
    return InputError("file-missing", where=str(where), value="no such file or folder", remedy=remedy)


class Inside(ValueError):
    """Error for a value inside a field that pydantic takes as a whole.

    Args:
        place: keys that lead to the value, from the field; of a document's root, from its top.
        value: value that is refused; a mapping is not shown, as its rule names what it is about.
    """

    def __init__(self, rule: str, place: tuple[str, ...], value: Any) -> None:
        super().__init__(rule)
        self.place, self.value = place, value


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.120}"
    except (ValueError, RecursionError):  # Python prints integers of up to 4,300 digits
        return f"{one(type(value).__name__)} that is too large to show"


def from_validation(
    error: Any, *, where: str, code: str, known: Mapping[str, Iterable[str]] | None = None
) -> InputError:
    """Turn a pydantic ValidationError into one line: the first problem, and the number of others.

    Args:
        known: dotted location (without list indices) -> keys allowed there, for a did-you-mean.
    """
    problems = error.errors()
    # report a misspelt key before the key that is missing because of it
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    parts, value = [str(part) for part in first["loc"]], first.get("input")
    within = first.get("ctx", {}).get("error")
    if isinstance(within, Inside):
        parts, value = [*parts, *within.place], within.value
    place = ".".join(parts)
    remedy = ""
    if first["type"] == "extra_forbidden":
        got, parent = "unknown key", ".".join(part for part in parts[:-1] if not part.isdigit())
        remedy = did_you_mean(parts[-1], known[parent]) if known is not None and parent in known else ""
    else:
        # the input of a rule about the whole document is the document, too long for one line
        whole = isinstance(within, Inside) and isinstance(value, dict)
        got = f"got {_shown(value)}" if place and first["type"] != "missing" and not whole else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    rule = first["msg"].removeprefix("Value error, ")
    where = f"{where}: {place}" if place else where
    return InputError(code, where=where, value=got, rule=f"{rule}{more}", remedy=remedy)
