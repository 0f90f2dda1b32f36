"""Cross-layer equalization (Nagel et al. 2019, arXiv 1906.04721, § 4.1).

Where f(s x) = s f(x) for s > 0 (no activation, ReLU, LeakyReLU, PReLU, pooling), the channels between two convolutions
can be rescaled:

    W₂ f(W₁ x + b₁) = (W₂ S) f(S⁻¹ W₁ x + S⁻¹ b₁)        s_c = √(r₁_c / r₂_c)

r₁_c is the largest magnitude in output channel c of W₁, r₂_c that in input channel c of W₂. Both become √(r₁_c r₂_c).
Pairs of a stack are repeated until no scale changes. Here s_c is rounded to a power of two, which changes only
exponents
of floats: outputs stay the same to the last bit, where exact scales changed a text detector's by 1e-4.
ReLU6 then has a different bound in every channel, which Clip cannot express. Such a pair is refused, unless the probe
stays below half of the upper bound; a ReLU then replaces the Clip. Guard: weights and biases are constants of one
convolution alone, and no other node reads a tensor in between. The paper's absorption of large biases is left out: it
is
exact only while inputs of the activation stay above the calibrated minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse._rule import Feeds, Fused, nodes, outputs
from quantkit.graph.fuse.activation_bounds import bounds
from quantkit.graph.values import Array, constant, name_of, set_input, why_not_constant

_HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")
_SWEEPS = 20


@dataclass(frozen=True)
class _Pair:
    """Two convolutions, and the clips between them."""

    first: ir.Node
    second: ir.Node
    clips: tuple[ir.Node, ...]


class Equalize:
    """Equalizes pairs of convolutions, as described in the module.

    Args:
        feeds: inputs for the probe of clips; without them every pair with a clip is refused.
    """

    name = "equalize"

    def __init__(self, feeds: Feeds = ()) -> None:
        self._feeds = feeds

    def run(self, model: ir.Model) -> list[Fused]:
        """Scale in place; list the first convolution of every pair."""
        pairs = [pair for node in nodes(model, "Conv") if (pair := _pair(node)) is not None]
        reached = self._reached(model, [clip for pair in pairs for clip in pair.clips])
        listed, chosen = [], []
        for pair in pairs:
            reason = _refuses(pair) or next(filter(None, (_binds(clip, reached) for clip in pair.clips)), "")
            listed.append(Fused(name_of(pair.first), self.name, not reason, reason))
            if not reason:
                chosen.append(pair)
        _equalize(chosen)
        for clip in (clip for pair in chosen for clip in pair.clips):
            clip.op_type = "Relu"
            clip.resize_inputs(1)
            clip.attributes.clear()
        return listed

    def _reached(self, model: ir.Model, clips: Sequence[ir.Node]) -> dict[str, float]:
        """Return the largest input of each clip of the main graph on the probe, by name."""
        inputs = {value.name: None for clip in clips if clip.graph is model.graph for value in clip.inputs[:1] if value}
        names = [name for name in inputs if name is not None]
        if not names or not self._feeds:
            return {}
        seen = [values[-len(names) :] for values in outputs(model, self._feeds, names)]
        return {
            name: max(float(values[place].max(initial=-math.inf)) for values in seen)
            for place, name in enumerate(names)
        }


def _pair(first: ir.Node) -> _Pair | None:
    """Return a convolution and the next one, with only activations in between; None for other readers."""
    value, clips = first.outputs[0], list[ir.Node]()
    while True:
        readers = [reader for reader, place in value.uses() if place == 0]
        second = next((reader for reader in readers if reader.op_type == "Conv"), None)
        if second is not None:
            return _Pair(first, second, tuple(clips))
        if len(readers) != 1 or readers[0].domain not in ("", "ai.onnx"):
            return None
        node = readers[0]
        if node.op_type == "Clip":
            clips.append(node)
        elif node.op_type not in _HOMOGENEOUS:
            return None
        value = node.outputs[0]


def _refuses(pair: _Pair) -> str:
    for node, places in ((pair.first, (1, 2)), (pair.second, (1,))):
        for value in (node.inputs[place] for place in places if place < len(node.inputs)):
            if value is None:
                continue
            if constant(value) is None:
                return why_not_constant(value)
            if len(value.uses()) > 1:
                return f"{value.name} is shared"
    value = pair.first.outputs[0]
    while True:
        if value.is_graph_output():
            return f"{value.name} is an output of the graph"
        readers = [reader for reader, _ in value.uses()]
        if len(readers) > 1:
            return f"{value.name} is read by {', '.join(sorted(map(name_of, readers)))}"
        if readers[0] is pair.second:
            return ""
        value = readers[0].outputs[0]


def _binds(clip: ir.Node, reached: Mapping[str, float]) -> str:
    """Return the reason if a clip may act as more than a ReLU on the probe; else ""."""
    ends = bounds(clip)
    if ends is None or ends[0] != 0:
        return f"the lower bound of {name_of(clip)} is not 0"
    value = clip.inputs[0]
    most = reached.get(value.name or "") if value is not None else None
    if most is None:
        return f"{name_of(clip)} was not probed"
    near = most > ends[1] / 2
    return f"{name_of(clip)} may bind: its bound is {ends[1]:g}, its input reaches {most:.3g}" if near else ""


def _equalize(pairs: Sequence[_Pair]) -> None:
    """Scale all pairs until no scale changes, then store the weights."""
    convs = {node: None for pair in pairs for node in (pair.first, pair.second)}
    stored = {
        (node, place): values
        for node in convs
        for place in range(1, len(node.inputs))
        if (values := constant(node.inputs[place])) is not None
    }
    wide = {key: values.astype(np.float64) for key, values in stored.items()}
    for _ in range(_SWEEPS):
        moved = False
        for pair in pairs:
            first, second = wide[pair.first, 1], wide[pair.second, 1]
            scale = _scale(np.abs(first).max(axis=tuple(range(1, first.ndim))), _input_range(pair.second, second))
            first /= scale.reshape(-1, *(1,) * (first.ndim - 1))
            if (pair.first, 2) in wide:
                wide[pair.first, 2] /= scale
            second *= _over_inputs(pair.second, second, scale)
            moved = moved or bool((scale != 1).any())
        if not moved:
            break
    for (node, place), values in wide.items():
        name = f"{node.outputs[0].name}.{'weight' if place == 1 else 'bias'}"
        set_input(node, place, values.astype(stored[node, place].dtype), name=name)


def _scale(one: Array, other: Array) -> Array:
    """Return √(one / other) as the nearest power of two; 1 for a channel of zeros."""
    alive = (one > 0) & (other > 0)
    ratio = np.where(alive, one, 1.0) / np.where(alive, other, 1.0)
    return np.asarray(np.exp2(np.rint(np.log2(ratio) / 2)))


def _input_range(node: ir.Node, W: Array) -> Array:
    """Return the largest magnitude [I] of each input channel of W [O, I/g, ...]."""
    groups = node.attributes.get_int("group", 1)
    apart = np.abs(W).reshape(groups, W.shape[0] // groups, W.shape[1], -1)
    return np.asarray(apart.max(axis=(1, 3)).reshape(-1))


def _over_inputs(node: ir.Node, W: Array, scale: Array) -> Array:
    """Broadcast scales [I] to W [O, I/g, ...]; each output channel has the inputs of its group."""
    groups = node.attributes.get_int("group", 1)
    rows = np.repeat(scale.reshape(groups, W.shape[1]), W.shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *(1,) * (W.ndim - 2))
