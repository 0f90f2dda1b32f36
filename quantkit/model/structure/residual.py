"""Readers and writers of the residual stream, found by running the model.

A reader is a linear whose every input row is an output row of a norm; a module is a norm if it commutes with a
reflection; a writer is a linear whose output reaches the next norm's input, or the block's output, by addition. A value
path leads, head by head, from one linear into another and only mixes tokens. No architecture is known by name. The
result is proved afterwards, see `turn.py`.

Skips: the tensor to which a linear's output is added, found by running the block and comparing.

    x_c = y_L + x_m

y_L is the output of linear L; x_c the input of a later module, or the block's output; x_m the input of an earlier
module. In a decoder layer, the attention's output projection is added to the first norm's input, the last projection of
the MLP to the second norm's input. All pairs of one run are tried, and a sum counts only if it holds in every element,
within rounding. A path with anything in between (a norm after the linear, an expert's weight) is no sum and has no
entry; nor has a tensor that is changed later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.streaming.calls import Call
from quantkit.model.structure import fold as folds
from quantkit.model.structure.fold import disagreement
from quantkit.model.structure.traced import (
    InDouble,
    SharedInput,
    Structure,
    hooked,
    is_linear,
    set_parameter,
    trace,
    weight_of,
)
from quantkit.model.structure.turn import Form, Heads, ModelPart, Norm, Residual, Rotations, gain_of, turn_heads

# relative tolerance: exact paths are far below, others far above
_EXACT = 1e-8


class Unturnable(Exception):
    """Reason why the residual stream cannot be rotated."""


@torch.no_grad()
def find(part: ModelPart) -> Residual:
    """Find a part's norms, readers and writers, without embeddings and heads. Raises Unturnable."""
    with InDouble():  # type: ignore[no-untyped-call]
        seen = _watch(part)
        width = part.hidden.shape[-1]
        modules = dict(part.module.named_modules())
        linears = [name for name, module in modules.items() if is_linear(module)]
        for name in linears:
            if name not in seen.inputs and width in weight_of(modules[name]).shape:
                raise Unturnable(f"no token reached {name}, so its input is unknown")
        norms = _norms(part, seen, [name for name in linears if name in seen.inputs], width)
        order = list(seen.inputs)
        points = sorted((order.index(norm.name), norm.name) for norm in norms)
        read = {reader for norm in norms for reader in norm.readers}
        writers = []
        for name in linears:
            if name not in seen.inputs or weight_of(modules[name]).shape[0] != width or not part.turns_output:
                continue
            if _writes(part, seen, name, [point for at, point in points if at > order.index(name)]):
                writers.append(name)
            elif name not in read:
                between = _through(part, seen, name)
                if between:
                    raise Unturnable(f"{name} reaches the residual stream through {between}, which mixes no channels")
        if part.turns_output and (last := _ends_in(part, seen)):
            raise Unturnable(f"the residual stream itself passes through {last}")
        return Residual(tuple(norms), tuple(writers))


