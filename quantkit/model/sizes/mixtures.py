"""Which type each matrix of a GGUF file has, by the name that users know the file by: llama.cpp's mixtures.

A file's own type is that of most matrices; values, what a layer puts out, and the head get more bits, some of them in
some layers alone. Where 256 does not divide K, a type of blocks of 32 stands in, whose bits are more. Source:
`llama_tensor_get_type` and `tensor_type_fallback` of llama.cpp (`src/llama-quant.cpp` in llama-cpp-python 0.3.36), with
an importance matrix, since codes are chosen by what inputs are here too. Falcon and mixtures of experts, for which it
has exceptions, are left out.

And what a group becomes that does not divide K.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.scheme import MIXTURES, WeightScheme

_POWERS = (256, 128, 64, 32, 16)
Shapes = Mapping[str, tuple[int, int]]

_FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_VALUES = ("v_proj", "qkv_proj")


class _Place(NamedTuple):
    """Where a matrix stands: its layer, of how many, and how many queries share a value."""

    layer: int
    layers: int
    shared: int


def mixed(mixture: str, shapes: Shapes, head: str | None = None) -> dict[str, WeightScheme]:
    """The scheme that a mixture gives each matrix, whatever divides its K.

    Args:
        mixture: one of `MIXTURES`.
        shapes: name -> [N, K], as layers follow one another.
        head: which of them is the head.
    """
    leaves = {name: name.rpartition(".")[2] for name in shapes if name != head}
    numbers = {name: int(blocks[0]) for name in leaves if (blocks := re.findall(r"\.(\d+)\.", f".{name}."))}
    layers = max(numbers.values(), default=-1) + 1
    values = [name for name, leaf in leaves.items() if leaf in _VALUES]
    rows = {leaf: shapes[name][0] for name, leaf in leaves.items() if leaf in ("q_proj", "k_proj")}
    shared = rows.get("q_proj", 1) // rows.get("k_proj", 1)
    found: dict[str, WeightScheme] = {}
    for name in shapes:
        if name == head:
            kind = MIXTURES[mixture] if MIXTURES[mixture] == "q8_0" else "q6_k"
        elif leaves[name] in _VALUES:
            kind = _of_values(mixture, _Place(values.index(name), len(values), shared), layers)
        elif leaves[name] == "down_proj":
            kind = _of_down(mixture, _Place(numbers.get(name, 0), layers, shared))
        elif leaves[name] == "o_proj" and mixture == "q3_k_m":
            kind = "q4_k"
        else:
            kind = MIXTURES[mixture]
        found[name] = WeightScheme(format=kind)
    return found


def instead(scheme: WeightScheme, columns: int) -> WeightScheme:
    """What stands in where K = `columns` is no whole super-blocks; the scheme itself where it is, or nothing does."""
    kind = _FALLBACKS.get(scheme.format)
    return WeightScheme(format=kind) if kind is not None and scheme.padding(columns) else scheme


def of_table(scheme: WeightScheme, columns: int, floats: str, name: str) -> tuple[WeightScheme | None, list[Decision]]:
    """What a table of embeddings is stored in, None where 32 does not divide its width, and the decision on that.

    Args:
        scheme: what was asked for.
        columns: its width.
        floats: the float format of what has no codes.
        name: the table.
    """
    found = instead(scheme, columns)
    if found == scheme and not found.padding(columns):
        return scheme, []
    whole = not found.padding(columns)
    before, after = (load_format(each.format).bits_per_weight((1, 256), each) for each in (scheme, found))
    bits = after if whole else 32.0 if floats == "float32" else 16.0
    reason = f"{256 if whole else 32} does not divide its width {columns}: {bits:.4g} bits a weight, not {before:.4g}"
    to = found.format if whole else floats
    return found if whole else None, [decision("recipe", "type-fallback", name, reason, scheme.format, to)]


def _of_values(mixture: str, at: _Place, layers: int) -> str:
    kind = MIXTURES[mixture]
    if mixture == "q3_k_m":
        kind = "q5_k" if at.layer < 2 else "q4_k"
    elif mixture == "iq4_nl" and at.shared >= 4:
        kind = "q5_k"
    elif mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        kind = "q6_k"
    # of 80 layers whose queries share values: they are an eighth of the queries' matrix
    return "q5_k" if layers == 80 and at.shared > 1 and kind in ("q3_k", "q4_k") else kind


def _of_down(mixture: str, at: _Place) -> str:
    if mixture == "q3_k_m":
        return "q5_k" if at.layer < at.layers // 16 else "q4_k"
    if mixture in ("q4_k_m", "q5_k_m") and _more_bits(at):
        return "q6_k"
    if mixture == "q4_0" and at.layer < at.layers // 8:
        return "q4_1"
    return MIXTURES[mixture]


def _more_bits(at: _Place) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = at.layers // 8
    return at.layer < eighth or at.layer >= 7 * at.layers // 8 or (at.layer - eighth) % 3 == 2


# --- groups that do not divide K ------------------------------------------------------------------------------------


def power(name: str, group: int, columns: int) -> int | None:
    """The largest power of two up to `group` that divides K and that the format has."""
    rules = load_format(name).rules
    allowed = () if rules.multiple else rules.groups or _POWERS
    return next((size for size in _POWERS if size <= group and columns % size == 0 and size in allowed), None)


def padded(linear: str, scheme: WeightScheme, columns: int | None) -> InputError:
    """`layout-unsupported`: a layer whose last group is filled up, in an export that stores whole groups alone.

    Args:
        scheme: its groups do not divide K.
        columns: K, where it is known.
    """
    size = None if columns is None or scheme.group is None else power(scheme.format, scheme.group, columns)
    instead = "--set on_indivisible=keep"
    if size:
        instead = f"--set scheme.weights.group={size}, or --set on_indivisible=shrink"
    return InputError(
        "layout-unsupported",
        where=linear,
        value=f"{f'K {columns} in groups' if columns else 'its last group'} of {scheme.group}, padded",
        rule="who reads this takes whole groups alone; padding goes with `onnx` and `checkpoint: {layout: dense}`",
        remedy=instead,
    )
