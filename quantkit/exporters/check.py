"""Run an export in its real runtime and compare it with the expected values.

    max |actual - expected| / max |expected|

is taken over logits, or over an encoder's last hidden states and the logits of its head. Expected values are computed
by torch, block by block, with weights expanded from the codes. The runs are a prompt, steps with the cache after it,
and a batch padded on the left; for encoders a batch, and a row that ends early. Every exporter defines its limits and
further checks.

Some models amplify the rounding of float32: Qwen2.5's large biases of keys make a batch padded on the left differ by
1e-3 in torch alone. An exceeded limit becomes five times the difference between torch in float32 and torch with blocks
in float64, if that is more, and 1e-2 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.lazy import torch

if TYPE_CHECKING:
    from quantkit.exporters.values import Values

Array = NDArray[Any]
_ROWS, _PROMPT, _STEPS, _PADDED = 2, 12, 4, 5
_NOISES, _MOST = 5.0, 1e-2


class RunningExport(Protocol):
    """Interface of a transformer in a runtime: the part of `runtimes.Session` and `Decoder` that checks need."""

    @property
    def decoder(self) -> bool:
        """True if it has a cache."""

    @property
    def headed(self) -> bool:
        """True if it returns logits besides the last hidden states."""

    def state(self, batch: int, capacity: int) -> Any:
        """Make an empty cache."""

    def run(self, state: Any, ids: Array, mask: Array | None = None) -> Array:
        """Return logits of new tokens [B, S], which are added to the state; `mask` has zeros for padding."""

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Return an encoder's last hidden states for ids [B, S]."""

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Return the logits of an encoder with a head for ids [B, S]."""


def decided(bundle: Path) -> Values | None:
    """Read the expected values of a finished bundle from its checkpoint; None if it has no codes."""
    if not (bundle / "model" / "config.json").is_file():
        return None
    from quantkit.exporters.values import Values

    try:
        return Values.of_bundle(bundle)
    except InputError as problem:
        if problem.code != "bundle-dense":
            raise
        return None  # only the export has the codes, beside values that may be rounded to the model's dtype


def judged(name: str, value: float | None, limit: float, where: str) -> Check:
    """Check one number; None and non-finite numbers fail."""
    finite = value if value is not None and np.isfinite(value) else None
    return Check(name=name, value=finite, limit=limit, ok=finite is not None and finite <= limit, where=where)


def counted(name: str, wrong: Sequence[str]) -> Check:
    """Check for an empty list of faults; the first three are named."""
    return Check(name=name, value=len(wrong), limit=0, ok=not wrong, where="; ".join(wrong[:3]))


def all_within(name: str, errors: Mapping[str, float], limit: float, missing: Collection[str], digits: int) -> Check:
    """Check the errors of all expected parts; the worst is the value, and the first three faults are named."""
    wrong = [f"{place}: {error:.{digits}g}" for place, error in errors.items() if not error <= limit]
    wrong += [f"{place}: not in the graph" for place in sorted(missing)]
    worst_error = max(errors.values(), default=0.0)
    value = worst_error if np.isfinite(worst_error) else None
    return Check(name=name, value=value, limit=limit, ok=not wrong, where="; ".join(wrong[:3]))


def reloaded(
    name: str,
    limit: float,
    values: Values,
    load: Callable[[], RunningExport],
    *,
    failures: tuple[type[Exception], ...] = (),
) -> Check:
    """Load an export in its runtime and check its outputs in all runs.

    Args:
        failures: exceptions of the runtime for a failed run, besides InputError.
    """
    try:
        error, where = worst(load(), values)
    except InputError as problem:
        error, where = None, problem.line()
    except failures as problem:
        error, where = None, first_line(problem)
    if error is not None and limit < error <= _MOST and (noise := _noise(values)) * _NOISES > limit:
        limit, where = min(_NOISES * noise, _MOST), f"{where}; float32 alone departs by {noise:.1g} from float64"
    return judged(name, error, limit, where)


def _noise(values: Values) -> float:
    """Return the difference between the expected values and those of blocks in float64."""
    from quantkit.model.streaming.transforms import TypedBlocks

    ids, wide = prompt(values), copy(values.stream)
    wide.transforms = [*wide.transforms, TypedBlocks(torch.float64)]
    return difference(_expected(values, ids), _expected(replace(values, stream=wide), ids))


def first_line(problem: Exception) -> str:
    """Return the beginning of the first line of a library's message."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]


