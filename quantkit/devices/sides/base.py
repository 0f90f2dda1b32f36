"""A bundle and its float model, as a measuring on a device takes them, whatever their kind is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.devices.collect import CollectedCells
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.shapes import TimingPlan


class DeviceSides:
    """A bundle and its float model, as far as its kind matters.

    Args:
        subject: of the float model in rows.
        floats: the runtime that runs it.
    """

    bundle: Bundle
    subject: str
    floats: str
    of: Any

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """What is loaded of both: relative path -> file here."""
        raise NotImplementedError

    def opened(self) -> tuple[str, str]:
        """What is opened there of both, below their folders; empty where that is the folder."""
        return "", ""

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """The plan's shapes that both have."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """What is scored: arrays of an .npz."""
        raise NotImplementedError

    def rows(self, answers: CollectedCells, runtime: str) -> list[Row]:
        """Of accuracy."""
        raise NotImplementedError

    def samples(self, sizes: Sequence[int]) -> tuple[dict[str, Any], float, float] | None:
        """What a graph is timed on, multiply-accumulates and outputs of a sample."""
        return None

    def weights(self) -> tuple[float, float]:
        """Bytes of all constants of graphs."""
        return 0.0, 0.0

    form = "float32"
