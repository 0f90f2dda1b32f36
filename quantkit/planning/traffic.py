"""Traffic: lengths of prompts and outputs, rate of requests, batches.

A lognormal length with mean m and coefficient of variation v has σ² = ln(1 + v²) and median m exp(−σ²/2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError

# defaults, shown as assumed: prompts are usually several times as long as answers
PROMPT, OUTPUT = 1024, 256
_LARGEST_STEP = 256
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class RequestKind:
    """Requests of one kind.

    Args:
        prompt: mean tokens of a prompt.
        output: mean tokens of an output.
        share: share of all requests.
        variation: coefficient of variation of both lengths, lognormal; 0 for equal lengths.
    """

    prompt: int
    output: int
    share: float = 1.0
    variation: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """All requests.

    Args:
        kinds: kinds of requests; their shares add up to 1.
        rate: requests a second; None if not given.
        assumed: assumptions, in words.
    """

    kinds: Sequence[RequestKind]
    rate: float | None = None
    assumed: Sequence[str] = ()

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(kind.share * kind.prompt for kind in self.kinds)

    @property
    def output(self) -> float:
        """Mean tokens of an output."""
        return sum(kind.share * kind.output for kind in self.kinds)

    @property
    def longest(self) -> int:
        """Tokens of the longest request; for lognormal lengths the 99.9th percentile, 3.09 deviations."""
        lengths = []
        for kind in self.kinds:
            sigma = math.sqrt(math.log1p(kind.variation**2))
            lengths.append((kind.prompt + kind.output) * math.exp(sigma * 3.09 - sigma**2 / 2))
        return math.ceil(max(lengths))

    def draw(
        self, count: int, generator: np.random.Generator, limit: int | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Draw the lengths of requests.

        Args:
            limit: most tokens of prompt and output together: the model's longest context. A longer prompt is cut to one
                less, then the output to the rest, as servers do.

        Returns:
            Prompts [count], outputs [count], each from 1 up, and the number of requests that were cut.
        """
        which = generator.choice(len(self.kinds), size=count, p=[kind.share for kind in self.kinds])
        normal = generator.standard_normal((2, count))
        sigma = np.sqrt(np.log1p(np.array([kind.variation for kind in self.kinds])[which] ** 2))
        lengths = []
        for row, length in zip(normal, ("prompt", "output"), strict=True):
            means = np.array([getattr(kind, length) for kind in self.kinds], dtype=float)[which]
            lengths.append(np.maximum(1, np.rint(means * np.exp(sigma * row - sigma**2 / 2))).astype(np.int64))
        prompts, outputs = lengths
        if limit is None:
            return prompts, outputs, 0
        cut = int(np.sum(prompts + outputs > limit))
        prompts = np.minimum(prompts, max(1, limit - 1))
        return prompts, np.minimum(outputs, np.maximum(1, limit - prompts)), cut

    def line(self) -> str:
        """Describe it: `prompts of 1,024 and outputs of 256 tokens, assumed`."""
        shown = "; ".join(
            f"{f'{kind.share:.0%}: ' if len(self.kinds) > 1 else ''}prompts of {kind.prompt:,} and outputs of "
            f"{kind.output:,} tokens{f', lognormal with variation {kind.variation:g}' if kind.variation else ''}"
            for kind in self.kinds
        )
        rate = f", {self.rate:g} requests/s" if self.rate is not None else ""
        return f"{shown}{rate}{' (assumed: ' + ', '.join(self.assumed) + ')' if self.assumed else ''}"


