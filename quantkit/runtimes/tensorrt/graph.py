"""A graph in an engine: arrays in, arrays out, and how long that takes by the device's clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.runtimes.tensorrt.engine import Engine
from quantkit.runtimes.torch import events

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


class LoadedGraph:
    """A network of images, or any other graph, in an engine.

    Args:
        engine: opened; of its profiles the first is run.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Output -> values, float32. Raises InputError `shape-unsupported`, `engine-failed`."""
        found = self.engine.run(0, self._given(feed))
        return {name: np.array(value.float().cpu().numpy()) for name, value in found.items()}

    def repeated(self, feed: Mapping[str, Array]) -> Callable[[], float | None]:
        """The same run, ready to be repeated: seconds by the device's clock; None where it has none."""
        context, given = self.engine.context(0), self._given(feed)
        held = self.engine.bind(context, given)

        def run() -> None:
            assert held and given  # bound by address alone: they have to live as long as this
            self.engine.enqueue(context)

        return lambda: events.seconds(run, self.engine.device)

    def _given(self, feed: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        import torch

        found = {}
        for name in self.engine.inputs:
            found[name] = self.engine.tensor(name, feed[name].shape)
            found[name].copy_(torch.from_numpy(np.ascontiguousarray(feed[name])))
        return found
