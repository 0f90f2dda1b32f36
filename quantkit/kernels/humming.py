"""Layer of humming-kernels, for formats without a kernel of ours (4-bit floats, FP8 by blocks, 4-bit weights by 8-bit
inputs), and for int4 where a table of choices says that its packing is the faster one.

    y = x Wᵀ + b      x [..., K] float16 or bfloat16, W [N, K] as compressed-tensors stores it, y in the dtype of x

The library (vLLM's, Apache-2.0; extra `humming`) takes stored tensors and arguments as they are, packs them when a
layer is made, rounds inputs if the arguments say so, and compiles its kernels at the first use. The packed weight
replaces the stored one: there is no second copy. Scales in floats of 16 or 32 bits are rounded to the dtype of x. A
layer keeps counters of its own (its buffer `locks`): two streams must not multiply by one layer at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import InputError, install
from quantkit.kernels.dispatch import HUMMING
from quantkit.kernels.modules import OpaqueLinear

# name as a candidate in a table
NAME = HUMMING
_METHOD = "compressed-tensors"


class HummingLinear(OpaqueLinear):
    """Linear layer that humming-kernels multiplies.

    Args:
        stored: tensors of the linear by their names in compressed-tensors: `weight_packed`, `weight_scale`, ...
        group: its config group: `format`, `weights` and `input_activations`, as in config.json.
        shape: (N, K).
        dtype: dtype of x.
        device: a GPU.
        bias: bias [N] or None.

    Raises:
        InputError: `kernel-unsupported` if the library is not installed or refuses the layer, with its reason.
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
        super().__init__(shape, bias)
        inputs = group.get("input_activations")
        if inputs is not None and inputs.get("dynamic") is not True:
            raise _refused("inputs with a fixed scale", "inputs are floats, or have dynamic scales")
        try:
            layer = (
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
            # the library would leave missing parameters uninitialized
            if missing := {name for name, _ in layer.named_parameters()} - set(stored):
                raise ValueError(f"not stored: {', '.join(sorted(missing))}")
            here = {name: part.to(device) for name, part in stored.items()}
            with torch.cuda.device_of(next(iter(here.values()))):
                layer.load_from_tensors(here)
                layer.transform()
        except ImportError as error:
            absent = f"no kernel of ours, and humming is not installed; {install('humming')}"
            raise _refused(str(error), absent) from None
        except (AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise _refused(str(error).partition("\n")[0] or type(error).__name__, "humming refuses it too") from None
        self.product = layer

    @property
    def resident_bytes(self) -> int:
        """Size of its packed tensors."""
        return sum(part.numel() * part.element_size() for part in self.product.state_dict().values())

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, as described in the module, without the bias."""
        y: torch.Tensor = self.product(x)
        return y


def _arguments(group: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the arguments of the library; their names are those of compressed-tensors."""
    arguments = {name: value for name, value in group[part].items() if value is not None}
    return {**arguments, "quant_method": _METHOD, "format": group["format"]}


def _refused(value: str, rule: str) -> InputError:
    return InputError("kernel-unsupported", where=NAME, value=value, rule=rule, remedy="it is expanded to floats")
