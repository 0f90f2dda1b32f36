"""A graph that multiplies many rows in another way (`integers.py`): does that way compute the same model?

onnx.bytes        how far a weight's bytes lie from what its codes stand for, in steps of its row: at most a half
reload.many       that way with its products in float32, on a prompt, steps and a padded batch, against the model
                  with weights of 8 bits a channel: max |found - expected| / max |expected| <= 1e-4
reload.prompts    the same way as it really multiplies, inputs in 8 bits too, on a prompt: ||found - expected|| /
                  ||expected|| <= 0.25, which finds what is broken, and no error of rounding
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quantkit.bundle import Check
from quantkit.exporters.check import judged, worst
from quantkit.exporters.onnx.integers import BYTES, LINEARS, expandable
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.model.streaming.stream import set_tensor
from quantkit.runtimes.onnxruntime.session import MODEL, OnnxModel
from quantkit.runtimes.onnxruntime.ways import nodes_of

LIMIT = 1e-4
# of a step, with the rounding of float32
HALF = 0.501
PROMPTS = 0.25


def check(folder: Path, values: Values, ids: torch.Tensor) -> list[Check]:
    """All three; none of a graph with one way, and the first alone where bytes are wrong.

    Args:
        folder: with `model.onnx`.
        ids: [B, S] of a prompt, `prefill.ROWS` tokens and more.
    """
    import onnx
    from onnx import numpy_helper
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = nodes_of(model, "prompts")
    if not nodes:
        return []
    stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def read(name: str) -> torch.Tensor:
        copied = onnx.TensorProto()
        copied.CopyFrom(stored[name])  # one weight in memory at a time
        if uses_external_data(copied):
            load_external_data_for_tensor(copied, str(folder))
        return torch.from_numpy(numpy_helper.to_array(copied).copy())

    off: dict[str, float] = {}
    for node in nodes:
        noted = {entry.key: entry.value for entry in node.metadata_props}
        if LINEARS not in noted or not node.input[1].endswith(BYTES):
            continue
        linears, step = noted[LINEARS].split(), read(node.input[3])[:, None]
        exact = torch.cat([_stands_for(values, linear) for linear in linears])
        found = float(((read(node.input[1]).T * step - exact) / step).abs().max())
        off |= dict.fromkeys(linears, found)
    head = values.stream.head
    wanted = {name for name, scheme in values.schemes.items() if name != head and expandable(scheme.format)}
    wrong = [f"{name}: {error:.3g}" for name, error in off.items() if not error <= HALF]
    wrong += [f"{name}: not in the graph" for name in sorted(wanted - set(off))]
    largest = max(off.values(), default=0.0)
    value = largest if math.isfinite(largest) else None
    checks = [Check(name="onnx.bytes", value=value, limit=HALF, ok=not wrong, where="; ".join(wrong[:3]))]
    if wrong:
        return checks
    threads = torch.get_num_threads()
    rounded = values.stream.on(values.stream.device, values.stream.place)
    rounded.transforms.append(_Rounded(rounded.block_names, frozenset(wanted), values.linears()))
    again = replace(values, stream=rounded)
    error, where = worst(OnnxModel(folder, threads=threads, accuracy_level=0, way="prompts"), again)
    checks.append(judged("reload.many", error, LIMIT, where))
    expected = rounded.answers(ids).all().float().numpy()
    running = OnnxModel(folder, threads=threads)
    given = running.run(running.state(*ids.shape), ids.numpy())
    return [
        *checks,
        judged("reload.prompts", float(np.linalg.norm(given - expected) / np.linalg.norm(expected)), PROMPTS, ""),
    ]


@dataclass(frozen=True)
class _Rounded:
    """Rounds weights of linears inside the blocks to 8 bits a row, as they load."""

    blocks: Sequence[str]
    linears: frozenset[str]
    turned: Mapping[str, bool]

    def block(self, index: int, block: nn.Module) -> None:
        """Round those of a block."""
        prefix = f"{self.blocks[index]}."
        for name in (each for each in self.linears if each.startswith(prefix)):
            parameter = f"{name.removeprefix(prefix)}.weight"
            weight = block.get_parameter(parameter).detach()
            rows = weight.T if self.turned[name] else weight
            step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            own = torch.round(rows / step) * step
            set_tensor(block, parameter, (own.T if self.turned[name] else own).contiguous())

    def rest(self, model: nn.Module) -> None:
        """Nothing."""


def _stands_for(values: Values, linear: str) -> torch.Tensor:
    tensor = values.quantized(linear)
    shape = values.skeleton.get_parameter(f"{linear}.weight").shape
    dense: torch.Tensor = load_format(tensor.scheme.format).dequantize(tensor)
    return dense[:, : shape[0] if values.linears()[linear] else shape[1]]