def traffic(
    *,
    prompt: int | None = None,
    output: int | None = None,
    mix: str | None = None,
    variation: float = 0.0,
    rate: float | None = None,
) -> Traffic:
    """Read `--prompt`, `--output`, `--requests`, `--variation` and `--rate`; list the defaults that were assumed.

    Raises:
        InputError: `traffic-invalid`.
    """
    if mix is not None and (prompt is not None or output is not None):
        raise _invalid("--requests", "and --prompt or --output", "only one of them gives the lengths")
    for name, value in (("--prompt", prompt), ("--output", output)):
        if value is not None and value < 1:
            raise _invalid(name, value, "tokens, from 1 up")
    if rate is not None and not 0 < rate < math.inf:
        raise _invalid("--rate", rate, "requests a second, above 0")
    if not 0 <= variation <= 10:
        rule = "a standard deviation as a share of the mean: 0 for fixed lengths, about 1 for chats, at most 10"
        raise _invalid("--variation", variation, rule)
    if mix is not None:
        return Traffic(kinds_of(mix, variation), rate)
    assumed = [
        f"{name} of {default:,} tokens"
        for name, value, default in (("prompts", prompt, PROMPT), ("outputs", output, OUTPUT))
        if value is None
    ]
    return Traffic([RequestKind(prompt or PROMPT, output or OUTPUT, 1.0, variation)], rate, assumed)


def of_products(batches: Iterable[int]) -> dict[int, float]:
    """Return M -> weight of a linear's product with M rows, for requests of the default lengths.

    Batches up to 256 are those of decode steps, all as frequent. Behind every `OUTPUT` steps with M sequences come M
    prompts: products of `PROMPT` rows. Where so many were not measured, they count as several of the largest batch.

    Args:
        batches: measured values of M.
    """
    known = sorted(set(batches))
    steps = [batch for batch in known if batch <= _LARGEST_STEP] or known[:1]
    prompt = next((batch for batch in known if batch >= PROMPT), known[-1])
    weights = dict.fromkeys(steps, 1.0)
    weights[prompt] = weights.get(prompt, 0.0) + sum(steps) / OUTPUT * max(PROMPT / prompt, 1.0)
    return weights


def kinds_of(text: str, variation: float = 0.0) -> list[RequestKind]:
    """Read `--requests`: `2000x300:0.7,8000x500:0.3`, prompt, output and share of the requests.

    Raises:
        InputError: `traffic-invalid`.
    """

    def lengths(key: str) -> tuple[int, int] | None:
        prompt, _, output = key.lower().partition("x")
        good = prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)
        return (int(prompt), int(output)) if good else None

    form = "PROMPTxOUTPUT:share, once each: 2000x300:0.7,8000x500:0.3"
    shares = _shares(text, "--requests", form, "shares of the requests", lengths)
    total = sum(shares.values())
    return [RequestKind(*both, share / total, variation) for both, share in shares.items() if share]


def traffic_of(text: str) -> dict[int, float]:
    """Read `--traffic`: `1:0.7,8:0.2,64:0.1`, batch and share of the steps.

    Raises:
        InputError: `traffic-invalid`, also if shares do not add up to 1.
    """

    def batch(key: str) -> int | None:
        return int(key) if key.isdecimal() and int(key) else None

    form = "batch:share for each batch, once each: 1:0.7,8:0.2,64:0.1"
    return _shares(text, "--traffic", form, "shares of the steps", batch)


def _shares(text: str, where: str, form: str, what: str, read: Callable[[str], _Key | None]) -> dict[_Key, float]:
    """Read `key:share,…`: each key once, shares from 0 up with a sum of 1."""
    shares: dict[_Key, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().rpartition(":")
        key = read(name)
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if key is None or key in shares or not 0 <= share < math.inf:
            raise _invalid(where, text, form)
        shares[key] = share
    total = sum(shares.values())
    if abs(total - 1) >= 0.005:
        names = ["x".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in shares]
        named = zip(names, shares.values(), strict=True)
        scaled = ",".join(f"{name}:{share / total:.3g}" for name, share in named) if total else ""
        remedy = f"if you mean their proportions: {where} {scaled}" if scaled else ""
        raise _invalid(where, f"shares add up to {total:g}", f"{what} add up to 1", remedy)
    return shares


def _invalid(where: str, value: object, rule: str, remedy: str = "") -> InputError:
    return InputError("traffic-invalid", where=where, value=value, rule=rule, remedy=remedy)
