"""Numbers in readable form: sizes, times, counts, shares. Units are decimal, digits no more than are significant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Interval = tuple[float, float]
Form = Callable[[float], str]
T = TypeVar("T")

_SIZES = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Format bytes in decimal units.

    >>> size(538_090_408)
    '538 MB'
    >>> size(4_200_000_000)
    '4.20 GB'
    """
    power = 0
    while abs(count) >= 999.5 and power < len(_SIZES) - 1:
        count, power = count / 1000, power + 1
    return f"{figure(count, 3)} {_SIZES[power]}"


def rate(value: float, unit: str) -> str:
    """Format a rate or a size with its unit: `rate(3e11, "B/s")` is `300 GB/s`."""
    if unit == "B":
        return size(value)
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{figure(value / factor, 3)} {prefix}{unit}"
    return f"{figure(value, 3)} {unit}"


def duration(seconds: float) -> str:
    """Format a time in natural units.

    >>> duration(0.42), duration(41), duration(72), duration(4_000)
    ('0.4 s', '41 s', '1 min 12 s', '1 h 07 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02} min"


def about(seconds: float) -> str:
    """Format an estimated time, rounded.

    >>> about(3), about(6), about(43), about(100), about(700)
    ('a few seconds', 'about 5 s', 'about 45 s', 'about 1 min 40 s', 'about 12 min')
    """
    if seconds < 5:
        return "a few seconds"
    step = 5 if seconds < 60 else 10 if seconds < 300 else 60
    return f"about {duration(max(step, round(seconds / step) * step)).replace('5.0', '5')}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return (factor, unit) for reading a time.

    >>> time_unit(0.0113)
    (1000.0, 'ms')
    """
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def moment(seconds: float) -> str:
    """Format a short time with a non-breaking space: `moment(0.0113)` is `11.3 ms`."""
    factor, unit = time_unit(abs(seconds))
    return f"{figure(seconds * factor, 3)}\u00a0{unit}"


def figure(value: float, digits: int = 4) -> str:
    """Format a number with significant digits, without an exponent if readable.

    >>> figure(4.3125, 5), figure(16.9234), figure(0.000003)
    ('4.3125', '16.92', '3e-06')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-4 or abs(value) >= 1e15:
        return f"{value:.{max(digits - 2, 0)}g}"
    # rounding may add a digit: 9.9996 becomes 10.00
    power = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(digits - 1 - power, 0)}f}"


def percent(share: float, places: int = 1) -> str:
    """Format a share: `percent(0.8214)` is `82.1 %`."""
    return f"{100 * share:.{places}f} %"


def share(value: float) -> str:
    """Format a share with two significant digits, however small: `share(0.0000654)` is `0.0065 %`."""
    return f"{figure(100 * value, 2)} %"


def points(difference: float, places: int = 1) -> str:
    """Format a difference of shares in percentage points, with its sign.

    >>> points(-0.0021), points(0.0004, 2), points(-0.0001)
    ('−0.2', '+0.04', '0.0')
    """
    return signed(100 * difference, places)


def signed(number: float, places: int) -> str:
    """Format `signed(-0.5, 1)` as `−0.5`; zero after rounding has no sign."""
    text = f"{number:+,.{places}f}"
    return text.lstrip("+-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def chance(p: float) -> str:
    """Format a p-value with useful digits.

    >>> chance(0.2968), chance(0.0312), chance(0.00002)
    ('0.30', '0.031', 'below 0.001')
    """
    return "below 0.001" if p < 0.001 else f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def visible(text: str) -> str:
    """Make model text visible and harmless: escape unprintable characters, show spaces at the ends as dots.

    >>> visible(" the\\n"), visible("\\x1b[2J")
    ('·the⏎', '\\\\x1b[2J')
    """
    text = text.replace("\n", "⏎").replace("\t", " ")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "·" * left + inner + "·" * (len(text) - left - len(inner)) if inner else "·" * len(text)


def plural(count: int, word: str) -> str:
    """Format a count: `plural(1, "layer")` is `1 layer`, `plural(210, "layer")` is `210 layers`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def article(noun: str) -> str:
    """Prefix the article: `article("encoder")` is `an encoder`."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def times(ratio: float) -> str:
    """Format a ratio: `times(2.66)` is `2.66×`."""
    return f"{figure(ratio, 3)}×"


def between(interval: Interval | None, form: Form) -> str:
    """Format `2.6× to 2.7×`; "" without an interval."""
    return f"{form(interval[0])} to {form(interval[1])}" if interval else ""


def sentence(text: str) -> str:
    """Capitalize the first letter only: `sentence("ship it")` is `Ship it`."""
    return text[:1].upper() + text[1:]


def listed(values: Sequence[int | str]) -> str:
    """Join values: `listed([1, 2, 1024])` is `1, 2 and 1,024`."""
    texts = [value if isinstance(value, str) else f"{value:,}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def plain(value: float) -> str:
    """Format an axis label: `plain(1024.0)` is `1,024`."""
    return f"{value:,g}"


def short(value: float) -> str:
    """Round to three significant digits."""
    return figure(value, 3)


def ratio(value: float) -> str:
    """Format an axis label: `ratio(2.0)` is `2×`."""
    return f"{value:g}×"


def thousands(value: float) -> str:
    """Format an axis label: `thousands(20_000)` is `20k`."""
    return f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"


def whole(share: float) -> str:
    """Format a share without decimals: `whole(0.82)` is `82 %`."""
    return percent(share, 0)


def whole_tick(share: float) -> str:
    """Format an axis label: `whole_tick(0.825)` is `82.5 %`."""
    return f"{100 * share:g} %"


def joined(*parts: str, by: str = ", ") -> str:
    """Join the non-empty parts."""
    return by.join(part for part in parts if part)


def bracketed(text: str) -> str:
    """Format ` (text)`; "" for an empty text."""
    return f" ({text})" if text else ""


def or_dash(value: object, form: Form) -> str:
    """Format a number with `form`; a dash for None or NaN."""
    return form(float(value)) if isinstance(value, int | float) else "–"


def by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Group items by a key, in the order of their first appearance."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
