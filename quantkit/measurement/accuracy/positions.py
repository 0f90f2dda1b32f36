"""Compare the next-token predictions of a model with its original's, at every position of the same text.

With o, c the logits [V] of the original and of the candidate at one position and y the token that follows:

    log p = o − log Σ exp o ,   log q = c − log Σ exp c
    negative log-likelihood     −log p_y  and  −log q_y ,   perplexity = exp(mean)
    KL(p ‖ q)                   Σ p (log p − log q) = Σ p (o − c) − (log Σ exp o − log Σ exp c)      nats
    top-1 agreement             argmax o = argmax c
    next word                   argmax = y, for each of the two

A sequence of T tokens has T − 1 scored positions (items). Scores are kept per item, for paired tests.

The tokens of a sequence are correlated, so sequences are the independent draws of all intervals (`stats.clustered`).
With fewer than 8 sequences, contiguous blocks of positions replace them. A flag of each row names the kind.

**Two candidates of one original** (`against`) are compared item by item: next words that only one gets right, the
difference of mean KL, and the rise of the mean negative log-likelihood. An effect above zero means worse. The draws are
again sequences or blocks of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle.disk import stopping_when_full, write_atomic
from quantkit.calibrate.tokens.ids import TokenSet
from quantkit.errors import GateError, InputError
from quantkit.measurement.accuracy.labelled import About, Drawn
from quantkit.measurement.rows import Baseline, Data, Interval, Row
from quantkit.stats.clustered import Estimate, clustered_mean, clusters_of
from quantkit.stats.evidence import Evidence
from quantkit.stats.flips import flips, increase, same_items

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

# logits per chunk: on a CPU two float32 buffers of this size stay in the cache, twice as fast as in memory; a GPU needs
# larger chunks
_ELEMENTS, _ON_GPU = 1 << 18, 1 << 25
# nats; largest difference between machines in one original's log-likelihoods of one text
_SAME_TEXT = 0.01
# dtypes of the arrays of `Items`
DTYPES: dict[str, type] = {
    "sequence": np.int32,
    "nll_original": np.float64,
    "nll_candidate": np.float64,
    "kl": np.float64,
    "agree": np.bool_,
    "right_original": np.bool_,
    "right_candidate": np.bool_,
    "best_original": np.int32,
    "best_candidate": np.int32,
    "chance_original": np.float32,
    "chance_candidate": np.float32,
}


@dataclass(frozen=True, eq=False)
class Items:
    """Scores of n positions, in order; arrays `[n]` of `DTYPES`.

    Args:
        sequence: index of the sequence.
        nll_original, nll_candidate: negative log-likelihoods, nats.
        kl: KL(original ‖ candidate), nats.
        agree: True if both have the same most likely token.
        right_original, right_candidate: True if the most likely token is the next one.
        best_original, best_candidate: most likely token.
        chance_original, chance_candidate: its probability.
    """

    sequence: Array
    nll_original: Array
    nll_candidate: Array
    kl: Array
    agree: Array
    right_original: Array
    right_candidate: Array
    best_original: Array
    best_candidate: Array
    chance_original: Array
    chance_candidate: Array

    @property
    def n(self) -> int:
        """Number of scored positions."""
        return int(self.sequence.size)

    def clusters(self) -> tuple[Array, str]:
        """Return a cluster label for every item, and the kind of cluster: `sequence`, or `block` where sequences
        are few."""
        return clusters_of(self.sequence)

    def mean(self, values: Array) -> Estimate:
        """Average values [n], with standard error and interval over the clusters."""
        return clustered_mean(values, self.clusters()[0])

    def rows(self, about: About) -> list[Row]:
        """Return `accuracy.perplexity`, `.kl`, `.top1_agreement` and `.next_word`, each with its interval.

        Raises InputError: `nothing-scored`.
        """
        if self.n == 0:
            value, rule = "no scored position", "scoring needs a sequence of at least two tokens"
            raise InputError("nothing-scored", where=about.data.set, value=value, rule=rule)
        drawn = Drawn(self.n, self.clusters()[1])
        shape = {"sequences": int(np.unique(self.sequence).size)}

        def row(name: str, value: float, against: Baseline | float, ci95: Interval | None, **others: Any) -> Row:
            return about.row(f"accuracy.{name}", value, drawn, against=against, ci95=ci95, shape=shape, **others)

        loss, original = self.mean(self.nll_candidate), self.mean(self.nll_original)
        divergence, agreement = self.mean(self.kl), self.mean(self.agree)
        right, before = self.mean(self.right_candidate), self.mean(self.right_original)
        # on the log scale, where both sides are paired and the interval is symmetric
        gain = self.mean(self.nll_original - self.nll_candidate)
        gained: dict[str, Any] = {"ratio": _exp(gain.value), "ratio_ci95": _exp_interval(gain.ci95)}
        quantiles = dict(zip(("p50", "p90", "p99"), map(float, np.quantile(self.kl, (0.5, 0.9, 0.99))), strict=True))
        perplexity = Baseline(subject=about.baseline, value=_exp(original.value), **gained)
        times = right.value / before.value if before.value else None
        words = Baseline(subject=about.baseline, value=before.value, ratio=times)
        nats: dict[str, Any] = {"unit": "nat", "better": "lower", "quantiles": quantiles}
        return [
            row("perplexity", _exp(loss.value), perplexity, _exp_interval(loss.ci95), better="lower", stat="exp_mean"),
            row("kl", divergence.value, 0.0, divergence.ci95, **nats),
            row("top1_agreement", agreement.value, 1.0, agreement.ci95, held=(0.0, 1.0)),
            row("next_word", right.value, words, right.ci95, held=(0.0, 1.0)),
        ]

    def save(self, path: Path) -> None:
        """Write the items as safetensors, completely or not at all, beside their measurements."""
        from safetensors.numpy import save

        arrays = {field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}
        with stopping_when_full(path):
            write_atomic(path, save(arrays, metadata={"format": "quantkit.items", "schema": "1"}))


def load_items(path: Path) -> Items:
    """Read the file of `Items.save`. Raises InputError: `items-invalid`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
        items = Items(**arrays)
    except (OSError, SafetensorError, TypeError) as error:
        raise InputError("items-invalid", where=str(path), value=str(error), remedy="measure again") from None
    if {array.shape for array in arrays.values()} != {(items.n,)}:
        raise InputError("items-invalid", where=str(path), value="arrays of different lengths", remedy="measure again")
    return items


