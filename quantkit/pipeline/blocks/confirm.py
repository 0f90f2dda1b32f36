"""Is the score true? What was scored on the stream, held against the original and the reloaded export in transformers.

Of a decoder the mean loss of the original and the mean KL of the candidate are compared, on the beginnings of a few of
the scored sequences; of other models what they give, token by token. Neither side of what is compared with runs any
code of quantkit's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import Check

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.measurement.accuracy.positions import Items
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel

LOSS, KL, ORIGINAL, OUTPUT = "score.loss", "score.kl", "score.original", "score.output"
# nats; of outputs, of the Euclidean norm of a token's. Where a library multiplies in kernels of its own, more is
# allowed: `model/kernel_limit.py`
LIMIT = 1e-3
_SEQUENCES, _TOKENS = 2, 96
# positions whose logits are in float64 at one time
_PART = 8


def confirm(original: StreamedModel, folder: Path | None, ids: Tensor, items: Items | None) -> list[Check]:
    """`score.loss` and `score.kl` of a decoder; of another model `score.original`, and `score.output` of the export.

    Args:
        folder: of the written checkpoint; None confirms the original alone.
        ids: [samples, tokens] that were scored.
        items: of every scored position of a decoder.
    """
    from quantkit.model.kernel_limit import DEPARTURES, departure

    few = ids[:_SEQUENCES, :_TOKENS]
    machine.let_go()  # embeddings and heads that were scored with
    before = _given(original.source, original, few)
    after = None if folder is None else _reloaded(folder, original, few)
    if folder is None or after is None:
        streamed = rounded = None
    else:
        streamed = _streamed(folder, few) if items is None or _rounds_inputs(folder) else None
        rounded = _streamed(folder, few, rounded=True) if _has_kernels(folder) else None
    if items is not None:
        return _decoder(before, after, few, items, streamed, rounded)
    checks = [_check(ORIGINAL, _apart(original.answers(few).all(), before), LIMIT)]
    if after is not None and streamed is not None:
        if rounded is None:
            checks.append(_check(OUTPUT, _apart(streamed, after), LIMIT))
        else:
            limit = LIMIT + DEPARTURES * departure(rounded, streamed)
            checks.append(_check(OUTPUT, departure(after, streamed), limit))
    return checks


def _decoder(
    before: Tensor, after: Tensor | None, ids: Tensor, items: Items, streamed: Tensor | None, rounded: Tensor | None
) -> list[Check]:
    """Loss of the original and KL of the candidate, in nats, against what was scored.

    Args:
        before, after: logits [samples, tokens, vocabulary] of plain transformers, of the original and of the export.
        streamed: logits of the scored candidate on `ids` alone, taken instead of its items; None takes those.
        rounded: the same with the products rounded that a library may round; None where it multiplies as torch does.
    """
    import numpy as np

    from quantkit.model.kernel_limit import DEPARTURES

    positions = ids.shape[1] - 1
    chosen = np.concatenate([np.flatnonzero(items.sequence == row)[:positions] for row in range(len(ids))])
    loss = -float(_of_positions(before, lambda one, part: one.gather(-1, ids[:, part + 1, None])[..., 0]).mean())
    checks = [_check(LOSS, abs(loss - float(items.nll_original[chosen].mean())), LIMIT)]
    if after is not None:
        scored = items.kl[chosen] if streamed is None else _divergences(before, streamed).numpy()
        # a mean of positions whose errors need not be independent
        apart = 0.0 if rounded is None else np.sqrt(np.square(_divergences(before, rounded).numpy() - scored).mean())
        error = abs(float(_divergences(before, after).mean()) - float(scored.mean()))
        checks.append(_check(KL, error, LIMIT + DEPARTURES * float(apart)))
    return checks


def _divergences(before: Tensor, logits: Tensor) -> Tensor:
    """KL from `before` at every position but the last, nats, sequence by sequence."""

    def divergence(one: Tensor, part: Tensor) -> Tensor:
        other = logits[:, part].double().log_softmax(dim=-1)
        # what the original rules out adds nothing; a NaN of the reloaded model is to be seen
        return (one.exp() * (one - other)).masked_fill_(one.isneginf(), 0.0).sum(dim=-1)

    return _of_positions(before, divergence)


def _of_positions(logits: Tensor, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A value of every position but the last, by log-probabilities [samples, some positions, vocabulary] and which."""
    import torch

    parts = torch.arange(logits.shape[1] - 1).split(_PART)  # in float64 a large vocabulary takes 2 MB a position
    values = [value(logits[:, part].double().log_softmax(dim=-1), part) for part in parts]
    return torch.cat(values, dim=1).flatten()


