"""What the user allows: limits on bits a weight, bytes, KL or seconds, and the error where none can be met.

bits=4.25       mean over the linears inside the blocks, those left in high precision counted at their own width
bytes=100MB     all weights of the model, embeddings and head included
kl=0.05         nats a token; then the smallest model that keeps to it is chosen, instead of the least harm
latency=12ms    of all linears inside the blocks together, at every batch of the timings
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import InputError

KINDS = ("bits", "bytes", "kl", "latency")
_UNITS = {
    "bits": {"": 1.0},
    "bytes": {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "kl": {"": 1.0},
    "latency": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6},
}


@dataclass(frozen=True)
class Budget:
    """Limits by kind, at least one: bits a weight, bytes of all weights, nats a token, seconds."""

    bits: float | None = None
    bytes: float | None = None
    kl: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Budget:
        """Read `["bits=4.25", "latency=12ms"]`, or one text with commas. Raises InputError: `budget-invalid`."""
        found: dict[str, float] = {}
        for text in (part.strip() for whole in texts for part in whole.split(",")):
            kind, equals, value = text.partition("=")
            number = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*", value)
            unit = _UNITS.get(kind, {}).get(number.group(2)) if number else None
            try:
                amount = float(number.group(1)) * unit if number and unit else 0.0
            except ValueError:
                amount = 0.0
            if not equals or kind in found or amount <= 0:
                value, rule = text or "nothing", "one of bits=, bytes=, kl=, latency=, each once, with a number above 0"
                remedy = "e.g. bits=4.25, bytes=100MB, kl=0.05, latency=12ms"
                raise InputError("budget-invalid", where="--budget", value=value, rule=rule, remedy=remedy)
            found[kind] = amount
        return cls(**found)

    def as_dict(self) -> dict[str, float]:
        """Give the limits that are set."""
        return {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{kind}={value:g}" for kind, value in self.as_dict().items())
