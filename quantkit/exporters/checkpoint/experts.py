"""What plain transformers can load of packed experts.

transformers 5 merges a checkpoint's expert linears to 3-D parameters while it loads them, and expands packed ones on
the way (`integrations/compressed_tensors.py`, `CompressedTensorsDequantize`). There it reads codes, scales and shapes,
but no zero points; of all expert linears of a model it takes one scheme; and an expert that is not packed is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quantkit.errors import InputError
from quantkit.scheme import WeightScheme

_DENSE = "export: checkpoint: {layout: dense}"


def demand_loadable(layout: str, schemes: Mapping[str, WeightScheme], merged: Collection[str], partly: bool) -> None:
    """Refuse packed experts that transformers would lose or misread.

    Args:
        schemes: linear -> scheme, of those to be packed.
        partly: whether calibration may leave some of them in high precision.

    Raises:
        InputError: `layout-unsupported`.
    """
    if not merged:
        return
    if layout != "pack-quantized":
        raise _refusal(min(merged), f"an expert in {layout}", "export: checkpoint: {layout: pack-quantized}")
    for linear in sorted(merged):
        scheme = schemes.get(linear)
        if scheme is None:
            raise _refusal(linear, "an expert in high precision among packed layers", "quantize it too")
        if not scheme.symmetric:
            raise _refusal(linear, "an expert with zero points", "scheme.weights.symmetric=true")
    if partly:
        raise _refusal("calibration.experts", "keep may leave an expert in high precision", "calibration.experts=force")
    if len({(each.format, each.granularity, each.group, each.symmetric) for each in schemes.values()}) > 1:
        raise _refusal(min(merged), "one of several schemes of a model with experts", "give all layers one scheme")


def _refusal(where: str, value: str, remedy: str) -> InputError:
    return InputError(
        "layout-unsupported",
        where=where,
        value=value,
        rule="transformers expands packed experts without zero points, of a single scheme, and all of them",
        remedy=f"{remedy}, or {_DENSE}",
    )
