"""Whether a compile fits on a GPU, and how much of it at a time: in sizes, before anything is loaded there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.passes import pass_of
from quantkit.planning.compiling import ALIVE, SCORED_TOGETHER, CompileSpec, needs, shared

# of the bytes that are free: the rest is for libraries' workspaces and for holes between what is allocated
USABLE = 0.85
# of the widest shared input: Hessians [K, K] of a solve, and what solvers hold beside weights [N, K]
_SQUARES, _BESIDE = 8, 6
# bytes that a search for folds takes at most, and how often it would like to have a shared input's weights
_SEARCH, _TRIED = 4e9, 42


@dataclass(frozen=True)
class Fit:
    """How a compile lies on a device.

    Args:
        needed: bytes without which it does not fit.
        free: bytes on the device.
        chunk: sequences of one forward; 0 where it does not fit.
        resident: whether hidden states of the whole set stay there.
        parts: bytes by what they are for.
    """

    needed: float
    free: float
    chunk: int
    resident: bool
    parts: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """Whether a block with its activations does."""
        return self.chunk > 0

    def as_dict(self) -> dict[str, object]:
        """As JSON."""
        return {
            "fits": self.fits,
            "needed_bytes": round(self.needed),
            "free_bytes": round(self.free),
            "sequences_at_once": self.chunk,
            "hidden_states": "device" if self.resident else "memory",
            "bytes": {name: round(size) for name, size in self.parts.items()},
        }


def fit(spec: CompileSpec, free: float) -> Fit:
    """How a compile lies on a device with so many bytes free.

    While blocks are solved, these are there together: three blocks in float32 (one is worked on, one is on its way, one
    is being written; a fourth where a pass looks at the original stream), the widest solve, a search's candidates, and
    the widest activation of a sequence `ALIVE` times; where the model's own forward stands still at each block, what
    lies outside the blocks and what each forward holds meanwhile (three hidden states, what is beside them, a mask).
    While models are scored: the ends of both, a block of each, a few sequences. The larger of the two has to fit. What
    is left goes to hidden states of the whole set, if all of them fit, then to sequences that go through at once; where
    forwards stand still, hidden states stay there in any case, and sequences go through one by one.
    """
    model = spec.architecture
    streams = 2 if spec.corrected else 1
    folding = any("hessian" in needs(step) and "folded" in pass_of(step).ensures for step in spec.recipe.passes)
    inputs = [(group[0].K, sum(matrix.N for matrix in group)) for layer in model.layers for group in shared(layer)]
    sequence = 4.0 * ALIVE * spec.widest * max(spec.length, spec.scored_length, 1)
    hidden = 4.0 * spec.tokens * model.hidden * 2 * streams
    parts = {
        "blocks": (2 + streams) * spec.block,
        "solving": max((4.0 * (_SQUARES * k**2 * spec.solving + _BESIDE * n * k) for k, n in inputs), default=0.0),
        "searching": max((min(_SEARCH, 4.0 * folding * _TRIED * n * k) for k, n in inputs), default=0.0),
        "ends": 2 * spec.ends,
        "sequence": sequence,
        "hidden": hidden,
    }
    solved = parts["blocks"] + parts["solving"] + parts["searching"] + sequence
    if spec.live:
        held_each = spec.length * (3 * model.hidden + spec.beside + spec.length)
        parts["suspended"] = streams * (spec.ends + 4.0 * spec.sequences * held_each)
        solved += parts["suspended"] + hidden
    needed = max(solved, parts["ends"] + 2 * spec.block + SCORED_TOGETHER * sequence)
    if needed > USABLE * free:
        return Fit(needed, free, 0, False, parts)
    if spec.live:
        return Fit(needed, free, 1, True, parts)
    left = USABLE * free - solved + sequence
    resident = hidden + sequence <= left
    chunk = max(1, int((left - hidden * resident) // sequence))
    # all of them, or a power of two: what else the card holds is then less likely to change the order of sums
    chunk = spec.sequences if 0 < spec.sequences <= chunk else 2 ** (chunk.bit_length() - 1)
    return Fit(needed, free, chunk, resident, parts)