def common(one: Items, other: Items) -> tuple[Items, Items]:
    """Cut the longer of two to the sequences of the shorter if both begin with the same text; else return both."""
    short, long = sorted((one, other), key=lambda items: items.n)
    count, begins = short.n, np.array_equal(short.sequence, long.sequence[: short.n])
    whole = 0 < count < long.n and begins and long.sequence[count] != long.sequence[count - 1]
    if not whole or np.abs(short.nll_original - long.nll_original[:count]).max() > _SAME_TEXT:
        return one, other
    cut = Items(**{name: getattr(long, name)[:count] for name in DTYPES})
    return (one, cut) if one is short else (cut, other)


def data_of(tokens: TokenSet) -> Data:
    """Return the `data` field for rows of a token set."""
    return Data(set=tokens.name, split=tokens.split, sha256=tokens.sha256, items=tokens.items, begins=tokens.begins)


class Accuracy:
    """An accumulator of scores from logits, a sequence or a few positions at a time."""

    def __init__(self) -> None:
        """Start without scores."""
        self._sequences = 0
        self._parts: list[dict[str, Array]] = []
        self._scratch: list[torch.Tensor] = []

    def add(self, ids: torch.Tensor, original: torch.Tensor, candidate: torch.Tensor) -> None:
        """Score one sequence: ids [T], logits [T, V] of both sides, any float dtype; the last position scores nothing.

        Raises ValueError: shapes that do not fit; InputError: `logits-not-finite`, of the original; GateError:
        `logits-not-finite`, of the candidate.
        """
        if original.shape != candidate.shape or original.ndim != 2 or ids.shape != original.shape[:1]:
            shapes = f"{tuple(ids.shape)}, {tuple(original.shape)}, {tuple(candidate.shape)}"
            raise ValueError(f"expected ids [T] and two logits [T, V], got {shapes}")
        self.add_positions(self._sequences, ids[1:], original[:-1], candidate[:-1])

    def add_positions(
        self, sequence: int, following: torch.Tensor, original: torch.Tensor, candidate: torch.Tensor
    ) -> None:
        """Score P positions of a sequence: their next tokens [P], and both sides' logits [P, V].

        For callers that compute logits a few positions at a time.
        """
        self._sequences = max(self._sequences, sequence + 1)
        count, width = original.shape
        numbers: dict[str, Array] = {name: np.empty(count, dtype) for name, dtype in DTYPES.items()}
        numbers["sequence"].fill(sequence)
        rows = max(1, min(count, (_ON_GPU if original.is_cuda else _ELEMENTS) // width))
        d, e = self._buffers(rows, width, original.device)
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            size = part.stop - part.start
            other = candidate[part].to(original.device)
            scored = _score(following[part], original[part], other, d[:size], e[:size])
            for name, values in scored.items():
                numbers[name][part] = values
        wrong = ~np.isfinite(numbers["nll_original"] + numbers["nll_candidate"] + numbers["kl"])
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise _not_finite(
                f"sequence {sequence}, position {first}", bool(np.isfinite(numbers["nll_original"][first]))
            )
        self._parts.append(numbers)

    def _buffers(self, rows: int, width: int, device: torch.device) -> list[torch.Tensor]:
        import torch

        # buffers are reused: repeated aligned allocations of megabytes make the C heap grow without bound
        if not self._scratch or self._scratch[0].shape != (rows, width) or self._scratch[0].device != device:
            self._scratch = [torch.empty((rows, width), dtype=torch.float32, device=device) for _ in range(2)]
        return self._scratch

    def items(self) -> Items:
        """Return all scores so far."""
        empty: dict[str, Array] = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
        return Items(**{name: np.concatenate([part[name] for part in (empty, *self._parts)]) for name in DTYPES})


def _not_finite(where: str, original_is: bool) -> InputError | GateError:
    side = "the candidate" if original_is else "the original"
    kind = GateError if original_is else InputError
    value, rule = f"{side} returns NaN, or probability 0 for a possible token", "logits must be finite"
    remedy = "look for NaN or infinite weights and scales (`quantkit verify`)" if original_is else "check the model"
    return kind("logits-not-finite", where=where, value=value, rule=rule, remedy=remedy)


def _score(
    following: torch.Tensor, original: torch.Tensor, candidate: torch.Tensor, d: torch.Tensor, e: torch.Tensor
) -> dict[str, Array]:
    """Apply the module's formulas to logits [P, V], in float32, with sums over V in float64.

    Both sides are shifted by their maximum first, so every exponential lies in (0, 1] and o − c stays small. d and e
    [P, V], float32, are overwritten.
    """
    import torch

    with torch.inference_mode():
        (top_o, best_o), (top_c, best_c) = original.max(dim=-1, keepdim=True), candidate.max(dim=-1, keepdim=True)
        following = following.to(best_o.device).long().unsqueeze(-1)
        _shift(candidate, top_c, out=e)
        _shift(original, top_o, out=d)
        at_c, at_o = e.gather(-1, following).squeeze(-1), d.gather(-1, following).squeeze(-1)
        d.sub_(e)
        log_c = e.exp_().sum(dim=-1, dtype=torch.float64).log_()
        sum_o = _shift(original, top_o, out=e).exp_().sum(dim=-1, dtype=torch.float64)
        moved = d.mul_(e).sum(dim=-1, dtype=torch.float64)
        if bool(moved.isnan().any()):
            # a token with logit −inf in the original adds 0 for any logit of the candidate
            moved = d.masked_fill_(e == 0, 0.0).sum(dim=-1, dtype=torch.float64)
        log_o = sum_o.log()
        kl = moved.div_(sum_o).add_(log_c).sub_(log_o).clamp_(min=0.0)
        numbers = {
            "nll_original": log_o - at_o,
            "nll_candidate": log_c - at_c,
            "kl": kl,
            "agree": (best_o == best_c).squeeze(-1),
            "right_original": (best_o == following).squeeze(-1),
            "right_candidate": (best_c == following).squeeze(-1),
            "best_original": best_o.squeeze(-1),
            "best_candidate": best_c.squeeze(-1),
            # logits are shifted by their maximum, so the most likely token's is 0
            "chance_original": log_o.neg().exp_(),
            "chance_candidate": log_c.neg().exp_(),
        }
        return {name: value.cpu().numpy() for name, value in numbers.items()}


def _shift(logits: torch.Tensor, top: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    import torch

    if logits.dtype == out.dtype:
        return torch.sub(logits, top, out=out)
    # widen first: a difference in half precision would be rounded
    return out.copy_(logits).sub_(top)


def _exp(value: float) -> float:
    """Return exp(value), limited to the range of a float: a row must be finite."""
    return float(np.exp(min(value, 700.0)))


def _exp_interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (_exp(interval[0]), _exp(interval[1]))


# mean nats: precisions of one original differ by hundredths, different texts by whole nats
_SAME_ORIGINAL = 0.1


def against(baseline: Items, candidate: Items, margins: Mapping[str, float], *, where: str = "") -> dict[str, Evidence]:
    """Return evidence by name of row, for `stats.decision`.

    Args:
        baseline: items of the other side.
        candidate: items of the judged side, for the same positions of the same text and against the same original.
        margins: margin of each requested row: a share for `accuracy.next_word`, nats for the other two.
        where: place for errors.

    Raises InputError: `items-differ` for different positions, texts or originals; `nothing-scored`.
    """
    items = (baseline.sequence, candidate.sequence)
    same_items(baseline.kl, candidate.kl, items, where)
    apart = float(np.mean(np.abs(baseline.nll_original - candidate.nll_original)))
    if not apart <= _SAME_ORIGINAL:
        value = f"the originals' log-likelihoods are {apart:.3g} nats apart on average"
        rule, remedy = "both sides must be scored on the same text, against the same original", "score both again"
        raise InputError("items-differ", where=where, value=value, rule=rule, remedy=remedy)
    clusters = candidate.clusters()[0]
    means = {
        "accuracy.kl": (baseline.kl, candidate.kl),
        "accuracy.perplexity": (baseline.nll_candidate, candidate.nll_candidate),
    }
    evidence: dict[str, Evidence] = {}
    for name, margin in margins.items():
        if name == "accuracy.next_word":
            right = baseline.right_candidate, candidate.right_candidate
            evidence[name] = flips(*right, margin=margin, clusters=clusters, where=where)
        else:
            evidence[name] = increase(*means[name], margin=margin, clusters=clusters, where=where)
    return evidence


def flipped(baseline: Items, candidate: Items) -> Array:
    """Return the positions [k] at which only one side's next word is right."""
    return np.flatnonzero(baseline.right_candidate != candidate.right_candidate)
