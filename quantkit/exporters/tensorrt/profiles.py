"""Optimisation profiles: the shapes that an engine is built for, from the target's words and the graph's inputs.

A graph's inputs have named sizes; a profile says of each the least, the likeliest and the most:

    batch_size, batch                              `batch`
    sequence_length                                `length`, the new tokens
    past_sequence_length                           `context`, tokens before them
    total_sequence_length                          both together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from quantkit.content import Closed
from quantkit.errors import InputError
from quantkit.target import Profile

Three = tuple[int, int, int]
_BATCH = ("batch_size", "batch")
# of an encoder or a network of images, where the target has none
_ANY = Profile(name="any", batch=(1, 1, 32), length=(1, 64, 512), context=(0, 0, 0))


class ProfileShapes(Closed):
    """One profile of a graph.

    Args:
        name: of the target's profile.
        inputs: input -> least, likeliest and largest shape.
        values: input whose values are sizes (`logits_to_keep`) -> the same of its values.
    """

    name: str
    inputs: dict[str, tuple[list[int], list[int], list[int]]]
    values: dict[str, tuple[list[int], list[int], list[int]]] = Field(default={})


def fitted(profiles: Sequence[Profile], *, kind: str, context: int) -> tuple[list[Profile], list[str]]:
    """The profiles that fit a model, and what was cut, in words.

    Args:
        kind: decoder, encoder or network: only the first has tokens before the new ones.

    Raises:
        InputError: `profile-impossible`, a profile that needs more than the model has even at its least.
    """
    found: list[Profile] = []
    said: list[str] = []
    for profile in profiles:
        if kind != "decoder" and profile.context[2] > 0:
            continue
        least = profile.context[0] + profile.length[0]
        if least > context:
            raise InputError(
                "profile-impossible",
                where=f"profile {profile.name}",
                value=f"at least {least} tokens",
                rule=f"the model has {context}",
                remedy="other `profiles` in the target",
            )
        length = _cut(profile.length, context)
        before = _cut(profile.context, context - length[2])
        cut = profile.model_copy(update={"length": length, "context": before})
        if cut != profile:
            said.append(f"profile {profile.name} is cut to the {context} tokens that the model has")
        found.append(cut)
    return found or [_ANY.model_copy(update={"length": _cut(_ANY.length, context)})], said


def batches(profiles: Sequence[Profile]) -> list[Profile]:
    """The one profile of a graph, whose batch alone is free: from the least to the most of all of the target's."""
    given = [profile.batch for profile in profiles] or [_ANY.batch]
    least, most = min(each[0] for each in given), max(each[2] for each in given)
    likely = max(each[1] for each in given)
    return [Profile(name="batch", batch=(least, likely, most), length=(1, 1, 1), context=(0, 0, 0))]


def _cut(sizes: Three, most: int) -> Three:
    return min(sizes[0], most), min(sizes[1], most), min(sizes[2], most)


def capacity(profiles: Sequence[Profile], context: int) -> int:
    """Tokens that a cache needs for all profiles, never more than the model has."""
    return min(context, max(profile.context[2] + profile.length[2] for profile in profiles))


def shapes(inputs: Mapping[str, Sequence[int | str | None]], profiles: Sequence[Profile]) -> list[ProfileShapes]:
    """Shapes of every input under every profile.

    Args:
        inputs: name -> sizes; a string is a named one.

    Raises:
        InputError: `profile-unknown-size`, a size that no profile speaks of.
    """
    found = []
    for profile in profiles:
        sizes: dict[str, Three] = dict.fromkeys(_BATCH, profile.batch)
        total = tuple(a + b for a, b in zip(profile.length, profile.context, strict=True))
        sizes |= {"sequence_length": profile.length, "past_sequence_length": profile.context}
        sizes["total_sequence_length"] = (total[0], total[1], total[2])
        made = {}
        for name, shape in inputs.items():
            for size in shape:
                if not isinstance(size, int) and size not in sizes:
                    raise InputError(
                        "profile-unknown-size",
                        where=name,
                        value=f"a free size {size or '?'}",
                        rule=f"profiles speak of {', '.join(sizes)}",
                        remedy="export the graph with a fixed size there",
                    )
            least, likely, most = (
                [size if isinstance(size, int) else sizes[str(size)][place] for size in shape] for place in range(3)
            )
            made[name] = (least, likely, most)
        values = {}
        if "logits_to_keep" in inputs:
            values["logits_to_keep"] = ([0], [1], [profile.length[2]])
        found.append(ProfileShapes(name=profile.name, inputs=made, values=values))
    return found


def inputs_of(network: Path) -> dict[str, list[int | str | None]]:
    """Input -> sizes of an ONNX file; weights are not read."""
    import onnx_ir as ir

    graph: Any = ir.load(network).graph
    found: dict[str, list[int | str | None]] = {}
    for value in graph.inputs:
        found[str(value.name)] = [each if isinstance(each, int) else each.value for each in value.shape or ()]
    return found
