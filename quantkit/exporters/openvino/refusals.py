"""What OpenVINO, or one of its devices, has no place for: refused before any work. Free of torch and openvino.

An NPU's rules are those of its documentation: static shapes alone, 4-bit weights without zero points, in groups or a
whole row. A cache that grows has no static shape.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.errors import InputError
from quantkit.exporters.onnx.nbits import block_size
from quantkit.formats import load_format
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

_DOCS = "https://docs.openvino.ai/2025/openvino-workflow"
SHAPES = f"{_DOCS}/running-inference/inference-devices-and-modes/npu-device.html"
CODES = f"{_DOCS}-generative/inference-with-genai/inference-with-genai-on-npu.html"
_BITS = (4, 8)
_LEAVE = "leave `openvino` out of `export`"


def refuse(
    weights: Mapping[str, WeightScheme],
    activations: Mapping[str, ActivationScheme],
    cache: CacheScheme | None,
    device: str,
) -> None:
    """Refuse what a model for OpenVINO cannot hold, or the device cannot take.

    Raises:
        InputError: `layout-unsupported`, naming the first layer; `npu-unsupported`.
    """
    if cache is not None:
        raise _unheld("scheme.kv_cache", f"a KV cache in {cache.format}", "this exporter's cache is in float32")
    for linear, inputs in activations.items():
        _refuse_inputs(linear, inputs, weights[linear])
    for linear, scheme in weights.items():
        if linear not in activations:
            _refuse_weights(linear, scheme)
        if device == "NPU" and load_format(scheme.format).bits == 4 and not scheme.symmetric:
            raise refused_by_npu(
                linear,
                "4-bit weights with zero points",
                "4-bit weights are symmetric",
                CODES,
                "--recipe int4-symmetric",
            )


def refuse_shape(kind: str, device: str, shape: tuple[int, ...]) -> None:
    """Refuse for an NPU what has no static shape.

    Args:
        kind: of the model.
        shape: [sequences, tokens] that was asked for, or of a graph [samples]; () where none was.

    Raises:
        InputError: `npu-unsupported`.
    """
    if device != "NPU":
        return
    if kind == "decoder":
        value, remedy = "a decoder, whose cache grows", "export it with `openvino: {device: CPU}`, or GPU"
    elif not shape:
        value, remedy = (
            "inputs of any shape",
            "export it with `openvino: {shape: [1, 128]}`, sequences and their tokens, or `shape: [1]`, samples",
        )
    else:
        return
    raise refused_by_npu("openvino.device", value, "only models with static shapes run on an NPU", SHAPES, remedy)


def refused_by_npu(where: str, value: str, rule: str, source: str, remedy: str) -> InputError:
    """`npu-unsupported`, with where the rule stands."""
    return InputError("npu-unsupported", where=where, value=value, rule=f"{rule} ({source})", remedy=remedy)


def _refuse_weights(linear: str, scheme: WeightScheme) -> None:
    bits = load_format(scheme.format).bits
    if bits not in _BITS or not scheme.format.startswith("int"):
        rule = f"OpenVINO keeps integers of {' and '.join(map(str, _BITS))} bits packed"
        raise _unheld(linear, f"weights in {scheme.format}", rule, "use int4 or int8, or ")
    block_size(scheme.group or 128, scheme, linear)


def _refuse_inputs(linear: str, inputs: ActivationScheme, weight: WeightScheme) -> None:
    value = f"activations in {inputs.format}"
    if inputs.format != "int8":
        raise _unheld(linear, value, "OpenVINO fuses pairs of 8-bit integers alone")
    if inputs.dynamic or inputs.granularity != "tensor":
        rule = "OpenVINO finds scales of its own where they are not fixed, whatever a file says"
        raise _unheld(linear, f"{value}, scales by {inputs.granularity}", rule, "fix them (--recipe int8), or ")
    if weight.format not in ("int8", "int7") or weight.granularity not in ("channel", "tensor") or not weight.symmetric:
        rule = "a product of bytes has one scale a channel, and no zero point"
        raise _unheld(linear, f"{value}, weights in {weight.format} by {weight.granularity}", rule)


def _unheld(where: str, value: str, rule: str, remedy: str = "") -> InputError:
    return InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=f"{remedy}{_LEAVE}")
