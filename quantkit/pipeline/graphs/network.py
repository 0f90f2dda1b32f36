"""A graph on its way to a TensorRT engine: scales, codes, the network, its checks, the build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit._version import __version__
from quantkit.bundle import Check, Decision, LayerEntry
from quantkit.exporters import load_exporter
from quantkit.formats import load_format
from quantkit.passes import NOTE, decision
from quantkit.passes.gptq import Gptq
from quantkit.passes.rtn import Rtn
from quantkit.pipeline.gates import demand
from quantkit.pipeline.graphs.prepared import EXPORT, PreparedGraph, wanted
from quantkit.pipeline.graphs.quantized import BATCH, SOLVING, IntegerForm, Steps, WeightForm
from quantkit.pipeline.progress import Progress
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import DATA, FOLDER, NETWORK

if TYPE_CHECKING:
    from quantkit.exporters.tensorrt.network.graph import NetworkProduct
    from quantkit.formats import QuantTensor
    from quantkit.graph.run import Runner

# what `shrink: auto` is here: one pass of a few samples says too little of the noise in them
_SHRINK = 0.5
# the least of float16's numbers; a scale of a channel that is zero
_LEAST = 2.0**-24


class Network:
    """A graph on its way to an engine.

    Args:
        prepared: what to quantize.
        progress: told how far it is.
        steps: where what is done is kept.
    """

    file = Path(FOLDER) / NETWORK

    def __init__(self, prepared: PreparedGraph, progress: Progress, steps: Steps) -> None:
        self.prepared, self.progress, self.steps = prepared, progress, steps
        recipe = prepared.request.recipe
        step = wanted(recipe)
        assert step is not None
        self.options, self.weights, self.activations = step.settings, recipe.scheme.weights, recipe.scheme.activations
        self.sites = {site.name: site for site in prepared.sites}
        self.decisions: list[Decision] = []
        self.pairs: dict[str, float] = {}
        self.products: dict[str, NetworkProduct] = {}
        if self.weights is not None:
            self.products = self._integers() if self.activations is not None else self._rounded()

    @property
    def format(self) -> str:
        """Of the pairs."""
        return "int8" if self.activations is None else self.activations.format

    def save(self, path: Path) -> None:
        """Write the network, its weights beside it."""
        from quantkit.exporters.tensorrt.network.graph import network
        from quantkit.exporters.trace.rewrite import save

        made = network(self.prepared.graph.model, self.products, self.pairs, self.format)
        made.producer_name, made.producer_version = "quantkit", __version__
        save(made, path, DATA)

    def checks(self, path: Path) -> tuple[list[Check], list[Decision]]:
        """The network's numbers, in ONNX Runtime. Raises GateError."""
        from quantkit.exporters.tensorrt.network.check_graph import check

        feed = self.prepared.calib.first(BATCH)
        found = check(path, self.prepared.graph.model, self.products, self.pairs, self.format, feed)
        demand(found, "the network is not what was decided on; nothing was delivered. Please report it")
        return found, []

    def build(self, bundle: Path) -> dict[str, str]:
        """The engine of a checked network: hashes by path in the bundle. Raises InputError."""
        made: dict[str, str] = load_exporter(EXPORT).build(
            bundle, self.options, lambda share, words: self.progress.at("build", share, words)
        )
        return made

    def runner(self, path: Path) -> Runner:
        """What scores: the network as it is written, on the CPU."""
        from quantkit.graph.run import Runner

        return Runner(path, literal=True)

    def notes(self) -> list[Decision]:
        """What a reader of the figures has to know."""
        why = load_runtime(self.options.library).why_not_here()
        if not self.options.engine:
            why = "none was built (engine: false)"
        reason = f"not run: {why or 'engines of graphs are not run yet'}; scored is its network, in ONNX Runtime"
        return [decision("measure", NOTE, FOLDER, reason)]

    def layers(self) -> list[LayerEntry]:
        """What the manifest says of each quantized product."""
        from quantkit.exporters.tensorrt.network.check_graph import dense

        found = []
        for name, product in self.products.items():
            matrix, tensor = product.site.matrix(), product.weight
            error = float(np.square(dense(product) - matrix).sum() / (np.square(matrix).sum() or 1.0))
            bits = load_format(tensor.scheme.format).bits_per_weight(matrix.shape, tensor.scheme)
            given = None if self.activations is None else self.activations.model_dump(mode="json", exclude_none=True)
            found.append(
                LayerEntry(
                    name=name,
                    shape=list(matrix.shape),
                    scheme=tensor.scheme.model_dump(mode="json", exclude_none=True),
                    bits_per_weight=bits,
                    error=error,
                    activations=given,
                    input_scale=self.pairs.get(product.site.input),
                )
            )
        return found

    def _passes(self) -> dict[str, Any]:
        """`gptq` with its `damping` and `shrink`, or `rtn` without its statistics; the rest is declined."""
        steps = self.prepared.request.recipe.passes
        for step in steps:
            if step.name not in (Gptq.name, Rtn.name):
                reason = (
                    "weights without quantized inputs are solved by gptq here, or rounded to nearest in searched ranges"
                )
                self.decisions.append(decision(step.name, "declined", self.prepared.graph.name, reason))
        given = {step.name: step.settings for step in steps}
        asked = given.get(Gptq.name)
        if asked is None:
            return {Rtn.name: given[Rtn.name]} if Rtn.name in given else {}
        unread = sorted(asked.model_fields_set - {"damping", "shrink", "correction"})
        if unread:
            reason = f"{', '.join(unread)}: not read where weights alone are quantized"
            self.decisions.append(decision(Gptq.name, NOTE, self.prepared.graph.name, reason))
        if asked.correction > 0:
            reason = "correction: errors of earlier products are made up for with quantized inputs alone"
            self.decisions.append(decision(Gptq.name, NOTE, self.prepared.graph.name, reason))
        shrink = _SHRINK if asked.shrink == "auto" else asked.shrink
        return {Gptq.name: Gptq.Settings(damping=asked.damping, shrink=shrink)}

    def _integers(self) -> dict[str, NetworkProduct]:
        """Inputs are quantized: fixed scales, then codes."""
        from quantkit.graph.codes import solve
        from quantkit.graph.pairs import qdq
        from quantkit.graph.pairs.placement import before

        prepared, progress = self.prepared, self.progress
        model, sites = prepared.graph.model, prepared.sites
        assert self.weights is not None and self.activations is not None
        placement = before(model, sites)
        feeds = list(prepared.calib.feeds(BATCH))
        activations = self.activations
        ranges = self.steps.ranges(
            lambda: solve.ranges(
                model,
                placement,
                feeds,
                activations,
                report=lambda done, words: progress.at("ranges", done, words),
                total=len(feeds),
                keeping=lambda tensors: prepared.keeping(
                    tensors, lambda names: before(model, [site for site in sites if site.name in names])
                ),
            )
        )
        self.pairs = {name: max(float(np.float16(own.scale)), _LEAST) for name, own in ranges.items()}
        if self.activations.format != "int8":
            return self._rounded()
        kept = {name: qdq.Range(scale, 0, signed=True) for name, scale in self.pairs.items()}
        products = self.steps.products("codes", list(self.sites), IntegerForm())
        codes = solve.solved(
            model,
            lambda found: qdq.insert(model, placement, kept, found, self.sites, weight_type="int8"),
            sites,
            feeds[: max(1, SOLVING // (prepared.calib.batch or BATCH))],
            self.weights,
            kept,
            placement,
            passes={step.name: step.settings for step in prepared.request.recipe.passes},
            seed=prepared.request.recipe.seed,
            again=products.again,
            keep=products.keep,
            report=lambda done, words: progress.at("codes", done, words),
        )
        self.decisions += [each for taken in products.decisions.values() for each in taken]
        return self._products({name: self._tensor(found) for name, found in codes.items()}, codes)

    def _rounded(self) -> dict[str, NetworkProduct]:
        """Weights alone, or 8-bit floats."""
        from quantkit.graph.codes.weights_only import rounded

        assert self.weights is not None
        feeds = list(self.prepared.calib.feeds(BATCH))
        products = self.steps.products("codes", list(self.sites), WeightForm(self.weights))
        tensors = rounded(
            self.prepared.graph.model,
            self.prepared.sites,
            feeds[: max(1, SOLVING // (self.prepared.calib.batch or BATCH))],
            self.weights,
            self._passes(),
            again=products.again,
            keep=products.keep,
            report=lambda done, words: self.progress.at("codes", done, words),
        )
        self.decisions += [each for taken in products.decisions.values() for each in taken]
        return self._products(tensors, {})

    def _tensor(self, codes: Any) -> QuantTensor:
        import torch

        from quantkit.formats import QuantTensor

        assert self.weights is not None
        return QuantTensor(torch.from_numpy(codes.codes), torch.from_numpy(codes.scale[:, None]), None, self.weights)

    def _products(self, tensors: Mapping[str, QuantTensor], codes: Mapping[str, Any]) -> dict[str, NetworkProduct]:
        from quantkit.exporters.tensorrt.network.graph import NetworkProduct
        from quantkit.graph.pairs.qdq import bias_of

        return {
            name: NetworkProduct(
                self.sites[name],
                _in_halves(tensor),
                codes[name].bias if name in codes else bias_of(self.sites[name]),
            )
            for name, tensor in tensors.items()
        }


def _in_halves(tensor: QuantTensor) -> QuantTensor:
    """The same weight with scales that are float16's; codes of integers follow where a scale has to move."""
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
