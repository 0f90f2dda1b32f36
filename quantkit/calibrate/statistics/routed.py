"""Tokens that each expert receives.

An expert with few calibration tokens has no useful Hessian. It is *forced*, calibrated on all tokens of its
layer without adding its output, or *kept* in high precision. Tokens are counted with the block's original weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.model.streaming.calls import Calls
from quantkit.model.structure.experts import found_in
from quantkit.model.structure.traced import hooked

Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]


class _Counted(Exception):
    """Signal that ends a run behind the last experts."""


@torch.no_grad()
def count(block: nn.Module, calls: Calls, stage: int, hidden: Tensor) -> dict[str, int]:
    """Count the calibration tokens routed to each expert of a block.

    Args:
        block: the block, with its original weights.
        calls: its calls.
        stage: number of the call.
        hidden: input of the block, [samples, tokens, width].

    Returns:
        expert -> number of tokens; empty for a block without experts.
    """
    layers = found_in(block)
    if not layers:
        return {}
    zeros = partial(torch.zeros, dtype=torch.int64, device=calls.device)
    counts = {path: zeros(len(experts)) for path, experts in layers.items()}

    def note(path: str) -> Hook:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            counts[path] += torch.bincount(args[1].flatten(), minlength=len(counts[path]))[: len(counts[path])]
            if len(layers) == 1:
                raise _Counted

        return hook

    def reached(path: str, number: int) -> Hook:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            # inputs of zeros stand for tokens of other experts
            counts[path][number] += args[0].reshape(-1, args[0].shape[-1]).any(dim=-1).sum()

        return hook

    hooks = [layer.register_forward_pre_hook(note(path)) for path, layer in layers.items() if layer.routed]
    for path, layer in layers.items():
        for number in range(0 if layer.routed else len(layer)):
            first = next(layer.get_submodule(str(number)).children())
            hooks.append(first.register_forward_pre_hook(reached(path, number)))
    with hooked(hooks):
        for number, part in enumerate(calls.chunks(hidden)):
            with suppress(_Counted):
                calls.run(block, stage, part, number)
    return {f"{path}.{number}": int(seen) for path, row in counts.items() for number, seen in enumerate(row.tolist())}


def force(block: nn.Module, names: list[str]) -> None:
    """Run these experts of a block on every token from now on, for observers of their inputs.

    Experts whose forward does not take the experts of each token stay as they are.

    Args:
        names: experts by their names in the block; all others are no longer forced.
    """
    for path, experts in found_in(block).items():
        numbers = [name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")]
        experts.forced = frozenset(int(number) for number in numbers)
