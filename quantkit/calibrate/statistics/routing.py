"""How many calibration tokens each expert of a block sees, and what is done about those that see too few.

An expert that calibration hardly ever routes to has no Hessian worth the name. It is *forced*: calibrated on all tokens
that reach its layer, as if each were routed to it; its output is left out, so that the block computes what it did. Or
it is *kept* in high precision.

Counted with the block's weights as they came, up to its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from quantkit.model.streaming.calls import Calls
from quantkit.model.structure.experts import Experts, found_in
from quantkit.model.structure.traced import hooked


class _Counted(Exception):
    """Ends a run behind the last experts."""


@torch.no_grad()
def count(block: nn.Module, calls: Calls, stage: int, hidden: Tensor) -> dict[str, int]:
    """Expert -> the calibration tokens that are routed to it; empty for a block without experts.

    Args:
        hidden: [samples, tokens, width], its input.
    """
    layers = found_in(block)
    if not layers:
        return {}
    counts = {
        path: torch.zeros(len(experts), dtype=torch.int64, device=calls.device) for path, experts in layers.items()
    }

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            counts[path] += torch.bincount(args[1].flatten(), minlength=len(counts[path]))
            if len(layers) == 1:
                raise _Counted

        return hook

    with hooked(experts.register_forward_pre_hook(note(path)) for path, experts in layers.items()):
        for number, part in enumerate(calls.chunks(hidden)):
            with suppress(_Counted):
                calls.run(block, stage, part, number)
    return {f"{path}.{number}": int(seen) for path, row in counts.items() for number, seen in enumerate(row.tolist())}


def force(block: nn.Module, names: list[str]) -> None:
    """From now on these experts of a block run on every token, for whoever watches their inputs."""
    for path, experts in found_in(block).items():
        numbers = [name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")]
        experts.forced = frozenset(int(number) for number in numbers)


def expert_of(linear: str, block: nn.Module) -> str | None:
    """The expert that a linear of a block belongs to: `mlp.experts.3.up_proj` -> `mlp.experts.3`."""
    owner = linear.rpartition(".")[0]
    path = owner.rpartition(".")[0]
    return owner if path and isinstance(block.get_submodule(path), Experts) else None
