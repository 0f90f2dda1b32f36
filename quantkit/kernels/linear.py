"""Linear layer on a packed weight, with the fastest measured kernel for each number of rows.

    y = x Wᵀ + b      x [..., K] float16 or bfloat16, W [N, K] packed (`layout`), y [..., N] in the dtype of x

A table of choices (`dispatch`) names the product for M rows of x: `quantkit`, the format's own kernel with its measured
tile sizes; `dequantize_matmul`, torch's product with a slab of the weight's rows at a time, expanded in the cache; or,
for 8-bit inputs, torch's own product of 8-bit codes. None keeps a second copy of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.errors import InputError
from quantkit.kernels import dispatch
from quantkit.kernels.dispatch import EXPANDED, OURS, Choice, Config, Table
from quantkit.kernels.matmul import by_slabs, weight_only
from quantkit.kernels.modules import OpaqueLinear
from quantkit.kernels.native import multiply, native, quantize_tokens, torch_product

if TYPE_CHECKING:
    from quantkit.kernels.layout import PackedWeight

# largest batches of our own kernels without timings: products of 8-bit codes, others
_OURS_TO = {True: (16, 32), False: (16, 32, 64, 128)}


class QuantLinear(OpaqueLinear):
    """Linear layer on a packed weight.

    Args:
        packed: the weight, on the device of the inputs.
        bias: bias [N] or None.
        table: measured choices; None for `unmeasured`.

    Raises:
        InputError: `kernel-unsupported` for a choice that this layer cannot run; `shape-unmeasured`.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        table: Table | None = None,
    ) -> None:
        super().__init__(packed.shape, bias)
        self.packed = packed
        if packed.words.is_cuda:
            # joined or moved weights are complete before the first product: `decode` reads them before it waits
            torch.cuda.current_stream(packed.words.device).synchronize()
        self.table = table or unmeasured(packed)
        self.table.choose(packed.shape, 1)
        for choice in self.table.choices[packed.shape]:
            if not (choice.candidate == OURS and choice.config) and choice.candidate != other(packed):
                where = f"{packed.kind}, batch {choice.batch}"
                rule = f"this layer runs {' or '.join(filter(None, (f'{OURS} with its tile sizes', other(packed))))}"
                remedy = "choose among these: `dispatch.fastest` of their timings"
                raise InputError("kernel-unsupported", where, choice.candidate, rule, remedy)

    @property
    def resident_bytes(self) -> int:
        """Size of the packed weight."""
        return self.packed.resident_bytes

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, as described in the module, without the bias."""
        choice = self.table.choose(self.packed.shape, x.shape[0])
        config = None if choice.config is None else Config.of(choice.config)
        if not self.packed.kind.endswith(".native"):
            if config is None:
                return by_slabs(x, self.packed)
            return weight_only(x, self.packed, config)
        codes, step = quantize_tokens(x, self.packed.kind.removesuffix(".native"))
        if config is None:
            return multiply(codes, step, self.packed, x.dtype)
        return native(codes, step, self.packed, config, dtype=x.dtype)


def other(packed: PackedWeight) -> str:
    """Return the alternative to our own kernel for a weight; "" if there is none."""
    return torch_product(packed) if packed.kind.endswith(".native") else EXPANDED


def unmeasured(packed: PackedWeight) -> Table:
    """Return choices without timings: likely tile sizes for each width, then the alternative for more rows."""
    size, native_kind, at = packed.resident_bytes, packed.kind.endswith(".native"), packed.words.device
    many = torch.cuda.get_device_properties(at).multi_processor_count if at.type == "cuda" else 1
    choices = []
    for batch in _OURS_TO[native_kind]:
        config = dispatch.unmeasured(packed.shape[0], batch, many, native=native_kind)
        choices.append(Choice(batch, OURS, config.as_dict(), float("nan"), size))
    if name := other(packed):
        choices.append(Choice(2 * choices[-1].batch, name, None, float("nan"), size))
    return Table({packed.shape: tuple(choices)})
