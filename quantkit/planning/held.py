"""Hold a plan against a measured load: each planned figure beside the measured one, with their ratio.

The plan simulates as many requests at the same rates, from an empty server to the last answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# measured row -> figure of a simulated visit; of latencies, the medians
_RATES = {"load.requests": "requests", "load.tokens": "tokens"}
_WAITS = {"load.ttft": "ttft", "load.tpot": "tpot", "load.e2el": "latency"}


@dataclass(frozen=True)
class HeldFigure:
    """A planned figure beside the measured one.

    Args:
        subject: label of the model: a recipe, or `float` for the original.
        what: name of the measured row.
        unit: unit of both figures.
        rate: requests a second; None for a figure of the whole server.
        planned: figure of the plan; None if it has none.
        measured: figure of the server.
    """

    subject: str
    what: str
    unit: str
    rate: float | None
    planned: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Planned divided by measured; None without both."""
        return None if self.planned is None or not self.measured else self.planned / self.measured

    @property
    def near(self) -> bool:
        """True within 25 % of the measured figure, and of blocks within 1 %."""
        off = 0.01 if self.what == "load.kv_blocks" else 0.25
        return self.ratio is not None and abs(self.ratio - 1) <= off

    def as_dict(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {**vars(self), "ratio": self.ratio}


def held(
    subject: str,
    rows: Sequence[Mapping[str, Any]],
    visits: Mapping[float, Mapping[str, float]],
    blocks: tuple[int, int] | None,
    *,
    original: bool = False,
) -> Iterator[HeldFigure]:
    """Compare a plan with the rows of a load.

    Args:
        subject: label of the model.
        rows: `load.*` rows of a bundle.
        visits: rate -> figures of a simulated visit; empty if no time is known.
        blocks: planned blocks of the KV cache, and requests that they hold.
        original: True to compare with the measured baseline.
    """
    for row in rows:
        name, settings = str(row["name"]), row.get("settings") or {}
        value = (row.get("baseline") or {}).get("value") if original else row.get("value")
        if value is None:
            continue
        if name == "load.kv_blocks":
            yield HeldFigure(subject, name, "1", None, blocks[0] if blocks else None, value)
            if (fits := settings.get("fits")) and not original:
                yield HeldFigure(subject, "load.fits", "1", None, blocks[1] if blocks else None, fits)
            continue
        if (key := _RATES.get(name) or _WAITS.get(name)) and settings.get("quantile", "p50") == "p50":
            rate, what = settings["rate"], name if name in _RATES else f"{name} p50"
            yield HeldFigure(subject, what, str(row["unit"]), rate, visits.get(rate, {}).get(key), value)
