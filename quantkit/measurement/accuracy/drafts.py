"""Acceptance of a draft model's tokens by a target model, and the gain of speculative decoding.

A draft proposes k tokens one after the other; the target reads them in one pass and keeps the first ones that it
accepts, then adds a token of its own. The output is the target's, exactly. At one position, with p the target's
probabilities [V] and q the draft's:

    greedy      accepted if argmax q = argmax p
    sampling    accepted with probability  a = Σ min(p, q) = 1 − ½ Σ |p − q|

With the mean acceptance a, taken as independent of the position, a pass yields

    E(k) = (1 − a^(k+1)) / (1 − a)       tokens, 1 to k + 1
    gain = E(k) t / (k d + v)            t, d: step of the target, of the draft; v: the target's pass of k + 1 tokens

v = t gives theorem 3.8 of the source. Positions are those of a text that both models read, each with all the text
before it. Text that the target writes itself is easier to guess, so a real acceptance is often higher. Prompts are the
independent draws of the intervals. Source: Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative
Decoding (2023), arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import Estimate, clustered_mean, clusters_of
from quantkit.stats.shares import clustered_share

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.runtimes.generate import Scores

Array = NDArray[Any]
Interval = tuple[float, float]
WAYS = ("greedy", "sampling")


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by position.

    Args:
        sequence: [n] index of the prompt.
        greedy: [n] True if both have the same most likely token.
        sampling: [n] sum of the smaller probabilities.
    """

    sequence: Array
    greedy: Array
    sampling: Array

    def mean(self, way: str) -> Estimate:
        """Average over all positions, with an interval over prompts, within 0 and 1."""
        values, clusters = getattr(self, way), clusters_of(self.sequence)[0]
        mean = clustered_mean(values, clusters)
        if mean.ci95 is None:
            return mean
        held = clustered_share(values, clusters) if way == "greedy" else mean.ci95
        return Estimate(mean.value, mean.standard_error, _within(held), mean.clusters, mean.n)

    def by_prompt(self, way: str) -> list[float]:
        """Average over the positions of each prompt."""
        counts = np.bincount(self.sequence)
        return [float(mean) for mean in np.bincount(self.sequence, weights=getattr(self, way)) / counts]


def accepted(target: Tensor, draft: Tensor) -> tuple[Array, Array]:
    """Return greedy and sampling acceptance [P] from logits [P, V] and [P, W]; a missing token has probability 0."""
    import torch

    with torch.inference_mode():
        width = min(target.shape[-1], draft.shape[-1])
        p, q = (logits.float().softmax(dim=-1) for logits in (target, draft))
        greedy = target.argmax(dim=-1) == draft.argmax(dim=-1)
        sampling = torch.minimum(p[:, :width], q[:, :width]).sum(dim=-1, dtype=torch.float64)
        return greedy.cpu().numpy(), sampling.clamp(max=1.0).cpu().numpy()


def acceptance(
    target: Scores, draft: Scores, ids: Tensor, few: int, progress: Callable[[float], None] | None = None
) -> Acceptance:
    """Read two models' logits at ids [n, T], `few` positions at a time; every position but the last counts."""
    parts: list[tuple[Array, Array, Array]] = []
    for index, row in enumerate(ids):
        for start in range(0, len(row) - 1, few):
            part = slice(start, min(start + few, len(row) - 1))
            greedy, sampling = accepted(target(index, part), draft(index, part))
            parts.append((np.full(len(greedy), index), greedy, sampling))
        if progress is not None:
            progress((index + 1) / len(ids))
    return Acceptance(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def expected_tokens(a: float, k: int) -> float:
    """Return E(k), the tokens of a pass with k drafted ones: `expected_tokens(0.5, 1)` is 1.5."""
    return float(k + 1) if a >= 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of a step.

    Args:
        draft: step of the draft.
        step: step of the target.
        passes: number of tokens -> the target's pass over so many.
        source: `measured`, `forecast`, or `bound` if a time has no forecast.
        about: runtime, device and shape, for the reader.
    """

    draft: float
    step: float
    passes: Mapping[int, float]
    source: str
    about: str


@dataclass(frozen=True)
class Gain:
    """Expected gain with k drafted tokens; `ci95` is that of the acceptance, at these times."""

    k: int
    way: str
    tokens: float
    gain: float
    ci95: Interval | None


def gains(seen: Acceptance, times: DraftTimes, most: int) -> list[Gain]:
    """Return the gain for 1 to `most` drafted tokens, both ways of decoding."""
    listed = []
    for way in WAYS:
        mean = seen.mean(way)
        for k in range(1, most + 1):
            seconds = k * times.draft + times.passes[k + 1]

            def gain(a: float, k: int = k, seconds: float = seconds) -> float:
                return expected_tokens(a, k) * times.step / seconds

            ends = None if mean.ci95 is None else (gain(mean.ci95[0]), gain(mean.ci95[1]))
            listed.append(Gain(k, way, expected_tokens(mean.value, k), gain(mean.value), ends))
    return listed


@dataclass(frozen=True)
class Drafted:
    """Result for one draft and one target.

    Args:
        draft, target: name and content hash of each bundle.
        data: text, in words.
        seen: acceptance.
        times: seconds of both; None if they are unknown.
        gains: expected gains; () without times.
        notes: limits of the figures.
    """

    draft: Mapping[str, str]
    target: Mapping[str, str]
    data: str
    seen: Acceptance
    times: DraftTimes | None
    gains: Sequence[Gain] = ()
    notes: Sequence[str] = ()

    def best(self, way: str) -> Gain | None:
        """Return the largest gain of a way."""
        return max((gain for gain in self.gains if gain.way == way), key=lambda gain: gain.gain, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        means = {way: self.seen.mean(way) for way in WAYS}
        prompts = [
            dict(zip(WAYS, both, strict=True)) for both in zip(*(self.seen.by_prompt(way) for way in WAYS), strict=True)
        ]
        best = {way: None if (gain := self.best(way)) is None else gain.k for way in WAYS}
        return {
            "draft": dict(self.draft),
            "of": dict(self.target),
            "data": self.data,
            "acceptance": {
                way: {"value": mean.value, "ci95": mean.ci95, "n": mean.n, "prompts": len(prompts)}
                for way, mean in means.items()
            },
            "prompts": prompts,
            "times": None if self.times is None else {**asdict(self.times), "passes": dict(self.times.passes)},
            "gain": [asdict(gain) for gain in self.gains],
            "best": best,
            "notes": list(self.notes),
        }


def _within(interval: Interval) -> Interval:
    return max(0.0, interval[0]), min(1.0, interval[1])
