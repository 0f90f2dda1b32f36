"""A user's own file, which has no card: how it is parted into splits, and what is said where it cannot be.

What calibrates must not score: the last 10 % are kept for `eval`, the 5 % before for `tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantkit import errors
from quantkit.calibrate.sets.card import Split
from quantkit.errors import InputError

# from here on a sample belongs to tune, to eval
_TUNE, _EVAL = 0.85, 0.90


def bounds(split: Split, count: int, place: Callable[[float], int] | None = None) -> tuple[int, int]:
    """The first of a split's samples, and the first behind them.

    Args:
        count: of all samples.
        place: share -> the first sample at or after it; None counts them.
    """
    tune, evaluation = (place(share) if place else int(count * share) for share in (_TUNE, _EVAL))
    return {"calib": (0, tune), "tune": (tune, evaluation), "eval": (evaluation, count)}[split]


def short(where: str, value: str, of: str) -> InputError:
    """Nothing is left for a split; `of`: what the set holds, in the plural."""
    return InputError(
        "calibration-short",
        where=where,
        value=value,
        rule=f"of {of} without splits, the last 10 % are for eval and the 5 % before for tune",
        remedy=f"more {of}, or a folder with a card.yaml that states the splits",
    )


def decoded(data: bytes, where: str, what: str = "text") -> str:
    """UTF-8 as text. Raises InputError `calibration-not-text`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(where, f"byte 0x{data[error.start]:02x} at {error.start} is not UTF-8", what) from None


def not_text(where: str, found: str, what: str = "text") -> InputError:
    """What is no text."""
    return InputError(
        "calibration-not-text", where=where, value=found, rule=f"{what} in UTF-8", remedy="convert the file"
    )


def empty(where: str, value: str, rule: str = "") -> InputError:
    """A file with nothing in it."""
    return InputError("calibration-empty", where=where, value=value, rule=rule, remedy="give another one")


def suffix(where: str, found: str, rule: str) -> InputError:
    """A file of a kind that is not read; `found`: its suffix."""
    value = f"cannot read {found or 'a file without a suffix'}"
    return InputError("calibration-suffix", where=where, value=value, rule=rule, remedy="convert it")


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Whatever a damaged file makes a library raise within it, the user's remedy is one: `unreadable`."""
    with errors.reading(lambda said: unreadable(where, said)):
        yield


def unreadable(where: str, said: Exception | str) -> InputError:
    """What cannot be read, whoever says so."""
    reason = str(said).split("\n", 1)[0][:200] or type(said).__name__
    return InputError("calibration-unreadable", where=where, value=reason, remedy="check the file, or write it anew")
