"""Replace products of a float graph by integer products whose inputs are quantized at run time.

    MatMul, Gemm    as in `integers.py`, by token or by tensor; a bias is added in float32
    Conv            DynamicQuantizeLinear, ConvInteger, Cast, Mul by s_x · s_w[o], Add b[o]

A convolution sums over positions and channels, so its input has one scale and one zero point for the whole tensor, even
where other products quantize by token. Its weights share one zero point too: ONNX Runtime 1.31 refuses several. Weights
may be u8 or s8; u8 by u8 is exact, u8 by s8 saturates without VNNI. Padding takes the input's zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporters.onnx.integers import MICROSOFT, Integers
from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName
from quantkit.exporters.trace.rewrite import Rewriting, Traced
from quantkit.formats.base.activation import InputCodes
from quantkit.graph.pairs.qdq import Codes, WeightType, unsigned
from quantkit.graph.sites import Site
from quantkit.graph.values import drop_unread, name_apart, parts_of
from quantkit.scheme import ActivationScheme, WeightScheme

Array = NDArray[Any]


def activations_of(site: Site, asked: ActivationScheme) -> ActivationScheme:
    """Return the scheme of a product's input; a convolution's is by tensor, with a zero point."""
    return ActivationScheme(format=asked.format, granularity="tensor", symmetric=False) if site.is_conv else asked


def insert(
    model: ir.Model,
    codes: Mapping[str, Codes],
    sites: Mapping[str, Site],
    weights: WeightScheme,
    activations: ActivationScheme,
    *,
    weight_type: WeightType = "uint8",
) -> ir.Model:
    """Copy a float graph, with the chosen products in integers.

    Args:
        model: float graph; not changed.
        codes: site's name -> codes, in the order in which the graph runs; other sites stay float.
        sites: name -> site.
        weights, activations: schemes; the activations' is dynamic, by token or tensor.
        weight_type: storage type of the codes; unsigned codes never saturate.
    """
    copied = model.clone()
    copied.opset_imports[MICROSOFT] = 1
    known = parts_of(copied.graph)
    linears = {}
    for name in codes:
        rows, columns = sites[name].matrix().shape
        how = InputCodes(activations_of(sites[name], activations))
        linears[name] = LinearSpec(rows, columns, weights, input=how)

    def grid(name: str) -> tuple[Array, None]:
        return codes[name].scale.reshape(-1, 1), None

    def dense(name: str) -> Array:
        raise KeyError(name)  # the graph holds its float tensors already

    by_name = WeightsByName(linears, {}, dense, lambda name: codes[name].codes, grid)
    rewriting = _Dynamic(Traced(copied, {}, decoder=False, layers=0), by_name)
    rewriting.apply({name: sites[name] for name in codes}, codes, weight_type)
    name_apart(copied.graph, known)
    return copied


class _Dynamic(Rewriting):
    """Rewrites one graph."""

    def apply(self, sites: Mapping[str, Site], codes: Mapping[str, Codes], weight_type: WeightType) -> None:
        """Rewrite all products with codes."""

        def shared(name: str, values: Any, dtype: Any) -> ir.Value:
            return self._constant(f"quantkit.{name}", values, dtype)

        integers = Integers(self._node, self._new, shared, self.weights, weight_type)
        nodes = {node.outputs[0].name: node for node in self.graph if node.outputs}
        for name, site in sites.items():
            node, stem = nodes[site.output], site.stem
            source = node.inputs[0]
            assert source is not None
            if site.is_conv:
                output = self._convolution(node, source, site, codes[name], integers, weight_type)
            else:
                output = integers.product(node, source, [name], stem)
            bias = codes[name].bias
            if bias is not None:
                added = self._constant(f"{stem}.bias", bias.reshape(_channels(site)), np.float32)
                (output,) = self._node(node, "Add", [output, added], [f"{stem}/biased"])
            self._replace(node, [output])
            output.name = site.output
        drop_unread(self.graph)  # replaced floats

    def _convolution(
        self, node: ir.Node, source: ir.Value, site: Site, own: Codes, integers: Integers, weight_type: WeightType
    ) -> ir.Value:
        linear, stem = self.weights.linears[site.name], site.stem
        assert linear.input is not None
        x = integers.input(source, linear.input, linear.columns)
        values, zero = (own.codes, 0) if weight_type == "int8" else (unsigned(own.codes), 128)
        weight = self._constant(f"{stem}.codes", site.shaped(values), values.dtype)
        point = self._constant(f"{stem}.zero", zero, values.dtype)
        (sums,) = self._node(node, "ConvInteger", [x.codes, weight, x.zero, point], [f"{stem}/sums"])
        product = sums.producer()
        assert product is not None
        product.attributes.update(node.attributes)
        (floats,) = self._node(node, "Cast", [sums], [f"{stem}/floats"], to=int(ir.DataType.FLOAT))
        scales = self._constant(f"{stem}.scale", own.scale.reshape(_channels(site)), np.float32)
        (step,) = self._node(node, "Mul", [x.scale, scales], [f"{stem}/step"])
        return self._node(node, "Mul", [floats, step], [f"{stem}/output"])[0]


def _channels(site: Site) -> tuple[int, ...]:
    """Return a shape for broadcasting along the channels of a product's output."""
    return (-1, *[1] * (site.weight.ndim - 2)) if site.is_conv else (-1,)
