"""Whether a compile fits on a GPU, and how much of it at a time: in sizes, before anything is loaded there.

    a block       its weights in float32, twice where a pass looks at the original stream
    solving       of the widest shared input: two halves of its Hessian, the Hessian, its drift, what a factor is
                  made of and the factor (8 [K, K]), and the weights of its linears with what solvers hold beside
                  them (6 [N, K])
    the ends      embedding and head in float32, with which hidden states begin and scores are made
    a sequence    the widest activation, `ALIVE` times
    resident      hidden states of the whole set, before a block and behind it

The first three and one sequence have to fit. What is left goes to hidden states, if all of them fit, then to sequences
that go through at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.planning.compiling.spec import ALIVE, CompileSpec, elements, needs, shared

# of the bytes that are free: the rest is for libraries' workspaces and for holes between what is allocated
USABLE = 0.85
_SQUARES, _BESIDE = 8, 6


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
    """How a compile lies on a device with so many bytes free."""
    model = spec.architecture
    copies = 2 if spec.corrected else 1
    solving = any("hessian" in needs(step) for step in spec.recipe.passes)
    groups = [group for layer in model.layers for group in shared(layer)]
    widest = max((max(matrix.N, matrix.K) for matrix in model.inside()), default=1)
    head = model.head.parameters if model.head is not None and not model.tied else 0
    sequence = 4.0 * ALIVE * widest * max(spec.length, spec.scored_length, 1)
    hidden = 4.0 * spec.tokens * model.hidden * 2 * copies
    parts = {
        "block": 4.0 * copies * max((elements(layer.matrices) for layer in model.layers), default=0.0),
        "solving": max(
            (
                4.0 * (_SQUARES * group[0].K ** 2 * solving + _BESIDE * sum(each.N for each in group) * group[0].K)
                for group in groups
            ),
            default=0.0,
        ),
        "ends": 4.0 * (model.embeddings + model.others + head),
        "sequence": sequence,
        "hidden": hidden,
    }
    needed = parts["block"] + parts["solving"] + parts["ends"] + sequence
    left = USABLE * free - needed + sequence
    if left < sequence:
        return Fit(needed, free, 0, False, parts)
    resident = hidden + sequence <= left
    chunk = int((left - hidden * resident) // sequence)
    return Fit(needed, free, max(1, min(chunk, max(spec.sequences, 1))), resident, parts)
