"""What an export is asked to hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.model.source.unloadable import Obstacle
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme


@dataclass(frozen=True)
class LayerSpec:
    """The layers of a model, before any work is done on them.

    Args:
        schemes: linear -> how its weight is stored.
        plain: the linears that are `torch.nn.Linear`.
        padded: the linears whose last group is filled up.
        tied: a head that shares its weight with the embedding.
        shapes: linear -> [N, K]; empty where nobody knows.
        merged: the linears of experts, which transformers merges while it loads them.
        partly: whether calibration may leave some experts in high precision.
        activations: linear -> how its input is quantized.
        cache: how keys and values are quantized.
        obstacles: what transformers would not load of it packed.
    """

    schemes: Mapping[str, WeightScheme] = field(default_factory=dict)
    plain: Collection[str] = ()
    padded: Collection[str] = ()
    tied: Collection[str] = ()
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    merged: Collection[str] = ()
    partly: bool = False
    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    cache: CacheScheme | None = None
    obstacles: Sequence[Obstacle] = ()

    def demand_no_experts(self, export: str) -> None:
        """Raises InputError `layout-unsupported` for a mixture of experts, of which no one graph can be traced."""
        for linear in sorted(self.merged)[:1]:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="belongs to a mixture of experts",
                rule="the graph is traced once, and which expert runs depends on the data",
                remedy=f"leave `{export}` out of `export`",
            )
