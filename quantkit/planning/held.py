"""Hold a plan against a measured load: each planned figure beside the measured one, with their ratio.

The plan simulates the same requests at the same rates. A rate above the capacity has no percentile; there the rates of
the full server are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.planning.load import Load

# measured row -> figure of the simulated load; percentiles by `settings.quantile`
_RATES: Mapping[str, Callable[[Load], float]] = {
    "load.requests": lambda load: min(load.rate, load.capacity),
    "load.tokens": lambda load: load.tokens_per_second,
}
_WAITS = {"load.ttft": "ttft", "load.tpot": "tpot", "load.e2el": "latency"}
_QUANTILES = ("p50",)


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
    loads: Mapping[float, Load | None],
    blocks: tuple[int, int] | None,
    *,
    original: bool = False,
) -> Iterator[HeldFigure]:
    """Compare a plan with the rows of a load.

    Args:
        subject: label of the model.
        rows: `load.*` rows of a bundle.
        loads: rate -> simulated load.
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
        rate = settings.get("rate")
        load = loads.get(rate) if rate is not None else None
        if name in _RATES:
            yield HeldFigure(subject, name, str(row["unit"]), rate, _RATES[name](load) if load else None, value)
        elif name in _WAITS and (quantile := settings.get("quantile")) in _QUANTILES:
            waits = getattr(load, _WAITS[name]) if load is not None else {}
            planned = waits[quantile].value if quantile in waits else None
            yield HeldFigure(subject, f"{name} {quantile}", str(row["unit"]), rate, planned, value)
