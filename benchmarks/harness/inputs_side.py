"""What rounding the inputs of 8-bit products costs, and what smoothing takes off: a process of its own.

    {"model": FOLDER, "blocks": FOLDER of a checkpoint, "calibration": [[ids]], "eval": [[ids]],
     "ways": {name: {"round": {kind: "token" | "block"}, "smooth": {kind: alpha}}}}, kinds: qkv, gate_up, o, down
        -> [{"way", "kl", "kl_se"}]

Plain transformers on both sides, weights as the codes stand for them. By token weights are rounded to 8 bits a channel,
too; by block, as MatMulNBits does it at level 4, they stay. Smoothing (Xiao et al., "SmoothQuant", arXiv 2211.10438):

    x / s, W s,  s_k = max|x_k|^alpha / max_n|W_nk|^(1 - alpha), its geometric mean 1

which a norm's weight, or the rows of up_proj, would absorb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from score import load
from torch import Tensor, nn

from quantkit.measurement.accuracy.positions import Accuracy

KINDS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
}
LEAST, BLOCK = 1e-5, 128


def by_token(x: Tensor) -> Tensor:
    step = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=LEAST**4)
    return torch.round(x / step).clamp(-128, 127) * step


def by_block(x: Tensor) -> Tensor:
    block = next(size for size in (BLOCK, 64, 32, 16) if x.shape[-1] % size == 0)
    parts = x.unflatten(-1, (-1, block))
    step = (parts.abs().amax(-1, keepdim=True) / 127).clamp(min=LEAST**4)
    return (torch.round(parts / step) * step).flatten(-2)


def by_channel(weight: Tensor) -> Tensor:
    step = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=LEAST**4)
    return torch.round(weight / step) * step


class Blocks:
    """The linears of a model's blocks, and how large their inputs are."""

    def __init__(self, model: Any, ids: list[list[int]]) -> None:
        self.model = model
        named = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        self.linears = {name: each for name, each in named.items() if name.rpartition(".")[2] in KINDS}
        self.weights = {name: each.weight.detach().clone() for name, each in self.linears.items()}
        self.largest: dict[str, Tensor] = {}
        hooks = [each.register_forward_pre_hook(self._seen(name)) for name, each in self.linears.items()]
        for row in ids:
            model(torch.tensor([row]))
        for hook in hooks:
            hook.remove()

    def _seen(self, name: str) -> Callable[[Any, Any], None]:
        def see(_: Any, given: Any) -> None:
            found = given[0].abs().flatten(0, -2).amax(0)
            self.largest[name] = torch.maximum(self.largest.get(name, found), found)

        return see

    def put(self, how: Mapping[str, Any]) -> list[Any]:
        """Round and smooth; the hooks that do it to inputs."""
        hooks = []
        for name, linear in self.linears.items():
            kind = KINDS[name.rpartition(".")[2]]
            rounding, scale = how["round"].get(kind), self._scale(name, kind, how["smooth"].get(kind))
            weight = self.weights[name]
            linear.weight.data.copy_(by_channel(weight * scale) / scale if rounding == "token" else weight)
            if rounding:
                hooks.append(linear.register_forward_pre_hook(self._rounds(rounding, scale)))
        return hooks

    def _scale(self, name: str, kind: str, alpha: float | None) -> Tensor:
        if alpha is None:
            return torch.ones(self.weights[name].shape[1])
        block = name.rpartition(".")[0]
        together = [self.weights[each] for each in self.weights if each.startswith(f"{block}.") and _kind(each) == kind]
        weight = torch.cat(together).abs().amax(0).clamp(min=LEAST)
        found = self.largest[name].clamp(min=LEAST) ** alpha / weight ** (1 - alpha)
        scale: Tensor = found / found.log().mean().exp()
        return scale

    @staticmethod
    def _rounds(rounding: str, scale: Tensor) -> Callable[[Any, Any], Any]:
        round_ = by_token if rounding == "token" else by_block
        return lambda _, given: (round_(given[0] / scale) * scale,)


def _kind(name: str) -> str:
    return KINDS[name.rpartition(".")[2]]


@torch.no_grad()
def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    original = load(request["model"])
    expected = [original(torch.tensor([row])).logits[0].float() for row in request["eval"]]
    del original
    blocks = Blocks(load(request["blocks"]), request["calibration"])
    rows = []
    for name, how in request["ways"].items():
        hooks, accuracy = blocks.put(how), Accuracy()
        for row, before in zip(request["eval"], expected, strict=True):
            accuracy.add(torch.tensor(row), before, blocks.model(torch.tensor([row])).logits[0].float())
        for hook in hooks:
            hook.remove()
        items = accuracy.items()
        kl = items.mean(items.kl)
        rows.append({"way": name, "kl": kl.value, "kl_se": kl.standard_error})
    return rows
