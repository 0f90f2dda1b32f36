"""humming-kernels for what no kernel of ours multiplies: 4-bit floats, FP8 by blocks, 4-bit weights by 8-bit inputs.

    y = x Wᵀ + b      x [..., K] float16 or bfloat16, W [N, K] as compressed-tensors stores it, y in the dtype of x

The library (vLLM's, Apache-2.0; extra `humming`) takes stored tensors and arguments as they are, packs them for itself
when a layer is made, rounds inputs where the arguments say so, and compiles its kernels when they are first used. What
it keeps takes the place of the stored weight: there is no second copy. Scales that are floats of 16 or 32 bits it
rounds to the dtype of x.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import InputError
from quantkit.kernels.dispatch import HUMMING

# as a candidate among those of a table
NAME = HUMMING
_METHOD = "compressed-tensors"


class HummingLinear(torch.nn.Module):
    """See the module.

    Args:
        stored: what is stored of the linear, by the names of compressed-tensors: `weight_packed`, `weight_scale`, ...
        group: the config group that it is in: `format`, `weights` and `input_activations`, as config.json has them.
        shape: (N, K).
        dtype: of x.
        device: that it runs on; a GPU.
        bias: [N] or None.

    Raises:
        InputError: `kernel-unsupported`: the library is not installed, or does not take it, in its own words.
    """

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        group: Mapping[str, Any],
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        inputs = group.get("input_activations")
        if inputs is not None and inputs.get("dynamic") is not True:
            raise _refused("inputs of a fixed scale", "inputs are floats, or are rounded as they come")
        self.shape, self.bias = shape, bias
        try:
            made = (
                importlib.import_module("humming.layer")
                .HummingLayer(
                    shape_n=shape[0],
                    shape_k=shape[1],
                    weight_config=_arguments(group, "weights"),
                    input_config=None if inputs is None else _arguments(group, "input_activations"),
                    torch_dtype=dtype,
                )
                .to(device)
            )
            # it would leave what is missing as the memory was
            if missing := {name for name, _ in made.named_parameters()} - set(stored):
                raise ValueError(f"not stored: {', '.join(sorted(missing))}")
            made.load_from_tensors({name: part.to(device) for name, part in stored.items()})
            made.transform()
        except ImportError as error:
            raise _refused(
                str(error), "no kernel of ours, and humming is not there: pip install 'quantkit[humming]'"
            ) from None
        except (AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise _refused(str(error).partition("\n")[0] or type(error).__name__, "nor does humming take it") from None
        self.product = made

    @property
    def resident_bytes(self) -> int:
        """What it keeps, packed."""
        return sum(part.numel() * part.element_size() for part in self.product.state_dict().values())

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        y: torch.Tensor = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _arguments(group: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The library's own names for them, and those of compressed-tensors, are the same."""
    given = {name: value for name, value in group[part].items() if value is not None}
    return {**given, "quant_method": _METHOD, "format": group["format"]}


def _refused(value: str, rule: str) -> InputError:
    return InputError("kernel-unsupported", where=NAME, value=value, rule=rule, remedy="it is expanded to floats")