@dataclass
class _Seen:
    """Input and output of each leaf module in its first run, in order; and the part's output."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    end: Tensor


def _watch(part: ModelPart, add: tuple[str, Tensor] | None = None) -> _Seen:
    """Run a part, with an optional addition to the output of one module."""
    seen = _Seen({}, {}, torch.empty(0))

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
                return None
            seen.inputs.setdefault(name, args[0].clone())
            moved = output + add[1] if add is not None and add[0] == name else output
            seen.outputs.setdefault(name, moved.clone())
            return moved

        return hook

    leaves = [(name, module) for name, module in part.module.named_modules() if not list(module.children())]
    with hooked(module.register_forward_hook(note(name)) for name, module in leaves):
        seen.end = part.run(part.hidden)
    return seen


def _norms(part: ModelPart, seen: _Seen, linears: Sequence[str], width: int) -> list[Norm]:
    """Find norms through the linears behind them."""
    order = list(seen.inputs)
    kinds: dict[str, tuple[Form, bool] | None] = {}
    readers: dict[str, list[str]] = {}
    for linear in linears:
        if weight_of(part.module.get_submodule(linear)).shape[1] != width:
            continue
        for name in reversed(order[: order.index(linear)]):
            module = part.module.get_submodule(name)
            if is_linear(module) or seen.outputs[name].shape[-1] != width:
                continue
            if not _holds_rows(seen.outputs[name], seen.inputs[linear]):
                continue
            if name not in kinds:
                kinds[name] = _kind(module, seen.inputs[name], seen.outputs[name])
            if kinds[name] is not None:
                readers.setdefault(name, []).append(linear)
                break
    norms = []
    for name, names in readers.items():
        kind = kinds[name]
        assert kind is not None
        norm = Norm(name, tuple(names), *kind)
        module = part.module.get_submodule(name)
        gain = gain_of(module, norm.form)
        if gain is not None and getattr(module, "bias", None) is not None and float(gain.abs().min()) < 1e-4:
            raise Unturnable(f"a weight of {name}, which has a bias, is too close to zero to divide by")
        norms.append(norm)
    return norms


def _holds_rows(whole: Tensor, part: Tensor) -> bool:
    """Tell whether every row of `part` [..., width] is a row of `whole` [..., width], to the last bit."""
    width = whole.shape[-1]
    some, rows = part.reshape(-1, width), whole.reshape(-1, width)
    if some.shape == rows.shape and torch.equal(some, rows):
        return True
    known = {row.numpy().tobytes() for row in rows}
    return all(row.numpy().tobytes() in known for row in some)


def _kind(module: nn.Module, inputs: Tensor, returned: Tensor) -> tuple[Form, bool] | None:
    """Return the form of a norm, and True if it subtracts the mean; None for other modules."""
    if inputs.shape != returned.shape or torch.equal(inputs, returned):
        return None
    width = inputs.shape[-1]
    plain = copy.deepcopy(module)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        set_parameter(plain, "bias", torch.zeros_like(bias))
    base = returned - bias if isinstance(bias, Tensor) else returned
    weight = getattr(module, "weight", None)
    forms: tuple[Form, ...] = ("none",)
    if isinstance(weight, Tensor):
        if weight.shape != (width,):
            return None
        forms = ("weight", "one_plus_weight")
    for form in forms:
        if form != "none":
            set_parameter(plain, "weight", torch.full_like(weight, 1.0 if form == "weight" else 0.0))  # type: ignore[arg-type]
        neutral = plain(inputs)
        gain = gain_of(module, form)
        if disagreement(base, neutral if gain is None else neutral * gain) > _EXACT:
            continue
        direction = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for centres in (False, True):
            away = direction - direction.mean() if centres else direction
            away = away / away.norm()

            def mirrored(rows: Tensor, away: Tensor = away) -> Tensor:
                return rows - 2 * (rows @ away).unsqueeze(-1) * away

            if disagreement(mirrored(neutral), plain(mirrored(inputs))) <= _EXACT:
                return form, centres
    return None


def _writes(part: ModelPart, seen: _Seen, name: str, points: Sequence[str]) -> bool:
    """Tell whether an addition to a linear's output reaches the next norm's input, or the part's output, unchanged."""
    output = seen.outputs[name]
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise *= output.abs().mean() + 1e-6
    moved = _watch(part, (name, noise))
    for before, after in [*((seen.inputs[point], moved.inputs[point]) for point in points), (seen.end, moved.end)]:
        change = after - before
        if change.numel() == noise.numel() and float(change.abs().max()) > 0:
            change = change.reshape(noise.shape)
            share = float((change * noise).sum() / noise.square().sum())
            # rounding error is relative to the stream
            slack = _EXACT * float(noise.abs().max()) + 1e-14 * float(before.abs().max())
            return bool((change - share * noise).abs().max() <= slack) and share != 0
    return False


def _through(part: ModelPart, seen: _Seen, name: str) -> str:
    """Return the module directly behind a linear, if it changes the linear's output."""
    order = list(seen.inputs)
    for later in order[order.index(name) + 1 :]:
        if torch.equal(seen.inputs[later], seen.outputs[name]):
            changes = seen.outputs[later].shape == seen.inputs[later].shape
            if changes and not torch.equal(seen.outputs[later], seen.inputs[later]):
                return "" if is_linear(part.module.get_submodule(later)) else later
    return ""


def _ends_in(part: ModelPart, seen: _Seen) -> str:
    """Return the module with the part's output."""
    for name in reversed(list(seen.outputs)):
        if torch.equal(seen.outputs[name], seen.end) and not torch.equal(seen.inputs[name], seen.end):
            return name
    return ""


