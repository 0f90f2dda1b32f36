"""Stand-in for humming-kernels (0.1.19), which needs a GPU: its interface, with compressed-tensors' mathematics."""

import sys
import types
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from quantkit.formats.base import activation
from quantkit.scheme import ActivationScheme

# format -> requirements of its schema for compressed-tensors: humming/schema/compressed_tensors.py
_ASKED = {
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
    "float-quantized": ("weight", "weight_scale"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mxfp4-pack-quantized": ("weight_packed", "weight_scale"),
}


class HummingLayer(torch.nn.Module):
    def __init__(
        self, *, shape_n: int, shape_k: int, weight_config: Any, input_config: Any, torch_dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert weight_config["quant_method"] == "compressed-tensors"
        self.shape, self.config, self.inputs, self.dtype = (shape_n, shape_k), weight_config, input_config, torch_dtype
        self.load_from_tensors({name: torch.empty(0) for name in _ASKED[weight_config["format"]]})

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, part in tensors.items():
            setattr(self, name, torch.nn.Parameter(part, requires_grad=False))

    def transform(self) -> None:
        form = self.config["format"]
        known = {name: value for name, value in self.config.items() if name in QuantizationArgs.model_fields}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**known), format=form)
        parts = {name: part.data for name, part in self.named_parameters()}
        self.dense = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"].to(self.dtype)
        assert self.dense.shape == self.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs is not None:
            assert (self.inputs["num_bits"], self.inputs["type"], self.inputs["dynamic"]) == (8, "float", True)
            group = self.inputs.get("group_size")
            granularity: Any = {"granularity": "group", "group": group} if group else {"granularity": "token"}
            x = activation.fake_quantize(x, ActivationScheme(format="fp8_e4m3", **granularity))
        return torch.nn.functional.linear(x, self.dense)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = types.ModuleType("humming.layer")
    library.HummingLayer = HummingLayer
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", library)
