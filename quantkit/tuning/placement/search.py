"""Where a network for TensorRT should quantize inputs: a search over groups of layers, for speed, under a gate.

A pair before a product lets it multiply in 8 bits, and costs a conversion that may take longer than that saves; which
it is depends on shapes, batch and GPU, so it is measured. Coordinate descent: all groups begin as they were compiled;
each in turn is switched and the change is kept if a step becomes faster by more than the noise and the gate holds; it
ends when no switch helps. What was measured is kept line by line, so that a search that was killed goes on.

The network of a bundle is content and stays as it is: what is found is a recipe's `overrides`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError
from quantkit.stats.deciding.apart import is_hidden

# a switch has to gain this much, beyond both spreads
MARGIN = 0.01


@dataclass(frozen=True)
class PlacementTime:
    """One placement.

    Args:
        seconds: of a step, median.
        spread: of that, as a share: half the width of its interval.
        harm: how far it is from the network without any pair: KL in nats a token of a language model, one less the
            mean cosine of what any other gives out.
    """

    seconds: float
    spread: float
    harm: float


@dataclass(frozen=True)
class FoundPlacement:
    """What came of a search.

    Args:
        off: groups whose inputs are better left in 16 bits.
        before, after: as compiled, and with those off.
        tried: placements that were measured, now or before.
    """

    off: tuple[str, ...]
    before: PlacementTime
    after: PlacementTime
    tried: int

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.before.seconds / self.after.seconds

    def overrides(self, groups: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        """For a recipe: the inputs of these layers are left alone."""
        kinds = dict.fromkeys(name.rpartition(".")[2] for group in self.off for name in groups[group])
        return [{"match": f"*.{kind}", "activations": None} for kind in kinds]

    def keep(self, groups: Mapping[str, Sequence[str]]) -> list[str]:
        """For a recipe of a graph, whose products have both sides in 8 bits or none: these nodes stay in floats."""
        return list(dict.fromkeys(name for group in self.off for name in groups[group]))


Measure = Callable[[frozenset[str]], PlacementTime]
Report = Callable[[float, str], None]


def search(
    groups: Collection[str],
    measure: Measure,
    *,
    harm_max: float,
    journal: Path,
    progress: Report | None = None,
) -> FoundPlacement:
    """Search.

    Args:
        measure: a placement, by the groups that are off; called once for each that the journal does not know.
        harm_max: what a placement may differ; the start is exempt, it is what was compiled.
        journal: file of what was measured so far.

    Raises:
        InputError: `nothing-to-tune`, no group.
    """
    if not groups:
        raise InputError(
            "nothing-to-tune",
            where="--autotune-qdq",
            value="no pair before a product",
            rule="inputs with fixed scales have pairs that can be left out",
            remedy="a recipe with fixed scales of inputs: int8-tensorrt",
        )
    tell = progress or (lambda share, words: None)
    known = _read(journal)

    def at(off: frozenset[str]) -> PlacementTime:
        if off not in known:
            known[off] = measure(off)
            _write(journal, known)
        return known[off]

    ordered = sorted(groups)
    now: frozenset[str] = frozenset()
    before = best = at(now)
    changed = True
    while changed:
        changed = False
        for place, group in enumerate(ordered):
            switched = now ^ {group}
            tell(place / len(ordered), f"without {', '.join(sorted(switched)) or 'none'}")
            found = at(switched)
            if found.harm <= max(harm_max, before.harm) and _faster(found, best):
                now, best, changed = switched, found, True
    return FoundPlacement(tuple(sorted(now)), before, best, len(known))


def _faster(one: PlacementTime, other: PlacementTime) -> bool:
    gain = other.seconds / one.seconds
    return gain > 1 + MARGIN and not is_hidden(math.log(gain), MARGIN + one.spread + other.spread)


def _read(journal: Path) -> dict[frozenset[str], PlacementTime]:
    """What is known; a last line that was cut off is left out."""
    found = {}
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
            found[frozenset(row["off"])] = PlacementTime(row["seconds"], row["spread"], row["harm"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _write(journal: Path, known: Mapping[frozenset[str], PlacementTime]) -> None:
    rows = [
        {"off": sorted(off), "seconds": each.seconds, "spread": each.spread, "harm": each.harm}
        for off, each in known.items()
    ]
    journal.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(journal, "".join(json.dumps(row) + "\n" for row in rows).encode())
