"""Build the network of a graph for a TensorRT engine: scales, codes, file, checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit._version import __version__
from quantkit.bundle import Check, Decision, LayerEntry
from quantkit.formats import load_format
from quantkit.passes import NOTE, decision
from quantkit.passes.gptq import Gptq
from quantkit.passes.rtn import Rtn
from quantkit.pipeline.gates import demand
from quantkit.pipeline.graphs.prepared import PreparedGraph
from quantkit.pipeline.graphs.quantized import BATCH, Products, Steps, solving
from quantkit.pipeline.progress import Progress
from quantkit.runtimes.tensorrt.file import DATA, FOLDER, NETWORK

if TYPE_CHECKING:
    from quantkit.exporters.tensorrt.graph import NetworkProduct
    from quantkit.formats import QuantTensor

# what `shrink: auto` is here: one pass of a few samples says too little of the noise in them
_SHRINK = 0.5
# the least of float16's numbers; a scale of a channel that is zero
_LEAST = 2.0**-24


class Network:
    """A graph in preparation for an engine; the counterpart of `QuantizedGraph`."""

    file = Path(FOLDER) / NETWORK

    def __init__(self, prepared: PreparedGraph, progress: Progress, steps: Steps) -> None:
        self.prepared, self.progress, self.steps = prepared, progress, steps
        scheme = prepared.request.recipe.scheme
        self.weights, self.activations = scheme.weights, scheme.activations
        self.format = "int8" if self.activations is None else self.activations.format
        self.sites = {site.name: site for site in prepared.sites}
        self.feeds = list(prepared.calib.feeds(BATCH))
        self.decisions: list[Decision] = []
        self.pairs: dict[str, float] = {}
        self.products: dict[str, NetworkProduct] = {}
        if self.weights is not None:
            self.products = self._integers() if self.activations is not None else self._rounded()

    def save(self, path: Path) -> None:
        """Write the network, its weights beside it."""
        from quantkit.exporters.tensorrt.graph import network
        from quantkit.exporters.trace.rewrite import save

        whole = network(self.prepared.graph.model, self.products, self.pairs, self.format)
        whole.producer_name, whole.producer_version = "quantkit", __version__
        save(whole, path, DATA)

    def checks(self, path: Path) -> tuple[list[Check], list[Decision]]:
        """Check the network's numbers, in ONNX Runtime. Raises GateError."""
        from quantkit.exporters.tensorrt.check import check_graph

        feed = self.prepared.calib.first(BATCH)
        checks = check_graph(path, self.prepared.graph.model, self.products, self.pairs, self.format, feed)
        demand(checks, "the network is not what was decided on; nothing was delivered. Please report it")
        return checks, []

    def layers(self) -> list[LayerEntry]:
        """Describe each quantized product for the manifest."""
        layers = []
        inputs = None if self.activations is None else self.activations.model_dump(mode="json", exclude_none=True)
        for name, product in self.products.items():
            matrix, scheme = product.site.matrix(), product.weight.scheme
            layers.append(
                LayerEntry(
                    name=name,
                    shape=list(matrix.shape),
                    scheme=scheme.model_dump(mode="json", exclude_none=True),
                    bits_per_weight=load_format(scheme.format).bits_per_weight(matrix.shape, scheme),
                    error=float(np.square(product.dense() - matrix).sum() / (np.square(matrix).sum() or 1.0)),
                    activations=inputs,
                    input_scale=self.pairs.get(product.site.input),
                )
            )
        return layers

    def _passes(self) -> dict[str, Any]:
        """Return `gptq` with its `damping` and `shrink`, or `rtn` without its statistics; the rest is declined."""
        graph = self.prepared.graph.name
        settings = {step.name: step.settings for step in self.prepared.request.recipe.passes}
        reason = "weights without quantized inputs are solved by gptq here, or rounded to nearest in searched ranges"
        others = [name for name in settings if name not in (Gptq.name, Rtn.name)]
        self.decisions += [decision(name, "declined", graph, reason) for name in others]
        asked = settings.get(Gptq.name)
        if asked is None:
            return {Rtn.name: settings[Rtn.name]} if Rtn.name in settings else {}
        unread = sorted(asked.model_fields_set - {"damping", "shrink", "correction"})
        if unread:
            reason = f"{', '.join(unread)}: not read where weights alone are quantized"
            self.decisions.append(decision(Gptq.name, NOTE, graph, reason))
        if asked.correction > 0:
            reason = "correction: errors of earlier products are made up for with quantized inputs alone"
            self.decisions.append(decision(Gptq.name, NOTE, graph, reason))
        shrink = _SHRINK if asked.shrink == "auto" else asked.shrink
        return {Gptq.name: Gptq.Settings(damping=asked.damping, shrink=shrink)}

    def _integers(self) -> dict[str, NetworkProduct]:
        """Quantize inputs too: fixed scales, then codes."""
        import torch

        from quantkit.formats import QuantTensor
        from quantkit.graph.codes import solve
        from quantkit.graph.pairs import qdq
        from quantkit.graph.pairs.placement import before

        prepared, progress, weights, activations = self.prepared, self.progress, self.weights, self.activations
        model, sites, recipe = prepared.graph.model, prepared.sites, prepared.request.recipe
        assert weights is not None and activations is not None
        placement = before(model, sites)
        ranges = self.steps.ranges(
            lambda: solve.ranges(
                model,
                placement,
                self.feeds,
                activations,
                report=lambda done, words: progress.at("ranges", done, words),
                total=len(self.feeds),
                keeping=lambda tensors: prepared.keeping(
                    tensors, lambda names: before(model, [site for site in sites if site.name in names])
                ),
            )
        )
        self.pairs = {name: max(float(np.float16(own.scale)), _LEAST) for name, own in ranges.items()}
        if activations.format != "int8":
            return self._rounded()
        kept = {name: qdq.Range(scale, 0, signed=True) for name, scale in self.pairs.items()}
        products = Products(self.steps, "codes", list(self.sites))
        codes = solve.solved(
            model,
            lambda solved: qdq.insert(model, placement, kept, solved, self.sites, weight_type="int8"),
            sites,
            self.feeds[: solving(prepared)],
            weights,
            kept,
            placement,
            passes={step.name: step.settings for step in recipe.passes},
            seed=recipe.seed,
            again=products.again,
            keep=products.keep,
            report=lambda done, words: progress.at("codes", done, words),
        )
        tensors = {
            name: QuantTensor(torch.from_numpy(own.codes), torch.from_numpy(own.scale[:, None]), None, weights)
            for name, own in codes.items()
        }
        return self._products(products, tensors, {name: own.bias for name, own in codes.items()})

    def _rounded(self) -> dict[str, NetworkProduct]:
        """Quantize weights alone, or in 8-bit floats."""
        from quantkit.graph.codes.solve import weights_alone
        from quantkit.graph.pairs.qdq import bias_of

        assert self.weights is not None
        products = Products(self.steps, "codes", list(self.sites), self.weights)
        tensors = weights_alone(
            self.prepared.graph.model,
            self.prepared.sites,
            self.feeds[: solving(self.prepared)],
            self.weights,
            self._passes(),
            again=products.again,
            keep=products.keep,
            report=lambda done, words: self.progress.at("codes", done, words),
        )
        return self._products(products, tensors, {name: bias_of(self.sites[name]) for name in tensors})

    def _products(
        self, products: Products, tensors: Mapping[str, QuantTensor], biases: Mapping[str, Any]
    ) -> dict[str, NetworkProduct]:
        from quantkit.exporters.tensorrt.graph import NetworkProduct

        self.decisions += [taken for own in products.decisions.values() for taken in own]
        return {
            name: NetworkProduct(self.sites[name], _in_halves(tensor), biases[name]) for name, tensor in tensors.items()
        }


def _in_halves(tensor: QuantTensor) -> QuantTensor:
    """Return the same weight with scales that are float16's; codes of integers follow where a scale has to move."""
    import torch

    scale = tensor.scale.float()
    halved = scale.to(torch.float16).clamp(min=_LEAST)
    moved = scale / halved.float()
    codes = tensor.codes
    if not codes.is_floating_point() and bool((moved != 1).any()):
        columns = codes.shape[1] // scale.shape[1] if scale.numel() > 1 else codes.shape[1]
        wide = moved.repeat_interleave(columns, dim=1) if scale.numel() > 1 else moved
        codes = torch.round(codes.float() * wide).clamp(int(codes.min()), int(codes.max())).to(codes.dtype)
    return tensor.replace(codes=codes, scale=halved)
