"""Which products the run is about, and in which order: what a whole model needs first."""

from __future__ import annotations

import torch

from quantkit.kernels.dispatch import Config, candidates
from quantkit.measurement.cuda.sides import FormatVariant, known

# out x in of the linears of Llama-3-8B. A block has four, as runtimes run it: gate and up as one; down; q, k and v as
# one; o. The others are the parts of those that were joined
WHOLE_MODEL = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
HEAD = (128256, 4096)
PARTS = ((14336, 4096), (1024, 4096))
# rows of x: of whole steps first
FIRST_BATCHES = (1, 16, 64, 256)
OTHER_BATCHES = (2, 4, 8, 32, 128, 512)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = (
    *("int4.g64.zeros", "int4.g128", "int4.g128.zeros", "int8", "fp8_e4m3", "nf4.g64.double"),
    *("int8.dynamic", "fp8_e4m3.dynamic"),
    *("int4.g32", "int4.g64"),
)
VARIANTS = tuple(known()[name] for name in _NAMES)
# how many of the variants are swept
SWEPT = 8
# those that lines of PENDING.md call int4: the recipes' form first
INT4 = ("int4.g64.zeros", "int4.g128")
# those that a whole model is built of
IN_WHOLE = ("int4.g64.zeros", "int4.g128", "int8")
# kernels whose counters are read: variant, and whether the whole K is in one program
BASELINE, ATTENTION = "torch.linear", "attention"
PROFILED = {
    **{f"{name} whole K": (name, True) for name in ("int4.g64.zeros", "int8")},
    **{"int4.g64.zeros split K": ("int4.g64.zeros", False)},
    **{name: (name, False) for name in (ATTENTION, BASELINE)},
}
# of `candidates`, which has the best by the machine code first: what is timed before anything else is
FIRST_SETTINGS = 2
_SMALLEST = Config(block_n=64, block_m=16, unroll=1, split=2, warps=4, stages=2)


def checked(variant: FormatVariant, batch: int, *, dry: bool = False) -> list[Config]:
    """Return the settings whose results are compared with float64: a small split of K and a large one, a whole K.

    Args:
        variant: of the weight.
        batch: rows of x.
        dry: plumbing only.
    """
    able = settings(variant, batch, dry=dry)
    whole = [each for each in able if each.whole_k]
    return list(dict.fromkeys((able[0], able[-1], *whole[:1], *whole[-1:])))


def settings(variant: FormatVariant, batch: int, *, dry: bool = False) -> list[Config]:
    """Tile sizes worth timing, the most promising first; in a dry run the smallest that split K.

    Args:
        variant: of the weight.
        batch: rows of x.
        dry: plumbing only.
    """
    return [_SMALLEST] if dry else candidates(batch, native=variant.native)
