"""Where the products come from that a bench runs: made here of random weights, or read from files that were made so."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantkit.exporters.onnx import single_op as single
from quantkit.exporters.onnx.single_product import SingleProduct
from quantkit.model.sizes.shapes import LinearShape

if TYPE_CHECKING:
    import torch

# what a variant's kernel is found out on: what is fused does not depend on the size
SMALL = LinearShape(name="small", K=256, N=256)
# rows of a weight that say how large all of it is
_FEW = 64


class ProductSource(Protocol):
    """The products of one linear, by the names of their variants."""

    def weight_bytes(self, variant: str) -> float:
        """Of one weight; 0 where there is none. Raises as `product`."""
        ...

    def product(self, variant: str) -> SingleProduct:
        """Raises InputError: `group-indivisible`, `shape-invalid`, what the variant cannot hold."""
        ...


class RandomProducts:
    """Made here: weights are normal, in every variant the same before they are quantized. Needs torch and onnx.

    Args:
        linear: their shape.
        seed: of the weights.
    """

    def __init__(self, linear: LinearShape, seed: int = 0) -> None:
        self.linear, self.seed = linear, seed

    @cached_property
    def _weight(self) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 8191 * self.linear.K + self.linear.N)
        return torch.randn(self.linear.N, self.linear.K, generator=generator).mul_(0.02)

    def weight_bytes(self, variant: str) -> float:
        """See `ProductSource`: by a few rows."""
        import torch

        few = min(self.linear.N, _FEW)
        weight = torch.randn(few, self.linear.K, generator=torch.Generator().manual_seed(self.seed))
        return single.product(single.variant(variant), weight).weight_bytes * self.linear.N / few

    def product(self, variant: str) -> SingleProduct:
        """See `ProductSource`."""
        return single.product(single.variant(variant), self._weight)


class StoredProducts:
    """Read from a folder: of each variant the file that `SingleProduct.save` wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def weight_bytes(self, variant: str) -> float:
        """See `ProductSource`."""
        return float(SingleProduct.bytes_in(self._file(variant)))

    def product(self, variant: str) -> SingleProduct:
        """See `ProductSource`."""
        return SingleProduct.read(self._file(variant), single.variant(variant))

    def _file(self, variant: str) -> Path:
        return self.folder / file_of(variant)


def file_of(variant: str) -> str:
    """What the file of a product is called."""
    return f"{variant}.npz"
