"""What users ask of a model: how long prompts and outputs are, how many requests come, which batches occur.

A lognormal length with mean m and coefficient of variation v has σ² = ln(1 + v²) and median m exp(−σ²/2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError

# taken where nothing is said, and shown as such: prompts are usually several times as long as what is answered
PROMPT, OUTPUT = 1024, 256


@dataclass(frozen=True)
class RequestKind:
    """Requests that are alike.

    Args:
        prompt: tokens on average.
        output: tokens on average.
        share: of all requests.
        variation: coefficient of variation of both lengths, lognormal; 0: each is as long as the average.
    """

    prompt: int
    output: int
    share: float = 1.0
    variation: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """All requests.

    Args:
        kinds: whose shares add up to 1.
        rate: requests a second; None where nobody said.
        assumed: what was taken because nobody said, in words.
    """

    kinds: Sequence[RequestKind]
    rate: float | None = None
    assumed: Sequence[str] = ()

    @property
    def prompt(self) -> float:
        """Tokens of a prompt on average."""
        return sum(kind.share * kind.prompt for kind in self.kinds)

    @property
    def output(self) -> float:
        """Tokens of an output on average."""
        return sum(kind.share * kind.output for kind in self.kinds)

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request, but for one in a thousand of lognormal lengths."""
        reach = max(
            (kind.prompt + kind.output) * (_at(kind.variation, 3.09) if kind.variation else 1.0) for kind in self.kinds
        )
        return math.ceil(reach)

    def draw(
        self, count: int, generator: np.random.Generator, limit: int | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Lengths of some requests.

        Args:
            limit: tokens that prompt and output together may have: the model's longest context. A longer prompt is cut
                to it less one, then the output to what is left, as servers do.

        Returns:
            Prompts [count], outputs [count], each from 1 up, and how many requests were cut.
        """
        which = generator.choice(len(self.kinds), size=count, p=[kind.share for kind in self.kinds])
        normal = generator.standard_normal((2, count))
        lengths = []
        for row, mean in zip(normal, ("prompt", "output"), strict=True):
            means = np.array([getattr(kind, mean) for kind in self.kinds], dtype=float)[which]
            sigma = np.sqrt(np.log1p(np.array([kind.variation for kind in self.kinds])[which] ** 2))
            drawn = means * np.exp(sigma * row - sigma**2 / 2)
            lengths.append(np.maximum(1, np.rint(drawn)).astype(np.int64))
        prompts, outputs = lengths
        if limit is None:
            return prompts, outputs, 0
        cut = int(np.sum(prompts + outputs > limit))
        prompts = np.minimum(prompts, max(1, limit - 1))
        return prompts, np.minimum(outputs, np.maximum(1, limit - prompts)), cut

    def line(self) -> str:
        """`prompts of 1,024 and outputs of 256 tokens, assumed`."""
        shown = "; ".join(
            f"{f'{kind.share:.0%}: ' if len(self.kinds) > 1 else ''}prompts of {kind.prompt:,} and outputs of "
            f"{kind.output:,} tokens{f', lognormal with variation {kind.variation:g}' if kind.variation else ''}"
            for kind in self.kinds
        )
        rate = f", {self.rate:g} requests/s" if self.rate is not None else ""
        return f"{shown}{rate}{' (assumed: ' + ', '.join(self.assumed) + ')' if self.assumed else ''}"


def _at(variation: float, normal: float) -> float:
    """A lognormal of mean 1 at so many standard deviations."""
    sigma = math.sqrt(math.log1p(variation**2))
    return math.exp(sigma * normal - sigma**2 / 2)


def traffic(
    *,
    prompt: int | None = None,
    output: int | None = None,
    mix: str | None = None,
    variation: float = 0.0,
    rate: float | None = None,
) -> Traffic:
    """What `--prompt`, `--output`, `--requests`, `--variation` and `--rate` say; the rest is assumed, and listed.

    Raises:
        InputError: `traffic-invalid`.
    """
    if mix is not None and (prompt is not None or output is not None):
        raise InputError(
            "traffic-invalid", where="--requests", value="and --prompt or --output", rule="one of them says the lengths"
        )
    for name, value in (("--prompt", prompt), ("--output", output)):
        if value is not None and value < 1:
            raise InputError("traffic-invalid", where=name, value=value, rule="tokens, from 1 up")
    if rate is not None and not 0 < rate < math.inf:
        raise InputError("traffic-invalid", where="--rate", value=rate, rule="requests a second, above 0")
    if not 0 <= variation <= 10:
        rule = "a standard deviation as a share of the mean: 0 for fixed lengths, about 1 for chats, at most 10"
        raise InputError("traffic-invalid", where="--variation", value=variation, rule=rule)
    if mix is not None:
        return Traffic(kinds_of(mix, variation), rate)
    assumed = [
        f"{name} of {default:,} tokens"
        for name, value, default in (("prompts", prompt, PROMPT), ("outputs", output, OUTPUT))
        if value is None
    ]
    return Traffic([RequestKind(prompt or PROMPT, output or OUTPUT, 1.0, variation)], rate, assumed)


def kinds_of(text: str, variation: float = 0.0) -> list[RequestKind]:
    """What `--requests` says: `2000x300:0.7,8000x500:0.3`, prompt, output and share of the requests.

    Raises:
        InputError: `traffic-invalid`.
    """
    form = "PROMPTxOUTPUT:share, once each: 2000x300:0.7,8000x500:0.3"
    found: dict[tuple[int, int], float] = {}
    for key, share in _shares(text, "--requests", form):
        prompt, _, output = key.lower().partition("x")
        if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
            raise InputError("traffic-invalid", where="--requests", value=text, rule=form)
        lengths = int(prompt), int(output)
        if lengths in found:
            raise InputError("traffic-invalid", where="--requests", value=text, rule=form)
        found[lengths] = share
    _add_up(found.values(), "--requests", "shares of the requests", [f"{p}x{o}" for p, o in found])
    total = sum(found.values())
    return [RequestKind(prompt, output, share / total, variation) for (prompt, output), share in found.items() if share]


def traffic_of(text: str) -> dict[int, float]:
    """What `--traffic` says: `1:0.7,8:0.2,64:0.1`, batch and share of the steps.

    Raises:
        InputError: `traffic-invalid`; shares that do not add up to 1 are not guessed at.
    """
    form = "batch:share for each batch, once each: 1:0.7,8:0.2,64:0.1"
    found: dict[int, float] = {}
    for key, share in _shares(text, "--traffic", form):
        if not (key.isdecimal() and int(key) > 0) or int(key) in found:
            raise InputError("traffic-invalid", where="--traffic", value=text, rule=form)
        found[int(key)] = share
    _add_up(found.values(), "--traffic", "shares of the steps", [str(batch) for batch in found])
    return found


def _shares(text: str, where: str, form: str) -> list[tuple[str, float]]:
    """`key:share,…` as pairs, every share a number from 0 up."""
    pairs = []
    for part in text.split(","):
        key, _, share = part.strip().rpartition(":")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not (key and 0 <= value < math.inf):
            raise InputError("traffic-invalid", where=where, value=text, rule=form)
        pairs.append((key, value))
    return pairs


def _add_up(shares: Any, where: str, what: str, keys: Sequence[str]) -> None:
    shares = list(shares)
    total = sum(shares)
    if abs(total - 1) < 0.005:
        return
    scaled = ",".join(f"{key}:{share / total:.3g}" for key, share in zip(keys, shares, strict=True)) if total else ""
    raise InputError(
        "traffic-invalid",
        where=where,
        value=f"shares add up to {total:g}",
        rule=f"{what} add up to 1",
        remedy=f"if you mean their proportions: {where} {scaled}" if scaled else "",
    )
