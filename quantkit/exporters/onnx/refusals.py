"""What ONNX Runtime has no kernel for, or the exporter no place: refused before any work. Free of torch and onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import InputError
from quantkit.exporters.onnx.nbits import BITS, block_size
from quantkit.formats import load_format
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# codes of 7 bits in bytes never saturate
_BYTES = ("int8", "int7")
# features of a head of GroupQueryAttention are a multiple of the first, and where it rotates of the second
_HEAD, ROTARY_HEAD = 8, 16


def refuse(
    weights: Mapping[str, WeightScheme], activations: Mapping[str, ActivationScheme], cache: CacheScheme | None
) -> None:
    """Refuse what a graph cannot hold.

    Raises:
        InputError: `layout-unsupported`, naming the first layer.
    """
    if cache is not None:
        raise InputError(
            "layout-unsupported",
            where="scheme.kv_cache",
            value=f"a KV cache in {cache.format}",
            rule="this exporter's cache is in float32",
            remedy="leave `onnx` out of `export`",
        )
    for linear, each in activations.items():
        _refuse_input(linear, each, weights[linear])
    for linear, scheme in weights.items():
        if linear in activations:
            continue
        bits = load_format(scheme.format).bits
        if bits not in BITS or not scheme.format.startswith("int"):
            raise InputError(
                "layout-unsupported",
                where=linear,
                value=f"weights in {scheme.format}",
                rule=f"MatMulNBits holds integers of {', '.join(map(str, BITS))} bits",
                remedy="use int4 or int8, or leave `onnx` out of `export`",
            )
        block_size(scheme.group or 128, scheme, linear)


def refuse_heads(config: Any, where: str) -> None:
    """Refuse heads that ONNX Runtime's cached attention does not take.

    Args:
        config: transformers', of a decoder.

    Raises:
        InputError: `attention-unsupported`.
    """
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    size = getattr(config, "head_dim", None) or (hidden // heads if heads and hidden else 0)
    if size % _HEAD:
        raise InputError(
            "attention-unsupported",
            where=where,
            value=f"heads of {size} features",
            rule=f"ONNX Runtime's GroupQueryAttention takes heads of a multiple of {_HEAD} features",
            remedy="leave `onnx` out of `export`",
        )


def _refuse_input(linear: str, inputs: ActivationScheme, weight: WeightScheme) -> None:
    """Refuse what ONNX Runtime has no integer kernel for."""
    value, rule = f"activations in {inputs.format}", ""
    if inputs.format != "int8":
        rule = "ONNX Runtime fuses QuantizeLinear and DequantizeLinear of 8-bit integers alone, not of floats"
    elif inputs.granularity == "group":
        value, rule = "activations in groups", "an integer kernel sums over all of K with one scale"
    elif weight.format not in _BYTES or weight.granularity not in ("channel", "tensor"):
        value = f"activations in int8, weights in {weight.format} by {weight.granularity}"
        rule = "an integer kernel multiplies int8 by int8 with one scale a channel"
    if rule:
        raise InputError(
            "layout-unsupported",
            where=linear,
            value=value,
            rule=rule,
            remedy="use int8 by channel with int8 activations by tensor or token, or leave `onnx` out of `export`",
        )
