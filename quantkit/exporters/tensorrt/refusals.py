"""What TensorRT has no operator or no kernel for: refused before any work, and without any package.

NVIDIA TensorRT documentation, "Working with Quantized Types"; what 1.7.1 of TensorRT-RTX builds is in docs/design.md.
"""

from __future__ import annotations

from quantkit.errors import InputError
from quantkit.model.sizes.assigned import padded
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# formats of weights that `network/weights.py` stores
FORMATS = ("int8", "int7", "int4", "fp8_e4m3", "mxfp8", "nvfp4", "nf4")
# the first GPUs that hold them, by library: what TensorRT-RTX 1.7.1 compiles (benchmarks/tensorrt_formats.py), and what
# TensorRT's documentation says; the targets' cells say the same (a test holds them together)
FIRST_SM = {
    "tensorrt_rtx": {"int4": 8.0, "nf4": 8.0, "fp8_e4m3": 8.9, "mxfp8": 8.9, "nvfp4": 12.0},
    "tensorrt": {"int4": 8.0, "nf4": 8.0, "fp8_e4m3": 8.9, "mxfp8": 10.0, "nvfp4": 10.0},
}
# formats that activations and the KV cache can have
RUNNING = ("int8", "fp8_e4m3")
_LEAST, _MOST = 16, 128


def refuse_weights(where: str, scheme: WeightScheme, columns: int | None) -> None:
    """Refuse what TensorRT has no operator for. Raises InputError `layout-unsupported`."""

    def refusal(value: str, rule: str, remedy: str) -> InputError:
        return InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=remedy)

    if scheme.format not in FORMATS:
        raise refusal(f"weights in {scheme.format}", f"TensorRT holds {', '.join(FORMATS)}", _nearest(scheme.format))
    if not scheme.symmetric:
        raise refusal(
            "weights with zero points",
            "TensorRT refuses any zero point",
            "--set scheme.weights.symmetric=true (codes are then solved anew, without)",
        )
    group = scheme.group
    if group is None:
        return
    sized = _LEAST <= group <= _MOST and not group & (group - 1)
    if not sized and scheme.format != "nf4":  # which is no type of TensorRT's, and looked up
        raise refusal(
            f"groups of {group}", "TensorRT has blocks of 16, 32, 64 and 128", "--set scheme.weights.group=64"
        )
    if columns is not None and columns % group:
        raise padded(where, scheme, columns)


def refuse_inputs(where: str, scheme: ActivationScheme) -> None:
    """The same of activations."""
    rule = "TensorRT quantizes activations by one fixed scale a tensor, without zero point, to int8 or fp8_e4m3"
    if scheme.format not in RUNNING:
        raise InputError(
            "layout-unsupported",
            where=where,
            value=f"inputs in {scheme.format}",
            rule=rule,
            remedy="--set scheme.activations.format=int8, or fp8_e4m3",
        )
    if scheme.dynamic or scheme.granularity != "tensor":
        raise InputError(
            "layout-unsupported",
            where=where,
            value=f"inputs scaled by {scheme.granularity}, as the model runs",
            rule=rule,
            remedy="--set scheme.activations.granularity=tensor --set scheme.activations.dynamic=false",
        )
    if not scheme.symmetric:
        raise InputError(
            "layout-unsupported",
            where=where,
            value="inputs with zero points",
            rule=rule,
            remedy="--set scheme.activations.symmetric=true",
        )


def refuse_cache(scheme: CacheScheme) -> None:
    """The same of the KV cache."""
    if scheme.format not in RUNNING or scheme.granularity != "tensor" or scheme.dynamic or not scheme.symmetric:
        raise InputError(
            "layout-unsupported",
            where="scheme.kv_cache",
            value=f"{scheme.format}, by {scheme.granularity}{'' if scheme.symmetric else ', with zero points'}",
            rule="TensorRT's cache has one fixed scale a layer and no zero points, in int8 or fp8_e4m3",
            remedy="kv_cache: {format: fp8_e4m3, granularity: tensor}",
        )


def refuse_gpu(where: str, form: str, library: str, sm: str) -> None:
    """Refuse a format that the library does not compile for a GPU. Raises InputError `layout-unsupported`."""
    first = FIRST_SM[library].get(form)
    if first is None or float(sm) >= first:
        return
    below = [name for name, least in {"int8": 7.5, **FIRST_SM[library]}.items() if float(sm) >= least and name != "nf4"]
    raise InputError(
        "layout-unsupported",
        where=where,
        value=f"{form} for SM {sm}",
        rule=f"{library} compiles it from SM {first} on",
        remedy=f"--set scheme.weights.format={'int4' if 'int4' in below else 'int8'}",
    )


def _nearest(name: str) -> str:
    near = {"int2": "int4", "int3": "int4", "mxfp4": "nvfp4", "fp8_e5m2": "fp8_e4m3"}
    return f"--set scheme.weights.format={near.get(name, 'int4')}"
