"""What all layouts of compressed-tensors have in common: names, configuration, scales and the library's expansion.

Every one stores the scales of a linear in `weight_scale`. The configuration that is written names the layout, and the
arguments of each scheme; the library expands by them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quantkit.errors import InputError, MissingDependency
from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.model.layouts import Expansion, Layout, Read
from quantkit.model.structure.names import same
from quantkit.scheme import WeightScheme

LIBRARY = "compressed_tensors"
SCALE = ".weight_scale"


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """A layout of compressed-tensors, but for what it packs and how.

    Args:
        name: the file's stem, and with hyphens the library's name of the layout.
    """

    name: str
    serving: str = field(default="", kw_only=True)
    libraries: ClassVar[tuple[str, ...]] = (LIBRARY,)

    @property
    def title(self) -> str:
        """The library's name of the layout."""
        return self.name.replace("_", "-")

    @abstractmethod
    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        """Those of the library's `QuantizationArgs`."""

    def accepts(self, schemes: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        self.quantization_config(schemes, [], "float32")

    def quantization_config(
        self, layers: Mapping[str, WeightScheme], ignore: Sequence[str], dtype: str
    ) -> dict[str, Any]:
        """See `Layout`.

        One config group for each kind of scheme. A single one is for all of class `Linear` but those to be ignored; of
        several, each names its linears, and what is ignored is said all the same.

        Raises:
            MissingDependency: compressed-tensors.
        """
        with MissingDependency.unless_found(LIBRARY, extra="compile", purpose="a packed checkpoint"):
            from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

        groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, scheme in layers.items():
            groups.setdefault(tuple(self.arguments(scheme).items()), []).append(name)
        config_groups = {
            f"group_{index}": QuantizationScheme(
                targets=["Linear"] if len(groups) == 1 else names,
                weights=QuantizationArgs(**dict(kind)),
                format=self.title,
            )
            for index, (kind, names) in enumerate(groups.items())
        }
        config = QuantizationConfig(
            config_groups=config_groups,
            format=self.title,
            quantization_status="compressed",
            ignore=list(ignore),
        )
        written: dict[str, Any] = config.model_dump(mode="json")
        if QuantizationConfig.model_validate(written) != config:
            raise AssertionError("compressed-tensors does not read back its own configuration")
        return written

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """See `Layout`."""
        return config.get("quant_method") == "compressed-tensors" and config.get("format") == self.title

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        """See `Layout`."""
        return read(prefix + SCALE)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """The very call that transformers makes for each linear, `BaseCompressor.decompress`, cast to `dtype`.

        Raises:
            MissingDependency: compressed-tensors.
        """
        with MissingDependency.unless_found(LIBRARY, extra="compile", purpose="a packed checkpoint"):
            from compressed_tensors.compressors import BaseCompressor
            from compressed_tensors.quantization import QuantizationConfig

        known = QuantizationConfig.model_fields.keys()
        parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key in known})
        groups = list(parsed.config_groups.values())
        # whether transformers expands weights while it loads them; else it keeps them, with scales in the model's dtype
        at_load = bool(config.get("dequantize"))

        def weight(prefix: str, read: Read) -> torch.Tensor:
            # the group that names the linear, else the one for all of its class
            scheme = next((group for group in groups if any(same(prefix, name) for name in group.targets)), groups[0])
            compressor = BaseCompressor.get_value_from_registry(str(scheme.format or parsed.format))
            parts = {name: read(f"{prefix}.{name}") for name in compressor.compression_param_names(scheme)}
            if not at_load and parts["weight_scale"].dtype.itemsize > 1:
                parts["weight_scale"] = parts["weight_scale"].to(dtype)
            found: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
            return found.to(dtype)

        return Expansion(LIBRARY, weight)


def exact_scale(prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales in the dtype that their scheme stores them in.

    Raises:
        InputError: `scale-inexact`, a scale that `dtype` cannot hold: loaders cast scales to it.
    """
    stored = tensor.scale.to(getattr(torch, tensor.scheme.scale))
    if not torch.equal(stored.to(dtype).float(), tensor.scale.float()):
        raise InputError(
            "scale-inexact",
            where=prefix,
            value=f"{tensor.scheme.scale} scales in a {str(dtype).removeprefix('torch.')} model",
            rule="who loads the checkpoint casts its scales to the model's dtype",
            remedy=f"--set scheme.weights.scale={str(dtype).removeprefix('torch.')}",
        )
    return stored
