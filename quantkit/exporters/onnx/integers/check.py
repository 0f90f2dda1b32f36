"""Products of 8-bit weights and inputs: does each compute what was decided on, and does the runtime use integers?

    reload.integers   ||y - x̂ Wᵀ|| / ||x̂ Wᵀ|| <= 1e-4 of every product, in the median of its tokens, from the input x
                      that it really got; x̂ is x rounded as the recipe says (`formats._activation`), W what the codes
                      stand for
    integer.macs      the share of the products' multiply-accumulates that ONNX Runtime runs in integer kernels on this
                      machine, from the graph that it has optimized (`graph.integer`): at least 0.95, and every product

The median, because a few inputs in 100,000 lie so close between two codes that they are rounded to the other one, which
is seen in one token alone. Sums that saturate, and scales that are wrong, are seen in all of them: 5e-3 and more.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.bundle import Check
from quantkit.exporters.check import judged
from quantkit.exporters.check import worst as compared
from quantkit.exporters.onnx.integers.prefill import BYTES, expandable
from quantkit.exporters.onnx.integers.products import LINEARS
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.formats.base import activation
from quantkit.graph import integer
from quantkit.graph.integer import QuantizedSite
from quantkit.model.streaming.stream import set_tensor
from quantkit.runtimes.onnxruntime.float_products import Links, many_way, one_way
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.runtimes.onnxruntime.session import MODEL, OnnxModel

Array = NDArray[Any]
LIMIT = 1e-4
SHARE = 0.95
# of a step of 8 bits, with the rounding of float32; of logits, whose inputs are rounded to 8 bits in every product
HALF, PROMPTS = 0.501, 0.25


@dataclass(frozen=True)
class GraphProduct:
    """One product of a written graph.

    Args:
        linears: whose weights it has, below each other.
        weight: the initializer with their codes.
        source, output: the values that it is made from, and that it makes.
    """

    linears: Sequence[str]
    weight: str
    source: str
    output: str

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(self.linears)


def products(folder: Path) -> list[GraphProduct]:
    """The products in integers of `onnx/`."""
    import onnx

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    one_way(model)
    links = Links(model.graph)
    found = []
    for node in model.graph.node:
        noted = {entry.key: entry.value for entry in node.metadata_props}
        if LINEARS in noted:
            *_, last = links.chain(node)
            weight, source = links.weight(node), links.source(node)
            found.append(GraphProduct(noted[LINEARS].split(), weight, source, last.output[0]))
    return found


def check(folder: Path, values: Values, ids: torch.Tensor) -> list[Check]:
    """Both checks; none where no input is quantized.

    Args:
        ids: [B, S] of a prompt.
    """
    if not values.inputs:
        return []
    written = products(folder)
    missing = sorted(set(values.inputs) - {linear for each in written for linear in each.linears})
    return [_numbers(folder, values, ids, written, missing), _kernels(folder, values, written, missing)]


def prompts(folder: Path, values: Values, ids: torch.Tensor) -> list[Check]:
    """Of a graph that multiplies many rows in another way (`prefill.py`), three checks; none of another graph.

    `onnx.bytes`: how far a weight's bytes lie from what its codes stand for, in steps of its row. `reload.many`: that
    way with its products in float32, prompt, steps and a padded batch, against the model with these weights.
    `reload.prompts`: |logits - expected| / |expected| as it really multiplies.

    Args:
        ids: [B, S] of a prompt, `prefill.ROWS` tokens and more.
    """
    import onnx
    from onnx import numpy_helper
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = many_way(model)
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
        worst_off = float(((read(node.input[1]).T * step - exact) / step).abs().max())
        off |= dict.fromkeys(linears, worst_off)
    head = values.stream.head
    wanted = {name for name, scheme in values.schemes.items() if name != head and expandable(scheme.format)}
    wrong = [f"{name}: {error:.3g}" for name, error in off.items() if not error <= HALF]
    wrong += [f"{name}: not in the graph" for name in sorted(wanted - set(off))]
    worst = max(off.values(), default=0.0)
    value = worst if math.isfinite(worst) else None
    checks = [Check(name="onnx.bytes", value=value, limit=HALF, ok=not wrong, where="; ".join(wrong[:3]))]
    if wrong:
        return checks
    threads = torch.get_num_threads()
    rounded = values.stream.on(values.stream.device, values.stream.place)
    rounded.transforms.append(_Rounded(rounded.block_names, frozenset(wanted), values.linears()))
    again = replace(values, stream=rounded)
    error, where = compared(OnnxModel(folder, threads=threads, accuracy_level=0, many=True), again)
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


def _numbers(
    folder: Path, values: Values, ids: torch.Tensor, written: Sequence[GraphProduct], missing: Sequence[str]
) -> Check:
    shown = list(dict.fromkeys(name for each in written for name in (each.source, each.output)))
    model = OnnxModel(folder, threads=torch.get_num_threads(), shown=shown)
    feeds = model.prompt(ids.numpy())
    given = set(feeds)
    wanted = [name for name in shown if name not in given]
    seen = dict(zip(wanted, model.session.run(wanted, feeds), strict=True))
    errors = {each.name: _error(each, values, seen) for each in written}
    wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
    worst = max(errors.values(), default=0.0)
    where = [f"{name}: {error:.2g}" for name, error in wrong.items()] + [
        f"{name}: not in the graph" for name in missing
    ]
    return Check(
        name="reload.integers",
        value=worst if math.isfinite(worst) else None,
        limit=LIMIT,
        ok=not wrong and not missing,
        where="; ".join(where[:3]),
    )


def _error(product: GraphProduct, values: Values, seen: Mapping[str, Array]) -> float:
    """The relative error of y, in the median of its tokens."""
    x = torch.from_numpy(seen[product.source]).float()
    first = product.linears[0]
    how = values.inputs[first]
    static = None
    if how.scale is not None:
        zero = None if how.scheme.symmetric else torch.tensor(how.zero, dtype=torch.int8)
        static = activation.InputScale(torch.tensor(how.scale), zero)
    rounded = activation.fake_quantize(x, how.scheme, static).double()
    weights = [_weight(values, linear)[:, : x.shape[-1]] for linear in product.linears]
    expected = rounded @ torch.cat(weights).double().T
    difference = torch.from_numpy(seen[product.output]).double() - expected
    errors = difference.norm(dim=-1) / expected.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return float(errors.flatten().median()) if bool(torch.isfinite(errors).all()) else math.inf


def _weight(values: Values, linear: str) -> torch.Tensor:
    tensor = values.quantized(linear)
    found: torch.Tensor = load_format(tensor.scheme.format).dequantize(tensor)
    return found


def _kernels(folder: Path, values: Values, written: Sequence[GraphProduct], missing: Sequence[str]) -> Check:
    import onnx_ir as ir

    shapes = {name: tuple(value.shape) for name, value in values.skeleton.named_parameters(remove_duplicate=False)}

    def macs(linears: Sequence[str]) -> float:
        return float(sum(shapes[f"{linear}.weight"][0] * shapes[f"{linear}.weight"][1] for linear in linears))

    sites = [QuantizedSite(each.name, each.weight, macs(each.linears), each.output) for each in written]
    sites += [QuantizedSite(name, "", macs([name])) for name in missing]
    with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as place:
        path = Path(place) / MODEL
        write_optimized(folder / MODEL, path)
        found = integer.found(ir.load(path), sites)
    where = [f"{name} runs as {kind}" for name, kind in found.floating.items()]
    return Check(
        name="integer.macs",
        value=found.share,
        limit=SHARE,
        ok=found.share >= SHARE and not found.floating,
        where="; ".join(where[:3]),
    )
