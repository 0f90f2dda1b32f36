"""Experts as vLLM's loader holds them, expanded by plain arithmetic, and beside ours.

vLLM has the experts of a layer in two tensors, w13 [E, 2I, K], gate first and then up, and w2 [E, K, I]:

    w13_weight_packed int32     eight (four) integers of 4 (8) bits a word, the first in its lowest bits, less 8 (128)
    w13_weight int8, fp8        the codes
    w13_weight uint8            two FP4 codes in a byte, gpt-oss alone: gate and up in turns
    w13_weight_scale            [E, 2I, groups]; uint8: an exponent and 127
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.model.source.open import open_written
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure import experts
from quantkit.runtimes.torch.reloaded import expanded

# of bfloat16: codes times scales, rounded on both sides
LIMIT = 2.0**-7
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_LAYER = re.compile(r"\.(\d+)\.")
_GATES, _UPS = ("gate_proj", "w1", "gate_up_proj"), ("up_proj", "w3")


def compared(folder: Path, loaded: Path) -> dict[str, Any]:
    """The largest difference of an expert's weight, relative to the largest weight; and with two experts exchanged."""
    theirs = {name: value for name, value in load_file(loaded).items() if "shape" not in name}
    model = StreamedModel(expanded(open_written(folder)))
    worst, apart, layers = 0.0, float("inf"), 0
    for path, layer in experts.found_in(model.skeleton).items():
        number = _LAYER.search(path)[1]  # type: ignore[index]
        for part, leaves in (("w13", (*_GATES, *_UPS)), ("w2", ("down_proj", "w2"))):
            names = [name for cut in layer.cuts.values() for name in cut.names if name in leaves]
            names.sort(key=lambda name: name in _UPS)
            ours = torch.stack(
                [
                    torch.cat([model.tensor(f"{path}.{expert}.{name}.weight").float() for name in names])
                    for expert in range(len(layer))
                ]
            )
            found = _expanded({name: value for name, value in theirs.items() if _is(name, number, part)}, ours.shape)
            largest = float(ours.abs().max())
            worst = max(worst, float((ours - found).abs().max()) / largest)
            apart = min(apart, float((ours - found.flip(0)).abs().max()) / largest)
            layers += part == "w2"
    equal = "equal" if layers and worst <= LIMIT else f"differs by {worst:.2g}"
    return {"loader": equal, "difference": worst, "exchanged": apart, "layers": layers}


def _is(name: str, number: str, part: str) -> bool:
    place = _LAYER.search(name)
    return place is not None and place[1] == number and f".{part}_weight" in name


def _expanded(tensors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Multiply codes by scales: [E, N, K] float32."""
    (scale,) = (value for name, value in tensors.items() if name.endswith("_scale"))
    (codes,) = (value for name, value in tensors.items() if name.endswith(("_weight", "_weight_packed")))
    codes = codes[:, : shape[1]]
    if codes.dtype == torch.int32:
        each = shape[2] // codes.shape[2]
        bits = 32 // each
        parts = torch.stack([(codes >> (bits * at)) & ((1 << bits) - 1) for at in range(each)], dim=-1)
        values = (parts - (1 << (bits - 1))).flatten(2).float()
    elif codes.dtype == torch.uint8:
        values = _FP4[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(2).long()]
        scale = torch.exp2(scale.float() - 127)
    else:
        values = codes.float()
    scale = scale.float()[:, : shape[1]]
    return values * scale.repeat_interleave(shape[2] // scale.shape[2], dim=2)
