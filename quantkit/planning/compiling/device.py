"""Whether a compile fits on a GPU, and how much of it at a time: in sizes, before anything is loaded there.

While blocks are solved, these are there together:

    blocks        weights in float32 of three: one is worked on, one is on its way, one is being written; a fourth is
                  the first as it came, where a pass looks at the original stream
    solving       of the widest shared input: two halves of its Hessian, the Hessian, its drift, what a factor is
                  made of and the factor (8 [K, K]), and the weights of its linears with what solvers hold beside
                  them (6 [N, K])
    searching     what a pass that looks for folds tries at once, 4 GB at most
    a sequence    the widest activation, `ALIVE` times
    suspended     of a model whose own forward stands still at each block: what lies outside the blocks, and what a
                  forward of each sequence holds meanwhile (three hidden states, what is beside them, a mask)

While models are scored: embedding and head of both in float32 (`ends`), a block of each, and a few sequences. The
larger of the two has to fit. What is left beside the first goes to hidden states of the whole set (`hidden`, before a
block and behind it), if all of them fit, then to sequences that go through at once. Where forwards stand still, hidden
states stay there in any case, and sequences go through one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.planning.compiling.spec import ALIVE, CompileSpec, elements, needs, shared
from quantkit.planning.compiling.work import SCORED_TOGETHER
from quantkit.plugins import PASSES

# of the bytes that are free: the rest is for libraries' workspaces and for holes between what is allocated
USABLE = 0.85
_SQUARES, _BESIDE = 8, 6
# bytes that a search takes at most, and how often it would like to have a shared input's weights
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
    """How a compile lies on a device with so many bytes free."""
    model = spec.architecture
    copies = 2 if spec.corrected else 1
    solving = any("hessian" in needs(step) for step in spec.recipe.passes)
    folding = any("hessian" in needs(step) and "folded" in PASSES.of(step).ensures for step in spec.recipe.passes)
    groups = [group for layer in model.layers for group in shared(layer)]
    widest = max((max(matrix.N, matrix.K) for matrix in model.inside()), default=1)
    head = model.head.parameters if model.head is not None and not model.tied else 0
    sequence = 4.0 * ALIVE * widest * max(spec.length, spec.scored_length, 1)
    hidden = 4.0 * spec.tokens * model.hidden * 2 * copies
    parts = {
        "blocks": 4.0 * (2 + copies) * max((elements(layer.matrices) for layer in model.layers), default=0.0),
        "solving": max(
            (
                4.0 * (_SQUARES * group[0].K ** 2 * solving + _BESIDE * sum(each.N for each in group) * group[0].K)
                for group in groups
            ),
            default=0.0,
        ),
        "searching": max(
            (min(_SEARCH, 4.0 * folding * _TRIED * sum(each.N for each in group) * group[0].K) for group in groups),
            default=0.0,
        ),
        "ends": 2 * 4.0 * (model.embeddings + model.others + head),
        "sequence": sequence,
        "hidden": hidden,
    }
    solved = parts["blocks"] + parts["solving"] + parts["searching"] + sequence
    if spec.live:
        outside, tokens = model.embeddings + model.others + head, spec.length
        held = spec.sequences * copies * tokens * (3 * model.hidden + spec.beside + tokens)
        parts["suspended"] = 4.0 * (copies * outside + held)
        solved += parts["suspended"] + hidden
    scored = parts["ends"] + 2 * parts["blocks"] / (2 + copies) + SCORED_TOGETHER * sequence
    needed = max(solved, scored)
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