@torch.no_grad()
def find_heads(block: nn.Module, call: Call, writers: Sequence[str], rotation: Rotations) -> tuple[Heads, ...]:
    """Find the value paths into possible output projections, each with its largest valid head; `rotation` returns a
    random one.
    """
    traced = trace(block, lambda: call(block))
    groups = tuple(group for group in traced.groups if any(member in writers for member in group.members))
    paths, _ = folds.find(block, Structure(groups, traced.idle, traced.order), call)
    value_paths = []
    for group in groups:
        fold = paths.get(group.name)
        if fold is None or fold.form != "linear":
            continue
        size = _head_size(block, call, group, fold.producer, fold.index, rotation)
        if size > 1:
            value_paths.append(Heads(fold.producer, group.members, fold.index, size))
    return tuple(value_paths)


def _head_size(
    block: nn.Module, call: Call, group: SharedInput, producer: str, index: Tensor, rotation: Rotations
) -> int:
    """Return the largest number of consecutive channels that may be rotated together; 1 if none."""
    breaks = (torch.nonzero(index[1:] != index[:-1] + 1).flatten() + 1).tolist()
    longest = math.gcd(index.numel(), *breaks)

    def holds(size: int) -> bool:
        part = ModelPart.of_block(block, call)
        with InDouble():  # type: ignore[no-untyped-call]
            before = part.run(part.hidden)
            turn_heads(part.module, Heads(producer, group.members, index, size), rotation(size))
            return disagreement(before, part.run(part.hidden)) <= folds.TOLERANCE

    sizes = [size for size in range(longest, 1, -1) if longest % size == 0]
    primes = [size for size in sizes if all(size % factor for factor in range(2, math.isqrt(size) + 1))]
    # a path that only commutes channel by channel (gate * up) fails for every prime size
    if not any(holds(size) for size in primes):
        return 1
    return next(size for size in sizes if holds(size))


# roundings: one each for a sum and a difference, two for a sum of three
_ROUNDING = 4
# values of a tensor that are compared first
_PROBED = 16


@torch.no_grad()
def skips(block: nn.Module, run: Callable[[nn.Module], Tensor]) -> Mapping[str, str]:
    """Map each linear to the module whose input its output is added to.

    `run` runs the block once, on any input that reaches all of it, and returns its output [..., width].
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
    sources: dict[str, str] = {}
    ends = [(last, _first(last))]
    firsts = {name: _first(x) for name, (_, x, _, _) in inputs.items()}
    for linear, (end, output) in outputs.items():
        alike = {name: note for name, note in inputs.items() if _alike(note[1], output)}
        sums = [(x, firsts[name]) for name, (start, x, _, _) in alike.items() if start > end]
        sums += ends if _alike(last, output) else []
        terms = [name for name, (start, _, x, version) in alike.items() if start < end and x._version == version]
        likely = _likely(sums, _first(output), [firsts[name] for name in terms])
        tried = ((terms[at], sums[whole][0]) for whole, at in likely)
        source = next((name for name, whole in tried if _is_sum(whole, output, inputs[name][1])), None)
        if source is not None:
            sources[linear] = source
    return sources


def _alike(x: Tensor, output: Tensor) -> bool:
    return x.is_floating_point() and (x.numel(), x.shape[-1:]) == (output.numel(), output.shape[-1:])


def _first(x: Tensor) -> Tensor:
    """Return the first values of a tensor, [at most `_PROBED`] float64."""
    return x.flatten()[:_PROBED].double()


def _likely(
    sums: Sequence[tuple[Tensor, Tensor]], output: Tensor, terms: Sequence[Tensor]
) -> Iterator[tuple[int, int]]:
    """Yield numbers of a sum and a term whose first values, each [n] float64, fit: a mixture has millions of pairs."""
    if not sums or not terms:
        return
    whole, term = torch.stack([first for _, first in sums])[:, None], torch.stack([*terms])
    eps = max(torch.finfo(x.dtype).eps for x, _ in sums)
    near = (whole - output - term).abs() <= _ROUNDING * eps * (whole.abs() + output.abs() + term.abs())
    fits = near.all(-1).flatten()
    while bool(fits.any()):  # one wait for a device, where there is none
        at = int(fits.int().argmax())
        yield divmod(at, len(terms))
        fits[at] = False


def _is_sum(whole: Tensor, output: Tensor, term: Tensor) -> bool:
    """Tell whether `whole = output + term` within rounding, with a non-zero term."""
    whole, output, term = (x.reshape(-1, x.shape[-1]) for x in (whole, output, term))
    apart = (whole - output - term).abs()
    size = whole.abs() + output.abs() + term.abs()
    return bool((apart <= _ROUNDING * torch.finfo(whole.dtype).eps * size).all()) and bool(term.any())
