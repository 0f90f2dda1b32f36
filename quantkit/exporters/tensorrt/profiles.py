"""Optimisation profiles: the range of input shapes of an engine, from the target's `profiles` and the graph's inputs.

A graph's inputs have named sizes. A profile gives the minimum, optimum and maximum of each:

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
# profile of an encoder or a network of images if the target has none
_ANY = Profile(name="any", batch=(1, 1, 32), length=(1, 64, 512), context=(0, 0, 0))


class ProfileShapes(Closed):
    """One profile of a graph: minimum, optimum and maximum shape of each input.

    `values` holds the same for inputs whose values are sizes (`logits_to_keep`).
    """

    name: str
    inputs: dict[str, tuple[list[int], list[int], list[int]]]
    values: dict[str, tuple[list[int], list[int], list[int]]] = Field(default={})


def fitted(profiles: Sequence[Profile], *, kind: str, context: int) -> tuple[list[Profile], list[str]]:
    """Return the profiles within the model's context, and a sentence about each profile that was cut.

    Args:
        kind: decoder, encoder or network; only a decoder has tokens before the new ones.

    Raises InputError: `profile-impossible`, the minimum of a profile exceeds the context.
    """
    fitting: list[Profile] = []
    notes: list[str] = []
    for profile in profiles:
        if kind != "decoder" and profile.context[2] > 0:
            continue
        least = profile.context[0] + profile.length[0]
        if least > context:
            value, rule = f"at least {least} tokens", f"the model has {context}"
            raise impossible(f"profile {profile.name}", value, rule, "other `profiles` in the target")
        length = _cut(profile.length, context)
        cut = profile.model_copy(update={"length": length, "context": _cut(profile.context, context - length[2])})
        if cut != profile:
            notes.append(f"profile {profile.name} is cut to the {context} tokens that the model has")
        fitting.append(cut)
    return fitting or [_ANY.model_copy(update={"length": _cut(_ANY.length, context)})], notes


def impossible(where: str, value: str, rule: str, remedy: str) -> InputError:
    """Make the error `profile-impossible`, for more tokens than the model has."""
    return InputError("profile-impossible", where=where, value=value, rule=rule, remedy=remedy)


def batches(profiles: Sequence[Profile]) -> list[Profile]:
    """Return a graph's one profile; only its batch varies, over the range of all the target's profiles."""
    least, likely, most = zip(*([profile.batch for profile in profiles] or [_ANY.batch]), strict=True)
    batch = (min(least), max(likely), max(most))
    return [Profile(name="batch", batch=batch, length=(1, 1, 1), context=(0, 0, 0))]


def _cut(sizes: Three, most: int) -> Three:
    return min(sizes[0], most), min(sizes[1], most), min(sizes[2], most)


def capacity(profiles: Sequence[Profile], context: int) -> int:
    """Count the tokens of a cache for all profiles, at most the model's context."""
    return min(context, max(profile.context[2] + profile.length[2] for profile in profiles))


def shapes(inputs: Mapping[str, Sequence[int | str | None]], profiles: Sequence[Profile]) -> list[ProfileShapes]:
    """Return the shapes of every input under every profile.

    Args:
        inputs: name -> sizes; a string is a named size.

    Raises InputError: `profile-unknown-size`, a named size that profiles do not define.
    """
    under = []
    for profile in profiles:
        sizes: dict[str, Sequence[int]] = {
            "batch_size": profile.batch,
            "batch": profile.batch,
            "sequence_length": profile.length,
            "past_sequence_length": profile.context,
            "total_sequence_length": [new + past for new, past in zip(profile.length, profile.context, strict=True)],
        }
        for name, shape in inputs.items():
            for size in shape:
                if not isinstance(size, int) and size not in sizes:
                    rule, remedy = f"profiles define {', '.join(sizes)}", "export the graph with a fixed size there"
                    raise InputError("profile-unknown-size", name, f"a free size {size or '?'}", rule, remedy)
        ranges: dict[str, Any] = {
            name: tuple(
                [size if isinstance(size, int) else sizes[str(size)][place] for size in shape] for place in range(3)
            )
            for name, shape in inputs.items()
        }
        values: dict[str, Any] = {}
        if "logits_to_keep" in inputs:
            values["logits_to_keep"] = ([0], [1], [profile.length[2]])
        under.append(ProfileShapes(name=profile.name, inputs=ranges, values=values))
    return under


def inputs_of(network: Path) -> dict[str, list[int | str | None]]:
    """Read the sizes of each input of an ONNX file; weights are not read."""
    import onnx_ir as ir

    graph: Any = ir.load(network).graph
    return {
        str(value.name): [size if isinstance(size, int) else size.value for size in value.shape or ()]
        for value in graph.inputs
    }
