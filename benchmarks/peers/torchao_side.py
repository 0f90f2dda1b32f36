"""torchao through transformers: rounding, with the scales that its own search finds where it has one."""

from __future__ import annotations

from typing import Any

from side import Quantized, Scheme, serve, while_loading

HOW = {
    "rtn": "`IntxWeightOnlyConfig`: rounded",
    "hqq scales": "`IntxWeightOnlyConfig`, `hqq_scale_only`",
    "dynamic": "its dynamic configuration, one scale a row",
}
SCHEMES = {
    "int4-g64": ["rtn"],
    "int4-g64-symmetric": ["hqq scales"],
    "int3-g64": ["rtn"],
    "int8-w8a8": ["dynamic"],
    "fp8-w8a8": ["dynamic"],
}


def configuration(scheme: Scheme, method: str) -> Any:
    """What torchao calls this scheme."""
    import torch
    from torchao import quantization as ao
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    if scheme.activations and scheme.format == "float":
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    if scheme.activations:
        return ao.Int8DynamicActivationInt8WeightConfig()
    mapping = ao.MappingType.SYMMETRIC if scheme.symmetric else ao.MappingType.ASYMMETRIC
    search = IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY if method == "hqq scales" else IntxChooseQParamsAlgorithm.AFFINE
    return ao.IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{scheme.bits}"),
        granularity=ao.PerGroup(scheme.group),
        mapping_type=mapping,
        scale_dtype=torch.float16,
        intx_choose_qparams_algorithm=search,
    )


def quantize(request: dict[str, Any], scheme: Scheme) -> Quantized:
    """See `while_loading`."""
    import transformers

    config = configuration(scheme, request["method"])
    made = while_loading(request, transformers.TorchAoConfig(config), {"config": repr(config)}, package="torchao")
    if not scheme.activations:
        made.notes.append("its codes are saved one a byte, whatever their bits")
    return made


if __name__ == "__main__":
    serve(quantize)
