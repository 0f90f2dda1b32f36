"""Names under which other programs look for the matrices that stay in floats beside packed linears.

A config says once how linears are stored; whoever loads it takes a module for one of them unless a list leaves it out.
Modules are not called alike everywhere: some linears are one in vLLM, a layer's experts are a module `experts` there
whatever the files call them, and a router is a linear where transformers has a parameter. So the list names

    what the files and the class call it        model.layers.0.mlp.gate
    the linear that vLLM makes of several       model.layers.0.self_attn.qkv_proj
    a layer's experts, and all inside           model.layers.0.mlp.experts, re:(.*\\.)?layers\\.0\\.mlp(\\..*)?$

of which compressed-tensors, transformers and vLLM (0.32, `find_matching_patterns`) understand all three.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set

from quantkit.model.layouts import REGEX

# vLLM's linear -> those of the files that it is made of: what its models have in common (`packed_modules_mapping`)
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
EXPERTS = "experts"
_ONE_EXPERT = re.compile(rf"(.*\.{EXPERTS})\.\d+\.")
_PLACE = re.compile(r"(?:^|.*?\.)([^.]+\.\d+(?:\.|$).*)")


def names(matrices: Mapping[str, int], packed: Set[str]) -> list[str]:
    """Everything that a list of what is not packed has to name.

    Args:
        matrices: module or parameter of two dimensions or more that stays in floats -> how many it has.
        packed: linears that are packed.
    """
    owners = {path for name in packed for path in _above(name)}
    found = dict.fromkeys(matrices)
    found |= {fused: None for fused, parts in _groups({*matrices, *packed}) if packed.isdisjoint(parts)}
    for name, dimensions in matrices.items():
        for module in _experts(name, dimensions, owners):
            found |= {module: None, REGEX + _inside(module, packed): None}
    return list(found)


def torn(kinds: Mapping[str, object], linears: Collection[str]) -> str:
    """The first linear that vLLM would make of several that are stored in several ways; "" where there is none.

    Args:
        kinds: linear -> how it is stored; those that stay in floats are missing.
        linears: all of them.
    """
    for fused, parts in _groups(linears):
        if any(kinds.get(part) != kinds.get(parts[0]) for part in parts):
            return fused
    return ""


def _groups(linears: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """(the linear that vLLM makes of them, those of the files), of several that there are."""
    owners = dict.fromkeys(linear.rpartition(".")[0] for linear in linears)
    for owner in owners:
        if _ONE_EXPERT.match(f"{owner}."):
            continue
        for fused, leaves in FUSED:
            parts = [f"{owner}.{leaf}" for leaf in leaves if f"{owner}.{leaf}" in linears]
            if len(parts) > 1:
                yield f"{owner}.{fused}", parts


def _experts(name: str, dimensions: int, owners: Set[str]) -> tuple[str, ...]:
    """The module that holds a layer's experts in vLLM, and the outermost one around it in which nothing is packed,
    where routers are that have other names there; none for what is no part of experts that stay in floats.

    Args:
        owners: modules in which something is packed.
    """
    one = _ONE_EXPERT.match(name)
    if one is None and dimensions != 3:
        return ()
    before, inside, _ = f"{name}.".partition(f".{EXPERTS}.")
    held = f"{before if inside else name.rpartition('.')[0]}.{EXPERTS}"
    path = held if inside else name
    if path in owners:
        return ()
    while (owner := path.rpartition(".")[0]) not in owners and not owner.rpartition(".")[2].isdigit():
        path = owner
    return held, path


def _inside(module: str, packed: Set[str]) -> str:
    """A pattern for a module and all in it, from the block's number on, where that means nothing else: vLLM may have
    other names in front of it."""
    place = _PLACE.match(module)
    pattern = rf"(.*\.)?{re.escape(place[1])}(\..*)?$" if place else ""
    if not place or any(re.match(pattern, linear) for linear in packed):
        return rf"{re.escape(module)}(\..*)?$"
    return pattern


def _above(name: str) -> Iterator[str]:
    """The modules that a linear is in, and itself; the model is ""."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