def prompt(values: Values) -> torch.Tensor:
    """Draw random ids [B, S]."""
    vocabulary = int(values.source.config.get("vocab_size", 2))
    return torch.randint(0, vocabulary, (_ROWS, _PROMPT + _STEPS), generator=torch.Generator().manual_seed(0))


def worst(model: RunningExport, values: Values) -> tuple[float | None, str]:
    """Return the largest difference of all runs, None if it is not finite, and the run."""
    return largest((_decoded if model.decoder else _encoded)(model, values, prompt(values)))


def largest(runs: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the largest number and its name; the first non-finite one precedes all."""
    for name, error in runs.items():
        if not np.isfinite(error):
            return None, f"{name}: not finite"
    name = max(runs, key=lambda name: runs[name])
    return runs[name], name


def difference(values: Array, expected: Array, scale: float = 0.0) -> float:
    """Return max |values - expected| / `scale`, by default max |expected|; 0 for empty arrays and equal zeros."""
    distance = np.abs(values - expected).max(initial=0)
    return float(distance / (scale or np.abs(expected).max(initial=0) or 1.0))


def _expected(values: Values, ids: torch.Tensor) -> Array:
    return values.stream.answers(ids).all().float().numpy()  # type: ignore[no-any-return]


def _decoded(model: RunningExport, values: Values, ids: torch.Tensor) -> dict[str, float]:
    expected, tokens = _expected(values, ids), ids.numpy()
    room = tokens.shape[1]

    def logits(tokens: Array, mask: Array | None = None) -> tuple[Array, Array]:
        state = model.state(_ROWS, room)
        first = model.run(state, tokens[:, :_PROMPT], mask)
        return first, np.concatenate([model.run(state, tokens[:, [at]]) for at in range(_PROMPT, room)], axis=1)

    first, steps = logits(tokens)
    runs = {"prompt": difference(first, expected[:, :_PROMPT]), "steps": difference(steps, expected[:, _PROMPT:])}
    # the last row starts later: its first columns are padding
    padded, mask = tokens.copy(), np.ones((_ROWS, _PROMPT), np.int64)
    padded[-1, :_PADDED], mask[-1, :_PADDED] = 0, 0
    padded[-1, _PADDED:] = tokens[-1, : room - _PADDED]
    together = np.concatenate(logits(padded, mask), axis=1)
    runs["padded row"] = difference(together[-1, _PADDED:], expected[-1, : room - _PADDED])
    runs["row beside it"] = difference(together[0], expected[0])
    return runs


def _encoded(model: RunningExport, values: Values, ids: torch.Tensor) -> dict[str, float]:
    tokens = ids.numpy()
    runs = {"batch": difference(model.encode(tokens), _expected(values, ids))}
    mask = np.ones_like(tokens)
    mask[-1, _PROMPT:] = 0
    short = _expected(values, ids[-1:, :_PROMPT])
    runs["padded row"] = difference(model.encode(tokens, mask)[-1:, :_PROMPT], short)
    if not model.headed:
        return runs
    whole = replace(values, stream=values.stream.with_head())
    expected = _expected(whole, ids)
    reach = _reach(whole, ids, expected)
    runs["logits"] = difference(model.logits(tokens), expected, reach)
    # some classes find the last token before the padding in the ids
    padded, padding = tokens.copy(), values.source.config.get("pad_token_id")
    padded[-1, _PROMPT:] = padding if isinstance(padding, int) else 0
    short, logits = _expected(whole, ids[-1:, :_PROMPT]), model.logits(padded, mask)[-1:]
    logits = logits[:, :_PROMPT] if logits.ndim > 2 else logits
    runs["logits of a padded row"] = difference(logits, short, reach)
    return runs


def _reach(whole: Values, ids: torch.Tensor, logits: Array) -> float:
    """Return the largest possible sum of a logit's terms in the last product, if none cancelled another.

    A text's only logit may be near 0, with an error as large as that of its terms.
    """
    inner = f"{whole.skeleton.base_model_prefix}."
    name = next((name for name in reversed(whole.linears()) if not name.startswith(inner)), "")
    weight = whole.tensor(f"{name}.weight").abs() if name else torch.zeros(0)
    if len(weight) != logits.shape[-1]:
        return float(np.abs(logits).max())
    answers = whole.stream.answers(ids)
    terms = [answers.given(name, row).abs() @ weight.T for row in range(len(ids))]
    return float(torch.stack([row.max() for row in terms]).max())
