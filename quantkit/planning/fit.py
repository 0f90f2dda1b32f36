"""Place a compile on a GPU: bytes that it needs there, and sequences per forward, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.passes import pass_of
from quantkit.planning.compiling import ALIVE, SCORED_TOGETHER, CompileSpec, needs_of, shared

# usable share of a GPU's free bytes: the rest is for libraries' workspaces and fragmentation
USABLE = 0.85
# for the widest shared input: matrices [K, K] of a solve, and matrices [N, K] beside the weight
_SQUARES, _BESIDE = 8, 6
# most bytes of a search for folds, and copies of a shared input's weights that it would use
_SEARCH, _TRIED = 4e9, 42


@dataclass(frozen=True)
class Fit:
    """Placement of a compile on a device.

    Args:
        needed: bytes that it needs at least.
        free: free bytes on the device.
        chunk: sequences per forward; 0 if it does not fit.
        resident: True if hidden states of the whole set stay on the device.
        parts: purpose -> bytes.
    """

    needed: float
    free: float
    chunk: int
    resident: bool
    parts: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """True if a block with its activations fits."""
        return self.chunk > 0

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON."""
        return {
            "fits": self.fits,
            "needed_bytes": round(self.needed),
            "free_bytes": round(self.free),
            "sequences_at_once": self.chunk,
            "hidden_states": "device" if self.resident else "memory",
            "bytes": {name: round(size) for name, size in self.parts.items()},
        }


def fit(spec: CompileSpec, free: float) -> Fit:
    """Place a compile on a device with so many free bytes, before anything is loaded there.

    While blocks are solved, the device holds: three blocks in float32 (the present one, the next, the one written; a
    fourth if a pass needs the original stream), the widest solve, a search's candidates, `ALIVE` copies of the widest
    activation of a sequence. If the model's own forward pauses at each block, it also holds the parts outside of the
    blocks and the state of each paused forward (three hidden states, other inputs, a mask). While models are scored it
    holds the ends of both, a block of each, a few sequences. The larger of the two has to fit. The rest goes first to
    hidden states of the whole set, if all fit, then to more sequences per forward. With paused forwards, hidden states
    always stay on the device, and sequences run one by one.
    """
    model = spec.architecture
    streams = 2 if spec.corrected else 1
    folding = any("hessian" in needs_of(step) and "folded" in pass_of(step).ensures for step in spec.recipe.passes)
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
        suspended = spec.length * (3 * model.hidden + spec.beside + spec.length)
        parts["suspended"] = streams * (spec.ends + 4.0 * spec.sequences * suspended)
        solved += parts["suspended"] + hidden
    needed = max(solved, parts["ends"] + 2 * spec.block + SCORED_TOGETHER * sequence)
    if needed > USABLE * free:
        return Fit(needed, free, 0, False, parts)
    if spec.live:
        return Fit(needed, free, 1, True, parts)
    left = USABLE * free - solved + sequence
    resident = hidden + sequence <= left
    chunk = max(1, int((left - hidden * resident) // sequence))
    # all, or a power of two: other uses of the card then rarely change the order of sums
    chunk = spec.sequences if 0 < spec.sequences <= chunk else 2 ** (chunk.bit_length() - 1)
    return Fit(needed, free, chunk, resident, parts)
