"""Score a bundle in vLLM, and check that vLLM computes its checkpoint as it was written.

The check is made wherever vLLM is installed:

    reload.vllm           median KL(torch in float32 | vLLM) of 254 positions of shipped text: at most 3 times the noise
                          floor KL(torch in float32 | torch, blocks and logits in vLLM's dtype), and 1e-4 nats more
                          A cache in fp8 is left out on a CPU: vLLM's kernel cuts values toward zero, and departs by 7
                          floors (a tiny Llama).
    reload.vllm_linears   the worst output feature n of vLLM's linears, fed with vectors x of random signs:
                          |y_n - x w_n| / (|x| |w_n|), at most 2 %; w is the checkpoint's weight in torch

The noise floor is that of the same checkpoint: rounded inputs multiply the noise of half precision, which the float
model does not show (benchmarks/vllm_cells.py). A wrong scale may hide in that noise, so the linears are compared alone
too: of a doubled group a feature's product is off by its share of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit import content, limits, machine
from quantkit.bundle import Bundle, Check, Decision
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters.check import judged
from quantkit.exporters.checkpoint.reload import config_json
from quantkit.model.structure.kinds import positions
from quantkit.model.structure.names import same
from quantkit.pipeline.progress import Progress
from quantkit.recipe import Recipe
from quantkit.runtimes import apart, load_runtime
from quantkit.runtimes.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.rows import Row
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.child import Report

LOGITS, LINEARS = "reload.vllm", "reload.vllm_linears"
# seconds in which vLLM has to open a checkpoint or answer a sequence
SILENCE = 900.0
_FLOORS, _LEAST, _FEATURE = 3.0, 1e-4, 0.02
_SEQUENCES, _TOKENS = 2, 128
# bytes that vLLM takes: of the weights, packed and as they are read; of its cache and its libraries
_COPIES, _OWN = 2, 3 << 30


def check(folder: Path, progress: Report | None = None) -> tuple[list[Check], str]:
    """Check the checkpoint of a decoder; no check, with the reason, where vLLM refuses it or has no room."""
    from quantkit.measurement.accuracy.score import at_a_time, compared
    from quantkit.model.source.open import open_written
    from quantkit.model.streaming.transforms import TypedBlocks
    from quantkit.runtimes.torch.reloaded import expanded, reloaded
    from quantkit.runtimes.vllm import NO_ENCODER, VllmModel

    try:
        if apart.find("vllm") is None:
            return [], ""
        if config_json(folder).get("is_encoder_decoder"):
            return [], f"not run in vLLM: {NO_ENCODER}"
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if (need := _COPIES * stored + _OWN) > (free := machine.memory_available()):
            return [], f"not run in vLLM: it takes about {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        ids = _text(folder)
        model = VllmModel(folder, progress=progress, silence=SILENCE)
        scores, products = model.probed(ids)
    except InputError as problem:
        # its own reason, or a library that it lacks
        why = f"{problem.rule}; {problem.remedy}" if problem.remedy.startswith("install") else problem.value
        return [], f"not run in vLLM: {why}"
    stream, half = reloaded(folder), reloaded(folder)
    half.transforms.append(TypedBlocks(model.half))
    before, few = stream.answers(ids), at_a_time(stream)
    rounded = half.answers(ids)
    sides = (lambda index, part: rounded(index, part).to(model.half), scores)
    floor, departure = (float(np.median(compared(before, after, ids, few).kl)) for after in sides)
    weights = expanded(open_written(folder)).weights
    worst, where = 0.0, ""
    known = {name.removesuffix(".weight"): name for name in weights.entries}
    for names, inputs, outputs in products:
        # vLLM's class for a model with images may have the text stack at another place
        there = [name if name in known else next((other for other in known if same(name, other)), "") for name in names]
        if all(there):
            own = {name: weights.read(known[name]).float() for name in there}
            worst, where = max((worst, where), _worst(own, inputs, outputs))
    if not where:
        return [], "not checked in vLLM: none of its linears has a name of the checkpoint"
    linears = judged(LINEARS, worst, _FEATURE, where)
    if (config_json(folder).get("quantization_config") or {}).get("kv_cache_scheme") and not model.about.get("device"):
        return [linears], "logits not compared in vLLM: on a CPU it cuts keys and values to fp8 toward zero"
    return [judged(LOGITS, departure, _FLOORS * floor + _LEAST, f"floor {floor:.2g}"), linears], ""


def score(
    bundle: Bundle,
    original: StreamedModel | None,
    tokens: TokenSet | None,
    baseline: str,
    runtime: str,
    progress: Progress,
) -> tuple[list[Row], Items | None]:
    """Score a checkpoint in a runtime with a Python of its own (`apart_rows`); `baseline`: hash of the original."""
    from quantkit.measurement.accuracy.score import apart_rows, flagged
    from quantkit.runtimes.torch import RUNTIME as TORCH

    assert tokens is not None
    reads = load_runtime(runtime)
    rows, items = apart_rows(
        reads.opens_apart,
        TORCH.stream(reads.folder(bundle)),
        original,
        tokens,
        subject=bundle.manifest.content_sha256,
        baseline=baseline,
        runtime=runtime,
        progress=lambda share, words: progress.at("score", share, words),
    )
    return flagged(rows, bundle.manifest.model.source.was), items


def text_of(bundle: Bundle, calibration: str | None, decisions: list[Decision]) -> TokenSet:
    """Load the scoring text of a bundle without its original: the checkpoint has the same tokenizer."""
    from quantkit.model.source.open import open_written
    from quantkit.pipeline.blocks import tokens

    manifest, written = bundle.manifest, open_written(bundle.model_folder)
    return tokens.again(Recipe.done(manifest.recipe), written, calibration, manifest.calibration, decisions)


def shipped_ids(folder: Path, count: int) -> list[int]:
    """Return the first ids of shipped text. Raises MissingDependency: tokenizers; InputError: `no-tokenizer`."""
    text = limits.read(content.folder("calibration") / "prose-en" / "tune.txt").decode()
    return list(Tokenizer(folder).encode(text[: 16 * count])[:count])


def _text(folder: Path) -> Tensor:
    """Return ids of shipped text; for a checkpoint without a tokenizer they are drawn at random."""
    import torch

    config = config_json(folder)
    length = min(_TOKENS, positions(config) or _TOKENS)
    count = _SEQUENCES * length
    try:
        ids = torch.tensor(shipped_ids(folder, count))
    except QuantkitError:
        vocabulary = int({**config, **(config.get("text_config") or {})}["vocab_size"])
        ids = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    return ids.reshape(_SEQUENCES, length)


def _worst(weights: Mapping[str, Tensor], inputs: Tensor, outputs: Tensor) -> tuple[float, str]:
    """Return the worst relative error of an output feature, and its linear; infinite for other shapes.

    Args:
        weights: linear -> [N, K], in the order of their outputs.
        inputs, outputs: [16, K], and [16, N] of all of them.
    """
    parts = outputs.split([len(weight) for weight in weights.values()], dim=1) if _fit(weights, outputs) else ()
    worst = (0.0, "") if parts else (math.inf, next(iter(weights)))
    for (name, weight), part in zip(weights.items(), parts, strict=False):
        sizes = weight.norm(dim=1) * inputs.norm() / math.sqrt(inputs.shape[1])
        errors = (part - inputs @ weight.T).norm(dim=0) / sizes.clamp(min=float(sizes.max()) * 1e-3)
        worst = max(worst, (float(errors.max()), name))
    return worst


def _fit(weights: Mapping[str, Tensor], outputs: Tensor) -> bool:
    return sum(map(len, weights.values())) == outputs.shape[1]
