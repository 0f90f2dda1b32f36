"""What TensorRT timed while it built: kernels tried for each layer, read from its verbose log.

    --------------- Timing Runner: LAYER (RUNNER)
    ... Set Tactic Name: KERNEL Tactic: 0x42
    Tactic: 0x42 Time: 0.0262451            milliseconds

as TensorRT 8.2 to 10 print it (10 has name and time in one line); nothing of it is documented, so a line that looks
otherwise is passed over. TensorRT-RTX compiles ahead of time and times nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quantkit.content import Closed

# layers that are kept: those whose fastest kernel takes the longest
KEPT = 32
_RUNNER = re.compile(r"-{5,} Timing Runner: (?P<layer>.+) \((?P<runner>[^()]+)\)\s*$")
_NAMED = re.compile(r"Tactic Name: (?P<name>[^\s,]+),? Tactic: (?P<id>0x[0-9a-f]+)")
_TIMED = re.compile(r"Tactic: (?P<id>0x[0-9a-f]+),? Time: (?P<ms>[0-9.e+-]+|inf|nan)\b")


class Tried(Closed):
    """One kernel.

    Args:
        name: of it, or its number.
        seconds: that it took.
    """

    name: str
    seconds: float


class TimedLayer(Closed):
    """A layer, and every kernel that was timed for it, the fastest first."""

    layer: str
    tried: tuple[Tried, ...]

    @property
    def spread(self) -> float:
        """How many times as long the slowest takes."""
        return self.tried[-1].seconds / self.tried[0].seconds


class Tactics:
    """Reads a log, line by line."""

    def __init__(self) -> None:
        self._layer, self._runner = "", ""
        self._names: dict[str, str] = {}
        self._found: dict[str, dict[str, float]] = {}

    def hear(self, line: str) -> None:
        """One line of the log."""
        if found := _RUNNER.search(line):
            self._layer, self._runner = found["layer"], found["runner"]
            return
        if "Fastest Tactic" in line:  # says again what has been said
            return
        if found := _NAMED.search(line):
            self._names[found["id"]] = found["name"]
        if (found := _TIMED.search(line)) and self._layer:
            seconds = float(found["ms"]) / 1e3
            if not 0 < seconds < float("inf"):
                return
            name = self._names.get(found["id"], f"{self._runner} {found['id']}")
            times = self._found.setdefault(self._layer, {})
            # the same kernel is timed for several layouts of its tensors
            times[name] = min(seconds, times.get(name, seconds))

    def timed(self, count: int = KEPT) -> list[TimedLayer]:
        """The layers that take the longest, those with conversions of layouts left out."""
        layers = [
            TimedLayer(
                layer=layer,
                tried=tuple(
                    Tried(name=name, seconds=taken) for name, taken in sorted(times.items(), key=lambda pair: pair[1])
                ),
            )
            for layer, times in self._found.items()
            if not layer.startswith("Optimizer Reformat")
        ]
        return sorted(layers, key=lambda each: -each.tried[0].seconds)[:count]


def of(record: object) -> list[TimedLayer]:
    """`tactics` of an engine's description."""
    return [TimedLayer.model_validate(each) for each in record] if isinstance(record, Sequence) else []
