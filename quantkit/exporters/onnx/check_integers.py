"""Products of 8-bit weights and inputs: does each compute what was decided on, and does the runtime use integers?

    reload.integers   ||y - b - x̂ Wᵀ|| / ||x̂ Wᵀ|| <= 1e-4 of every product, in the median of its tokens, from the
                      input x that it really got; x̂ is x rounded as the recipe says (`formats._activation`), W what the
                      codes stand for, b the bias where the product adds it
    integer.macs      the share of the products' multiply-accumulates that ONNX Runtime runs in integer kernels on this
                      machine, from the graph that it has optimized (`graph.integer`): at least 0.95, and every product

The median, because a few inputs in 100,000 lie so close between two codes that they are rounded to the other one, which
is seen in one token alone. Sums that saturate, and scales that are wrong, are seen in all of them: 5e-3 and more.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from quantkit.bundle import Check
from quantkit.exporters.onnx.integers import LINEARS
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.formats.base import activation
from quantkit.graph import integer
from quantkit.graph.integer import QuantizedSite
from quantkit.runtimes.onnxruntime.float_products import BIAS, Links
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.runtimes.onnxruntime.session import MODEL, OnnxModel
from quantkit.runtimes.onnxruntime.ways import one_way

Array = NDArray[Any]
LIMIT = 1e-4
SHARE = 0.95


@dataclass(frozen=True)
class GraphProduct:
    """One product of a written graph.

    Args:
        linears: whose weights it has, below each other.
        weight: the initializer with their codes.
        source, output: the values that it is made from, and that it makes.
        biased: whether it adds the linears' biases.
    """

    linears: Sequence[str]
    weight: str
    source: str
    output: str
    biased: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(self.linears)


def products(folder: Path) -> list[GraphProduct]:
    """The products in integers of `onnx/`."""
    import onnx

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    one_way(model, "steps")
    links = Links(model.graph)
    found = []
    for node in model.graph.node:
        noted = {entry.key: entry.value for entry in node.metadata_props}
        if LINEARS in noted:
            *_, last = links.chain(node)
            weight, source = links.weight(node), links.source(node)
            biased = node.op_type == "MatMulIntegerToFloat" and len(node.input) > BIAS
            found.append(GraphProduct(noted[LINEARS].split(), weight, source, last.output[0], biased))
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
    biases = [values.tensor(f"{linear}.bias").double() for linear in product.linears if product.biased]
    difference = torch.from_numpy(seen[product.output]).double() - expected - (torch.cat(biases) if biases else 0)
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
