"""What all layouts of compressed-tensors have in common: the configuration they write, and the library's expansion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.errors import MissingDependency
from quantkit.model.layouts import Expansion, Read
from quantkit.model.names import same
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

LIBRARY = "compressed_tensors"


def quantization_config(
    layers: Mapping[str, WeightScheme],
    ignore: Sequence[str],
    *,
    layout: str,
    weights: Callable[[WeightScheme], Mapping[str, Any]],
) -> dict[str, Any]:
    """`quantization_config` of config.json, as transformers and vLLM read it.

    One config group for each kind of scheme. A single one is for all of class `Linear` but those to be ignored; of
    several, each names its linears.

    Args:
        layers: linear -> scheme.
        ignore: the other linears of the model.
        layout: the library's name of the compression format.
        weights: scheme -> arguments of the library's `QuantizationArgs`.

    Raises:
        MissingDependency: compressed-tensors.
    """
    try:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    except ImportError:
        raise MissingDependency(LIBRARY, extra="compile", purpose="a packed checkpoint") from None

    groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, scheme in layers.items():
        groups.setdefault(tuple(weights(scheme).items()), []).append(name)
    config_groups = {
        f"group_{index}": QuantizationScheme(
            targets=["Linear"] if len(groups) == 1 else names, weights=QuantizationArgs(**dict(kind)), format=layout
        )
        for index, (kind, names) in enumerate(groups.items())
    }
    config = QuantizationConfig(
        config_groups=config_groups,
        format=layout,
        quantization_status="compressed",
        ignore=list(ignore) if len(groups) == 1 else [],
    )
    written: dict[str, Any] = config.model_dump(mode="json")
    if QuantizationConfig.model_validate(written) != config:
        raise AssertionError("compressed-tensors does not read back its own configuration")
    return written


def expansion(config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
    """The very call that transformers makes for each linear, `BaseCompressor.decompress`.

    Args:
        config: `quantization_config` of config.json.
        dtype: of the model; expanded weights are cast to it, as transformers does.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        raise MissingDependency(LIBRARY, extra="compile", purpose="a packed checkpoint") from None

    known = QuantizationConfig.model_fields.keys()
    parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key in known})
    groups = list(parsed.config_groups.values())
    # whether transformers expands weights while it loads them; else it keeps them, with scales in the model's dtype
    at_load = bool(config.get("dequantize"))

    def weight(prefix: str, read: Read) -> torch.Tensor:
        # the group that names the linear, else the one for all of its class
        scheme = next((group for group in groups if any(same(prefix, target) for target in group.targets)), groups[0])
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format or parsed.format))
        parts = {name: read(f"{prefix}.{name}") for name in compressor.compression_param_names(scheme)}
        if not at_load and parts["weight_scale"].dtype.itemsize > 1:
            parts["weight_scale"] = parts["weight_scale"].to(dtype)
        found: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
        return found.to(dtype)

    return Expansion(LIBRARY, weight)