def _given(source: Source, like: StreamedModel, ids: Tensor, *, cached: bool = False) -> Tensor:
    """What the model of plain transformers gives for ids [samples, tokens]; `cached` as its config says."""
    from contextlib import nullcontext

    import torch

    from quantkit.model.source.open import quiet_loading
    from quantkit.model.streaming.calls import forward, uncached
    from quantkit.model.streaming.stream import answer

    with quiet_loading():
        model = source.load()
        with torch.no_grad(), nullcontext() if cached else uncached(model):
            runs = like.runs(model)
            found = answer(runs(input_ids=ids) if cached else forward(runs, ids)).float()
    del model
    machine.let_go()
    return found


def _reloaded(folder: Path, like: StreamedModel, ids: Tensor) -> Tensor | None:
    """The same of a written checkpoint, expanded by its library; None where transformers leaves out what was scored."""
    from quantkit.model import layouts, run_time
    from quantkit.model.source.open import open_written

    source, config = open_written(folder), _quantization(folder)
    if config is not None and not run_time.weights_are_dense(config) and layouts.missing(layouts.of(config)):
        return None
    if run_time.expands_at_load(folder) and run_time.is_named(config):
        return None  # weights alone are expanded: inputs and cache stay floats there
    return _given(source, like, ids, cached=bool((config or {}).get("kv_cache_scheme")))


def _streamed(folder: Path, ids: Tensor, *, rounded: bool = False) -> Tensor:
    """What the stream that scores a written checkpoint gives for ids [samples, tokens]; `rounded`: as kernels may."""
    from quantkit.model.kernel_limit import RoundedProducts
    from quantkit.runtimes.torch.reloaded import ExpandedWeights, reloaded

    stream = reloaded(folder)
    if rounded and isinstance(weights := stream.source.weights, ExpandedWeights):
        packed = {name.removesuffix(".weight") for name, file in stream.files.items() if file in weights.packed}
        stream.transforms.append(RoundedProducts(stream.block_names, packed))
    return stream.answers(ids).all()


def _quantization(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a written checkpoint."""
    from quantkit.model.source.open import open_written

    found: dict[str, Any] | None = open_written(folder).config.get("quantization_config")
    return found


def _rounds_inputs(folder: Path) -> bool:
    """Whether inputs or the cache are rounded as the model runs.

    A number between two codes then goes either way by the last bit of a sum, which the length of a sequence changes:
    plain transformers on two threads, run on 96 tokens, departs from itself, run on 512, by 0.015 nats (SmolLM2-135M,
    `int8`; on one thread by nothing; `benchmarks/rounded_inputs.py`). So both sides see the same tokens.
    """
    from quantkit.model import run_time

    return run_time.is_named(_quantization(folder))


def _has_kernels(folder: Path | None) -> bool:
    """Whether a written checkpoint is multiplied in kernels of its library."""
    from quantkit.model import layouts, run_time

    config = None if folder is None else _quantization(folder)
    return config is not None and not run_time.weights_are_dense(config) and layouts.of(config).kernels


def _apart(found: Tensor, expected: Tensor) -> float:
    """The worst token's difference, of its norm."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.cpu(), expected.cpu()  # one side may come from a GPU
    size = expected.double().norm(dim=-1).clamp(min=1e-30)
    return float(((found.double() - expected.double()).norm(dim=-1) / size).max())


def _check(name: str, value: float, limit: float) -> Check:
    finite = value if value < float("inf") else None
    return Check(name=name, value=finite, limit=limit, ok=finite is not None and finite <= limit)
