"""Skips: the tensor that a linear's output is added to, found by running the block and comparing.

    x_c = y_L + x_m

y_L is the output of linear L; x_c the input of a module that runs after it, or the block's output; x_m the input of a
module that runs before it. In a decoder layer, the attention's output projection is added to what the first norm reads,
the last projection of the MLP to what the second norm reads. Nothing is known of any architecture: all pairs of one run
are tried, and a sum holds only if it does in every element, within its rounding. A path with anything in between (a
norm after the linear, an expert's weight) is no sum, and has no entry; nor has a tensor that is written to later on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from quantkit.model.structure.traced import hooked, is_linear

# a sum and a difference are each rounded once, and a sum of three twice
_ROUNDING = 4


@torch.no_grad()
def skips(block: nn.Module, run: Callable[[nn.Module], Tensor]) -> Mapping[str, str]:
    """Linear -> the module whose input its output is added to.

    Args:
        run: runs it once, on anything that reaches all of it, and gives its output [..., width].
    """
    inputs: dict[str, tuple[int, Tensor, Tensor, int]] = {}
    outputs: dict[str, tuple[int, Tensor]] = {}
    clock = iter(range(1 << 62))

    def before(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def note(_: nn.Module, args: tuple[object, ...]) -> None:
            if args and isinstance(args[0], Tensor) and name not in inputs:
                inputs[name] = (next(clock), args[0].clone(), args[0], args[0]._version)

        return note

    def after(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and name not in outputs:
                outputs[name] = (next(clock), output.clone())

        return note

    hooks = []
    for name, module in block.named_modules():
        if name and not list(module.children()):
            hooks.append(module.register_forward_pre_hook(before(name)))
            if is_linear(module):
                hooks.append(module.register_forward_hook(after(name)))
    with hooked(hooks):
        last = run(block)
    found: dict[str, str] = {}
    for linear, (end, output) in outputs.items():
        sums = [x for start, x, _, _ in inputs.values() if start > end] + [last]
        terms = [
            (name, x)
            for name, (start, x, itself, version) in inputs.items()
            if start < end and itself._version == version
        ]
        pairs = ((name, whole, term) for whole in sums for name, term in terms)
        source = next((name for name, whole, term in pairs if _is_sum(whole, output, term)), None)
        if source is not None:
            found[linear] = source
    return found


def _is_sum(whole: Tensor, output: Tensor, term: Tensor) -> bool:
    """Whether `whole = output + term` but for rounding; a sum with nothing is none."""
    if not whole.shape[-1] == output.shape[-1] == term.shape[-1] or not whole.numel() == output.numel() == term.numel():
        return False
    whole, output, term = (x.reshape(-1, x.shape[-1]) for x in (whole, output, term))
    if not whole.is_floating_point():
        return False
    apart = (whole - output - term).abs()
    size = whole.abs() + output.abs() + term.abs()
    return bool((apart <= _ROUNDING * torch.finfo(whole.dtype).eps * size).all()) and bool(term.any())
