"""A model's linears as a runtime reads them: which bytes, multiplied in what.

native      the stored form is read: codes, scales, zeros
emulated    the weights are expanded to the target's floats when they are loaded, and read so
inputs too  where the recipe quantizes the inputs as well and the target computes in that format, products are done
            in it; else in the target's floats, whatever the weights are stored in
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from quantkit.formats import stored_bits
from quantkit.planning.bound.roofline import RooflineProduct
from quantkit.planning.model.architecture import Architecture, Matrix
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import ComputeType, Stored, Target

# bytes of an element of the target's own floats
WIDTH: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
FLOATS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# what products of such inputs are done in
_COMPUTE: Mapping[str, ComputeType] = {
    "int8": "int8",
    "int7": "int8",
    "int4": "int4",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e4m3",
    "mxfp8": "fp8_e4m3",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}
# MatMulNBits quantizes its inputs to 8 bits at this accuracy level
_LEVEL = 4


def products(
    architecture: Architecture,
    weights: Mapping[str, WeightScheme],
    activations: Mapping[str, ActivationScheme],
    target: Target,
    runtime: str,
    *,
    accuracy_level: int | None = None,
) -> list[RooflineProduct]:
    """All linears that run, the head's last.

    Args:
        weights: name -> how it is stored, of those that are quantized.
        activations: name -> how its input is, of those whose input is.
        accuracy_level: of ONNX Runtime's products with integer weights; None of other runtimes.
    """
    head = [architecture.head] if architecture.head is not None else []
    return [
        _product(each, weights.get(each.name), activations.get(each.name), target, runtime, accuracy_level)
        for each in (*architecture.inside(), *head)
    ]


def compute_type(
    weights: WeightScheme | None,
    activations: ActivationScheme | None,
    target: Target,
    runtime: str,
    accuracy_level: int | None = None,
) -> ComputeType:
    """What products with such weights and inputs are done in."""
    base = cast(ComputeType, target.baseline)
    if weights is None:
        return base
    if activations is None:
        integers = weights.format.startswith("int") and accuracy_level == _LEVEL
        return "int8" if integers and "int8" in target.compute else base
    kind = _COMPUTE.get(activations.format, base)
    inputs = Stored(activations.format, activations.symmetric, "inputs")
    return kind if target.use(inputs, runtime).state == "native" and kind in target.compute else base


def _product(
    matrix: Matrix,
    weights: WeightScheme | None,
    activations: ActivationScheme | None,
    target: Target,
    runtime: str,
    accuracy_level: int | None,
) -> RooflineProduct:
    width = WIDTH[target.baseline]
    dense = float(matrix.N * matrix.K * width)
    floats = FLOATS[target.baseline]
    if weights is None or target.supports(weights.format, runtime).state != "native":
        return RooflineProduct(matrix, dense, floats, cast(ComputeType, target.baseline), width)
    kind = compute_type(weights, activations, target, runtime, accuracy_level)
    return RooflineProduct(matrix, stored_bits((matrix.N, matrix.K), weights) / 8, weights.format, kind, width)
