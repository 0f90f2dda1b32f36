"""How a GGUF file's rotary embedding is stretched over longer texts, as transformers' `rope_scaling`.

    linear, yarn   by name, with their numbers
    llama3         by a tensor: what each of the d / 2 frequencies is divided by. 1 for short waves, `factor` for long
                   ones, between them 1 / ((1 - s) / factor + s) with s = (context / wave - low) / (high - low). That
                   is a line over 1 / wave, of two numbers; `low` is taken to be 1, as in every Llama, and what is
                   found has to give the file's factors again

llama.cpp multiplies what a file says of YaRN's attention by 1 + 0.1 ln(factor); transformers takes the product.
Sources: `LlamaModel.generate_extra_tensors` of llama.cpp's converter, llama-context.cpp, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quantkit.model.source.gguf.parts import refused, short

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Llama 3.1's, and the contexts that are tried where a file's factors tell none
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
_CONTEXTS = [2**exponent for exponent in range(4, 21)]


def rope_scaling(stated: dict[str, Any], context: int) -> dict[str, Any] | None:
    """transformers' `rope_scaling` of what a file says by name; None: the rotary embedding is as it is.

    Args:
        stated: metadata without the architecture's name. What is understood is taken out of it; what is left would
            compute something else.
        context: the longest text.
    """
    kind = stated.pop("rope.scaling.type", None)
    factors = [stated.pop(key, 0) for key in ("rope.scaling.factor", "rope.scale_linear")]
    factor = next((short(each) for each in factors if each), 1.0)
    stated.pop("rope.scaling.finetuned", None)
    original = stated.pop("rope.scaling.original_context_length", None)
    if kind in (None, "linear") and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        found["original_max_position_embeddings"] = original or context
        for key in ("beta_fast", "beta_slow"):
            if (value := stated.pop(f"rope.scaling.yarn_{key}", None)) is not None:
                found[key] = short(value)
        if (value := stated.pop("rope.scaling.yarn_attn_factor", None)) is not None:
            found["attention_factor"] = short(value * (1 + 0.1 * math.log(factor)))
        return found
    if kind not in (None, "linear", "none"):
        stated["rope.scaling.type"] = kind
    return None


def llama3(factors: NDArray[np.float32], base: float, where: str) -> dict[str, Any] | None:
    """transformers' `rope_scaling` that divides frequencies by these factors [d / 2]; None where all are 1.

    Raises:
        InputError: `gguf-architecture`: no numbers of Llama 3's rule give these factors.
    """
    import numpy as np

    half = len(factors)
    waves = 2 * math.pi * float(base) ** (np.arange(half) / half)
    factor = short(float(factors.max()))
    if np.all(factors == 1):
        return None
    for low, high, context in _guesses(factors, waves, factor):
        smooth = (context / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        computed = np.where(waves < context / high, 1, np.where(waves > context / low, factor, between))
        if np.allclose(computed, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise refused(where, "rope_freqs.weight", "frequencies are divided as Llama 3's are")


def _guesses(
    factors: NDArray[np.float32], waves: NDArray[np.float64], factor: float
) -> Iterator[tuple[float, float, int]]:
    """(low, high, context) to try: Llama's own, that of the line through what lies between, powers of two."""
    import numpy as np

    yield _LOW, _HIGH, _CONTEXT
    inside = (factors > 1) & (factors < factor)
    if inside.sum() > 1:
        smooth = (1 / factors[inside].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(1 / waves[inside], smooth, 1)
        if offset < 0:
            yield _LOW, float(f"{1 - 1 / offset:.4g}"), round(-slope / offset)
    for context in _CONTEXTS:
        yield _LOW, _HIGH, context
