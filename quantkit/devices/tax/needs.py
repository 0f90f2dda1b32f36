"""What single products take on a device, known before any of them is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.measurement.operators.onnxruntime import ProductSource
from quantkit.measurement.operators.products import copies
from quantkit.measurement.operators.tax import StepCost
from quantkit.model.sizes.shapes import LinearShape

# in the file, in the session, and packed for its kernel: as the bench that runs them has it
_TIMES = 3
# rows of x and y, in float32, that stand beside each weight
_KNOWN = 18 * 4


@dataclass(frozen=True)
class ProductNeeds:
    """Args: memory: bytes at once, without which nothing can be compared; disk: bytes of all files."""

    memory: float
    disk: float

    @classmethod
    def of(
        cls, linears: Sequence[tuple[LinearShape, ProductSource]], baseline: str, others: Sequence[str], cache: int
    ) -> ProductNeeds:
        """Of products of each linear: where the baseline's weights do not fit, nothing is timed; others are left out.

        Args:
            cache: bytes of the last-level cache there, beyond which the weights together have to go.
        """
        memory = disk = 0.0
        for linear, source in linears:
            sizes = {name: source.weight_bytes(name) for name in (baseline, *others)}
            disk += sum(size + _KNOWN * (linear.K + linear.N) for size in sizes.values())
            memory = max(memory, _TIMES * sizes[baseline] * copies(StepCost(baseline, sizes[baseline]), cache))
        return cls(memory, disk)
