"""Every tensor of the source is accounted for: quantized, or carried over as it is, with the reason.

What counts as a linear weight is what multiplies activations as a matrix: the weights of linears, of merged experts,
and any other parameter of two or more dimensions that is no table of embeddings, no convolution and no norm. How much
of it stays in floats is what "4 bits per weight" leaves out, so it is said: above 5 % that the recipe did not ask for,
it is a warning before the work, and an error under `--strict`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from quantkit.bundle import Decision, WeightsEntry, decision
from quantkit.model.sizes.assigned import AS_ASKED, ASKED, EXPERTS_KEPT, FLOATS, FLOATS_LIMIT, ROUTER
from quantkit.passes import NOTE

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from quantkit.model.streaming.stream import StreamedModel

State = Literal["quantized", "carried", "unused"]
# (state, reason, whether it is a linear weight, whether the recipe asked for it) -> (name, elements) of each
Sums = dict[tuple[State, str, bool, bool], list[tuple[str, int]]]
QUANTIZED: State = "quantized"
CARRIED: State = "carried"
UNUSED: State = "unused"
_HEAD = "the recipe keeps the head"


def account(
    stream: StreamedModel, quantized: Collection[str], decisions: Sequence[Decision], *, head: bool
) -> list[WeightsEntry]:
    """What becomes of every tensor of the source's files, those of one reason together.

    Args:
        quantized: full names of its linears with codes.
        decisions: taken so far; those on a linear are its reason.
        head: whether the recipe stores the head in its scheme.
    """
    from torch import nn

    modules = dict(stream.skeleton.named_modules())
    reasons = {each.where: each for each in decisions}
    users: dict[str, list[str]] = {}
    for name, file in stream.files.items():
        users.setdefault(file, []).append(name)
    sums: Sums = {}
    for file, entry in stream.source.weights.entries.items():
        key: tuple[State, str, bool, bool] = (
            UNUSED,
            f"{stream.source.architecture} has no such parameter",
            False,
            False,
        )
        names = users.get(file, [])
        owners = {name.rpartition(".")[0]: name for name in reversed(names)}
        wanted = [owner for owner in owners if owner in quantized or (head and owner == stream.head)]
        # of a tensor that several parameters share, the one that the recipe is about; else the embedding
        wanted += [owner for owner in owners if isinstance(modules[owner], nn.Embedding)]
        chosen = owners[wanted[0]] if wanted else next(iter(names), "")
        if chosen:
            key = _one(chosen, modules, quantized, reasons, stream, head=head)
        sums.setdefault(key, []).append((file, math.prod(entry.shape)))
    return _entries(sums)


def account_graph(model: ir.Model, quantized: Collection[str], decisions: Sequence[Decision]) -> list[WeightsEntry]:
    """The same of a float ONNX graph: its products' weights, and its tables of embeddings.

    Args:
        quantized: names of its products with codes; one that no decision speaks of either is kept by the recipe.
    """
    from quantkit.graph.sites import ZEROS, left_in_floats, sites

    reasons = {each.where: each for each in decisions if each.code != NOTE}
    sums: Sums = {}
    for site in sites(model):
        key: tuple[State, str, bool, bool] = (QUANTIZED, "", True, True)
        if site.name not in quantized:
            taken = reasons.get(site.name)
            key = (CARRIED, "the recipe keeps it", True, True)
            if taken is not None:
                key = (CARRIED, taken.reason, True, taken.code in ASKED)
        sums.setdefault(key, []).append((site.name, site.weight.size))
    for each in left_in_floats(model):
        key = (CARRIED, each.reason or "embeddings", bool(each.reason), each.reason in ("", ZEROS))
        sums.setdefault(key, []).append((each.name, each.elements))
    return _entries(sums)


def _entries(sums: Sums) -> list[WeightsEntry]:
    return [
        WeightsEntry(
            state=state,
            reason=reason,
            linear=linear,
            asked=asked,
            tensors=len(found),
            elements=sum(count for _, count in found),
            example=max(found, key=lambda each: each[1])[0],
        )
        for (state, reason, linear, asked), found in sorted(sums.items())
    ]


def _one(
    name: str,
    modules: Mapping[str, nn.Module],
    quantized: Collection[str],
    reasons: Mapping[str, Decision],
    stream: StreamedModel,
    *,
    head: bool,
) -> tuple[State, str, bool, bool]:
    """(state, reason, whether it is a linear weight, whether the recipe asked for it) of a parameter."""
    from quantkit.model.streaming.stream import find_head
    from quantkit.model.structure.traced import is_linear

    owner, _, leaf = name.rpartition(".")
    module = modules[owner]
    if owner in quantized and leaf == "weight":
        return QUANTIZED, "", True, True
    if beside := no_product(module, leaf):
        return CARRIED, beside, False, True
    if not head and owner == find_head(stream.skeleton):  # a masked language model's too, which no recipe quantizes
        return CARRIED, _HEAD, False, True
    taken = reasons.get(owner)
    if taken is not None:
        return CARRIED, taken.reason, True, taken.code in (AS_ASKED, ROUTER, EXPERTS_KEPT)
    inside = any(name.startswith(f"{block}.") for block in stream.block_names)
    if not is_linear(module):
        return CARRIED, f"a parameter of {type(module).__name__}, which is no linear", True, False
    return CARRIED, "it was not decided on" if inside else "it lies outside the blocks", True, False


def no_product(module: nn.Module, leaf: str) -> str:
    """Name what a parameter is that multiplies no activations as a matrix; empty for a linear weight."""
    from torch import nn

    from quantkit.model.structure.traced import is_linear

    value = getattr(module, leaf)
    if value.dim() < 2 or min(value.shape[-2:]) == 1:
        return "norms, biases and scalars"
    if isinstance(module, nn.Embedding) or "embed" in f"{leaf} {type(module).__name__}".lower():
        return "embeddings"
    return "convolutions" if type(module).__name__.startswith("Conv") and not is_linear(module) else ""


def left_in_floats(entries: Iterable[WeightsEntry], *, unasked: bool = False) -> float | None:
    """The share of linear weights that stay in floats, 0 to 1; `unasked`: of those that the recipe did not ask for.

    None where there are no linear weights, or nothing is quantized.
    """
    linear = [entry for entry in entries if entry.linear]
    whole = sum(entry.elements for entry in linear)
    left = [entry for entry in linear if entry.state != QUANTIZED and not (unasked and entry.asked)]
    if not whole or not any(entry.state == QUANTIZED for entry in linear):
        return None
    return sum(entry.elements for entry in left) / whole


def about(entries: Sequence[WeightsEntry]) -> list[Decision]:
    """The decision on what stays in floats although nobody asked for it, where that is too much."""
    share = left_in_floats(entries, unasked=True)
    if share is None or share <= FLOATS_LIMIT:
        return []
    left = [entry for entry in entries if entry.linear and entry.state != QUANTIZED and not entry.asked]
    most = max(left, key=lambda entry: entry.elements)
    reason = f"{share:.0%} of the linear weights stay in floats, most of them like {most.example}: {most.reason}"
    return [decision("recipe", FLOATS, "linear weights", reason, None, round(share, 4))]
